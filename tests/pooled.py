"""What a plan's ranks hold at the least, pool by pool: what the search's bounds must stay below."""

from __future__ import annotations

from meshplan.memory.told import told_rank
from meshplan.planner.found import Measured
from meshplan.planner.job import Job


def pooled_bytes(at: Job, measured: Measured) -> int:
    """The most of any rank that the pools of all streams hold together of what was asked for."""
    assert measured.result is not None
    plan, groups = measured.result.plan, measured.result.memory.groups
    logs = (told_rank(plan, g.ranks[0], device=at.question.device) for g in groups)
    return max(log.pooled_bytes for log in logs)
