"""From bytes asked for to bytes reserved: torch's caching allocator, played on an event log.

The allocator asks the driver for segments, cuts blocks out of them, and gives segments back only
when nothing fits. What it holds beyond what tensors asked for depends on the order of events, so
nothing but playing them tells.

Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp (constants, `get_allocation_size`,
`should_split`, best fit by size and then address; expandable segments map pages).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Final

from meshplan.memory.log import EventLog

_ROUND: Final = 512
_SMALL: Final = 1 << 20
_SMALL_SEGMENT: Final = 2 << 20
_LARGE_SEGMENT: Final = 20 << 20
_LEAST_OF_ITS_OWN: Final = 10 << 20
_ROUND_SEGMENT: Final = 2 << 20
"""Sizes in bytes: of a block, of what is small, of segments that blocks share, and from which on a
block gets a segment of its own, rounded to this."""


class OutOfMemoryError(Exception):
    """The device has fewer bytes than the log needs, even with everything cached given back."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """The most that one rank held at once, by who counts.

    Attributes:
        requested_bytes: What tensors asked for.
        allocated_bytes: The blocks they got, `torch.cuda.max_memory_allocated`.
        reserved_bytes: The segments these lie in, `torch.cuda.max_memory_reserved`.
        num_retries: How often everything cached had to be given back first.
        left_bytes: The segments held at the end, less than the most where some were given back.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    num_retries: int = 0
    left_bytes: int = 0


def reserve(log: EventLog, *, limit_bytes: int | None = None, expandable: bool = False) -> Reserve:
    """Play a log.

    Args:
        limit_bytes: What the allocator may reserve; None for no end.
        expandable: As under `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`: one segment for
            each stream and size class grows page by page.

    Raises:
        OutOfMemoryError: The log does not fit into `limit_bytes`.
    """
    allocator = _Allocator(limit_bytes, expandable)
    sizes: dict[int, int] = {}
    requested = most = 0
    for delta, storage, _ in log.events:
        before = sizes.get(storage, 0)
        sizes[storage] = after = before + delta
        if before:
            allocator.free(storage)
        if after:
            allocator.take(storage, after, log.storages[storage].stream)
        requested += delta
        most = max(most, requested)
    return Reserve(
        most,
        allocator.most_allocated,
        allocator.most_reserved,
        allocator.num_retries,
        allocator.reserved,
    )


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment, between its neighbours."""

    size: int
    address: int
    pool: _Pool
    is_free: bool = True
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True, eq=False)
class _Pool:
    """The free blocks of a stream and a size class, smallest first."""

    is_small: bool
    free: list[tuple[int, int, _Block]] = field(default_factory=list)
    end: _Block | None = None
    """The last block of the expandable segment."""

    def add(self, block: _Block) -> None:
        bisect.insort(self.free, (block.size, block.address, block))  # No two addresses are equal.

    def remove(self, block: _Block) -> None:
        at = bisect.bisect_left(self.free, (block.size, block.address))
        assert self.free[at][2] is block
        del self.free[at]

    def take(self, size: int) -> _Block | None:
        """The smallest that is large enough."""
        at = bisect.bisect_left(self.free, (size, -1))
        return self.free.pop(at)[2] if at < len(self.free) else None


class _Allocator:
    """The state of the device's memory."""

    def __init__(self, limit: int | None, expandable: bool) -> None:
        self.limit, self.expandable = limit, expandable
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self.num_retries = 0
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._taken: dict[int, _Block] = {}
        self._next_address = 0

    def take(self, key: int, asked: int, stream: int) -> None:
        size = -(-asked // _ROUND) * _ROUND
        is_small = size <= _SMALL
        pool = self._pools.get((is_small, stream))
        if pool is None:
            pool = self._pools[is_small, stream] = _Pool(is_small)
        block = pool.take(size)
        if block is None:
            block = self._grow(pool, size) if self.expandable else self._segment(pool, size)
        rest = block.size - size
        if rest >= _ROUND if is_small or self.expandable else rest > _SMALL:
            self._split(block, size)
        block.is_free = False
        self._taken[key] = block
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def free(self, key: int) -> None:
        block = self._taken.pop(key)
        self.allocated -= block.size
        block.is_free = True
        block.pool.add(self._joined(block))

    def _segment(self, pool: _Pool, size: int) -> _Block:
        if pool.is_small:
            length = _SMALL_SEGMENT
        elif size < _LEAST_OF_ITS_OWN:
            length = _LARGE_SEGMENT
        else:
            length = -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        self._reserve(length)
        return _Block(length, self._address(length), pool)

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """The last free block of the pool's segment, made long enough by further pages."""
        page = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT
        end = pool.end
        is_open = end is not None and end.is_free
        missing = size - (end.size if end is not None and is_open else 0)
        length = -(-missing // page) * page
        self._reserve(length)
        if end is not None and is_open:
            pool.remove(end)
            end.size += length
            return end
        # Addresses of one segment are spread so that it may grow for ever.
        address = end.address + end.size if end is not None else self._address(1 << 60)
        block = _Block(length, address, pool, before=end)
        if end is not None:
            end.after = block
        pool.end = block
        return block

    def _reserve(self, length: int) -> None:
        if self.limit is not None and self.reserved + length > self.limit:
            self.num_retries += 1
            self._give_back()
            if self.reserved + length > self.limit:
                raise OutOfMemoryError(
                    f"{length} bytes more than the {self.reserved} reserved do not fit into "
                    f"{self.limit}"
                )
        self.reserved += length
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _give_back(self) -> None:
        """Free segments go back to the driver; of an expandable one, the free pages at its end."""
        for pool in self._pools.values():
            for _, _, block in tuple(pool.free):
                if self.expandable and block is pool.end:
                    pool.remove(block)
                    pool.end = block.before
                    if block.before is not None:
                        block.before.after = None
                    self.reserved -= block.size
                elif not self.expandable and block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.address + size, block.pool)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if block.pool.end is block:
            block.pool.end = rest
        block.pool.add(rest)

    def _joined(self, block: _Block) -> _Block:
        """The block and its free neighbours as one."""
        before, after = block.before, block.after
        if after is not None and after.is_free:
            block.pool.remove(after)
            self._absorb(block, after)
        if before is not None and before.is_free:
            block.pool.remove(before)
            self._absorb(before, block)
            return before
        return block

    def _absorb(self, first: _Block, second: _Block) -> None:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if first.pool.end is second:
            first.pool.end = first

    def _address(self, length: int) -> int:
        address, self._next_address = self._next_address, self._next_address + length
        return address
