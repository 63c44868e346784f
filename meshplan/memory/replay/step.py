"""Compose the event log of a rank's step on a GPU from one microbatch of the rank."""

from __future__ import annotations

from meshplan.memory.log.events import EventLog
from meshplan.memory.replay import Prepared, replay
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.plan.plan import Plan


def composed_log(trace: Prepared, plan: Plan, rank: int) -> EventLog:
    """Return the event log of a step on a GPU, where optimizers keep step counts in host memory.

    Args:
        trace: One microbatch of this rank.
        plan: The plan of the whole model, all stages included.
        rank: The rank whose step is composed.

    Raises:
        PlanError: There is no rule for a feature of this plan.
    """
    foreach = is_uniform(plan.assignment)
    optimizer = plan.spec.optimizer
    return replay(trace, plan, optimizer, rank=rank, foreach=foreach, has_host=True)
