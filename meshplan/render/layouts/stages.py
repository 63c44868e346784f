"""The pipeline of a plan as a table: each stage, its pp rank, and its modules."""

from __future__ import annotations

from typing import Any

from meshplan.plan.plan import Plan
from meshplan.render.base.text import columns
from meshplan.spec.match import fold


def stages_to_text(plan: Plan) -> list[str]:
    """Return a title and a row per stage; [] without a pp axis."""
    stages = plan.assignment.stages
    if stages is None:
        return []
    rows = [("stage", "pp", "modules", "parameters")]
    for stage in range(stages.num):
        modules = ", ".join(fold(dict.fromkeys(m for m, s in stages.units if s == stage)))
        rows.append(
            (str(stage), str(stages.rank_of(stage)), modules, f"{_numel_of(plan, stage):,}")
        )
    why = stages.reason
    where = f", {why.origin.place}" if why.origin else ""
    title = f"pipeline {stages.schedule}, {stages.microbatches} microbatches ({why.text}{where})"
    return [title, *columns(rows, ">><>")]


def stages_to_json(plan: Plan) -> dict[str, Any] | None:
    """Return the pipeline as JSON values; None without a pp axis."""
    stages = plan.assignment.stages
    if stages is None:
        return None
    return {
        "schedule": stages.schedule,
        "microbatches": stages.microbatches,
        "stages": [
            {
                "pp": stages.rank_of(stage),
                "modules": [module for module, at in stages.units if at == stage],
                "tensors": [fqn for fqn, stages_of in stages.tensors.items() if stage in stages_of],
            }
            for stage in range(stages.num)
        ],
    }


def _numel_of(plan: Plan, stage: int) -> int:
    stages, tensors = plan.assignment.stages, plan.assignment.tensors
    assert stages is not None
    return sum(
        tensors[fqn].info.numel
        for fqn, stages_of in stages.tensors.items()
        if stage in stages_of and not tensors[fqn].info.is_buffer
    )
