"""Record when storages are allocated, resized and freed while code runs, as an `EventLog`.

The tracker works on real and on fake tensors, so that a fake trace and a real process can be
compared byte by byte. Two kinds of memory are not recorded: memory that belongs to no tensor, and
buffers inside of operators, except for the workspaces that `Behaviour.inside` returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from meshplan.memory.log.categories import assign_terms
from meshplan.memory.log.events import Event, EventLog, Storage, Term
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.host_copies import CROSSING, MemorySide
from meshplan.runtime.base.pytree import given_to
from meshplan.runtime.fake_step.cuda_mode import AS_IT_IS, Behaviour
from meshplan.runtime.fake_step.current_module import CurrentModule
from meshplan.runtime.torch_private.modes import Watching, answer_device
from meshplan.runtime.torch_private.ops import around_propagation
from meshplan.runtime.torch_private.private import on_resize

_SENDING: Final = ("c10d", "_c10d_functional", "_dtensor")
"""Namespaces of operators that communicate."""
_ADD: Final = torch.ops.aten.add_.Tensor
_WAIT: Final = torch.ops._c10d_functional.wait_tensor.default


class MemoryTracker(Watching):
    """A dispatch mode to open around the code to be tracked.

    Args:
        names: The fqn of every module of the model.
        behaviour: Behaviour of the device that tensors stand for.

    Attributes:
        phases: Names of the phases since `forget`; the last one is running.
    """

    def __init__(self, names: Mapping[nn.Module, str], behaviour: Behaviour = AS_IT_IS) -> None:
        super().__init__()
        self._behaviour = behaviour
        self._place = CurrentModule(names)
        self.phases: list[str] = ["before"]
        self._storages: list[Storage] = []
        self._events: list[Event] = []
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        """(number, weak reference that reports the end) of each live storage, by address."""
        self._sizes: dict[int, int] = {}
        self._host_storages: set[int] = set()
        self._host_live = self._host_most = 0
        self._sent: set[int] = set()
        self._overlooked: set[int] = set()
        self._muted = _Muted()
        self._num_before = 0
        self._open = ExitStack()

    def begin(self, phase: str) -> None:
        """Note that a phase of the step begins, such as "forward"."""
        if self.phases[-1] != phase:
            self.phases.append(phase)
        self._place.mark(is_loss=phase == "loss")

    @property
    def is_muted(self) -> bool:
        """True while DTensor computes a global shape by an operator that no rank runs."""
        return self._muted.depth > 0

    @property
    def num_events(self) -> int:
        """The number of events recorded so far."""
        return len(self._events)

    @property
    def alive(self) -> frozenset[int]:
        """Numbers of the storages that have memory now, on the device or on the host."""
        return frozenset(number for number, size in self._sizes.items() if size)

    def cut(self, first: int) -> tuple[Event, ...]:
        """Remove and return all events from number `first` on."""
        out, self._events = tuple(self._events[first:]), self._events[:first]
        return out

    def numbers_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the numbers of a tensor's recorded storages; a subclass may have several."""
        known = (self._live.get(part.untyped_storage()._cdata) for part in _plain(tensor))
        return tuple(each[0] for each in known if each is not None)

    def log(self) -> EventLog:
        """Return the log of all events since `forget`."""
        events, phases = tuple(self._events), tuple(self.phases)
        found = assign_terms(
            self._storages, events, phases, sent=self._sent, num_before=self._num_before
        )
        return EventLog(found, events, phases, self._host_most)

    def forget(self) -> None:
        """Start a new log, in which all live storages exist from the beginning."""
        live = [
            (n, size) for n, size in self._sizes.items() if size and n not in self._host_storages
        ]
        self._host_most = self._host_live
        self.phases = ["before"]
        self._events = [Event(size, number, 0) for number, size in live]
        self._num_before = len(self._storages)

    def note(self, tensors: Iterable[torch.Tensor], term: Term) -> None:
        """Set the category of existing tensors; a tensor that was not recorded yet is added."""
        for tensor in tensors:
            for plain in _plain(tensor):
                self._see(plain, "", term)
                number = self._live[plain.untyped_storage()._cdata][0]
                self._storages[number] = self._storages[number]._replace(term=term)

    def set_term(self, tensors: Iterable[torch.Tensor], term: Term) -> None:
        """Set the category of tensors; a tensor that was not recorded is ignored."""
        for number in dict.fromkeys(n for t in tensors for n in self.numbers_of(t)):
            self._storages[number] = self._storages[number]._replace(term=term)

    def attribute(self, tensors: Iterable[torch.Tensor], module: str) -> None:
        """Attribute tensors to the module with this fqn, whichever module made them."""
        for number in dict.fromkeys(n for t in tensors for n in self.numbers_of(t)):
            self._storages[number] = self._storages[number]._replace(module=module)

    def stop_counting(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stop counting tensors that are recorded but are not in device memory."""
        for tensor in tensors:
            for plain in _plain(tensor):
                known = self._live.get(plain.untyped_storage()._cdata)
                if known is not None:
                    self._sizes[known[0]] = 0
                    self._overlooked.add(known[0])

    def put_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count recorded tensors as host memory, and so all results computed from them alone."""
        for number in dict.fromkeys(n for t in tensors for n in self.numbers_of(t)):
            size = self._sizes[number]
            self._change(number, 0)
            self._host_storages.add(number)
            self._change(number, size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := answer_device(func, args)) is not None:
            return device
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # torch then dispatches the operators on local tensors.
        if self.is_muted:
            return func(*args, **(kwargs or {}))
        # `wait_tensor` returns its argument, but its fake implementation makes a new tensor.
        is_wait = func is _WAIT and is_fake_execution()
        out = args[0] if is_wait else func(*args, **(kwargs or {}))
        on_host = self._is_on_host(func, (args, kwargs))
        # A view allocates nothing. If its storage was never recorded, a backend owns the memory.
        if not func.is_view:
            name = _name_of(func)
            for tensor in given_to(out):
                for plain in _plain(tensor):
                    self._see(plain, name, Term.TEMPORARIES, on_host=on_host)
        if not on_host and (sizes := self._behaviour.inside(func, args, out)):
            self._pass_by(_name_of(func), sizes)
        if func.namespace in _SENDING:
            for tensor in given_to((args, kwargs, out)):
                for plain in _plain(tensor):
                    known = self._live.get(plain.untyped_storage()._cdata)
                    self._sent |= {known[0]} if known else set()
        return out

    def __enter__(self) -> MemoryTracker:
        self._open = ExitStack()
        self._open.enter_context(on_resize(self._resized))
        self._open.enter_context(around_propagation(self._muted))
        self._open.enter_context(self._place)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._open.close()

    def _is_on_host(self, func: Any, given: Any) -> bool:
        """Return True if an operator's result is on the host.

        It is if all inputs are, or inside `crossing_to(HOST)`. A device tensor that is added to a
        host tensor in place is copied to the host first, which counts in the host's peak.
        """
        if not self._behaviour.has_host:
            return False
        crossing = CROSSING.get()
        if crossing is not None:
            return crossing is MemorySide.HOST
        if not self._host_storages:
            return False
        tensors = given_to(given)
        sides = [n in self._host_storages for t in tensors for n in self.numbers_of(t)]
        if func is _ADD and sides[:1] == [True] and False in sides:
            self._host_most = max(self._host_most, self._host_live + tensors[1].nbytes)
        return bool(sides) and all(sides)

    def _see(self, tensor: torch.Tensor, op: str, term: Term, *, on_host: bool = False) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            self._change(known[0], size)
            return
        number = len(self._storages)
        self._storages.append(self._storage(op, term))
        ref = weakref.ref(storage, partial(self._dies, key, number))
        self._live[key] = (number, ref)
        if on_host:
            self._host_storages.add(number)
        self._change(number, size)

    def _storage(self, op: str, term: Term) -> Storage:
        if term == Term.TEMPORARIES and self._place.is_loss:
            term = Term.LOSS
        return Storage(term, op, self._place.module, self.phases[-1], self._behaviour.stream())

    def _pass_by(self, op: str, sizes: Sequence[int]) -> None:
        """Record an operator's workspace: buffers of these bytes, allocated and then freed."""
        first = len(self._storages)
        for number, size in enumerate(sizes, first):
            self._storages.append(self._storage(op, Term.TEMPORARIES))
            self._change(number, size)
        for number in range(first, len(self._storages)):
            self._change(number, 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._live.get(storage._cdata)
        if known is not None:
            self._change(known[0], storage.nbytes())

    def _dies(self, key: int, number: int, _: Any) -> None:
        # A new storage may already have the same address.
        if key in self._live and self._live[key][0] == number:
            del self._live[key]
        self._change(number, 0)

    def _change(self, number: int, size: int) -> None:
        if number in self._overlooked:
            return
        delta = size - self._sizes.get(number, 0)
        self._sizes[number] = size
        if number in self._host_storages:
            self._host_live += delta
            self._host_most = max(self._host_most, self._host_live)
        elif delta:
            self._events.append(Event(delta, number, len(self.phases) - 1))


class _Muted:
    """A context in which no operator is recorded, because its tensors have no memory anywhere."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


@cache
def _name_of(func: Any) -> str:
    return str(func)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the strided tensors that a tensor consists of; none for meta, which has no memory."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):
                yield from _plain(part)
    elif tensor.device.type != "meta" and tensor.layout == torch.strided:
        yield tensor
