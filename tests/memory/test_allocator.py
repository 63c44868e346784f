"""What the caching allocator makes of a log: sizes of blocks and segments, reuse, giving back.

Which seeded bug would this catch? A block that is not joined with its neighbour, one reused on
another stream, a segment of another size, a limit that is passed.
"""

from __future__ import annotations

import random

import pytest

from meshplan.memory.log.allocator import OutOfMemoryError, reserve
from meshplan.memory.log.events import Event, EventLog, Storage, Term

KB, MB = 1 << 10, 1 << 20


def log(*steps: tuple[str, float], streams: dict[str, int] | None = None) -> EventLog:
    """Storages by name: (name, bytes it then has)."""
    names = list(dict.fromkeys(name for name, _ in steps))
    has = dict.fromkeys(names, 0)
    events = []
    for name, size in steps:
        events.append(Event(int(size) - has[name], names.index(name), 0))
        has[name] = int(size)
    stream = streams or {}
    storages = (Storage(Term.TEMPORARIES, stream=stream.get(name, 0)) for name in names)
    return EventLog(tuple(storages), tuple(events), ("before",))


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MB),
        (513, 1024, 2 * MB),
        (MB, MB, 2 * MB),
        (MB + 1, MB + 512, 20 * MB),
        (10 * MB - 512, 10 * MB - 512, 20 * MB),
        (10 * MB - 1, 10 * MB, 10 * MB),
        (10 * MB + 1, 12 * MB, 12 * MB),  # 2 MiB less 512: more than 1 MiB would be cut off.
        (11 * MB, 12 * MB, 12 * MB),
        (23 * MB, 24 * MB, 24 * MB),
    ],
)
def test_one_block(asked: int, allocated: int, reserved: int) -> None:
    found = reserve(log(("a", asked)))
    assert found.requested_bytes == asked
    assert found.reserved_bytes == reserved
    rest = reserved - (-(-asked // 512) * 512)
    is_cut = rest >= 512 if asked <= MB else rest > MB
    assert found.allocated_bytes == (-(-asked // 512) * 512 if is_cut else allocated)


def test_what_is_freed_is_used_again() -> None:
    again = log(("a", 30 * MB), ("a", 0), ("b", 30 * MB), ("b", 0), ("c", 25 * MB))
    assert reserve(again).reserved_bytes == 30 * MB


def test_neighbours_join() -> None:
    parts = [(name, 5 * MB) for name in "abcd"]  # One segment of 20 MiB.
    freed = [(name, 0) for name in "bca"]
    assert reserve(log(*parts, *freed, ("e", 15 * MB))).reserved_bytes == 20 * MB
    apart = [(name, 0) for name in "ac"]
    assert reserve(log(*parts, *apart, ("e", 10 * MB))).reserved_bytes == 30 * MB


def test_the_smallest_block_that_fits_is_taken() -> None:
    steps = [("a", 40 * MB), ("b", 30 * MB), ("a", 0), ("b", 0), ("c", 30 * MB), ("d", 40 * MB)]
    assert reserve(log(*steps)).reserved_bytes == 70 * MB


def test_streams_share_nothing() -> None:
    steps = [("a", 30 * MB), ("a", 0), ("b", 30 * MB)]
    assert reserve(log(*steps, streams={"b": 1})).reserved_bytes == 60 * MB


def test_small_and_large_share_nothing() -> None:
    assert reserve(log(("a", 5 * MB), ("b", 100 * KB))).reserved_bytes == 22 * MB


def test_a_resized_storage_moves() -> None:
    found = reserve(log(("a", 30 * MB), ("b", 512), ("a", 0), ("a", 30 * MB)))
    assert found.reserved_bytes == 32 * MB
    assert found.requested_bytes == 30 * MB + 512


def test_at_the_limit_what_is_cached_is_given_back() -> None:
    steps = [("a", 30 * MB), ("a", 0), ("b", 40 * MB)]
    found = reserve(log(*steps), limit_bytes=50 * MB)
    assert (found.reserved_bytes, found.num_retries) == (40 * MB, 1)
    with pytest.raises(OutOfMemoryError, match="cannot reserve"):
        reserve(log(("a", 30 * MB), ("b", 40 * MB)), limit_bytes=50 * MB)


def test_expandable_segments_grow_in_pages() -> None:
    steps = [("a", 30 * MB), ("a", 0), ("b", 45 * MB)]
    assert reserve(log(*steps), expandable=True).reserved_bytes == 60 * MB
    assert reserve(log(*steps)).reserved_bytes == 76 * MB
    held = [("a", 30 * MB), ("b", 20 * MB), ("b", 0), ("c", 45 * MB)]
    assert reserve(log(*held), expandable=True).reserved_bytes == 80 * MB
    found = reserve(
        log(("a", 100 * MB), ("a", 0), ("b", MB / 2)), expandable=True, limit_bytes=101 * MB
    )
    assert found.num_retries == 1


@pytest.mark.parametrize("expandable", [False, True])
def test_all_that_is_freed_joins_again(expandable: bool) -> None:
    """After any log, one block as large as all that was reserved fits without more."""
    for seed in range(30):
        rng = random.Random(seed)
        live: list[str] = []
        steps: list[tuple[str, float]] = []
        for number in range(300):
            if live and rng.random() < 0.48:
                steps.append((live.pop(rng.randrange(len(live))), 0))
            else:
                live.append(f"s{number}")
                steps.append((live[-1], int(2 ** rng.uniform(20.1, 26))))
        found = reserve(log(*steps), expandable=expandable)
        assert found.requested_bytes <= found.allocated_bytes <= found.reserved_bytes
        steps += [*((name, 0) for name in live), ("all", found.reserved_bytes)]
        again = reserve(log(*steps), expandable=expandable, limit_bytes=found.reserved_bytes)
        assert again.reserved_bytes == again.allocated_bytes == found.reserved_bytes
        assert not (expandable and again.num_retries)


class Naive:
    """The same rules on lists that are walked from one end to the other: [address, size, who]."""

    def __init__(self) -> None:
        self.segments: dict[tuple[int, bool], list[list[list[int]]]] = {}
        self.reserved = self.address = 0

    def take(self, who: int, asked: int, stream: int) -> None:
        size = -(-asked // 512) * 512
        is_small = size <= MB
        segments = self.segments.setdefault((stream, is_small), [])
        free = [b for segment in segments for b in segment if b[2] < 0 and b[1] >= size]
        if not free:
            own = -(-size // (2 * MB)) * 2 * MB
            length = 2 * MB if is_small else 20 * MB if size < 10 * MB else own
            free = [[self.address, length, -1]]
            segments.append(free)
            self.reserved += length
            self.address += 2 * length
        block = min(free, key=lambda b: (b[1], b[0]))
        rest = block[1] - size
        if rest >= 512 if is_small else rest > MB:
            (segment,) = (s for s in segments if block in s)
            segment.insert(segment.index(block) + 1, [block[0] + size, rest, -1])
            block[1] = size
        block[2] = who

    def free(self, who: int) -> None:
        for segment in (s for each in self.segments.values() for s in each):
            for block in segment:
                block[2] = -1 if block[2] == who else block[2]
            joined: list[list[int]] = []
            for block in segment:
                if joined and joined[-1][2] < 0 and block[2] < 0:
                    joined[-1][1] += block[1]
                else:
                    joined.append(block)
            segment[:] = joined

    def allocated(self) -> int:
        every = (s for each in self.segments.values() for s in each)
        return sum(block[1] for segment in every for block in segment if block[2] >= 0)


def test_one_loop_does_what_walking_over_all_blocks_does() -> None:
    rng = random.Random(3)
    for most in (4 * KB, 3 * MB, 40 * MB):
        naive, sizes, allocated = Naive(), dict[int, int](), 0
        changes: list[tuple[int, int, int]] = []
        streams = [rng.choice((0, 0, 0, 1, 7)) for _ in range(150)]
        for number in range(150):
            for gone in rng.sample(sorted(sizes), min(len(sizes), rng.choice((0, 0, 1, 2)))):
                changes.append((-sizes.pop(gone), gone, 0))
                naive.free(gone)
            if sizes and rng.random() < 0.2:  # A storage grows or shrinks where it is.
                resized, more = rng.choice(sorted(sizes)), rng.randrange(1, most)
                changes.append((more - sizes[resized], resized, 0))
                naive.free(resized)
                naive.take(resized, more, streams[resized])
                sizes[resized] = more
                allocated = max(allocated, naive.allocated())
            sizes[number] = rng.choice((rng.randrange(1, most), most, most // 2))
            changes.append((sizes[number], number, 0))
            naive.take(number, sizes[number], streams[number])
            allocated = max(allocated, naive.allocated())
        storages = tuple(Storage(Term.TEMPORARIES, stream=stream) for stream in streams)
        found = reserve(EventLog(storages, tuple(changes), ("before",)))
        assert (found.reserved_bytes, found.allocated_bytes) == (naive.reserved, allocated)
