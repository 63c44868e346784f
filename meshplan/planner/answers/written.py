"""Estimate the plan file by itself, to compare it with the planner's choices."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.errors import MeshplanError
from meshplan.layout.hardware import Cluster
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.plan.plan import make_plan
from meshplan.planner.problem.decision import Decision
from meshplan.planner.tables.whole_plan import Costed


@dataclass(frozen=True, slots=True)
class Written:
    """The plan file with its defaults, as every verb but `plan` uses it if no lock holds.

    Attributes:
        memory: Memory estimate of the plan.
        seconds: Seconds of a step; None if the cost model has no figures for it.
    """

    memory: MemoryEstimate
    seconds: float | None


def as_written(decision: Decision, device: str, cluster: Cluster) -> Written | None:
    """Estimate a plan file as it stands, with its defaults.

    Args:
        decision: The planner's decision on that file.
        device: A device name of `layout.hardware`, or "cuda".
        cluster: The machine.

    Returns:
        The estimate; None if something in the file is `auto`, if the planner chose the same plan,
        or if the plan cannot be estimated from the model's config.
    """
    chosen = decision.chosen
    if chosen is None or decision.spec.free_fields or not chosen.plan.graph.config:
        return None
    try:
        plan = make_plan(decision.spec, chosen.plan.graph)
        if plan.digest() == chosen.plan.digest():
            return None
        memory = estimate_analytic(
            plan, device=device, limit_bytes=decision.limit_bytes, try_expandable=False
        )
    except MeshplanError:
        return None  # The file leaves something open that only `plan` can choose.
    try:
        seconds = Costed(plan, cluster, decision.profile).seconds
    except MeshplanError:
        seconds = None
    return Written(memory, seconds)
