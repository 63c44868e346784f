"""What a plan's ranks hold at the least, pool by pool: what the search's bounds must stay below."""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.result import ReplayedMemory


def pooled_bytes(at: PlanningProblem, measured: ReplayedMemory) -> int:
    """The most of any rank that the pools of all streams hold together of what was asked for."""
    return max(pooled_by_group(at, measured))


def pooled_by_group(at: PlanningProblem, measured: ReplayedMemory) -> Iterator[int]:
    """The same of each group of equal ranks."""
    assert measured.result is not None
    plan = measured.result.plan
    for group in measured.result.memory.groups:
        yield analytic_log_of_rank(plan, group.ranks[0], device=at.request.device).pooled_bytes
