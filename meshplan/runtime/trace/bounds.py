"""Operators whose results are as large as numbers say, made as large as they could be.

A mask picks at most all it covers, `unique` keeps at most all it is given. What is traced so takes
at least what the step takes, if picking fewer makes nothing larger: whether it does is looked at,
by tracing the same step with half as much picked (`check_grows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final

import torch

from meshplan.memory.log.events import EventLog

_ops: Final[Any] = torch.ops.aten
Share = Callable[[int], int]
_PICKING: ContextVar[Share | None] = ContextVar("_PICKING", default=None)


class NoBoundError(Exception):
    """Nothing proves that what was traced is the most."""


def everything(count: int) -> int:
    """All that could be picked."""
    return count


def half(count: int) -> int:
    """Half of it."""
    return (count + 1) // 2


@contextmanager
def picking(share: Share) -> Iterator[None]:
    """Inside, operators of fakes pick so many of those that they could."""
    token = _PICKING.set(share)
    try:
        yield
    finally:
        _PICKING.reset(token)


def picked(func: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operator, as large as `picking` says; `NotImplemented` for all others."""
    share = _PICKING.get()
    rule = _RULES.get(func)
    if share is None or rule is None:
        return NotImplemented
    return rule(share, *args, **kwargs)


def taken_to_pick(args: Any) -> tuple[int, ...]:
    """Bytes that indexing with masks takes for the places of what they pick, where `picking`.

    Source: TensorIndexing, `expandTensors`: a mask becomes the result of `nonzero`.
    """
    share = _PICKING.get()
    if share is None:
        return ()
    return tuple(8 * i.ndim * share(i.numel()) for i in args[1] if _is_mask(i))


def check_grows(most: EventLog, less: EventLog) -> None:
    """Refuse a step in which picking fewer makes anything larger, or takes another course.

    Args:
        most: Where everything was picked.
        less: Where half of it was.

    Raises:
        NoBoundError: It does.
    """
    for one, other in zip_longest(most.events, less.events):
        if one is None or other is None:
            raise NoBoundError("with fewer picked, the step takes another course")
        storage, twin = most.storages[one.storage], less.storages[other.storage]
        is_same = (storage.op, storage.module) == (twin.op, twin.module)
        if not is_same or one.phase != other.phase or (one.delta > 0) != (other.delta > 0):
            raise NoBoundError("with fewer picked, the step takes another course")
        if abs(other.delta) > abs(one.delta):
            where = f" in {storage.module}" if storage.module else ""
            raise NoBoundError(f"with fewer picked, what {storage.op}{where} makes is larger")


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
    # Inverse and counts are made whether or not anybody asked for them: at the most.
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
