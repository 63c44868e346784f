"""One configuration: its fastest way, and its smallest, within a linear memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.cuts import cut
from meshplan.planner.knapsack import NONE, Choice, Counts, Floats, solve
from meshplan.planner.numbers import Numbers, in_flight, weights


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way, whole.

    Args:
        row: Of the grid.
        seconds: Of a step.
        ends: Of the stages, in blocks, 0 first.
        takes: By stage and kind, how many blocks take each option.
        linear_bytes: By stage, what the bounds say it holds.
    """

    row: int
    seconds: float
    ends: tuple[int, ...]
    takes: tuple[tuple[tuple[int, ...], ...], ...]
    linear_bytes: tuple[float, ...]


def solve_row(
    numbers: Numbers, row: int, capacity: float, below: float = float("inf")
) -> Candidate | None:
    """The fastest way of one row within a linear memory; None where none is below.

    Args:
        capacity: Bytes of one rank.
    """
    solver = Row(numbers, row, capacity)
    return solver.best(below)


class Row:
    """One configuration."""

    def __init__(self, numbers: Numbers, row: int, capacity: float) -> None:
        self._numbers, self._row = numbers, row
        self._config = numbers.grid[row]
        self._stages = int(self._config["pp"])
        flights = [in_flight(self._config, s) for s in range(self._stages)]
        menus = {k: numbers.menu(row, k) for k in dict.fromkeys(flights)}
        self._flights, self._menus = flights, [menus[k] for k in flights]
        self._rooms = [capacity] * (self._stages - 1) + [capacity - float(numbers.top[row])]
        self._known: dict[tuple[float, float, bytes], Choice] = {}
        # Every stage has a block, and begins with one; what is in no block goes along.
        named = np.array([bool(name) for name in numbers.names] or [True] * len(numbers.order))
        self._can_begin = np.append(named, False)
        self._can_begin[0] = True
        self._pinned = [
            (place, stage if stage >= 0 else self._stages - 1)
            for place, stage in enumerate(numbers.stages)
            if stage is not None
        ]
        self._can_end = np.append(False, np.logical_or.accumulate(named))

    def best(self, below: float) -> Candidate | None:
        numbers, row = self._numbers, self._row
        a, b = (float(each[0]) for each in weights(numbers.grid[row : row + 1]))
        once = float(numbers.once_s[row])
        if self._stages == 1:
            choice = self._solve(0, 0, len(numbers.order), (below - once) / (a + b))
            if choice is NONE:
                return None
            return self._candidate((0, len(numbers.order)), (a + b) * choice.seconds + once)

        def exact(stage: int, i: int, j: int) -> float:
            return self._solve(stage, i, j).seconds

        cost, ends = cut(self._bounds(), exact, (a, b), below - once)
        return self._candidate(ends, cost + once) if ends else None

    def smallest(self) -> Candidate:
        """What holds the least, on the rank that holds the most."""
        numbers, row = self._numbers, self._row
        held = [np.where(np.isfinite(m.seconds), m.memory, np.inf) for m in self._menus]
        least = [each.argmin(axis=1) for each in held]
        tops = [0.0] * (self._stages - 1) + [float(numbers.top[row])]
        before, places = numbers.before, len(numbers.order) + 1
        kinds = np.arange(len(numbers.counts))
        i, j = np.triu_indices(places, 1)
        table = np.full((self._stages, places, places), np.inf)
        for stage, options in enumerate(least):
            each = np.where(numbers.counts > 0, held[stage][kinds, options], 0.0)
            is_open = self._is_open(stage, i, j)
            table[stage, i[is_open], j[is_open]] = (before[j] - before[i])[is_open] @ each
            table[stage, i[is_open], j[is_open]] += tops[stage]
        _, ends = cut(table, lambda *at: float(table[at]), (1.0, 0.0))
        takes = []
        for stage, (first, last) in enumerate(itertools.pairwise(ends)):
            counts = before[last] - before[first]
            one = np.zeros(numbers.seconds.shape[1:], dtype=np.int64)
            one[kinds, least[stage]] = counts
            takes.append(tuple(tuple(map(int, options)) for options in one))
        linear = [
            float(table[at]) for at in zip(range(self._stages), ends[:-1], ends[1:], strict=True)
        ]
        a, b = (float(each[0]) for each in weights(numbers.grid[row : row + 1]))
        taken = np.array(takes)
        stages = (taken * np.where(taken > 0, numbers.seconds[row][None], 0.0)).sum(axis=(1, 2))
        seconds = float(a * stages.max() + b * stages.sum() + numbers.once_s[row])
        return Candidate(row, seconds, ends, tuple(takes), tuple(linear))

    def _is_open(self, stage: int, i: Counts, j: Counts) -> NDArray[np.bool_]:
        """Where a stage may begin and end: blocks are left for those before and after it."""
        places = len(self._numbers.order) + 1
        is_open = (i >= stage) & (j <= places - self._stages + stage)
        is_open &= (i == 0) == (stage == 0)
        is_open &= (j == places - 1) == (stage == self._stages - 1)
        for place, own in self._pinned:
            if stage == own:
                is_open &= (i <= place) & (place < j)
        return np.asarray(is_open & self._can_begin[i] & self._can_end[j])

    def _bounds(self) -> Floats:
        """[stages, i, j] seconds from below of each stage with each stretch of blocks."""
        before, places = self._numbers.before, len(self._numbers.order) + 1
        i, j = np.triu_indices(places, 1)
        table = np.full((self._stages, places, places), np.inf)
        counts = before[j] - before[i]
        known: dict[tuple[int, float], Floats] = {}
        for stage, (menu, room) in enumerate(zip(self._menus, self._rooms, strict=True)):
            key = (id(menu), room)
            if key not in known:
                known[key] = menu.relaxed(counts, np.array([room]))
            is_open = self._is_open(stage, i, j)
            table[stage, i[is_open], j[is_open]] = known[key][is_open]
        return table

    def _solve(self, stage: int, i: int, j: int, below: float = float("inf")) -> Choice:
        before = self._numbers.before
        counts = before[j] - before[i]
        key = (self._flights[stage], self._rooms[stage], counts.tobytes())
        if key not in self._known:
            self._known[key] = solve(self._menus[stage], counts, self._rooms[stage], below)
        return self._known[key]

    def _candidate(self, ends: tuple[int, ...], seconds: float) -> Candidate:
        takes, linear = [], []
        for stage, (i, j) in enumerate(itertools.pairwise(ends)):
            chosen = self._solve(stage, i, j).takes
            table = np.array(chosen)
            held = float(np.where(table > 0, table * self._menus[stage].memory, 0.0).sum())
            on_top = float(self._numbers.top[self._row]) if stage == self._stages - 1 else 0.0
            takes.append(chosen)
            linear.append(held + on_top)
        return Candidate(
            row=self._row,
            seconds=seconds,
            ends=ends,
            takes=tuple(takes),
            linear_bytes=tuple(linear),
        )
