"""Simulate torch's caching allocator on an event log, from bytes requested to bytes reserved.

Reserved bytes depend on the order in which blocks are allocated and freed, so the log is played
event by event: by compiled code if there is some (`compiled_allocator`), otherwise by `_Allocator`.
The rules for a request of `delta` bytes, which gets a block of `length` bytes:

    rounding   size = ceil(delta / 512) * 512                                  `_ROUND`
    pool       small if size <= 1 MiB else large, of the storage's stream      `_SMALL`, `_Pool`
    best fit   the free block of the pool with the least (length, address)     `_Pool.free`,
               among those with length >= size                                 `_ADDRESS_BITS`
    segment    where none fits, a new segment of                               `_segment`
                   2 MiB                             in the small pool         `_SMALL_SEGMENT`
                   20 MiB                            if size < 10 MiB          `_LARGE_SEGMENT`,
                                                                               `_LEAST_OF_ITS_OWN`
                   ceil(size / 2 MiB) * 2 MiB        if size >= 10 MiB         `_ROUND_SEGMENT`
    split      the rest, length - size, stays free if                          `play`
                   rest >= 512                       in the small pool         `_ROUND`
                   rest > 1 MiB                      in the large pool         `_SMALL`
               and otherwise the whole block is handed out
    freeing    a freed block joins the free blocks that adjoin it              `play`
    giving     if reserved + segment > limit, every segment that is free       `_give_back`
    back       from end to end goes back to the driver
    failure    if reserved + segment > limit even then                         `_reserve`

With `expandable_segments:True` each pool has one segment, which grows by pages of 2 MiB (small) or
20 MiB (large) and whose last free block has `tail` bytes (0 if the segment ends in use):

    growth     ceil((size - tail) / page) * page instead of a new segment      `_grow`, `_missing`
    split      rest >= 512 in both pools                                       `play`
    giving     floor(tail / page) * page at the end of each segment            `_give_back`
    back

Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp (constants, `get_allocation_size`,
`should_split`, best fit by size and then address; expandable segments map pages).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshplan.memory.log.events import EventLog

if TYPE_CHECKING:
    from meshplan.memory.log.columns import Columns, Ints

_ROUND: Final = 512
_SMALL: Final = 1 << 20
_SMALL_SEGMENT: Final = 2 << 20
_LARGE_SEGMENT: Final = 20 << 20
_LEAST_OF_ITS_OWN: Final = 10 << 20
_ROUND_SEGMENT: Final = 2 << 20
"""Sizes in bytes, with torch's names: every block is a multiple of `_ROUND` (kMinBlockSize); up to
`_SMALL` (kSmallSize) a block is small. Blocks share segments of `_SMALL_SEGMENT` (kSmallBuffer)
or `_LARGE_SEGMENT` (the default large_segment_size). From `_LEAST_OF_ITS_OWN` (kMinLargeAlloc)
on a block gets a segment of its own, a multiple of `_ROUND_SEGMENT` (kRoundLarge)."""
_APART: Final = 1 << 60
"""Bytes of address space between two expandable segments, so that neither grows into the other."""
_ADDRESS_BITS: Final = 80
_ADDRESS: Final = (1 << _ADDRESS_BITS) - 1
"""A free block is one number, its size in the bits above its address. In a sorted list of such
numbers, the first one from `size << _ADDRESS_BITS` on is the best fit."""


class OutOfMemoryError(Exception):
    """The log needs more bytes than the limit, even after all unused segments are released."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """The peak memory of one rank, at three levels of the allocator.

    Attributes:
        requested_bytes: Peak bytes that tensors asked for.
        allocated_bytes: Peak bytes of the blocks handed out for those requests, as
            `torch.cuda.max_memory_allocated` reports.
        reserved_bytes: Peak bytes of the segments that contain the blocks, as
            `torch.cuda.max_memory_reserved` reports.
        num_retries: Number of times that unused segments were released to the driver to make room.
        left_bytes: Bytes reserved after the last event; less than `reserved_bytes` if segments
            were released.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    num_retries: int = 0
    left_bytes: int = 0


def reserve(
    log: EventLog,
    *,
    limit_bytes: int | None = None,
    expandable: bool = False,
    from_first: bool = False,
) -> Reserve:
    """Return the peak bytes that torch's caching allocator hands out and reserves for a log.

    Args:
        log: The events to play, in bytes as requested.
        limit_bytes: Maximum bytes that the allocator may reserve; None for no limit.
        expandable: If True, simulate `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, where one
            segment for each stream and size class grows page by page.
        from_first: If True, the log is of a later step: play the first one before it
            (`first_step`).

    Raises:
        OutOfMemoryError: The log does not fit into `limit_bytes`.
    """
    # Late: commands that play no log do without numpy.
    from meshplan.memory.log import compiled_allocator as compiled
    from meshplan.memory.log.columns import peak_of
    from meshplan.memory.log.first_step import with_first_step

    events = with_first_step(log) if from_first else log.columns
    if compiled.LIBRARY is None:
        figures = _Allocator(limit_bytes, expandable).play(events, log.streams)
    else:
        *figures, refused = compiled.play(events, log.streams, limit_bytes, expandable)
        if refused:
            raise _out_of_memory(refused, figures[-1], limit_bytes)
    return Reserve(peak_of(events)[0], *figures)


def _out_of_memory(refused: int, reserved: int, limit: int | None) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"cannot reserve {refused} bytes: {reserved} are reserved already, and the limit is {limit}"
    )


@dataclass(slots=True, eq=False)
class _Pool:
    """The free blocks of one stream and size class.

    Attributes:
        is_small: True for the pool of blocks of up to 1 MiB.
        free: Free blocks in ascending order, each encoded as `size << _ADDRESS_BITS | address`.
        begin, end: Addresses where the pool's expandable segment begins and ends; -1 if there is
            none.
    """

    is_small: bool
    free: list[int] = field(default_factory=list)
    begin: int = -1
    end: int = -1

    @property
    def page(self) -> int:
        """Bytes by which an expandable segment grows."""
        return _SMALL_SEGMENT if self.is_small else _LARGE_SEGMENT


class _Allocator:
    """The segments and free blocks of one device.

    `_beginning` and `_ending` find a free block by the address where it begins and by the address
    where it ends, so that a freed block can be joined with the free blocks next to it. No segment
    begins where another one ends, so blocks of different segments never join.
    """

    def __init__(self, limit: int | None, expandable: bool) -> None:
        self.limit, self.expandable = limit, expandable
        self.reserved = self.most_reserved = 0
        self.num_retries = 0
        self._small: dict[int, _Pool] = {}
        self._large: dict[int, _Pool] = {}
        """Pools by stream."""
        self._beginning: dict[int, int] = {}
        self._ending: dict[int, int] = {}
        """Sizes of free blocks, by the address where they begin and where they end."""
        self._segments: dict[int, int] = {}
        """Sizes of the segments that do not grow, by address."""
        self._next_address = 0

    def play(self, events: Columns, stream_of: Ints) -> list[int]:
        """Play all events, and return the fields of `Reserve` except for the first one.

        The body is one loop without a function call per event, because a planner plays millions of
        events.
        """
        streams = stream_of.tolist()
        taken: list[tuple[int, int, int, list[int]] | None] = [None] * len(streams)
        small, large = self._small, self._large
        small_rest, large_rest = _ROUND, _ROUND if self.expandable else _SMALL + 1
        beginning, ending = self._beginning, self._ending
        is_beginning, is_ending = beginning.pop, ending.pop
        bits, mask, round_up, round_down = _ADDRESS_BITS, _ADDRESS, _ROUND - 1, -_ROUND
        find, put, most_small = bisect.bisect_left, bisect.insort, _SMALL
        allocated = most_allocated = 0
        for delta, storage in zip(*events[:2].tolist(), strict=True):
            # Play a change of size as a free and a new allocation.
            if before := taken[storage]:
                requested, address, length, free = before
                allocated -= length
                # Join the freed block with the free blocks directly after and before it.
                if near := is_beginning(address + length, 0):
                    del free[find(free, near << bits | address + length)]
                    length += near
                if near := is_ending(address, 0):
                    address -= near
                    del free[find(free, near << bits | address)]
                    length += near
                put(free, length << bits | address)
                beginning[address] = ending[address + length] = length
                delta += requested
                taken[storage] = None
            if not delta:
                continue
            size = delta + round_up & round_down
            if size <= most_small:
                pools, least = small, small_rest
            else:
                pools, least = large, large_rest
            pool = pools.get(streams[storage])
            if pool is None:
                pool = pools[streams[storage]] = _Pool(size <= most_small)
            free = pool.free
            at = find(free, size << bits)
            if at < len(free):
                block = free.pop(at)
                address, length = block & mask, block >> bits
                del beginning[address]
            else:
                address, length = self._more(pool, size)
            rest = length - size
            if rest >= least:
                # Split the block. `ending` already has an entry at the end of the rest, because
                # the rest ends where the block ended.
                end, begin = address + length, address + size
                put(free, rest << bits | begin)
                beginning[begin] = ending[end] = rest
                length = size
            else:
                del ending[address + length]
            taken[storage] = delta, address, length, free
            allocated += length
            if allocated > most_allocated:
                most_allocated = allocated
        return [most_allocated, self.most_reserved, self.num_retries, self.reserved]

    def _more(self, pool: _Pool, size: int) -> tuple[int, int]:
        """Return (address, size) of a new block for a request that no free block fits.

        The block is registered in `_ending` only. `play` expects this, because it removes a block
        taken from the free list from `_beginning` only.
        """
        address, length = self._grow(pool, size) if self.expandable else self._segment(pool, size)
        self._ending[address + length] = length
        return address, length

    def _add(self, pool: _Pool, address: int, size: int) -> None:
        bisect.insort(pool.free, size << _ADDRESS_BITS | address)
        self._beginning[address] = self._ending[address + size] = size

    def _remove(self, pool: _Pool, address: int, size: int) -> None:
        del pool.free[bisect.bisect_left(pool.free, size << _ADDRESS_BITS | address)]
        del self._beginning[address], self._ending[address + size]

    def _segment(self, pool: _Pool, size: int) -> tuple[int, int]:
        """Reserve a new segment for a request of `size` bytes and return its (address, size)."""
        if pool.is_small:
            length = _SMALL_SEGMENT
        elif size < _LEAST_OF_ITS_OWN:
            length = _LARGE_SEGMENT
        else:
            length = -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        if not self._has_room(length):
            self._give_back()
        self._reserve(length)
        # Leave a gap after each segment, so that its blocks never join those of the next segment.
        address, self._next_address = self._next_address, self._next_address + length + _ROUND
        self._segments[address] = length
        return address, length

    def _grow(self, pool: _Pool, size: int) -> tuple[int, int]:
        """Grow the pool's expandable segment and return (address, size) of its last free block."""
        if pool.begin < 0:
            pool.begin = pool.end = self._next_address
            self._next_address += _APART
        if not self._has_room(self._missing(pool, size)):
            self._give_back()
        missing, there = self._missing(pool, size), self._ending.get(pool.end, 0)
        self._reserve(missing)
        address = pool.end - there
        if there:
            self._remove(pool, address, there)
        pool.end += missing
        return address, there + missing

    def _missing(self, pool: _Pool, size: int) -> int:
        """Return the bytes of pages by which the pool's segment must grow to fit `size` bytes."""
        return -(-(size - self._ending.get(pool.end, 0)) // pool.page) * pool.page

    def _has_room(self, length: int) -> bool:
        return self.limit is None or self.reserved + length <= self.limit

    def _reserve(self, length: int) -> None:
        if not self._has_room(length):
            raise _out_of_memory(length, self.reserved, self.limit)
        self.reserved += length
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _give_back(self) -> None:
        """Release to the driver all free segments and the free last pages of expandable ones."""
        self.num_retries += 1
        for pool in (*self._small.values(), *self._large.values()):
            there = self._ending.get(pool.end, 0)
            if pages := there // pool.page:
                address = pool.end - there
                self._remove(pool, address, there)
                pool.end -= pages * pool.page
                if address < pool.end:
                    self._add(pool, address, pool.end - address)
                self.reserved -= pages * pool.page
            for block in tuple(pool.free):
                size, address = block >> _ADDRESS_BITS, block & _ADDRESS
                if self._segments.get(address) == size:
                    self._remove(pool, address, size)
                    del self._segments[address]
                    self.reserved -= size
