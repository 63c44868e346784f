"""The last look for faster answers, against trying everything moment by moment.

Which seeded bug would this catch? A chain that is told and never looked at, a moment that is left
out, an answer whose linear figures are those of another one.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from meshplan.cost.grid import OPTIONS
from meshplan.planner.objectives.refine import refine
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import Candidate
from meshplan.planner.solve.result import ReplayedMemory, SearchResult
from meshplan.planner.tables.cost_table import CostTable
from tests.helpers.brute import random_rounds

ORDER = (0, 1, 2, 1, 0)
"""Two kinds of blocks between ends that have nothing to choose."""
Turns = tuple[tuple[float, ...], ...]


def space(seed: int) -> tuple[CostTable, Turns, float]:
    """(numbers, what each block's backward holds beside what those before it keep, capacity)."""
    numbers, _ = random_rounds(seed, num_rows=3)
    rng = np.random.default_rng(seed)
    numbers.grid["pp"], numbers.grid["virtual"], numbers.grid["schedule"] = 1, 1, 0
    numbers.grid["micro"] = 1
    seconds = rng.uniform(1.0, 2.0, numbers.seconds.shape)
    seconds[:, 0, 1:] = np.inf
    numbers = replace(
        numbers, order=ORDER, names=("", "b.0", "b.1", "b.2", ""), seconds=seconds,
        resident=np.ones_like(numbers.resident),
    )  # fmt: skip
    turns = ((), *(tuple(rng.uniform(0, 12, 3)) for _ in range(3)), ())
    return numbers, turns, float(rng.uniform(12, 26))


def fastest(numbers: CostTable, turns: Turns, row: int, capacity: float) -> float:
    best = float("inf")
    seconds, saved = numbers.seconds[row], numbers.saved[row]
    ends = float(numbers.last_stage_extra_bytes[row]) + 2 * float(saved[0, 0])
    for chosen in itertools.product(range(len(OPTIONS)), repeat=3):
        kept = most = 0.0
        for place, option in enumerate(chosen, 1):
            most = max(most, kept + turns[place][OPTIONS[option][0]])
            kept += float(saved[ORDER[place], option])
        gives_back = {OPTIONS[option][1] for option in chosen}
        if len(gives_back) == 1 and ends + len(ORDER) + max(most, kept) <= capacity:
            options = zip(ORDER[1:4], chosen, strict=True)
            each = 2 * seconds[0, 0] + sum(seconds[kind, option] for kind, option in options)
            best = min(best, float(each * numbers.grid["microbatches"][row] + numbers.once_s[row]))
    return best


@pytest.mark.parametrize("block", range(3))
def test_what_fits_by_its_moments_is_found(block: int) -> None:
    answers = 0
    for seed in range(block * 10, block * 10 + 10):
        numbers, turns, capacity = space(seed)

        def measure(numbers: CostTable, candidate: Candidate) -> ReplayedMemory:
            return ReplayedMemory(fits=True, is_of_row=False)

        kinds = [SimpleNamespace(has_options=kind > 0) for kind in range(3)]
        chain = SimpleNamespace(kinds=kinds, backward_bytes=turns)
        chains = {1: chain}
        job = cast(Any, SimpleNamespace(chain_at=chains.get, capacity=capacity, measure=measure))
        found = SearchResult()
        refine(cast(PlanningProblem, job), numbers, found)
        rows = range(len(numbers.grid))
        expected = min(fastest(numbers, turns, row, capacity) for row in rows)
        seconds = found.best.seconds if found.best else float("inf")
        assert seconds == pytest.approx(expected, rel=2e-4), seed
        if found.best is None:
            continue
        answers += 1
        row, option_counts = found.best.row, np.array(found.best.option_counts[0])
        held = (numbers.saved[row] + numbers.resident[row])[option_counts > 0] @ option_counts[
            option_counts > 0
        ]
        last_stage_extra_bytes = numbers.extra_bytes(row, 0)
        assert found.best.linear_bytes == pytest.approx((float(held) + last_stage_extra_bytes,))
    assert answers > 3
