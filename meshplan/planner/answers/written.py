"""The plan file by itself, beside the choices of the planner for what it leaves out."""

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
    """The plan file with its defaults: what every verb but `plan` goes by where no lock holds.

    Attributes:
        seconds: Of a step; None where the cost model has no figures for it.
    """

    memory: MemoryEstimate
    seconds: float | None


def as_written(decision: Decision, device: str, cluster: Cluster) -> Written | None:
    """Estimate a plan as its file stands.

    None where something in it is `auto`, where the choices are no others, and where no config tells
    it.

    Args:
        device, cluster: As of the question.
    """
    chosen = decision.chosen
    if chosen is None or decision.spec.free_fields or not chosen.plan.graph.config:
        return None
    try:
        plan = make_plan(decision.spec, chosen.plan.graph)
        if plan.digest() == chosen.plan.digest():
            return None
        memory = estimate_analytic(
            plan, device=device, limit_bytes=decision.limit_bytes, packs=False
        )
    except MeshplanError:
        return None  # It leaves open what no verb but `plan` can say.
    try:
        seconds = Costed(plan, cluster, decision.profile).seconds
    except MeshplanError:
        seconds = None
    return Written(memory, seconds)
