"""Answers that are found soon, where the fastest rows fail.

They bound what is left, and are told if the time is up.
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
_LOOKED_AT, _FEW, _ASKED = 40, 8, 3
"""Rows that are tried at each share of the memory, and beside one that fits; those measured."""

Answer = tuple[Candidate, ReplayedMemory]


class IsOpen(Protocol):
    """Whether nothing speaks against a row, or one of its answers."""

    def __call__(self, row: int, candidate: Candidate | None = None) -> bool: ...


class WarmStart:
    """Of one space.

    Args:
        capacity: Bytes of one rank by the linear figures.
        times, held: `numbers.time_bounds` and `numbers.memory_bounds`.
        measure: Asks the memory room.
        is_late: Whether to end with what is there.
    """

    def __init__(
        self,
        numbers: CostTable,
        capacity: float,
        times: Floats,
        held: Floats,
        *,
        measure: Callable[[Candidate], ReplayedMemory],
        is_open: IsOpen,
        is_late: Callable[[], bool],
    ) -> None:
        self._numbers, self._capacity = numbers, capacity
        self._times, self._held = times, held
        self._measure, self._is_open, self._is_late = measure, is_open, is_late

    def any(self) -> Iterator[Answer]:
        """One that keeps well clear of the limit, if there is any."""
        for share in _SHARES:
            if found := self._fastest(self._capacity * share):
                yield found
                return
        yield from self.smallest()

    def smallest(self) -> Iterator[Answer]:
        """Blocks in the most parts come and go the smallest; then a faster one with as many.

        What has one stage is told soonest, and so is looked at first.
        """
        grid = self._numbers.grid
        there = np.flatnonzero(np.isfinite(self._times) & (self._held <= self._capacity))
        least = there[np.argsort(self._held[there], kind="stable")]
        for rows in (least[grid["pp"][least] == 1], least[grid["pp"][least] > 1]):
            parts = grid["tp"][rows]
            for row in (int(rows[parts == tp][0]) for tp in sorted(set(parts), reverse=True)):
                if self._is_late():
                    return
                smallest = ConfigSolver(self._numbers, row, float("inf")).smallest()
                measured = self._measure(smallest)
                if measured.fits:
                    yield smallest, measured
                    room = self._capacity - max(measured.excess_bytes, 0.0)
                    if found := self._fastest(room, grid["tp"] == grid["tp"][row], _FEW):
                        yield found
                    return

    def _fastest(
        self, room: float, among: NDArray[np.bool_] | None = None, looks: int = _LOOKED_AT
    ) -> Answer | None:
        """The first of the fastest answers of some rows within so much memory that fits."""
        can_be = (self._held <= room) & np.isfinite(self._times)
        # The more stages there are, the longer it takes to tell, and the more is there beside.
        for name in ("pp", "virtual"):
            alone = can_be & (self._numbers.grid[name] == 1)
            can_be = alone if alone.any() else can_be
        rows = np.flatnonzero(can_be if among is None else can_be & among)
        if not len(rows):
            return None
        order = np.argsort(priced_bounds(self._numbers, rows, room), kind="stable")
        asked = 0
        for row in map(int, rows[order[:looks]]):
            if self._is_late() or asked == _ASKED:
                break
            if not self._is_open(row):
                continue
            candidate = solve_config(self._numbers, row, room)
            if candidate is None or not self._is_open(row, candidate):
                continue
            measured, asked = self._measure(candidate), asked + 1
            if measured.fits:
                return candidate, measured
        return None
