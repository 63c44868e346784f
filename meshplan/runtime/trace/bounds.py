"""Upper bounds for operators whose result shapes depend on values, or on a library.

A mask selects at most all elements it covers, and `unique` keeps at most all of its input. A trace
with these sizes needs at least as much memory as the step, provided that selecting fewer elements
makes nothing larger. To check that, the same step is traced with half as many (`check_grows`).

Buffers of which only a library knows the size are counted in full in the first trace, and not at
all in the second.
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
    """A tensor's size is not known before the step runs. An upper bound may still be known."""


class NoBoundError(Exception):
    """There is no proof that the traced memory is an upper bound."""


class UnknownBufferError(UnknownShapeError):
    """A library makes a buffer of a size that only it knows."""


class Picks:
    """The sizes of a trace inside `picking`.

    Args:
        share: Returns how many of so many selectable elements are selected.
        has_buffers: If True, buffers of libraries are counted in full, else not at all.

    Attributes:
        are_used: True once an operator had a shape that depends on values.
    """

    def __init__(self, share: Share, *, has_buffers: bool) -> None:
        self.share, self.has_buffers, self.are_used = share, has_buffers, False


def everything(count: int) -> int:
    """Select every element that could be selected."""
    return count


def half(count: int) -> int:
    """Select half of the elements that could be selected, rounded up."""
    return (count + 1) // 2


@contextmanager
def picking(share: Share, *, has_buffers: bool = True) -> Iterator[Picks]:
    """Let operators on fake tensors select `share(count)` of `count` selectable elements.

    Args:
        share: Returns how many of so many elements are selected.
        has_buffers: If True, buffers of libraries are counted in full, else not at all.
    """
    picks = Picks(share, has_buffers=has_buffers)
    token = _PICKING.set(picks)
    try:
        yield picks
    finally:
        _PICKING.reset(token)


def picked(func: Any, args: Any, kwargs: Any) -> Any:
    """Return an operator's results, sized by `picking`; `NotImplemented` for other operators."""
    picks = _PICKING.get()
    rule = _RULES.get(func)
    if picks is None or rule is None:
        return NotImplemented
    out = rule(picks.share, *args, **kwargs)
    picks.are_used = picks.are_used or out is not NotImplemented
    return out


def buffer_elements(count: int, problem: Problem) -> int:
    """Return how many elements of a library's buffer are counted, inside `picking`.

    Args:
        count: The most elements that the buffer may have.
        problem: What the buffer is, for the error.

    Raises:
        UnknownBufferError: It is asked outside of `picking`, where sizes are exact.
    """
    picks = _PICKING.get()
    if picks is None:
        raise UnknownBufferError(problem)
    return count if picks.has_buffers else min(count, 1)  # An empty tensor would be no event.


def taken_to_pick(args: Any) -> tuple[int, ...]:
    """Return the bytes of the index tensors that indexing with masks makes, inside `picking`.

    Args:
        args: Arguments of `aten.index.Tensor`: a tensor and its indices.

    Source: TensorIndexing, `expandTensors`: a mask becomes the result of `nonzero`.
    """
    picks = _PICKING.get()
    if picks is None:
        return ()
    return tuple(8 * i.ndim * picks.share(i.numel()) for i in args[1] if _is_mask(i))


def check_grows(most: EventLog, less: EventLog) -> None:
    """Reject a step in which selecting fewer makes a tensor larger, or changes the operators.

    Args:
        most: The log with every element selected.
        less: The log with half of them selected.

    Raises:
        NoBoundError: There is such a tensor or operator.
    """
    for one, other in zip_longest(most.events, less.events):
        if one is None or other is None:
            raise NoBoundError("with fewer elements selected, the step runs other operators")
        storage, twin = most.storages[one.storage], less.storages[other.storage]
        is_same = (storage.op, storage.module) == (twin.op, twin.module)
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
    # Upper bound: inverse and counts are made whether or not the caller asked for them.
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
