"""Solve one configuration: find its fastest or its smallest candidate within a memory limit.

Memory is counted in "linear bytes": lower bounds on the memory of a rank that are sums over its
blocks (`CostTable`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshplan.planner.knapsack.knapsack import (
    NONE,
    Counts,
    Floats,
    KnapsackSolution,
    Options,
    bytes_of,
    solve,
)
from meshplan.planner.knapsack.lp_relaxation import solve_relaxations
from meshplan.planner.knapsack.stage_cuts import cut_into_stages, least_cut_cost
from meshplan.planner.tables.cost_table import CostTable, weights
from meshplan.planner.tables.stage_layout import BlockRanges, stage_layout_of
from meshplan.shown import shown

Capacity = float | tuple[float, ...]
"""Linear bytes that every rank along pp may use; a tuple if they differ between the ranks."""


@shown
@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan of a configuration: an option for every block, and the cuts between stages.

    Args:
        row: Index of the configuration in the grid.
        seconds: Seconds of one step.
        ends: Boundaries of the stages: stage s has the places of `CostTable.order` from ends[s] up
            to, but without, ends[s + 1].
        option_counts: [stage][kind][option] number of blocks that take each option.
        linear_bytes: Linear bytes of each pipeline rank: a lower bound on its memory.
    """

    row: int
    seconds: float
    ends: tuple[int, ...]
    option_counts: tuple[tuple[tuple[int, ...], ...], ...]
    linear_bytes: tuple[float, ...]


@dataclass(slots=True)
class _ConfigBounds:
    """The results so far for one configuration and one capacity.

    Attributes:
        row: The solver of the configuration; None once `answer` is found.
        answer: The fastest candidate; None as long as none is found.
        none_below: Seconds of a step below which the solver found no candidate.
    """

    row: ConfigSolver | None
    answer: Candidate | None = None
    none_below: float = float("-inf")


def solve_config(
    table: CostTable, row: int, capacity: Capacity, below: float = float("inf")
) -> Candidate | None:
    """Return the fastest candidate of one configuration within a limit of linear bytes.

    Args:
        table: The cost table.
        row: Index of the configuration in the grid.
        capacity: Linear bytes that each rank may use.
        below: Seconds of a step that the candidate must beat.

    Returns:
        The candidate; None if no candidate fits and is faster than `below`.
    """
    known = _known(table, row, capacity)
    if known.row is not None and below > known.none_below:
        known.none_below = below
        known.answer = known.row.best(below) if known.row.least_s < below else None
        known.row = known.row if known.answer is None else None
    answer = known.answer
    return answer if answer is not None and answer.seconds < below else None


def config_bound(table: CostTable, row: int, capacity: Capacity) -> float:
    """Return a lower bound on the seconds of a step of the candidate that `solve_config` returns.

    The LP relaxation gives the bound in a fraction of the time of `solve_config`. The bound is
    infinite if nothing fits.

    Args:
        table: The cost table.
        row: Index of the configuration in the grid.
        capacity: Linear bytes that each rank may use.
    """
    known = _known(table, row, capacity)
    if known.row is not None:
        return known.row.least_s
    return known.answer.seconds if known.answer is not None else float("inf")


def _known(table: CostTable, row: int, capacity: Capacity) -> _ConfigBounds:
    """Return the cached results for a configuration and a capacity; new ones hold a solver."""
    known: _ConfigBounds | None = table.answers.get((row, capacity))
    if known is None:
        known = table.answers[row, capacity] = _ConfigBounds(ConfigSolver(table, row, capacity))
    return known


class ConfigSolver:
    """Solver of one configuration within a limit of linear bytes.

    Args:
        table: The cost table.
        row: Index of the configuration in the grid.
        capacity: Linear bytes that each rank may use.
    """

    def __init__(self, table: CostTable, row: int, capacity: Capacity) -> None:
        self._cost_table, self._row = table, row
        self._layout = stage_layout_of(table, row)
        self._menus = self._layout.menus
        extra = self._layout.extra_bytes
        each = capacity if isinstance(capacity, tuple) else (capacity,) * len(extra)
        self._capacities = [most - own for most, own in zip(each, extra, strict=True)]
        self._known: dict[tuple[int, float, bytes], KnapsackSolution] = {}

    @cached_property
    def least_s(self) -> float:
        """Lower bound on the seconds of a step: the LP relaxation, which may split blocks."""
        (a, b), once = self._weights, float(self._cost_table.once_s[self._row])
        if self._layout.num == 1:
            counts = self._layout.counts(0, 0, len(self._cost_table.order))
            capacity = np.array([self._capacities[0]])
            return (a + b) * float(self._menus[0].relaxed(counts, capacity)[0]) + once
        return least_cut_cost(self._table(self._bounds), (a, b)) + once

    @cached_property
    def _weights(self) -> tuple[float, float]:
        """The factors (a, b) of the slowest stage and of the sum of stages in a step's seconds."""
        a, b = weights(self._cost_table.grid[self._row : self._row + 1])
        return float(a[0]), float(b[0])

    def best(self, below: float) -> Candidate | None:
        """Return the fastest candidate whose step takes less than `below` seconds; None if none."""
        table, row, layout = self._cost_table, self._row, self._layout
        (a, b), once = self._weights, float(table.once_s[row])
        if layout.num == 1:  # With one stage there is nothing to cut.
            choice = self._solve(0, 0, len(table.order), (below - once) / (a + b))
            if choice is NONE:
                return None
            return self._candidate((0, len(table.order)), (a + b) * choice.seconds + once)

        def exact(rank: int, i: int, j: int) -> float:
            return self._solve(rank, i, j).seconds

        cost, ends = cut_into_stages(self._table(self._bounds), exact, (a, b), below - once)
        return self._candidate(ends, cost + once) if ends else None

    def smallest(self) -> Candidate:
        """Return the candidate whose fullest rank has the fewest linear bytes."""
        table, row, layout = self._cost_table, self._row, self._layout
        option_bytes = [np.where(np.isfinite(m.seconds), m.memory, np.inf) for m in self._menus]
        smallest_option = [each.argmin(axis=1) for each in option_bytes]

        def value(rank: int, counts: Counts) -> Floats:
            kinds = np.arange(len(smallest_option[rank]))
            there = counts.any(axis=0)
            each = np.where(there, option_bytes[rank][kinds, smallest_option[rank]], 0.0)
            return np.asarray(counts @ each + layout.extra_bytes[rank])

        range_bytes = self._table(self._values(lambda queries: [value(*each) for each in queries]))
        # With weights (1, 0), the cut minimises the largest value: the bytes of the fullest rank.
        _, ends = cut_into_stages(range_bytes, lambda *at: float(range_bytes[at]), (1.0, 0.0))
        option_counts, times = [], []
        for rank, (first, last) in enumerate(itertools.pairwise(ends)):
            one = np.zeros(option_bytes[rank].shape, dtype=np.int64)
            one[np.arange(len(one)), smallest_option[rank]] = layout.counts(rank, first, last)
            option_counts.append(tuple(tuple(map(int, options)) for options in one))
            times.append(float((one * np.where(one > 0, self._menus[rank].seconds, 0.0)).sum()))
        linear = [
            float(range_bytes[at])
            for at in zip(range(layout.num), ends[:-1], ends[1:], strict=True)
        ]
        a, b = self._weights
        seconds = a * max(times) + b * sum(times) + float(table.once_s[row])
        return Candidate(row, seconds, *layout.stages(ends, option_counts), tuple(linear))

    @cached_property
    def _bounds(self) -> list[Floats]:
        """One [sets] array per rank: lower bounds on the seconds of each distinct set of blocks."""
        return self._values(
            lambda queries: solve_relaxations(
                [(self._menus[rank], counts, self._capacities[rank]) for rank, counts in queries]
            )
        )

    @cached_property
    def _stretches(self) -> list[BlockRanges]:
        """The contiguous block ranges that may be put on each rank."""
        return [self._layout.stretches(rank) for rank in range(self._layout.num)]

    def _values(self, value: Callable[[list[tuple[int, Counts]]], list[Floats]]) -> list[Floats]:
        """Return one [sets] array per rank, with a value for each set of blocks it may have.

        Ranks with equal options, capacities, `tops` and sets of blocks are evaluated once.

        Args:
            value: Maps a list of (rank, [sets, kinds] block counts) to a list of [sets] arrays.
        """
        keys = [
            (
                id(self._menus[rank]),
                self._capacities[rank],
                self._layout.extra_bytes[rank],
                id(each.made_of),
            )
            for rank, each in enumerate(self._stretches)
        ]
        first = {key: rank for rank, key in reversed([*enumerate(keys)])}
        queries = [(rank, self._stretches[rank].made_of) for rank in first.values()]
        known = dict(zip(first, value(queries), strict=True))
        return [known[key] for key in keys]

    def _table(self, values: list[Floats]) -> Floats:
        """Return [ranks, i, j] values of the block range from i up to j; infinite if impossible.

        Args:
            values: One [sets] array per rank, as `_values` returns them.
        """
        num, places = self._layout.num, self._layout.places
        table = np.full((num, places * places), np.inf)
        for rank, (own, each) in enumerate(zip(values, self._stretches, strict=True)):
            table[rank, each.at] = own[each.contents]
        return table.reshape(num, places, places)

    def range_of(self, rank: int, i: int, j: int) -> tuple[Options, float, Counts]:
        """Return the options, the linear bytes and the [kinds] counts of the blocks from i up to j.

        The bytes are those that the blocks may use on this rank.
        """
        return self._menus[rank], self._capacities[rank], self._layout.counts(rank, i, j)

    def put(self, rank: int, i: int, j: int, solution: KnapsackSolution) -> None:
        """Take a solution for the block range from i up to j on a rank, with every capacity."""
        table = self._cost_table
        table.range_solutions[self._row, rank, i, j] = solution
        for key in [key for key in table.answers if key[0] == self._row]:
            del table.answers[key]

    def replaced(self, candidate: Candidate, rank: int, solution: KnapsackSolution) -> Candidate:
        """Return a candidate of this configuration with other options on one rank.

        Ranks must have one stage each.
        """
        option_counts = [*candidate.option_counts]
        option_counts[rank] = solution.option_counts
        return self._of_options(candidate.ends, option_counts)

    def _of_options(
        self, ends: tuple[int, ...], option_counts: Sequence[tuple[tuple[int, ...], ...]]
    ) -> Candidate:
        times, linear = [], []
        for menu, chosen, extra in zip(
            self._menus, option_counts, self._layout.extra_bytes, strict=True
        ):
            counts = np.array(chosen)
            taken = counts > 0  # Options that do not exist take infinite seconds.
            times.append(float((counts[taken] * menu.seconds[taken]).sum()))
            linear.append(bytes_of(menu, KnapsackSolution(times[-1], chosen)) + extra)
        a, b = self._weights
        seconds = a * max(times) + b * sum(times) + float(self._cost_table.once_s[self._row])
        return Candidate(self._row, seconds, ends, tuple(option_counts), tuple(linear))

    def _solve(self, rank: int, i: int, j: int, below: float = float("inf")) -> KnapsackSolution:
        """Return the fastest options of the block range from i up to j on a rank."""
        counts, menu = self._layout.counts(rank, i, j), self._menus[rank]
        found: KnapsackSolution | None = self._cost_table.range_solutions.get(
            (self._row, rank, i, j)
        )
        if found is not None and (found is NONE or bytes_of(menu, found) <= self._capacities[rank]):
            return found
        key = (id(menu), self._capacities[rank], counts.tobytes())
        if key not in self._known:
            choice = solve(menu, counts, self._capacities[rank], below)
            if choice is NONE and below < float("inf"):
                return NONE  # Do not cache: a solution slower than `below` may exist.
            self._known[key] = choice
        return self._known[key]

    def _candidate(self, ends: tuple[int, ...], seconds: float) -> Candidate:
        """Return the candidate with these boundaries of ranges and the fastest options."""
        option_counts, linear = [], []
        for rank, (i, j) in enumerate(itertools.pairwise(ends)):
            solution = self._solve(rank, i, j)
            option_counts.append(solution.option_counts)
            linear.append(bytes_of(self._menus[rank], solution) + self._layout.extra_bytes[rank])
        stages = self._layout.stages(ends, option_counts)
        return Candidate(self._row, seconds, *stages, linear_bytes=tuple(linear))
