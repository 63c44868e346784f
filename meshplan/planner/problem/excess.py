"""Read what a replay tells of a candidate: its excess bytes rank by rank, or why it failed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from meshplan.errors import MeshplanError
from meshplan.memory.analytic.ranks import ERROR
from meshplan.memory.answer.estimate import RESERVED_ERROR, MemoryEstimate
from meshplan.plan.plan import Plan
from meshplan.planner.problem.live_model import StageError
from meshplan.planner.solve.config import Candidate
from meshplan.planner.solve.result import ReplayedMemory

SHARES: Final = (1 + RESERVED_ERROR) * (1 + ERROR)
"""Factor by which memory estimates widen the reserved bytes to their upper end."""
ROUNDING_BYTES: Final = 3
"""Bytes by which the upper end may be below that product, because it is rounded down twice."""


def excess_of(
    plan: Plan, memory: MemoryEstimate, candidate: Candidate, driver_bytes: int
) -> tuple[dict[int, float], tuple[int, ...]]:
    """Return the excess bytes of each rank along pp, and the indices of those that do not fit.

    Args:
        plan: The plan of the candidate.
        memory: Its memory.
        candidate: The candidate.
        driver_bytes: Bytes that the driver uses on every rank.
    """
    excess, over = dict[int, float](), set[int]()
    # Undo the estimate's margins, so that the reserved bytes are comparable to linear bytes.
    for group in memory.groups:
        linear = (group.band[1] - driver_bytes) / SHARES
        place = plan.mesh.index(group.ranks[0], ("pp",))
        own = linear - candidate.linear_bytes[place]
        excess[place] = max(excess.get(place, 0.0), own)
        if group.fits is False:
            over.add(place)
    return excess, tuple(sorted(over))


class LastExcess:
    """The excess bytes that replays found last on each rank of a configuration.

    Candidates of one configuration differ in few blocks, so the rank that did not fit last time
    probably does not fit the next time either.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[int, float]] = {}

    def note(self, row: int, excess: Mapping[int, float]) -> None:
        """Take the excess bytes by rank that a replay of a candidate of `grid[row]` found."""
        self._known.setdefault(row, {}).update(excess)

    def guess(self, candidate: Candidate) -> list[float]:
        """Return a guess of the bytes that each rank of a candidate needs, up to a constant.

        A rank that was not replayed yet is guessed to exceed its linear bytes like the worst one.
        """
        known = self._known.get(candidate.row, {})
        most = max(known.values(), default=0.0)
        return [linear + known.get(n, most) for n, linear in enumerate(candidate.linear_bytes)]


def rank_keys(candidate: Candidate, allocator: str) -> list[Hashable]:
    """Return a key for each rank along pp: equal keys mean equal blocks, options and settings.

    Args:
        candidate: The candidate.
        allocator: The allocator setting.
    """
    num_ranks, ends = len(candidate.linear_bytes), candidate.ends
    stages = [*zip(ends[:-1], ends[1:], candidate.option_counts, strict=True)]
    # Stage s is on rank s % pp in every schedule that is searched.
    return [(candidate.row, allocator, tuple(stages[rank::num_ranks])) for rank in range(num_ranks)]


def least_over(found: Sequence[ReplayedMemory]) -> ReplayedMemory:
    """Return the estimate with the least excess of one candidate that fits with no allocator.

    Its ranks that do not fit are those that fit with none of the settings.

    Args:
        found: The estimates with each allocator setting.
    """
    over = set(found[0].over).intersection(*(each.over for each in found))
    least = min(found, key=lambda each: each.most_excess)
    by_setting = tuple(each.excess for each in found) if len(found) > 1 else ()
    return replace(least, over=tuple(sorted(over)), by_setting=by_setting)


def refused_by(error: MeshplanError, candidate: Candidate, *, is_of_cut: bool) -> ReplayedMemory:
    """Return the result of a replay that an error ended.

    Args:
        error: The error.
        candidate: The candidate.
        is_of_cut: If True, another cut of the model into stages may raise no error.
    """
    at = tuple(range(len(candidate.ends) - 1)) if is_of_cut else ()
    if isinstance(error, StageError):
        at = (error.place,)
    return ReplayedMemory(fits=False, why=error.problems[0].what, over=at)
