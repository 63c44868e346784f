"""Resolve what replays leave open: other candidates of their configuration, with a smaller excess.

The search lowers the capacity of each rank by the excess that a replay found, or, on ranks that the
replay did not reach, by the most that it found. Another candidate may have a smaller excess,
because its memory peaks at another time. Only one thing is assumed here: where a rank does not fit
with an allocator setting, it does not fit with that setting in any candidate of the configuration
that puts at least as many linear bytes on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from meshplan.planner.solve.config import Candidate, solve_config
from meshplan.planner.solve.result import (
    NodeState,
    ReplayedMemory,
    SearchResult,
    excess_by_rank,
)
from meshplan.planner.tables.cost_table import CostTable

_MOST_REPLAYED, _MOST_BISECTED = 12, 12
"""Most candidates of one configuration that are replayed, and most bisections to find the smallest
one that is faster than the best."""


def resolve_failures(
    table: CostTable,
    states: Mapping[int, NodeState],
    found: SearchResult,
    *,
    capacity: float,
    room: Callable[[int], tuple[float, ...]],
    is_open: Callable[[int], bool],
    measure: Callable[[Candidate], ReplayedMemory],
    take: Callable[[Candidate, ReplayedMemory], None],
    is_late: Callable[[], bool],
    tolerance: float,
) -> float:
    """Replay the candidates that replays left out and that are faster than the best one.

    In each configuration, a candidate with few bytes among these is replayed first. If a rank does
    not fit, faster candidates must put fewer bytes on it. If all do, the bytes between it and the
    failures are bisected.

    Args:
        table: The cost table.
        states: States of the configurations that were examined. Their bytes that fit, or do not,
            are set.
        found: The result of the search, whose best candidate `take` replaces.
        capacity: Bytes that a rank may use, with its excess.
        room: Maps a configuration to the linear bytes that each rank may use before any replay.
        is_open: Returns True if nothing excludes a configuration.
        measure: Replays the memory of every rank of a candidate.
        take: Makes a candidate that fits the best one, if it is faster.
        is_late: Returns True once the search has to end.
        tolerance: Share by which some plan may be faster than the answer.

    Returns:
        Lower bound on the seconds of candidates that are still left out; infinite if none are.
    """
    left_s = float("inf")
    for row in sorted(states, key=lambda row: states[row].seconds):
        state, fitted, replayed = states[row], False, 0
        while state.is_replayed and is_open(row) and row not in found.refused:
            limit = (found.best.seconds if found.best else float("inf")) * (1 - tolerance)
            tops = [
                (top, most)
                for most in state.left(room(row))
                if (top := solve_config(table, row, most, limit)) and not state.has_fitted(top)
            ]
            if not tops:
                break
            top, most = min(tops, key=lambda each: each[0].seconds)
            if is_late() or replayed == _MOST_REPLAYED:
                found.is_whole = found.is_whole and not is_late()
                found.given_up += replayed == _MOST_REPLAYED
                left_s = min(left_s, top.seconds)
                break
            candidate = _between(table, row, state, most, top, limit, halfway=fitted)
            measured, replayed = measure(candidate), replayed + 1
            fitted = measured.fits
            if measured.why:
                found.refused[row] = measured.why
                break
            state.learn(candidate, measured, capacity)
            if fitted:
                take(candidate, measured)
    return left_s


def _between(
    table: CostTable,
    row: int,
    state: NodeState,
    most: Sequence[float],
    top: Candidate,
    limit: float,
    *,
    halfway: bool,
) -> Candidate:
    """Return a candidate that is faster than a limit, within the bytes that failures leave.

    The bytes of a rank are counted with its excess in the last replay.

    Args:
        table: The cost table.
        row: Index of the configuration.
        state: Its state.
        most: Linear bytes that each rank may use.
        top: The fastest such candidate.
        limit: Seconds that the candidate has to beat.
        halfway: If False, return the one with the fewest bytes on the fullest rank; if True, one
            whose bytes are halfway between these and those of `top`.
    """
    excess = excess_by_rank(state.excess, len(most))
    fitted = state.fits_up_to or (0.0,) * len(most)

    def within(fullest: float) -> Candidate | None:
        """Return the fastest candidate whose ranks use at most so many bytes, or fitted ones."""
        each = zip(most, excess, fitted, strict=True)
        room = tuple(min(own, max(fullest - more, fit)) for own, more, fit in each)
        return solve_config(table, row, room, limit)

    smallest, low, high = top, 0.0, _fullest(top, excess)
    for _ in range(_MOST_BISECTED):
        middle = (low + high) / 2
        if (tried := within(middle)) is None:
            low = middle
        else:
            smallest, high = tried, _fullest(tried, excess)
    if not halfway:
        return smallest
    return within((high + _fullest(top, excess)) / 2) or smallest


def _fullest(candidate: Candidate, excess: Sequence[float]) -> float:
    """Return the bytes of the fullest rank, its excess included."""
    return max(map(sum, zip(candidate.linear_bytes, excess, strict=True)))
