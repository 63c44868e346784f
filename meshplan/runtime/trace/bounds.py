"""Upper bounds for results and buffers whose size is unknown before the step runs.

The shape of some results depends on values: a mask selects at most all elements it covers, and
`unique` keeps at most all of its input. A trace with these largest sizes needs at least as much
memory as the step, provided that selecting fewer elements makes no tensor larger. To check that,
the step is traced once more with half of the elements selected (`check_grows`).

The size of some buffers is known to a library only, such as cuDNN. The first trace counts the most
that such a buffer may have, the second trace one element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final

import torch

from meshplan.errors import PlanError, Problem
from meshplan.memory.log.events import EventLog

_ops: Final[Any] = torch.ops.aten
Share = Callable[[int], int]
_PICKING: ContextVar[Picks | None] = ContextVar("_PICKING", default=None)


class UnknownShapeError(PlanError):
    """Raised if a tensor's size is not known before the step runs, though it may have a bound."""


class NoBoundError(Exception):
    """Raised if it is not proved that the traced memory is an upper bound."""


class UnknownBufferError(UnknownShapeError):
    """Raised if a library, such as cuDNN, makes a buffer whose size only the library knows."""


class Picks:
    """The sizes that a trace inside `picking` uses where the real ones are unknown.

    Args:
        share: Maps the number of selectable elements to the number selected.
        has_buffers: If True, buffers of libraries have their largest size; if False, one element.

    Attributes:
        are_used: True once an operator whose result shape depends on values has run.
    """

    def __init__(self, share: Share, *, has_buffers: bool) -> None:
        self.share, self.has_buffers, self.are_used = share, has_buffers, False


def everything(count: int) -> int:
    """Return the number of selected elements if all `count` of them are selected."""
    return count


def half(count: int) -> int:
    """Return the number of selected elements if half of `count` are selected, rounded up."""
    return (count + 1) // 2


@contextmanager
def picking(share: Share, *, has_buffers: bool = True) -> Iterator[Picks]:
    """Make operators on fake tensors select `share(count)` of `count` elements inside the block.

    Args:
        share: Maps the number of selectable elements to the number selected.
        has_buffers: If True, buffers of libraries have their largest size; if False, one element.

    Yields:
        The sizes in use, which record if an operator needed them.
    """
    picks = Picks(share, has_buffers=has_buffers)
    token = _PICKING.set(picks)
    try:
        yield picks
    finally:
        _PICKING.reset(token)


def picked(func: Any, args: Any, kwargs: Any) -> Any:
    """Return an operator's results, with the sizes that `picking` states.

    Return NotImplemented outside of `picking`, and for operators whose shapes do not depend on
    values.
    """
    picks = _PICKING.get()
    rule = _RULES.get(func)
    if picks is None or rule is None:
        return NotImplemented
    out = rule(picks.share, *args, **kwargs)
    picks.are_used = picks.are_used or out is not NotImplemented
    return out


def buffer_elements(count: int, problem: Problem) -> int:
    """Return the number of elements that a library's buffer has inside `picking`.

    Args:
        count: The most elements that the buffer may have.
        problem: Describes the buffer, for the error.

    Raises:
        UnknownBufferError: The call is outside of `picking`, where all sizes must be exact.
    """
    picks = _PICKING.get()
    if picks is None:
        raise UnknownBufferError(problem)
    return (
        count if picks.has_buffers else min(count, 1)
    )  # A buffer of 0 bytes would not appear in the log.


def taken_to_pick(args: Any) -> tuple[int, ...]:
    """Return the bytes of each temporary index tensor that `x[mask]` makes; () outside `picking`.

    Args:
        args: Arguments of `aten.index.Tensor`: a tensor and its indices.

    Source: torch's `expandTensors` (TensorIndexing), which replaces a mask by its `nonzero`.
    """
    picks = _PICKING.get()
    if picks is None:
        return ()
    return tuple(8 * i.ndim * picks.share(i.numel()) for i in args[1] if _is_mask(i))


def bound_of(error: UnknownShapeError) -> str:
    """Return a sentence that says why a trace with the largest sizes is an upper bound."""
    (problem,) = error.problems
    if isinstance(error, UnknownBufferError):
        return f"{problem.what}; its largest size, according to a public report, is counted"
    op, where = problem.what.partition(" ")[0], problem.what.rpartition(": ")[2]
    return (
        f"{op} selects as much as possible, {where}; in a second trace, where it selects half, no "
        "tensor is larger"
    )


def check_grows(most: EventLog, less: EventLog) -> None:
    """Check that the memory with all elements selected is an upper bound for fewer.

    Args:
        most: The log of the step with all elements selected.
        less: The log of the same step with half of the elements selected.

    Raises:
        NoBoundError: `less` has a larger tensor than `most`, or other operators.
    """
    for one, other in zip_longest(most.events, less.events):
        if one is None or other is None:
            raise NoBoundError("with fewer elements selected, the step runs other operators")
        storage, other_storage = most.storages[one.storage], less.storages[other.storage]
        is_same = (storage.op, storage.module) == (other_storage.op, other_storage.module)
        if not is_same or one.phase != other.phase or (one.delta > 0) != (other.delta > 0):
            raise NoBoundError("with fewer elements selected, the step runs other operators")
        if abs(other.delta) > abs(one.delta):
            where = f" in {storage.module}" if storage.module else ""
            raise NoBoundError(
                f"with fewer elements selected, {storage.op}{where} makes a larger tensor"
            )


def _nonzero(share: Share, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((share(x.numel()), x.ndim), dtype=torch.int64)


def _masked_select(share: Share, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return x.new_empty((share(shape.numel()),))


def _index(share: Share, x: torch.Tensor, indices: Any) -> Any:
    if not any(map(_is_mask, indices)):
        return NotImplemented
    places: list[torch.Tensor | None] = []
    for index in indices:
        if _is_mask(index):
            count = share(index.numel())
            places += [x.new_empty((count,), dtype=torch.int64) for _ in range(index.ndim)]
        else:
            places.append(index)
    return _ops.index.Tensor(x, places)


def _unique(share: Share, x: torch.Tensor, *flags: Any, **more: Any) -> tuple[torch.Tensor, ...]:
    # An upper bound: inverse and counts are returned even if the caller did not ask for them.
    count = share(x.numel())
    whole = x.new_empty(x.shape, dtype=torch.int64)
    return x.new_empty((count,)), whole, x.new_empty((count,), dtype=torch.int64)


def _unique_dim(
    share: Share, x: torch.Tensor, dim: int, *flags: Any, **more: Any
) -> tuple[torch.Tensor, ...]:
    count, shape = share(x.shape[dim]), list(x.shape)
    shape[dim] = count
    inverse = x.new_empty((x.shape[dim],), dtype=torch.int64)
    return x.new_empty(shape), inverse, x.new_empty((count,), dtype=torch.int64)


def _unique_consecutive(
    share: Share,
    x: torch.Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[torch.Tensor, ...]:
    return _unique(share, x) if dim is None else _unique_dim(share, x, dim)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


_RULES: Final[Mapping[Any, Callable[..., Any]]] = MappingProxyType(
    {
        _ops.nonzero.default: _nonzero,
        _ops.masked_select.default: _masked_select,
        _ops.index.Tensor: _index,
        _ops._unique2.default: _unique,
        _ops.unique_dim.default: _unique_dim,
        _ops.unique_consecutive.default: _unique_consecutive,
    }
)
