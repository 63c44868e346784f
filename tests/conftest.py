"""Fixtures every test may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import hypothesis
import pytest
import torch.distributed as dist

from tests.helpers.pool import Pool, forkserver

WIDE = frozenset((Path(__file__).parent / "wide_cases.txt").read_text().splitlines())
"""Cases that take seconds and combine what others show, beside those that say so themselves."""
collect_ignore = [
    "transcripts/files", "interop/scripts", "helpers/sft_jobs.py", "helpers/pair_jobs.py",
]  # fmt: skip
"""Scripts and models that tests run, which train when they are imported; and jobs that import
packages which most machines lack."""
MOST_KEPT = 4
"""Ranks of a pool that waits for the next file."""

# Plans of the tests name models of the tests; what is not allowed is for tests/hostile to see.
os.environ["MESHPLAN_ALLOW_CODE"] = "1"
# A search is searched.
os.environ["MESHPLAN_CACHE"] = "off"
# Workers of pytest-xdist have a width, to which every answer would be folded.
os.environ.pop("COLUMNS", None)

# How long an example takes says how busy the machine is, and nothing of what it shows.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave them to `-m wide`."""
    for item in items:
        if item.nodeid in WIDE:
            item.add_marker(pytest.mark.wide)


def pytest_collection_finish() -> None:
    """What is imported by now is never garbage: looking for it takes a second each time."""
    gc.freeze()


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Those of the session, by world size."""
    pools: dict[int, Pool] = {}
    yield pools
    for each in pools.values():
        each.close()


@pytest.fixture(scope="module")
def pool(pools: dict[int, Pool]) -> Iterator[Callable[[int], Pool]]:
    """`pool(world)`: the session's pool of that many gloo ranks, started when first used.

    Ranks that wait are not free: gloo looks for messages a hundred times a second for each group.
    Many of them are let go at the end of a file, few are kept for the next one.
    """
    yield lambda world: pools.setdefault(world, Pool(world))
    for world, each in pools.items():
        if world > MOST_KEPT:
            each.close()


@pytest.fixture(autouse=True, scope="module")
def _begins_in_no_group() -> None:
    """`parallelize` in the tests of another file leaves this process in a group."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process that is in no group, the same for all tests: it takes seconds to start.

    What it has imported is never garbage: each step that is imagined would look for it twice.
    """
    with ProcessPoolExecutor(1, forkserver(), initializer=gc.freeze) as executor:
        yield executor
