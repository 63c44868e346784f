"""Search a cost table of a planning problem, with the problem's memory estimates and guesses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import Candidate
from meshplan.planner.solve.result import Guess, ReplayedMemory, SearchResult
from meshplan.planner.solve.search import search
from meshplan.planner.tables.cost_table import CostTable


class Measure(Protocol):
    """A function that estimates a candidate's memory, as `PlanningProblem.measure` does."""

    def __call__(self, candidate: Candidate, *, to_the_end: bool = False) -> ReplayedMemory: ...


def search_plans(
    problem: PlanningProblem,
    table: CostTable,
    *,
    measure: Measure | None = None,
    guess: Callable[[Candidate], Guess | None] | None = None,
    **more: Any,
) -> SearchResult:
    """Find the fastest candidate of a cost table that fits.

    Args:
        problem: The problem.
        table: A cost table with the configurations of `problem.grid`.
        measure: Estimates a candidate's memory; None for `problem.measure`.
        guess: Guesses a candidate's memory; None for `problem.guess`.
        more: Further arguments of `search`.
    """
    estimate: Measure = measure or partial(problem.measure, table)
    return search(
        table,
        problem.capacity,
        estimate,
        # What is proved not to fit needs no estimate to the end.
        measure_all=lambda candidate: estimate(
            candidate, to_the_end=not problem.is_over(table, candidate)
        ),
        guess=guess or partial(problem.guess, table),
        is_over=partial(problem.is_over, table),
        taken=problem.taken,
        **more,
    )
