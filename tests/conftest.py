"""Fixtures every test may use."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from tests.pool import Pool


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
