"""Resolve what a replay that failed leaves open: candidates of its configuration with fewer bytes.

The search lowers the capacity of a configuration by the excess of the candidate that did not fit.
Candidates with fewer linear bytes may have a smaller excess, because their memory peaks at another
time. Only one thing is assumed here: where a candidate does not fit, no candidate of its
configuration with at least as many linear bytes does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from meshplan.planner.solve.config import Candidate, solve_config
from meshplan.planner.solve.result import NodeState, ReplayedMemory, SearchResult
from meshplan.planner.tables.cost_table import CostTable

_MOST_REPLAYED, _MOST_BISECTED = 12, 12
"""Most candidates of one configuration that are replayed, and most bisections to find the smallest
one that is faster than the best."""
_ROUNDING: Final = 1e-9
"""Relative difference of linear bytes below which two candidates count as equal."""


def resolve_failures(
    table: CostTable,
    states: Mapping[int, NodeState],
    found: SearchResult,
    *,
    room: Callable[[int], float],
    is_open: Callable[[int], bool],
    is_over: Callable[[Candidate], bool],
    measure: Callable[[Candidate], ReplayedMemory],
    take: Callable[[Candidate, ReplayedMemory], None],
    is_late: Callable[[], bool],
    tolerance: float,
) -> float:
    """Replay the candidates that failures left out and that are faster than the best one.

    In each configuration, the candidate with the fewest bytes among these is replayed first. If it
    does not fit, no faster one of the configuration fits either. If it does, the bytes between it
    and the last failure are bisected.

    Args:
        table: The cost table.
        states: States of the configurations that were examined. Their bytes that fit, or do not,
            are set.
        found: The result of the search, whose best candidate `take` replaces.
        room: Maps a configuration to the linear bytes of its candidates, before any replay.
        is_open: Returns True if nothing excludes a configuration.
        is_over: Returns True if a candidate is proved not to fit.
        measure: Replays the memory of a candidate.
        take: Makes a candidate that fits the best one, if it is faster.
        is_late: Returns True once the search has to end.
        tolerance: Share by which some plan may be faster than the answer.

    Returns:
        Lower bound on the seconds of candidates that are still left out; infinite if none are.
    """
    left_s = float("inf")
    for row in sorted(states, key=lambda row: states[row].seconds):
        state, fitted, replayed = states[row], False, 0
        while state.over_from < float("inf") and is_open(row) and row not in found.refused:
            limit = (found.best.seconds if found.best else float("inf")) * (1 - tolerance)
            # Solving allows for rounding, so leave out what differs from a failure by no more.
            top = solve_config(table, row, min(state.over_from * (1 - _ROUNDING), room(row)), limit)
            if top is None or max(top.linear_bytes) <= state.fits_up_to:
                break
            if is_late() or replayed == _MOST_REPLAYED:
                found.is_whole = found.is_whole and not is_late()
                found.given_up += replayed == _MOST_REPLAYED
                left_s = min(left_s, top.seconds)
                break
            candidate = _between(table, row, state, top, limit, halfway=fitted)
            num_bytes, replayed, fitted = max(candidate.linear_bytes), replayed + 1, False
            if is_over(candidate):
                state.over_from = num_bytes
                continue
            measured = measure(candidate)
            fitted = measured.fits
            if measured.why:
                found.refused[row] = measured.why
            elif fitted:
                take(candidate, measured)
                state.fits_up_to = num_bytes
            else:
                state.over_from = num_bytes
    return left_s


def _between(
    table: CostTable, row: int, state: NodeState, top: Candidate, limit: float, *, halfway: bool
) -> Candidate:
    """Return a candidate that is faster than `limit`, and has at most as many bytes as `top`.

    Args:
        table: The cost table.
        row: Index of the configuration.
        state: Its state.
        top: The fastest candidate with fewer linear bytes than those that failed.
        limit: Seconds that the candidate has to beat.
        halfway: If False, return the one with the fewest linear bytes; if True, one whose bytes are
            halfway between these and those of `top`.
    """
    smallest, low, high = top, max(state.fits_up_to, 0.0), max(top.linear_bytes)
    for _ in range(_MOST_BISECTED):
        middle = (low + high) / 2
        if (tried := solve_config(table, row, middle, limit)) is None:
            low = middle
        else:
            smallest, high = tried, max(tried.linear_bytes)
    if not halfway:
        return smallest
    middle = (high + max(top.linear_bytes)) / 2
    return solve_config(table, row, middle, limit) or smallest
