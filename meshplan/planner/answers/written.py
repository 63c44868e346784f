"""Estimate the plan file without the planner's choices, to compare the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshplan.errors import MeshplanError
from meshplan.layout.hardware import Cluster
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.plan.plan import Plan
from meshplan.planner.problem.decision import Decision
from meshplan.planner.tables.whole_plan import Costed
from meshplan.shown import shown
from meshplan.spec.spec import Spec


@shown
@dataclass(frozen=True, slots=True)
class Written:
    """The plan file with default values for open keys, as commands use it if no lock applies.

    Attributes:
        memory: Memory estimate of the plan.
        seconds: Seconds of a step; None if the cost model has no figures for it.
    """

    memory: MemoryEstimate
    seconds: float | None


def as_written(
    decision: Decision,
    device: str,
    cluster: Cluster,
    decide: Callable[[Spec], Plan],
    trace: Callable[[], MemoryEstimate],
) -> Written | None:
    """Estimate the plan file of a decision with default values for its open keys.

    Args:
        decision: The planner's decision on the plan file.
        device: A device name of `layout.hardware`, or "cuda".
        cluster: The machine.
        decide: Returns the plan of a spec for the model.
        trace: Estimates the memory of the file by a trace, for a model that its config does not
            describe.

    Returns:
        The estimate; None if something in the file is `auto`, if the planner chose the same plan,
        or if the plan cannot be estimated.
    """
    chosen = decision.chosen
    if chosen is None or decision.spec.free_fields:
        return None
    try:
        plan = decide(decision.spec)
        if plan.digest() == chosen.plan.digest():
            return None
        if plan.graph.config:
            memory = estimate_analytic(
                plan, device=device, limit_bytes=decision.limit_bytes, try_expandable=False
            )
        else:
            memory = trace()
    except MeshplanError:
        return None  # Some open key has no default, or the step cannot be traced.
    try:
        measured = decision.profile if decision.profile_path is not None else None
        seconds = Costed(plan, cluster, measured).seconds
    except MeshplanError:
        seconds = None
    return Written(memory, seconds)
