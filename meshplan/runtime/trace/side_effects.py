"""Undo the side effects of running a copy of a model: no tensor of the run stays in a cache.

The copy shares with the model all that is outside of it: `functools.lru_cache` on a function,
tables in globals and classes, closures of hooks. A forward of the copy may leave a fake tensor
there, which the first real forward would find. What the run adds is therefore removed, and the run
is rejected if that is impossible. Caches of tensors are also emptied before the run, because on
some ranks an earlier forward may have filled them, and all ranks must record the same.
"""

from __future__ import annotations

import builtins
import functools
import gc
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.base.module_state import containers_kept, held_by_hooks

_LruCache: Final = type(functools.lru_cache(lambda: None))
_DEPTH: Final = 4
"""Levels of containers that are searched for a tensor: `cache[device][size] = (cos, sin)`."""
_REACH: Final = 7
"""Most references followed from a name in a Python module: class, method, variable of its
decorator, table, `[a][b]`."""
_CONTAINERS: Final = (dict, OrderedDict, defaultdict, list, deque, set)
_NAMESPACES: Final = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)
"""Types whose references are not followed, since they lead to all other objects."""
_KNOWN: Final = sys.stdlib_module_names | {"torch"}


@dataclass(slots=True)
class Trace:
    """The objects made by a run, and the state outside the model before the run.

    Attributes:
        made: Weak references to the watched objects.
        before: (container or closure cell outside the model, copy of its contents).
        caches: Functions with an `lru_cache` that the model's code can reach. They are listed here
            because `gc.get_objects` does not list them after `gc.freeze`.
    """

    made: list[weakref.ref[Any]] = field(default_factory=list)
    before: list[tuple[Any, Any]] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)

    def watch(self, item: Any) -> None:
        """Add an object that must be gone after the run."""
        self.made.append(weakref.ref(item))

    def alive(self) -> list[Any]:
        """Return the watched objects that still exist."""
        return [item for ref in self.made if (item := ref()) is not None]


@contextmanager
def nothing_left(model: nn.Module) -> Iterator[Trace]:
    """Remove the objects that are watched in the `with` block from all caches when it ends.

    Random numbers that the block drew are drawn again afterwards: a model that skips layers by
    Python's or NumPy's numbers skips those of one process.

    The block runs a copy of `model`, and passes what the run makes to `Trace.watch`.

    Assumes: all functions of the run have returned or raised when the block ends, because a frame
    keeps its local variables alive.

    Raises:
        ApplyError: A watched object is kept alive where it cannot be removed.
    """
    outside = list(_outside(model))
    caches = [item for item in outside if type(item) is _LruCache]
    for cache in caches:
        if _holds_tables(cache):
            cache.cache_clear()
    before = [(at, _copied(at)) for at in outside if _can_change(at)]
    trace = Trace(before=before, caches=caches)
    try:
        # Hooks keep such things as a count of calls.
        with containers_kept(held_by_hooks(model)), randomness_kept():
            yield trace
    except BaseException:
        # The traceback keeps all objects alive, so we cannot check that nothing else does.
        _take_out(trace)
        raise
    if not trace.alive():
        return
    gc.collect()  # Modules may be in reference cycles.
    if not trace.alive():
        return
    _take_out(trace)
    gc.collect()
    left = trace.alive()
    if left:
        raise ApplyError(_problem(model, left[0]))


def _take_out(trace: Trace) -> None:
    ids = {id(item) for item in trace.alive()}
    if not ids:
        return
    for item in (*trace.caches, *gc.get_objects()):
        if type(item) is _LruCache and _holds(item, ids):
            item.cache_clear()
    for at, old in trace.before:
        _put_back(at, old, ids)


def _holds(item: Any, ids: set[int]) -> bool:
    """Return True if an object with one of these ids is in the item, up to `_DEPTH` levels deep."""
    return any(id(part) in ids for part in _inside(item))


def _holds_tables(cache: Any) -> bool:
    """Return True if an `lru_cache` has tensors that its function can compute again.

    If the cache has modules, the answer is False, because the modules may have been trained.
    """
    kinds = [type(part) for part in _inside(cache, beside=cache.__wrapped__)]
    has_modules = any(issubclass(kind, nn.Module) for kind in kinds)
    return not has_modules and any(issubclass(kind, torch.Tensor) for kind in kinds)


def _inside(item: Any, beside: Any = None) -> Iterator[Any]:
    """Yield the item and what it references, up to `_DEPTH` levels deep, without `beside`."""
    edge, seen = [item], {id(item), id(beside)}
    yield item
    for _ in range(_DEPTH):
        edge = [
            part
            for part in gc.get_referents(*edge)
            if id(part) not in seen and not issubclass(type(part), _NAMESPACES)
        ]
        seen.update(map(id, edge))
        yield from edge


def _put_back(at: Any, old: Any, ids: set[int]) -> None:
    """Undo the changes that brought an object with one of these ids into a container.

    Args:
        at: A container, class or closure cell.
        old: Its contents before the run, as `_copied` returned them.
        ids: Ids of the objects to remove. Other changes of the container stay.
    """
    if isinstance(at, types.CellType):
        now = _copied(at)
        if now is not None and (old is None or now[0] is not old[0]) and _holds(now[0], ids):
            if old is None:
                del at.cell_contents
            else:
                at.cell_contents = old[0]
    elif isinstance(at, dict | type):
        now = dict(vars(at)) if isinstance(at, type) else dict(at)
        for key, value in now.items():
            if (key in old and old[key] is value) or not _holds((key, value), ids):
                continue
            if isinstance(at, type):
                type.__setattr__(at, key, old[key]) if key in old else type.__delattr__(at, key)
            elif key in old:
                at[key] = old[key]
            else:
                del at[key]
    else:
        known = set(map(id, old))
        if any(id(part) not in known and _holds(part, ids) for part in at):
            at.clear()
            at.extend(old) if isinstance(at, list | deque) else at.update(old)


def _outside(model: nn.Module) -> list[Any]:
    """Return the objects that the model and a copy of it share, and that its code may change.

    These are its classes and the globals of their Python modules, closure cells of its functions
    and hooks, plain containers reached from there, and functions with an `lru_cache`; each once.
    """
    found: dict[int, Any] = {}
    seen = {id(vars(builtins))}
    edge: Iterable[Any] = _roots(model)
    for _ in range(_REACH):
        new = {id(item): item for item in edge if id(item) not in seen}
        seen |= new.keys()
        found.update(
            (at, item) for at, item in new.items() if _can_change(item) or type(item) is _LruCache
        )
        edge = [part for item in new.values() for part in _parts(item)]
    return list(found.values())


def _roots(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        for cls in type(module).__mro__:
            if _is_foreign(cls.__module__) and cls.__module__ in sys.modules:
                yield cls
                yield vars(sys.modules[cls.__module__])
        for value in vars(module).values():  # The model's own containers are copied with it.
            yield from value.values() if isinstance(value, dict) else (value,)


def _can_change(item: Any) -> bool:
    # By type rather than `isinstance`, because a proxy may run code when asked for its class.
    if issubclass(type(item), type):
        return _is_foreign(item.__module__)
    return type(item) in (*_CONTAINERS, types.CellType)


def _parts(item: Any) -> Iterable[Any]:
    if _can_change(item):
        now = _copied(item) or ()
        return tuple(now.values() if isinstance(now, dict) else now)
    if type(item) in (staticmethod, classmethod):
        return (item.__func__,)
    if type(item) is types.FunctionType:
        defaults = (*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values())
        return (*(item.__closure__ or ()), *defaults)
    return ()


def _is_foreign(module: str) -> bool:
    """Return True if a Python module is neither of the standard library nor of torch.

    Those two keep no tensors of a model.
    """
    return module.partition(".")[0] not in _KNOWN


def _copied(item: Any) -> Any:
    """Return a copy of a container, (contents,) of a closure cell, or None for an empty cell."""
    if isinstance(item, type):
        return dict(vars(item))
    if isinstance(item, types.CellType):
        try:
            return (item.cell_contents,)
        except ValueError:
            return None
    return item.copy()


def _problem(model: nn.Module, item: Any) -> Problem:
    shape = f" of shape {tuple(item.shape)}" if isinstance(item, torch.Tensor) else ""
    kept = next(
        (f" in a {type(holder).__name__}" for holder in gc.get_referrers(item)
         if not isinstance(holder, types.FrameType)), ""
    )  # fmt: skip
    return Problem(
        f"the forward of {type(model).__name__} keeps a {type(item).__name__}{shape} outside "
        f"the model{kept}, from where that of a trial run on a copy cannot be removed",
        fix="keep it in a buffer or an attribute of a module, or compute it in every forward",
    )


@contextmanager
def randomness_kept() -> Iterator[None]:
    """Put the random number generators of this process back as they were."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
