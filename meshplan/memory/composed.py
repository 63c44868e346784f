"""A step of a rank from one microbatch of its model, with the streams that wrappers use."""

from __future__ import annotations

from meshplan.memory.log import EventLog, on_streams
from meshplan.memory.replay import Prepared, replay
from meshplan.memory.replay.optimizer import is_uniform
from meshplan.memory.told import streams_of
from meshplan.plan import Plan


def composed_log(work: Prepared, plan: Plan, rank: int) -> EventLog:
    """The events of a step on a GPU, where the optimizer counts its steps on the host.

    Args:
        work: One microbatch of this rank.

    Raises:
        PlanError: As of `replay`.
    """
    foreach = is_uniform(plan.assignment)
    optimizer = plan.spec.optimizer
    log = replay(work, plan, optimizer, rank=rank, foreach=foreach, has_host=True)
    return on_streams(log, streams_of(plan, rank))
