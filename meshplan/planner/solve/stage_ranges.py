"""Solve what a pipeline rank of a live model can hold, by replays of one range of its blocks.

The linear bytes of a live model's stage leave out what is computed outside of the blocks, and each
stage needs other bytes in addition. So a replay that fails says nothing about other cuts. It says
which ranks do not fit, and for each of these the fastest options of the same blocks that do fit are
found here. What a rank holds depends on its own blocks alone, whatever the others do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from meshplan.planner.knapsack.knapsack import (
    NONE,
    Counts,
    KnapsackSolution,
    Options,
    bytes_of,
    solve,
)
from meshplan.planner.solve.config import Candidate, ConfigSolver
from meshplan.planner.solve.result import ReplayedMemory

_MOST_LISTED: Final = 8
"""Most choices for the blocks of a range that are listed and tried one by one."""
_MOST_BISECTED: Final = 40


class RangeSolution(NamedTuple):
    """The fastest options for one range of blocks with which their rank fits.

    Attributes:
        solution: The options; `NONE` if the rank fits with none.
        is_proved: If True, no faster choice fits: each was replayed, or has at least as many linear
            bytes as one that does not fit, or the one with the fewest bytes does not fit.
    """

    solution: KnapsackSolution
    is_proved: bool


def solve_ranges(
    solver: ConfigSolver,
    candidate: Candidate,
    measured: ReplayedMemory,
    measure: Callable[[Candidate], ReplayedMemory],
    is_late: Callable[[], bool],
) -> bool:
    """Solve the block ranges of all ranks of a candidate that do not fit.

    `ConfigSolver` takes the solutions from then on.

    Args:
        solver: The solver of the candidate's configuration.
        candidate: The candidate.
        measured: Its replayed memory, with the ranks that do not fit.
        measure: Replays the memory of a candidate.
        is_late: Returns True once the search has to end.

    Returns:
        True if every solution is proved.
    """
    if measured.why:
        return _exclude(solver, candidate, measured.over)
    is_proved = True
    for place in measured.over:
        found = _solve_range(solver, candidate, place, measure, is_late)
        solver.put(place, candidate.ends[place], candidate.ends[place + 1], found.solution)
        is_proved &= found.is_proved
    return is_proved


def _exclude(solver: ConfigSolver, candidate: Candidate, places: tuple[int, ...]) -> bool:
    """Exclude the blocks of a rank whose stage cannot run; return True if no other plan goes too.

    Args:
        solver: The solver of the candidate's configuration.
        candidate: The candidate.
        places: Index along pp of the rank, or of all ranks of which one has such a stage.
    """
    # Of several ranks, take one whose blocks the fewest other cuts have: between two others.
    place = places[len(places) // 2]
    begin, end = candidate.ends[place : place + 2]
    menu, _, counts = solver.range_of(place, begin, end)
    solver.put(place, begin, end, NONE)
    return len(places) == 1 and _num_choices(menu, counts) == 1


def _solve_range(
    solver: ConfigSolver,
    candidate: Candidate,
    place: int,
    measure: Callable[[Candidate], ReplayedMemory],
    is_late: Callable[[], bool],
) -> RangeSolution:
    """Find the fastest options with which one rank of a candidate fits.

    Args:
        solver: The solver of the candidate's configuration.
        candidate: A candidate in which the rank does not fit.
        place: Index of the rank along pp.
        measure: Replays the memory of a candidate.
        is_late: Returns True once the search has to end.
    """
    begin, end = candidate.ends[place : place + 2]
    menu, capacity, counts = solver.range_of(place, begin, end)

    def fits(solution: KnapsackSolution) -> bool:
        return place not in measure(solver.replaced(candidate, place, solution)).over

    failed, smallest = candidate.option_counts[place], _smallest(menu, counts)
    if smallest.option_counts == failed:
        return RangeSolution(NONE, is_proved=True)
    least = measure(solver.replaced(candidate, place, smallest))
    if place in least.over:  # A stage that cannot run says nothing of other options.
        return RangeSolution(NONE, is_proved=not least.why)
    if _num_choices(menu, counts) > _MOST_LISTED:
        return _bisected(menu, counts, smallest, failed, fits, is_late)
    # A choice with fewer linear bytes may need more memory, so each is replayed.
    for choice in sorted(_choices(menu, counts), key=lambda choice: choice.seconds):
        if choice.seconds >= smallest.seconds:
            break
        if is_late():
            return RangeSolution(smallest, is_proved=False)
        is_new = choice.option_counts != failed and bytes_of(menu, choice) <= capacity
        if is_new and fits(choice):
            return RangeSolution(choice, is_proved=True)
    return RangeSolution(smallest, is_proved=True)


def _bisected(
    menu: Options,
    counts: Counts,
    smallest: KnapsackSolution,
    failed: tuple[tuple[int, ...], ...],
    fits: Callable[[KnapsackSolution], bool],
    is_late: Callable[[], bool],
) -> RangeSolution:
    """Find the fastest choice that fits, if those with more linear bytes than a failure do not.

    Args:
        menu: The options of the rank's blocks.
        counts: [kinds] numbers of blocks.
        smallest: The choice with the fewest bytes, which fits.
        failed: Option counts of a choice that does not fit.
        fits: Returns True if the rank fits with a choice.
        is_late: Returns True once the search has to end.
    """
    best, low = smallest, bytes_of(menu, smallest)
    high = bytes_of(menu, KnapsackSolution(0.0, failed))
    for _ in range(_MOST_BISECTED):
        top = solve(menu, counts, float(np.nextafter(high, 0.0)), best.seconds)
        if top is NONE or top.seconds >= best.seconds or bytes_of(menu, top) >= high:
            return RangeSolution(best, is_proved=True)
        if is_late():
            break
        middle = (low + high) / 2
        choice = solve(menu, counts, middle, best.seconds)
        if choice is NONE or choice.seconds >= best.seconds:
            low = middle
        elif fits(choice):
            best, low = choice, middle
        else:
            high = bytes_of(menu, choice)
    return RangeSolution(best, is_proved=False)


def _smallest(menu: Options, counts: Counts) -> KnapsackSolution:
    """Return the choice with the fewest bytes; of two options with as many, the faster one."""
    least = np.where(np.isfinite(menu.seconds), menu.memory, np.inf)
    out, seconds = np.zeros(least.shape, dtype=np.int64), 0.0
    for kind in np.flatnonzero(counts):
        option = min(
            range(least.shape[1]),
            key=[*zip(least[kind], menu.seconds[kind], strict=True)].__getitem__,
        )
        out[kind, option] = counts[kind]
        seconds += float(counts[kind] * menu.seconds[kind, option])
    return KnapsackSolution(seconds, tuple(tuple(map(int, row)) for row in out))


def _num_choices(menu: Options, counts: Counts) -> int:
    offered = np.isfinite(menu.seconds).sum(axis=1)
    return math.prod(
        math.comb(int(many + options - 1), int(options - 1))
        for many, options in zip(counts, offered, strict=True)
        if many
    )


def _choices(menu: Options, counts: Counts) -> Iterator[KnapsackSolution]:
    """Yield every choice for a range: how many blocks of each kind take each option."""
    width = menu.seconds.shape[1]
    by_kind = [
        [*_shared(int(many), np.flatnonzero(np.isfinite(row)).tolist(), width)]
        for many, row in zip(counts, menu.seconds, strict=True)
    ]
    for option_counts in itertools.product(*by_kind):
        taken = np.array(option_counts)
        seconds = float((taken * np.where(taken > 0, menu.seconds, 0.0)).sum())
        yield KnapsackSolution(seconds, option_counts)


def _shared(many: int, options: list[int], width: int) -> Iterator[tuple[int, ...]]:
    """Yield the [width] counts with which `many` blocks can be shared out among some options."""
    if not many:
        yield (0,) * width
        return
    for chosen in itertools.combinations_with_replacement(options, many):
        yield tuple(chosen.count(option) for option in range(width))
