"""Convert a plan to a configuration: one row of the grid, and one option for each of its blocks.

The search, the cost of a given plan and the picture of a pipeline schedule all use these functions,
so that they agree about a plan's mode and options.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import (
    ACTIVATIONS_ON_HOST,
    GRID,
    MODES,
    OPTIONS,
    PARAMS_ON_HOST,
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
"""(modes as indices into `MODES`, values of reshard_after_forward), by strategy."""


def plan_as_config(plan: Plan) -> NDArray[Any]:
    """Return the grid whose only row is the configuration of a plan, of dtype `GRID`.

    If a pipeline runs several times in one step, `microbatches` counts all runs together.

    Assumes: the plan states its batch.
    """
    assert plan.micro is not None
    stages = plan.assignment.stages
    parts = stages.microbatches if stages is not None else 1
    row = np.zeros(1, GRID)
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        row[axis] = plan.mesh.size(axis)
    if stages is not None:
        row["virtual"] = stages.virtual
        row["schedule"] = SCHEDULE_WORDS.index(stages.schedule)
    else:
        row["virtual"] = 1
    row["micro"], row["microbatches"] = plan.micro // parts, parts * plan.accumulate
    row["mode"] = mode_of(plan)
    row["offload"], row["loss_chunks"] = offload_of(plan), loss_chunks_of(plan)
    return row


def mode_of(plan: Plan) -> int:
    """Return the index into `MODES` of the layout over data ranks that a plan's strategy has."""
    (mode,), _ = STRATEGY_OPTIONS[plan.assignment.strategy.name]
    return mode


def option_of(plan: Plan, block: str) -> int:
    """Return the index into `OPTIONS` of a block's option.

    Args:
        plan: The plan.
        block: Fqn of the block; "" for modules outside the blocks, which have only one option.
    """
    if not block:
        return OPTIONS.index((0, 0))
    a = plan.assignment
    recompute, unit = a.recompute.get(block), a.units.get(block)
    mode = RECOMPUTE.index(recompute.policy.mode if recompute is not None else "none")
    reshards = mode_of(plan) == SHARD and unit is not None and bool(unit.reshard_after_forward)
    return OPTIONS.index((mode, int(reshards)))


def offload_of(plan: Plan) -> int:
    """Return the states and activations that a plan offloads, as bits of the grid's `offload`.

    A bit is set only if it holds for every unit or every block.
    """
    a = plan.assignment
    full = {fqn for fqn, recompute in a.recompute.items() if recompute.policy.mode == "full"}
    blocks = set(plan.graph.blocks())
    params = PARAMS_ON_HOST * (bool(a.units) and all(unit.on_host for unit in a.units.values()))
    activations = bool(blocks) and blocks == a.host_activations.keys() and blocks <= full
    return params | ACTIVATIONS_ON_HOST * activations
