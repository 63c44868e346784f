"""Read what a replay tells of a candidate: its excess bytes rank by rank, or why it failed."""

from __future__ import annotations

from collections.abc import Sequence
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


def excess_of(
    plan: Plan, memory: MemoryEstimate, candidate: Candidate, driver_bytes: int
) -> tuple[float, tuple[int, ...]]:
    """Return the most excess bytes of a rank, and the indices along pp of ranks that do not fit.

    Args:
        plan: The plan of the candidate.
        memory: Its memory.
        candidate: The candidate.
        driver_bytes: Bytes that the driver uses on every rank.
    """
    excess, over = 0.0, set[int]()
    # Undo the estimate's margins, so that the reserved bytes are comparable to linear bytes.
    for group in memory.groups:
        linear = (group.band[1] - driver_bytes) / SHARES
        place = plan.mesh.index(group.ranks[0], ("pp",))
        excess = max(excess, linear - candidate.linear_bytes[place])
        if group.fits is False:
            over.add(place)
    return excess, tuple(sorted(over))


def least_over(found: Sequence[ReplayedMemory]) -> ReplayedMemory:
    """Return the estimate with the fewest bytes of one candidate that fits with no allocator.

    Its ranks that do not fit are those that fit with none of the settings.

    Args:
        found: The estimates with each allocator setting.
    """
    over = set(found[0].over).intersection(*(each.over for each in found))
    least = min(found, key=lambda each: each.excess_bytes)
    return replace(least, over=tuple(sorted(over)))


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
