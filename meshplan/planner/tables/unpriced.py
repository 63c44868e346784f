"""The features of a plan that the cost model has no figures for, or the search no tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshplan.assign.base.cascade import Cascade
from meshplan.cost.config import mode_of, offload_of, stage_of
from meshplan.cost.grid import ACTIVATIONS_ON_HOST, DDP, PARAMS_ON_HOST, ZERO1
from meshplan.cost.pipeline import CLOSED_FORMS
from meshplan.errors import Problem
from meshplan.layout.mesh import SHARD_AXES
from meshplan.layout.optimizers import product_flops
from meshplan.layout.schedules import SCHEDULES
from meshplan.model.graph import around, is_inside
from meshplan.plan.plan import Plan
from meshplan.spec.borrow import LENDER


def not_read(plan: Plan) -> Iterator[Problem]:
    """Yield a problem if the model has no config, and if the plan states no sequence length."""
    if not plan.graph.config:
        yield _no_figures(plan, f"{plan.graph.name}, which has no config")
    if plan.spec.batch.seq_len is None:
        yield _no_figures(plan, "a plan that states no batch.seq_len")


def _no_figures(plan: Plan, what: str) -> Problem:
    fix = "change this in the plan, or run meshplan estimate, which needs no step time"
    return Problem(f"the cost model has no figures for {what}", plan.spec.origin(""), fix)


def unpriced(plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each feature of the plan that the cost model has no figures for."""
    a, mesh, stages = plan.assignment, plan.mesh, plan.assignment.stages
    mode = mode_of(plan)
    odd_data = (mode == DDP and mesh.size("dp_shard") > 1) or (
        mode == ZERO1 and mesh.size("dp_replicate") > 1
    )
    apart = [block for block in plan.graph.blocks() if block not in a.units]
    blocks = plan.graph.blocks()
    split = stages and {_stages_of_block(plan, block) for block in blocks}
    for is_present, what in (
        (plan.micro is None, "a plan that states no batch size"),
        (any(loan.within != LENDER for loan in mesh.loans), f"ranks not borrowed from {LENDER}"),
        (any(u.on_host for f, u in a.units.items() if f and f not in (*blocks, *a.experts)),
         "offloaded parameters of units that are no blocks"),
        (any(_reshards_apart(plan, fqn) for fqn in a.units),
         "units that are resharded otherwise than the block or the model around them"),
        (bool(a.host_activations) and not offload_of(plan) & ACTIVATIONS_ON_HOST,
         "offloaded activations without full recomputation of all blocks"),
        (has_unlike_units(plan) and mesh.size("ep") > 1,
         "units that are not all sharded along the same axes"),
        (bool(a.units) and not all(_is_in_root(plan, each) for each in apart),
         "blocks inside larger units"),
        (odd_data, f"{a.strategy.name} on this mesh"),
        (bool(product_flops(plan.spec.optimizer, (1, 1)))
         and any(placed.stored.axes for placed in a.tensors.values()),
         "the products of Muon's step on sharded parameters"),
        (stages is not None and SCHEDULES[stages.schedule].splits_backward
         and any(unit.on_host for unit in a.units.values()),
         "a split backward of offloaded parameters"),
        (bool(split) and max(len(each) for each in split or ()) > 1,
         "stage boundaries inside blocks"),
    ):  # fmt: skip
        if is_present:
            yield _no_figures(plan, what)


def unsearched(plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each feature that `Costed` prices, and the search does not."""
    a, stages = plan.assignment, plan.assignment.stages
    over = (unit.reshard_after_forward for unit in a.units.values())
    for is_present, what in (
        (bool(a.units) and not set(plan.graph.blocks()) <= set(a.units),
         "blocks that are not units"),
        (any(not isinstance(each, bool) for each in over), "resharding over fewer ranks"),
        (has_unlike_units(plan), "units that are not all sharded along the same axes"),
        (any(u.on_host for u in a.units.values()) and not offload_of(plan) & PARAMS_ON_HOST,
         "offloaded parameters of single modules"),
        (any(each.policy.save for each in a.recompute.values()), "a list of operations to save"),
        (stages is not None and plan.accumulate > 1, "gradient accumulation around a pipeline"),
        (stages is not None and stages.schedule not in CLOSED_FORMS,
         f"the schedule {stages.schedule}" if stages is not None else ""),
        (stages is not None and stages.virtual > 1 and _states_stages(plan),
         "stated stages of which a rank has several"),
    ):  # fmt: skip
        if is_present:
            yield Problem(f"the planner does not search plans with {what}", plan.spec.origin(""))


def _states_stages(plan: Plan) -> bool:
    """Return True if a plan states the stages of blocks, by `pipeline.split` or by rules."""
    spec, blocks = plan.spec, plan.graph.blocks()
    named = {fqn for fqn, _ in Cascade(spec, plan.graph).modules_with("stage")}
    is_split = spec.pipeline is not None and isinstance(spec.pipeline.split, tuple)
    return is_split or not named.isdisjoint(blocks)


def has_unlike_units(plan: Plan) -> bool:
    """Return True if a unit is sharded along other axes than the plan's strategy shards along.

    Units of experts are left out: with ep they are sharded over the ranks that ep leaves. So are
    the units of ddp, which shard nothing.
    """
    if mode_of(plan) == DDP:
        return False
    a, mesh = plan.assignment, plan.mesh
    usual = mesh.present(SHARD_AXES), mesh.present(("dp_replicate",))
    units = (unit for fqn, unit in a.units.items() if fqn not in a.experts)
    return any((unit.shard_axes, unit.replicate_axes) != usual for unit in units)


def _reshards_apart(plan: Plan, fqn: str) -> bool:
    """Return True if a unit that is no block is resharded otherwise than the unit around it.

    Outside the blocks of a live model, units may be: they are priced as if they were not.
    """
    a, blocks = plan.assignment, plan.graph.blocks()
    unit = a.units[fqn]
    if not fqn or fqn in a.experts or fqn in blocks or not unit.is_sharded:
        return False
    if not plan.graph.config and not any(is_inside(fqn, block) for block in blocks):
        return False
    outer = next((a.units[each] for each in around(fqn) if each != fqn and each in a.units), unit)
    return outer.is_sharded and outer.reshard_after_forward != unit.reshard_after_forward


def _is_in_root(plan: Plan, block: str) -> bool:
    """Return True if no unit but the root has the parameters of a block that is no unit."""
    return not any(fqn and is_inside(block, fqn) for fqn in plan.assignment.units)


def _stages_of_block(plan: Plan, block: str) -> tuple[int, ...]:
    """Return all stages that have a tensor of a block."""
    stages = plan.assignment.stages
    assert stages is not None
    counts: Counter[int] = Counter()
    for fqn, stages_of in stages.tensors.items():
        if fqn.startswith(f"{block}."):
            counts.update(stages_of)
    return tuple(counts)


def is_uneven(plan: Plan) -> bool:
    """Return True if some rank has a stage with two blocks more than another of its stages."""
    stages = plan.assignment.stages
    assert stages is not None
    counts = Counter(stage_of(plan, block) for block in plan.graph.blocks())
    by_rank: dict[int, list[int]] = {}
    for stage in range(stages.num):
        by_rank.setdefault(stages.rank_of(stage), []).append(counts[stage])
    return any(max(each) - min(each) > 1 for each in by_rank.values())
