"""A plan as a configuration: one row of the grid, and one option for each of its blocks.

The search, the figures of a stated plan and the picture of a pipeline's schedule all read a plan
through these functions, so that they agree about its mode and its options.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import (
    ACTIVATIONS_THERE,
    GRID,
    MODES,
    OPTIONS,
    PARAMS_THERE,
    RECOMPUTE,
    SCHEDULE_WORDS,
)
from meshplan.memory.analytic.microbatches import loss_chunks_of
from meshplan.plan.plan import Plan

DDP, ZERO1, SHARD = range(len(MODES))
STRATEGY_OPTIONS: Final[Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]] = MappingProxyType(
    {
        "ddp": ((DDP,), (0,)),
        "zero1": ((ZERO1,), (0,)),
        "zero2": ((SHARD,), (0,)),
        "full_shard": ((SHARD,), (1,)),
        "hybrid_shard": ((SHARD,), (1,)),
        "hybrid_shard_zero2": ((SHARD,), (0,)),
    }
)
"""Modes that each strategy may have, as places in `MODES`, and values of reshard_after_forward."""


def plan_as_config(plan: Plan) -> NDArray[Any]:
    """Return a plan that states its batch as the only row of a grid, of dtype `GRID`.

    A pipeline that runs several times before the optimizer steps counts all its microbatches. A
    schedule that the grid has no word for is "".
    """
    assert plan.micro is not None
    stages = plan.assignment.stages
    parts = stages.microbatches if stages is not None else 1
    row = np.zeros(1, GRID)
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        row[axis] = plan.mesh.size(axis)
    if stages is not None:
        row["virtual"] = stages.virtual
        if stages.schedule in SCHEDULE_WORDS:
            row["schedule"] = SCHEDULE_WORDS.index(stages.schedule)
    else:
        row["virtual"] = 1
    row["micro"], row["microbatches"] = plan.micro // parts, parts * plan.accumulate
    row["mode"] = mode_of(plan)
    row["offload"], row["loss_chunks"] = offload_of(plan), loss_chunks_of(plan)
    return row


def mode_of(plan: Plan) -> int:
    """Return how data ranks hold the model under a plan's strategy, as a place in `MODES`."""
    (mode,), _ = STRATEGY_OPTIONS[plan.assignment.strategy.name]
    return mode


def option_of(plan: Plan, block: str) -> int:
    """Return the option of a block, as a place in `OPTIONS`; "" names what has no choice."""
    if not block:
        return OPTIONS.index((0, 0))
    a = plan.assignment
    recompute, unit = a.recompute.get(block), a.units.get(block)
    again = RECOMPUTE.index(recompute.policy.mode if recompute is not None else "none")
    reshards = mode_of(plan) == SHARD and unit is not None and bool(unit.reshard_after_forward)
    return OPTIONS.index((again, int(reshards)))


def offload_of(plan: Plan) -> int:
    """Return what of a whole plan is on the host, as the bits of the grid's `offload`.

    Offloading of only a part of the model counts as nothing.
    """
    a = plan.assignment
    full = {fqn for fqn, again in a.recompute.items() if again.policy.mode == "full"}
    blocks = set(plan.graph.blocks())
    params = PARAMS_THERE * (bool(a.units) and all(unit.on_host for unit in a.units.values()))
    activations = bool(blocks) and blocks == a.host_activations.keys() and blocks <= full
    return params | ACTIVATIONS_THERE * activations
