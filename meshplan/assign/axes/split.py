"""The demands of a schedule that splits the backward (zero bubble) on the rest of a plan.

The weight gradients of a microbatch are computed later than its input gradients, from the same
autograd graph. Until then the weights must stay the tensors that forward used, so FSDP2 must not
free and gather them in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshplan.assign.base.cascade import Cascade
from meshplan.assign.base.types import Placed, Stages, Unit
from meshplan.errors import Problem
from meshplan.layout.schedules import SCHEDULES
from meshplan.spec.spec import Spec


def _splits(stages: Stages | None) -> bool:
    return stages is not None and SCHEDULES[stages.schedule].splits_backward


def gathered_throughout(units: Mapping[str, Unit], stages: Stages | None) -> dict[str, Unit]:
    """Return the units by fqn; with a split backward, without resharding after forward."""
    if not _splits(stages):
        return dict(units)
    return {fqn: replace(unit, reshard_after_forward=False) for fqn, unit in units.items()}


def split_problems(
    spec: Spec,
    cascade: Cascade,
    stages: Stages | None,
    tensors: Mapping[str, Placed],
) -> Iterator[Problem]:
    """Yield the settings that cannot be combined with a split backward."""
    if stages is None or not _splits(stages):
        return
    fix = "use 1F1B or Interleaved1F1B"
    for _, stated in cascade.modules_with("reshard_after_forward"):
        if stated.value is not False:
            yield Problem(
                f"{stages.schedule} keeps parameters gathered until the end of the step",
                spec.origin(stated.path),
                f"write reshard_after_forward: false, or {fix}",
            )
            return
    for fqn, placed in tensors.items():
        if placed.reduced_alone and placed.info.trainable:
            yield Problem(
                f"the gradient of {fqn} is averaged separately, outside of the FSDP units, which "
                f"{stages.schedule} does not support",
                spec.origin("pipeline.schedule"),
                fix,
            )
            return
