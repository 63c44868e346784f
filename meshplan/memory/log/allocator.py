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

from meshplan.memory.log.events import EventLog

_ROUND: Final = 512
_SMALL: Final = 1 << 20
_SMALL_SEGMENT: Final = 2 << 20
_LARGE_SEGMENT: Final = 20 << 20
_LEAST_OF_ITS_OWN: Final = 10 << 20
_ROUND_SEGMENT: Final = 2 << 20
"""Sizes in bytes: of a block, of what is small, of segments that blocks share, and from which on a
block gets a segment of its own, rounded to this."""
_APART: Final = 1 << 60
"""Bytes between expandable segments, so that each may grow for ever."""
_ADDRESS_BITS: Final = 80
_ADDRESS: Final = (1 << _ADDRESS_BITS) - 1
"""A free block is one number, its size above its address: sorted, the smallest comes first."""


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
    return _Allocator(limit_bytes, expandable).play(log)


@dataclass(slots=True, eq=False)
class _Pool:
    """The free blocks of a stream and a size class.

    Attributes:
        free: In order.
        begin, end: Addresses of the expandable segment; negative where there is none.
    """

    is_small: bool
    free: list[int] = field(default_factory=list)
    begin: int = -1
    end: int = -1

    @property
    def page(self) -> int:
        """What an expandable segment grows by."""
        return _SMALL_SEGMENT if self.is_small else _LARGE_SEGMENT


class _Allocator:
    """The state of the device's memory.

    Blocks are numbers. A free one is found by where it begins, and by where it ends, so that what
    becomes free beside it joins it; no segment begins where another ends.
    """

    def __init__(self, limit: int | None, expandable: bool) -> None:
        self.limit, self.expandable = limit, expandable
        self.reserved = self.most_reserved = 0
        self.num_retries = 0
        self._small: dict[int, _Pool] = {}
        self._large: dict[int, _Pool] = {}
        """By stream."""
        self._beginning: dict[int, int] = {}
        self._ending: dict[int, int] = {}
        """Sizes of free blocks."""
        self._segments: dict[int, int] = {}
        """By address, sizes of those that do not grow."""
        self._next_address = 0

    def play(self, log: EventLog) -> Reserve:
        """All events, in one loop: whoever plans plays millions."""
        streams = [storage.stream for storage in log.storages]
        taken: list[tuple[int, int, int, list[int]] | None] = [None] * len(log.storages)
        small, large = self._small, self._large
        small_rest, large_rest = _ROUND, _ROUND if self.expandable else _SMALL + 1
        beginning, ending = self._beginning, self._ending
        is_beginning, is_ending = beginning.pop, ending.pop
        bits, mask, round_up, round_down = _ADDRESS_BITS, _ADDRESS, _ROUND - 1, -_ROUND
        find, put, most_small = bisect.bisect_left, bisect.insort, _SMALL
        allocated = most_allocated = 0
        for delta, storage, _ in log.changes:
            if before := taken[storage]:
                asked, address, length, free = before
                allocated -= length
                # What is free beside it joins it.
                if near := is_beginning(address + length, 0):
                    del free[find(free, near << bits | address + length)]
                    length += near
                if near := is_ending(address, 0):
                    address -= near
                    del free[find(free, near << bits | address)]
                    length += near
                put(free, length << bits | address)
                beginning[address] = ending[address + length] = length
                delta += asked
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
                # Its end is known already.
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
        most = max(log.peak.live_bytes, 0)
        return Reserve(most, most_allocated, self.most_reserved, self.num_retries, self.reserved)

    def _more(self, pool: _Pool, size: int) -> tuple[int, int]:
        """(address, size) of a free block, known by its end alone, where none was large enough."""
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
        """(address, size) of a new one."""
        if pool.is_small:
            length = _SMALL_SEGMENT
        elif size < _LEAST_OF_ITS_OWN:
            length = _LARGE_SEGMENT
        else:
            length = -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        if not self._has_room(length):
            self._give_back()
        self._reserve(length)
        address, self._next_address = self._next_address, self._next_address + length + _ROUND
        self._segments[address] = length
        return address, length

    def _grow(self, pool: _Pool, size: int) -> tuple[int, int]:
        """The free block at the end of the pool's segment, made long enough by further pages."""
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
        """Bytes of the pages that a segment has to grow by."""
        return -(-(size - self._ending.get(pool.end, 0)) // pool.page) * pool.page

    def _has_room(self, length: int) -> bool:
        return self.limit is None or self.reserved + length <= self.limit

    def _reserve(self, length: int) -> None:
        if not self._has_room(length):
            raise OutOfMemoryError(
                f"{length} bytes more than the {self.reserved} reserved do not fit into "
                f"{self.limit}"
            )
        self.reserved += length
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _give_back(self) -> None:
        """Free segments go back to the driver; of an expandable one, the free pages at its end."""
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
