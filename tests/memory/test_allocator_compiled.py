"""The compiled allocator does what the one in Python does, event for event.

Which seeded bug would this catch? A block that is split or joined in another case, another best fit
among equal sizes, a segment that is not given back, a page more, a stale library that is played.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.memory.log import allocator, compiled_allocator
from meshplan.memory.log.allocator import OutOfMemoryError, Reserve, reserve
from meshplan.memory.log.events import EventLog, Storage, Term

KB, MB = 1 << 10, 1 << 20

needs_library = pytest.mark.skipif(
    compiled_allocator.LIBRARY is None,
    reason="the allocator was not compiled: there was no C compiler when meshplan was installed",
)


def drawn_log(rng: random.Random, num: int) -> EventLog:
    """Draw a log in which storages of all sizes are born, resized, emptied and freed."""
    most = rng.choice((4 * KB, 3 * MB, 40 * MB, 900 * MB))
    streams = [rng.choice((0, 0, 0, 1, 7)) for _ in range(num)]
    sizes: dict[int, int] = {}
    changes: list[tuple[int, int, int]] = []
    favourites = [rng.randrange(1, most) for _ in range(4)]
    for number in range(num):
        for gone in rng.sample(sorted(sizes), min(len(sizes), rng.choice((0, 0, 1, 2, 3)))):
            changes.append((-sizes.pop(gone), gone, 0))
        if sizes and rng.random() < 0.2:
            resized, more = rng.choice(sorted(sizes)), rng.randrange(1, most)
            changes.append((more - sizes[resized], resized, 0))
            sizes[resized] = more
        sizes[number] = rng.choice((rng.randrange(1, most), most, *favourites))
        changes.append((sizes[number], number, 0))
    storages = tuple(Storage(Term.TEMPORARIES, stream=stream) for stream in streams)
    return EventLog(storages, tuple(changes), ("before",))


def played(log: EventLog, **how: Any) -> Reserve | str:
    try:
        return reserve(log, **how)
    except OutOfMemoryError as error:
        return str(error)


@needs_library
@pytest.mark.parametrize("seed", range(12))
def test_both_do_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    retried = refused = 0
    for _ in range(12):
        log = drawn_log(rng, rng.choice((3, 40, 300)))
        for expandable in (False, True):
            most = reserve(log, expandable=expandable).reserved_bytes
            live = log.peak.live_bytes
            for limit in (None, most, most - 1, (most + live) // 2, live, live // 2):
                how = {"limit_bytes": limit, "expandable": expandable}
                compiled = played(log, **how)
                with monkeypatch.context() as patched:
                    patched.setattr(compiled_allocator, "LIBRARY", None)
                    assert played(log, **how) == compiled, (seed, how)
                refused += isinstance(compiled, str)
                retried += isinstance(compiled, Reserve) and compiled.num_retries > 0
    assert retried
    assert refused


@needs_library
@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (19 * MB, 20 * MB, 20 * MB),  # Of a segment of 20 MiB, 1 MiB is not worth splitting off.
        (19 * MB - 512, 19 * MB - 512, 20 * MB),
        (MB, MB, 2 * MB),  # The largest of the small pool.
        (MB + 1, MB + 512, 20 * MB),
        (10 * MB - 1, 10 * MB, 10 * MB),  # Rounded first, and then large enough for its own.
    ],
)
def test_both_split_at_the_same_sizes(
    size: int, allocated: int, reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog((Storage(Term.TEMPORARIES),), ((size, 0, 0),), ("before",))
    assert reserve(log) == Reserve(size, allocated, reserved, 0, reserved)
    monkeypatch.setattr(compiled_allocator, "LIBRARY", None)
    assert reserve(log) == Reserve(size, allocated, reserved, 0, reserved)


@needs_library
def test_an_empty_log(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reserve(EventLog((), (), ("before",))) == Reserve(0, 0, 0)
    monkeypatch.setattr(compiled_allocator, "LIBRARY", None)
    assert reserve(EventLog((), (), ("before",))) == Reserve(0, 0, 0)


@needs_library
def test_a_library_of_another_source_is_not_used(tmp_path: Path) -> None:
    folder = Path(compiled_allocator.__file__).parent
    for name in ("allocator.c", "libmeshplan_allocator.so"):
        shutil.copy(folder / name, tmp_path)
    library = tmp_path / "libmeshplan_allocator.so"
    assert compiled_allocator._load(library) is not None
    with (tmp_path / "allocator.c").open("a") as source:
        source.write("\n")
    assert compiled_allocator._load(library) is None


@pytest.mark.parametrize("content", [None, b"", b"no library"])
def test_a_library_that_cannot_be_loaded_is_not_used(tmp_path: Path, content: bytes | None) -> None:
    shutil.copy(Path(compiled_allocator.__file__).with_name("allocator.c"), tmp_path)
    library = tmp_path / "libmeshplan_allocator.so"
    if content is not None:
        library.write_bytes(content)
    assert compiled_allocator._load(library) is None


@needs_library
def test_columns_may_lie_apart() -> None:
    """Arrays that are not contiguous are copied, not read with wrong strides."""
    log = drawn_log(random.Random(5), 40)
    spread = np.asfortranarray(log.columns)
    assert not spread[0].flags.c_contiguous
    whole = compiled_allocator.play(log.columns, log.streams, None, False)
    assert compiled_allocator.play(spread, log.streams, None, False) == whole
    assert whole == [*allocator._Allocator(None, False).play(log.columns, log.streams), 0]
