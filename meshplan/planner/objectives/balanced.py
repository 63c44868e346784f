"""Between the fastest and the smallest: the plan of which seconds times bytes are the least.

Down the frontier of memory against time it pays to be slower by a share while more than that share
of the memory is left. Where it stops paying, what is left is headroom that costs little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from meshplan.planner.knapsack.knapsack import Floats
from meshplan.planner.objectives.fastest import decide
from meshplan.planner.objectives.offload_variants import searched
from meshplan.planner.problem.decision import Decision, Evaluated, PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.result import SearchResult
from meshplan.planner.solve.search import search
from meshplan.planner.tables.cost_table import CostTable, memory_bounds, time_bounds
from meshplan.spec.keys import TIME_LIMIT_S
from meshplan.units import format_gib, format_step

_STEP: Final = 0.95
"""The next plan that is looked at holds less than this share of the one before: what lies between
is not looked at, and may be better by as much."""


@dataclass(frozen=True, slots=True)
class Balance:
    """Where seconds times bytes are the least.

    Attributes:
        job, way: The plan that was found, and of which question.
        gap: By which share another plan's product may be less.
        is_whole: Whether the search came to its end.
    """

    job: PlanningProblem
    way: Evaluated
    gap: float
    is_whole: bool

    @property
    def limit_bytes(self) -> int:
        """What the plan holds; the fastest within it is the plan."""
        return self.way.memory.worst.band[1]


def balanced(question: PlanRequest, told: Callable[[str], None] = lambda text: None) -> Decision:
    """The plan that balances the two.

    Raises:
        PlanError: As `decide`.
    """
    began = time.monotonic()
    found = balance(question, told)
    if found is None:
        return replace(decide(question, told), objective="balanced")
    decision = decide(replace(question, limit_bytes=found.limit_bytes), told)
    if decision.chosen is None:  # Nobody waited for it to be looked for once more.
        decision = _so_far(decision, found)
    return replace(
        decision,
        objective="balanced",
        gap=found.gap,
        ladder=None,  # Of a machine with no more memory than that.
        limit_bytes=question.limit_bytes,
        is_whole=decision.is_whole and found.is_whole,
        search_s=time.monotonic() - began,
    )


def _so_far(decision: Decision, found: Balance) -> Decision:
    """The same with what was found before."""
    job, candidate = found.job, found.way.candidate
    assert candidate is not None
    samples = job.samples(candidate.row)
    return replace(
        decision,
        chosen=job.certified(found.way),
        best_s=found.way.seconds,
        samples=samples,
        tokens=samples * (job.spec.batch.seq_len or 0),
        flops=job.flops(candidate.row),
    )


def balance(
    question: PlanRequest, told: Callable[[str], None] = lambda text: None
) -> Balance | None:
    """What memory to give the fastest plan; None where none was found that fits.

    The fastest plan, the fastest that holds less, and so on, until whatever holds less still is
    too slow, even if it held the least that anything can.
    """
    began = time.monotonic()
    deadline = began + (TIME_LIMIT_S if question.time_limit_s is None else question.time_limit_s)
    limit, free = question.limit_bytes, None
    at: tuple[PlanningProblem, Evaluated] | None = None
    best, lower, seconds = float("inf"), float("inf"), 0.0
    while True:
        job = PlanningProblem(replace(question, limit_bytes=limit), free)
        free = job.free
        found = _fastest(job, seconds, best, deadline)
        way = found.measured.result if found.measured is not None else None
        if not isinstance(way, Evaluated) or not found.is_whole:
            break
        seconds, held = way.seconds, way.memory.worst.band[1]
        told(f"{format_step(seconds)} with {format_gib(held)}")
        if seconds * held < best:
            best, at = seconds * held, (job, way)
        # What holds more than the next limit is no faster; what holds less has its turn.
        limit = int(held * _STEP)
        lower = min(lower, seconds * limit)
    if at is None:
        return None
    if not found.is_whole:
        lower = min(lower, float(_products(job, job.usual, seconds).min(initial=np.inf)))
    return Balance(*at, max(0.0, 1 - lower / best), found.is_whole)


def _fastest(job: PlanningProblem, seconds: float, best: float, deadline: float) -> SearchResult:
    """The fastest that fits, of the configurations whose seconds times bytes may be below the best.

    Args:
        seconds: Nothing takes less.
    """

    def run(numbers: CostTable) -> SearchResult:
        hopeful = _products(job, numbers, seconds) < best
        kept = np.where(hopeful[:, None, None], numbers.seconds, np.inf)
        with np.errstate(invalid="ignore"):  # Infinity times nothing is no bound.
            return search(
                replace(numbers, seconds=kept),
                job.capacity,
                partial(job.measure, numbers),
                deadline=deadline,
                is_stopped=job.question.is_stopped,
            )

    return searched(job, run)[1]


def _products(job: PlanningProblem, numbers: CostTable, seconds: float) -> Floats:
    """By row, seconds times bytes at the least; infinite where there is no such row."""
    takes, holds = time_bounds(numbers), memory_bounds(numbers)
    exists = np.isfinite(takes) & np.isfinite(holds)
    held = [job.widened(each) for each in np.where(exists, holds, 0.0).tolist()]
    return np.where(exists, np.maximum(takes, seconds) * held, np.inf)
