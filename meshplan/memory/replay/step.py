"""A step of a rank from one microbatch of its model."""

from __future__ import annotations

from meshplan.memory.log.events import EventLog
from meshplan.memory.replay import Prepared, replay
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.plan.plan import Plan


def composed_log(work: Prepared, plan: Plan, rank: int) -> EventLog:
    """The events of a step on a GPU, where the optimizer counts its steps on the host.

    Args:
        work: One microbatch of this rank.

    Raises:
        PlanError: As of `replay`.
    """
    foreach = is_uniform(plan.assignment)
    optimizer = plan.spec.optimizer
    return replay(work, plan, optimizer, rank=rank, foreach=foreach, has_host=True)
