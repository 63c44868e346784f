"""Find a candidate that fits early, for searches in which the fastest configurations do not fit.

Such a candidate lets the search exclude slower configurations, and is the answer if the time limit
is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.knapsack.knapsack import Floats
from meshplan.planner.solve.config import Candidate, ConfigSolver, solve_config
from meshplan.planner.solve.result import ReplayedMemory
from meshplan.planner.tables.cost_table import CostTable, priced_bounds

_SHARES: Final = (0.8, 0.65, 0.5, 0.35)
"""Shares of the capacity within which a candidate is sought, one after the other."""
_MOST_ROWS, _FEW, _MOST_MEASURED = 40, 8, 3
"""Configurations tried at each share of the capacity, configurations tried after a smallest
candidate fits, and the most candidates replayed in either case."""

Answer = tuple[Candidate, ReplayedMemory]


class IsOpen(Protocol):
    """A function: True if nothing excludes a configuration, nor this candidate of it if given."""

    def __call__(self, row: int, candidate: Candidate | None = None) -> bool: ...


class WarmStart:
    """Find early candidates that fit in one space of configurations.

    Args:
        table: The cost table.
        capacity: Linear bytes that one rank may use.
        times: [configs] lower bounds on the seconds of a step (`cost_table.time_bounds`).
        least_bytes: [configs] lower bounds on the bytes of the fullest rank
            (`cost_table.memory_bounds`).
        measure: Replays the memory of a candidate.
        is_open: Returns True if nothing excludes a configuration, nor this candidate of it if
            given.
        is_late: Returns True once the search has to end.
    """

    def __init__(
        self,
        table: CostTable,
        capacity: float,
        times: Floats,
        least_bytes: Floats,
        *,
        measure: Callable[[Candidate], ReplayedMemory],
        is_open: IsOpen,
        is_late: Callable[[], bool],
    ) -> None:
        self._cost_table, self._capacity = table, capacity
        self._times, self._least_bytes = times, least_bytes
        self._measure, self._is_open, self._is_late = measure, is_open, is_late

    def any(self) -> Iterator[Answer]:
        """Yield a candidate well below the memory limit; if there is none, those of `smallest`."""
        for share in _SHARES:
            if found := self._fastest(self._capacity * share):
                yield found
                return
        yield from self.smallest()

    def smallest(self) -> Iterator[Answer]:
        """Yield a smallest candidate that fits, then the fastest found with the same size of tp.

        Of each size of tp, the configuration with the lowest memory bound is tried. The largest
        sizes come first, because their blocks have the least transient memory. Configurations with
        one stage come before pipelines, because they are replayed the fastest.
        """
        grid = self._cost_table.grid
        there = np.flatnonzero(np.isfinite(self._times) & (self._least_bytes <= self._capacity))
        least = there[np.argsort(self._least_bytes[there], kind="stable")]
        for rows in (least[grid["pp"][least] == 1], least[grid["pp"][least] > 1]):
            parts = grid["tp"][rows]
            for row in (int(rows[parts == tp][0]) for tp in sorted(set(parts), reverse=True)):
                if self._is_late():
                    return
                smallest = ConfigSolver(self._cost_table, row, float("inf")).smallest()
                measured = self._measure(smallest)
                if measured.fits:
                    yield smallest, measured
                    capacity = self._capacity - max(measured.most_excess, 0.0)
                    if found := self._fastest(capacity, grid["tp"] == grid["tp"][row], _FEW):
                        yield found
                    return

    def _fastest(
        self, capacity: float, among: NDArray[np.bool_] | None = None, num_rows: int = _MOST_ROWS
    ) -> Answer | None:
        """Return a fast candidate within a limit of linear bytes whose replay fits.

        Args:
            capacity: Linear bytes that one rank may use.
            among: [configs] mask of the configurations to try; None for all.
            num_rows: Number of configurations to try.

        Returns:
            The candidate and its replayed memory; None if no replayed candidate fits.
        """
        can_be = (self._least_bytes <= capacity) & np.isfinite(self._times)
        # Prefer configurations with one stage: more stages take longer to replay, and need memory
        # that linear bytes leave out.
        for name in ("pp", "virtual"):
            alone = can_be & (self._cost_table.grid[name] == 1)
            can_be = alone if alone.any() else can_be
        rows = np.flatnonzero(can_be if among is None else can_be & among)
        if not len(rows):
            return None
        order = np.argsort(priced_bounds(self._cost_table, rows, capacity), kind="stable")
        num_measured = 0
        for row in map(int, rows[order[:num_rows]]):
            if self._is_late() or num_measured == _MOST_MEASURED:
                break
            if not self._is_open(row):
                continue
            candidate = solve_config(self._cost_table, row, capacity)
            if candidate is None or not self._is_open(row, candidate):
                continue
            measured, num_measured = self._measure(candidate), num_measured + 1
            if measured.fits:
                return candidate, measured
        return None
