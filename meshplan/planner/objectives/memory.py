"""Search for the plan that uses the least memory."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.knapsack.knapsack import Floats
from meshplan.planner.problem.decision import Evaluated
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import Candidate, ConfigSolver
from meshplan.planner.solve.result import mesh_key
from meshplan.planner.tables.cost_table import memory_bounds


def least_rows(grid: NDArray[np.void], bounds: Floats, capacity: float) -> list[int]:
    """Return the configurations that may use the least memory, lowest bound first.

    Of configurations that differ only in their microbatches, only the one with the smallest
    microbatches is returned.

    Args:
        grid: All configurations.
        bounds: [configs] lower bounds on the bytes of the fullest rank.
        capacity: Bytes above which a configuration is left out.

    Returns:
        Indices into `grid`.
    """
    least: dict[tuple[int, ...], int] = {}
    for row in np.argsort(grid["micro"], kind="stable"):
        if bounds[row] <= capacity and np.isfinite(bounds[row]):
            least.setdefault(mesh_key(grid[row]), int(row))
    return sorted(least.values(), key=lambda row: float(bounds[row]))


class LeastMemory:
    """A search for the plan with the least memory, run by the constructor.

    Args:
        problem: The problem. Its `capacity` is lowered.
        deadline: Value of `time.monotonic()` at which to stop.

    Attributes:
        evaluated: The plan with the least memory, which may still exceed the limit; None if no
            estimate was completed.
        lower_bytes: Lower bound on the bytes of the fullest rank of every plan.
        is_whole: If True, all plans that may use less memory were examined before the deadline.
        num_measured: Number of memory estimates made.
    """

    def __init__(self, problem: PlanningProblem, deadline: float) -> None:
        self.evaluated: Evaluated | None = None
        self.is_whole, self.num_measured = True, 0
        table = problem.table
        bounds = memory_bounds(table)
        rows = least_rows(table.grid, bounds, float("inf"))
        self.lower_bytes = problem.widened(float(bounds[rows[0]])) if rows else 0.0
        candidates: list[Candidate] = []
        for row in rows:
            if self._is_late(problem, deadline):
                break
            candidates.append(ConfigSolver(table, row, float("inf")).smallest())
        candidates.sort(key=_fullest_rank_bytes)
        if candidates and self.is_whole:
            self.lower_bytes = problem.widened(_fullest_rank_bytes(candidates[0]))
        least = float("inf")
        for candidate in candidates:
            if problem.widened(_fullest_rank_bytes(candidate)) >= least or self._is_late(
                problem, deadline
            ):
                break
            for allocator in problem.free.allocators:
                self.num_measured += 1
                evaluated = problem.measure(table, candidate, allocators=(allocator,)).result
                if isinstance(evaluated, Evaluated) and evaluated.memory.high_bytes < least:
                    least, self.evaluated = evaluated.memory.high_bytes, evaluated
                    problem.allow(least)  # Later estimates stop above the best plan's bytes.

    @property
    def fitting(self) -> Evaluated | None:
        """The plan with the least memory, if it fits."""
        return self.evaluated if self.evaluated and self.evaluated.memory.fits else None

    def _is_late(self, problem: PlanningProblem, deadline: float) -> bool:
        late = time.monotonic() > deadline or problem.request.is_stopped()
        self.is_whole = self.is_whole and not late
        return late


def _fullest_rank_bytes(candidate: Candidate) -> float:
    """Return the linear bytes of the fullest rank."""
    return max(candidate.linear_bytes)
