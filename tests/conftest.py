"""Fixtures every test may use."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings

from tests.pool import Pool

settings.register_profile("untimed", deadline=None)  # A machine may have other things to do.
settings.load_profile("untimed")

WIDE = frozenset((Path(__file__).parent / "wide_cases.txt").read_text().splitlines())
"""Cases that take seconds and combine what others show, beside those that say so themselves."""


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
def pool() -> Iterator[Callable[[int], Pool]]:
    """`pool(world)`: the session's pool of that many gloo ranks, started when first used."""
    pools: dict[int, Pool] = {}

    def of(world: int) -> Pool:
        return pools.setdefault(world, Pool(world))

    yield of
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process that is in no group, the same for all tests: it takes seconds to start."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as executor:
        yield executor
