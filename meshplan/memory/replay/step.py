"""Compose a rank's step on a GPU from one microbatch of its model."""

from __future__ import annotations

from meshplan.memory.log.events import EventLog
from meshplan.memory.replay import Prepared, replay
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.plan.plan import Plan


def composed_log(work: Prepared, plan: Plan, rank: int) -> EventLog:
    """Return the events of a step on a GPU whose optimizer counts its steps in the host's memory.

    Args:
        work: One microbatch of this rank.
        plan: The plan, decided for the whole model.
        rank: The rank whose step is composed.

    Raises:
        PlanError: There is no rule for something in this plan: trace the whole step instead.
    """
    foreach = is_uniform(plan.assignment)
    optimizer = plan.spec.optimizer
    return replay(work, plan, optimizer, rank=rank, foreach=foreach, has_host=True)
