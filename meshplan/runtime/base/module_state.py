"""State that modules keep from one forward to the next: their buffers and attributes."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from meshplan.model.flow import AttributeWrite
from meshplan.runtime.base.pytree import tensors_in

_PLAIN: Final = (bool, int, float, complex, str, type(None))

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))


_SERIES: Final = (list, deque, set)
_DEPTH: Final = 3
"""Levels of containers and objects that are searched: `module.state["steps"].count`."""
_FEW: Final = 1024
"""Items up to which a container is searched for others: a longer one is data."""
_OTHERS: Final = ("builtins", "torch", "meshplan", "transformers", "numpy", "random")
"""Packages whose objects count nothing: configurations, functions, generators of random numbers."""

Table = dict[Any, Any]
Series = list[Any] | deque[Any] | set[Any]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return {name: value} of the attributes that a module has beyond those of every nn.Module."""
    return {n: v for n, v in vars(module).items() if n not in _OF_EVERY_MODULE}


def has_own_class(parameter: torch.Tensor | None) -> bool:
    """Return True for a parameter of a subclass of `nn.Parameter`, such as quantised weights have.

    Scales are then attributes of the parameter, which a shard or another tensor does not have.
    """
    kind = type(parameter)  # Not that of `isinstance`, which is true of a DTensor, too.
    lazy = nn.parameter.UninitializedTensorMixin
    return nn.Parameter in kind.__mro__[1:] and not issubclass(kind, lazy)


def plain_attributes(model: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Return the numbers that modules keep in attributes, such as counts of calls.

    The keys are (module, name). Booleans are left out, because callers restore these attributes:
    code that sets a flag, such as one for a preparation in the first call, has other effects too,
    and without the flag it would run again.
    """
    return {
        (module, name): value
        for module in model.modules()
        for name, value in own_attributes(module).items()
        if type(value) in (int, float, complex)
    }


def containers_in(values: Iterable[Any]) -> Iterator[tuple[Table | Series, type | None]]:
    """Yield the containers among some values and in them, and the attributes of objects, each once.

    The second item is the class of the object whose attributes a dict holds, else None.
    """
    seen: set[int] = set()
    level = list(values)
    for _ in range(_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, _PLAIN) or id(value) in seen:
                continue
            seen.add(id(value))
            found, owner = _contained(value)
            if found is None:
                continue
            if not isinstance(found, tuple):
                yield found, owner
            if len(found) <= _FEW:
                inner += found.values() if isinstance(found, dict) else found
        level = inner


def _contained(value: Any) -> tuple[Table | Series | tuple[Any, ...] | None, type | None]:
    """Return (a container, or the attributes of an object of the model's own code; its class)."""
    if isinstance(value, dict) or type(value) in (*_SERIES, tuple):
        return value, None
    if isinstance(value, nn.Module | torch.Tensor | type | types.ModuleType):
        return None, None
    own = getattr(value, "__dict__", None)
    is_own = type(value).__module__.partition(".")[0] not in _OTHERS
    return (own, type(value)) if is_own and isinstance(own, dict) else (None, None)


@contextmanager
def containers_kept(values: Iterable[Any]) -> Iterator[None]:
    """Give `containers_in` some values the items back that they had before the `with` block."""
    insides = [(found, found.copy()) for found, _ in containers_in(values)]
    try:
        yield
    finally:
        for found, before in insides:
            found.clear()
            found.extend(before) if isinstance(found, list | deque) else found.update(before)


def users_hooks(model: nn.Module) -> Iterator[Any]:
    """Yield the hooks of forwards, in all modules, that neither meshplan nor torch registered."""
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if is_users(hook):
                yield hook


def is_users(hook: Any) -> bool:
    """Return True if the function of a hook is defined in neither meshplan nor torch."""
    return defined_in(hook).partition(".")[0] not in ("torch", "meshplan")


def defined_in(hook: Any) -> str:
    """Return the name of the Python module that defines a hook's function; "" if unknown."""
    *_, function = _layers(hook)
    return getattr(function, "__module__", None) or type(function).__module__


def _layers(hook: Any) -> Iterator[Any]:
    """Yield a hook, and what it calls as a partial, a bound method or a decorator."""
    while hook is not None:
        yield hook
        if isinstance(hook, functools.partial):
            hook = hook.func
        elif isinstance(hook, types.MethodType):
            hook = hook.__func__
        else:
            hook = getattr(hook, "__wrapped__", None)


def held_by_hooks(model: nn.Module) -> list[Any]:
    """Return what users' hooks of forwards hold: variables of closures, arguments, objects."""
    found: list[Any] = []
    for layer in (layer for hook in users_hooks(model) for layer in _layers(hook)):
        if isinstance(layer, functools.partial):
            found += [*layer.args, *layer.keywords.values()]
        elif isinstance(layer, types.FunctionType):
            found += [cell.cell_contents for cell in layer.__closure__ or () if _is_set(cell)]
        elif not isinstance(owner := getattr(layer, "__self__", layer), nn.Module):
            found.append(owner)
    return found


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # The variable is not assigned yet.
        return False


def tensor_attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return {dotted name: tensor} of the plain tensors that modules keep in attributes."""
    return {
        f"{fqn}.{name}" if fqn else name: value
        for fqn, module in model.named_modules()
        for name, value in own_attributes(module).items()
        if type(value) is torch.Tensor and not value.is_meta
    }


def contents(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return a snapshot of the attributes of all modules, to compare with a later snapshot.

    The keys are (fqn, name). The snapshot includes the items of a list, set or mapping and the
    attributes of an object. It has numbers and strings as they are and the `id` of anything else,
    so that it keeps no object alive.
    """
    return {
        (fqn, name): _inside(value)
        for fqn, module in model.named_modules()
        for name, value in own_attributes(module).items()
    }


def _inside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((_sign(key), _sign(each)) for key, each in value.items())
    if isinstance(value, list | tuple | set):
        return tuple(map(_sign, value))
    own = getattr(value, "__dict__", None)
    if own is None or isinstance(value, nn.Module | torch.Tensor | type):
        return _sign(value)
    return id(value), _inside(own)


def _sign(value: Any) -> Any:
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def hooks_of(module: nn.Module) -> Iterator[Mapping[Any, Any]]:
    """Yield the module's dicts of hooks around forward and backward, one per kind of hook."""
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        yield vars(module)[name]


def module_state_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the tensors and plain values in the buffers and attributes of all modules.

    The keys are (fqn of the module, name); the name of a tensor inside a container is its path.
    """
    out: dict[tuple[str, str], Any] = {}
    # Many modules share one object without tensors, such as a config with hundreds of fields.
    without: set[int] = set()
    for fqn, module in model.named_modules():
        for name, value in (*module._buffers.items(), *own_attributes(module).items()):
            if isinstance(value, _PLAIN):
                out[fqn, name] = value
            elif id(value) not in without:
                found = {(fqn, path): tensor for path, tensor in tensors_in(value, name)}
                if not found:
                    without.add(id(value))
                out |= found
    return out


def changes(
    before: Mapping[tuple[str, str], Any],
    after: Mapping[tuple[str, str], Any],
    value_of: Callable[[torch.Tensor], int],
) -> Iterator[AttributeWrite]:
    """Yield a write for each entry that was replaced by another tensor or an unequal plain value.

    Args:
        before: State of the modules before a call, as `module_state_of` returns it.
        after: State of the modules after the call.
        value_of: Returns the number that a trace gives to the value of a tensor.
    """
    for module, name in dict.fromkeys((*before, *after)):
        old, new = before.get((module, name)), after.get((module, name))
        is_tensor = isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor)
        if old is new or (not is_tensor and old == new):
            continue
        ids = (value_of(t) if isinstance(t, torch.Tensor) else None for t in (old, new))
        yield AttributeWrite(module=module, name=name, old=next(ids), new=next(ids))
