"""Convert a plan to what the cost model takes: a row of the grid, options of blocks, and a chain.

The search, the cost of a given plan and the pictures all use these functions, so that they agree
about a plan's mode, options and stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from meshplan.cost.chain import BEFORE, chain_of, parts_of_places, with_optimizer
from meshplan.cost.grid import (
    ACTIVATIONS_ON_HOST,
    CONTEXT_WORDS,
    DDP,
    GRID,
    OPTIONS,
    PARAMS_ON_HOST,
    RECOMPUTE,
    SCHEDULE_WORDS,
    SHARD,
    ZERO1,
    Array,
)
from meshplan.cost.types import Chain
from meshplan.errors import PlanError, Problem
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.memory.analytic.microbatches import (
    loss_chunks_of,
    op_refusals,
    saves_of,
    styled_of,
)
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.spec.spec import PRODUCTS

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


def plan_as_config(plan: Plan) -> Array:
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
    if (context := plan.assignment.context) is not None:
        row["gathers_kv"] = CONTEXT_WORDS.index(context.attention)
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


def chain_of_plan(plan: Plan) -> Chain:
    """Return the chain of a plan's model, as one rank of the plan's tp and ep computes it.

    Raises:
        PlanError: The model is of no known family, the plan is incomplete, or the plan uses a
            feature that the cost model cannot price.
    """
    (_, seq_len), tp = plan.fed(), plan.mesh.size("tp")
    if not plan.graph.config:
        what = (
            "the cost model needs a Hugging Face config of a known family, and the model has none"
        )
        raise PlanError(Problem(what, None, "add --config PATH"))
    if problems := list(op_refusals(plan)):
        raise PlanError(problems)
    (dtype,) = plan.assignment.compute_dtypes
    found = chain_of(
        plan.graph,
        seq_len=seq_len,
        element_bytes=DTYPE_BYTES[dtype],
        tp=tp,
        ep=plan.mesh.size("ep"),
        styled=styled_of(plan) if tp > 1 else None,
        loss_chunks=loss_chunks_of(plan),
        saves={n: kept for n, kept in saves_of(plan).items() if kept != frozenset(PRODUCTS)},
        is_compiled=plan.spec.compile,
    )
    return with_optimizer(found, plan.graph, plan.spec.optimizer)


def stage_of_places(plan: Plan, chain: Chain) -> tuple[int, ...]:
    """Return the stage of each place of a chain.

    Places before the blocks are in the first stage, places after the blocks in the last stage.
    """
    stages, out = plan.assignment.stages, []
    if stages is None:
        return (0,) * len(chain.order)
    for name, part in zip(chain.names, parts_of_places(chain), strict=True):
        outside = 0 if part == BEFORE else stages.num - 1
        out.append(stage_of(plan, name) if name else outside)
    return tuple(out)


def stage_of(plan: Plan, block: str) -> int:
    """Return the stage of a block: the stage of its first unit or, without units, tensor."""
    stages = plan.assignment.stages
    assert stages is not None
    first_stages = ((fqn, own[0]) for fqn, own in stages.tensors.items())
    return next(s for fqn, s in (*stages.units, *first_stages) if is_inside(fqn, block))
