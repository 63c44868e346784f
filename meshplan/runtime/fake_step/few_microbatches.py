"""Trace few of a pipeline's many microbatches: as many as the peak memory of a step depends on.

In schedules that alternate forwards and backwards, all microbatches between the warm-up and the end
use the same memory (`layout.schedules.num_to_simulate`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from meshplan.assign.base.types import Stages
from meshplan.layout.schedules import SCHEDULES, num_to_simulate
from meshplan.memory.log.events import Term
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.plan.plan import Plan
from meshplan.runtime.base.batch import mapped


def num_traced(stages: Stages) -> int:
    """Return the number of microbatches to trace for the peak memory of a step."""
    schedule = SCHEDULES[stages.schedule]
    return num_to_simulate(schedule, stages.num_ranks, stages.microbatches)


def of_few(plan: Plan) -> Plan:
    """Return a plan with stages with no more microbatches than are to be traced."""
    stages = plan.assignment.stages
    assert stages is not None
    count, micro = num_traced(stages), plan.micro
    return replace(
        plan,
        micro=micro if micro is None else micro // stages.microbatches * count,
        assignment=replace(plan.assignment, stages=replace(stages, microbatches=count)),
    )


def first_microbatches(batch: Any, stages: Stages) -> Any:
    """Return the samples of the microbatches to trace, of a nested batch of all microbatches."""

    def first(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim:
            return tensor
        return tensor[: tensor.shape[0] // stages.microbatches * num_traced(stages)]

    return mapped(batch, first)


def with_all_inputs(trace: MicrobatchTrace, stages: Stages) -> MicrobatchTrace:
    """Return the trace of the first microbatches with the inputs and targets of all of them.

    Args:
        trace: The trace of `num_traced` microbatches.
        stages: The stages, with the number of all microbatches.
    """
    storages, traced = trace.log.storages, num_traced(stages)
    if traced == stages.microbatches:
        return trace
    changes = tuple(
        (delta * stages.microbatches // traced, storage, phase)
        if storages[storage].term == Term.INPUTS
        else (delta, storage, phase)
        for delta, storage, phase in trace.log.changes
    )
    return replace(trace, log=replace(trace.log, changes=changes))
