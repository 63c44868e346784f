"""Estimate the plan file without the planner's choices, to compare the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshplan.errors import MeshplanError
from meshplan.layout.hardware import Cluster
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.plan.plan import make_plan
from meshplan.planner.problem.decision import Decision
from meshplan.planner.tables.whole_plan import Costed
from meshplan.shown import shown


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
    trace: Callable[[], MemoryEstimate] | None = None,
) -> Written | None:
    """Estimate the plan file of a decision with default values for its open keys.

    Args:
        decision: The planner's decision on the plan file.
        device: A device name of `layout.hardware`, or "cuda".
        cluster: The machine.
        trace: Estimates the memory of the file by a trace, for a model that its config does not
            describe; None if that is not possible.

    Returns:
        The estimate; None if something in the file is `auto`, if the planner chose the same plan,
        or if the plan cannot be estimated.
    """
    chosen = decision.chosen
    if chosen is None or decision.spec.free_fields:
        return None
    has_config = bool(chosen.plan.graph.config)
    if not has_config and trace is None:
        return None
    try:
        plan = make_plan(decision.spec, chosen.plan.graph)
        if plan.digest() == chosen.plan.digest():
            return None
        if has_config or trace is None:
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
