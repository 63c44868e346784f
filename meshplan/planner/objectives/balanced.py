"""The balanced objective: the plan with the least product of step time and memory.

Along the frontier of memory against time, a slower plan is better as long as it saves a larger
share of memory than it adds to the time. The plan at which this ends leaves much memory free at
little cost in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from meshplan.planner.knapsack.knapsack import Floats
from meshplan.planner.objectives.fastest import decide
from meshplan.planner.objectives.offload_variants import searched
from meshplan.planner.objectives.search_plans import search_plans
from meshplan.planner.problem.decision import Decision, Evaluated, PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.result import SearchResult
from meshplan.planner.tables.cost_table import CostTable, memory_bounds, time_bounds
from meshplan.units import format_gib, format_step

_STEP: Final = 0.95
"""Share of the last plan's memory that the next plan may use. Plans between the two are not
searched; their product may be smaller by up to this step."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The plan with the least product of seconds and bytes.

    Attributes:
        problem: The problem that the plan was found in.
        evaluated: The plan.
        gap: Share by which another plan's product may be smaller.
        is_whole: If True, the search ran to its end; if False, it was stopped before.
    """

    problem: PlanningProblem
    evaluated: Evaluated
    gap: float
    is_whole: bool

    @property
    def limit_bytes(self) -> int:
        """Bytes of the plan's fullest rank. The plan is the fastest one within this limit."""
        return self.evaluated.memory.high_bytes


def balanced(request: PlanRequest, report: Callable[[str], None] = lambda text: None) -> Decision:
    """Find the plan that balances time and memory.

    Args:
        request: The request.
        report: Called with lines on the progress.

    Raises:
        PlanError: The plan file lacks a statement, or allows no configuration.
    """
    began = time.monotonic()
    found = balance(request, report)
    if found is None:
        return replace(decide(request, report), objective="balanced")
    decision = decide(replace(request, limit_bytes=found.limit_bytes), report)
    if decision.chosen is None:  # The second search was stopped before it found the plan again.
        decision = _so_far(decision, found)
    return replace(
        decision,
        objective="balanced",
        gap=found.gap,
        ladder=None,  # The ladder at hand is that of a smaller memory limit.
        limit_bytes=request.limit_bytes,
        is_whole=decision.is_whole and found.is_whole,
        search_s=time.monotonic() - began,
    )


def _so_far(decision: Decision, found: Balance) -> Decision:
    """Return the decision with the plan that `balance` found as the chosen one."""
    problem, candidate = found.problem, found.evaluated.candidate
    assert candidate is not None
    return replace(
        decision,
        chosen=problem.certified(found.evaluated),
        best_s=found.evaluated.seconds,
        samples=problem.samples(candidate.row),
        flops=problem.flops(candidate.row),
    )


def balance(
    request: PlanRequest, report: Callable[[str], None] = lambda text: None
) -> Balance | None:
    """Find the plan with the least product of seconds and bytes; None if no plan fits.

    The fastest plan is searched, then the fastest plan with less memory, and so on, until the lower
    bounds show that no plan with less memory has a smaller product.

    Args:
        request: The request.
        report: Called with lines on the progress.

    Raises:
        PlanError: The plan file lacks a statement, or allows no configuration.
    """
    deadline = time.monotonic() + request.limit_s
    limit, free = request.limit_bytes, None
    at: tuple[PlanningProblem, Evaluated] | None = None
    best, lower, seconds = float("inf"), float("inf"), 0.0
    while True:
        problem = PlanningProblem(replace(request, limit_bytes=limit), free)
        free = problem.free
        found = _fastest(problem, seconds, best, deadline)
        evaluated = found.measured.result if found.measured is not None else None
        if not isinstance(evaluated, Evaluated) or not found.is_whole:
            break
        seconds, num_bytes = evaluated.seconds, evaluated.memory.high_bytes
        report(f"{format_step(seconds)} with {format_gib(num_bytes)}")
        if seconds * num_bytes < best:
            best, at = seconds * num_bytes, (problem, evaluated)
        # No plan within this limit is faster. Plans that use more than the next limit therefore
        # have a product of at least seconds * limit; plans that use less are searched next.
        limit = int(num_bytes * _STEP)
        lower = min(lower, seconds * limit)
    if at is None:
        return None
    if not found.is_whole:
        lower = min(lower, float(_products(problem, problem.table, seconds).min(initial=np.inf)))
    return Balance(*at, max(0.0, 1 - lower / best), found.is_whole)


def _fastest(
    problem: PlanningProblem, seconds: float, best: float, deadline: float
) -> SearchResult:
    """Search the fastest plan that fits, among configurations that may beat the least product.

    Args:
        problem: The problem.
        seconds: Lower bound on the step time of all plans.
        best: Smallest product of seconds and bytes found so far.
        deadline: Value of `time.monotonic()` at which to stop.
    """

    def run(table: CostTable) -> SearchResult:
        hopeful = _products(problem, table, seconds) < best
        kept = np.where(hopeful[:, None, None], table.seconds, np.inf)
        with np.errstate(invalid="ignore"):  # Infinity * 0.
            return search_plans(
                problem,
                replace(table, seconds=kept),
                deadline=deadline,
                is_stopped=problem.request.is_stopped,
            )

    return searched(problem, run)[1]


def _products(problem: PlanningProblem, table: CostTable, seconds: float) -> Floats:
    """Return [configs] lower bounds on seconds * bytes; infinite where no plan is possible.

    Args:
        problem: The problem.
        table: The cost table.
        seconds: Lower bound on the step time of all plans.
    """
    seconds_floor, holds = time_bounds(table), memory_bounds(table)
    exists = np.isfinite(seconds_floor) & np.isfinite(holds)
    num_bytes = [problem.widened(each) for each in np.where(exists, holds, 0.0).tolist()]
    return np.where(exists, np.maximum(seconds_floor, seconds) * num_bytes, np.inf)
