"""The traffic of parameters, gradients and buffers along the data axes.

Knows what FSDP2 and DistributedDataParallel do with a layout, call by call.

Source: torch 2.13: FSDPParamGroup.unshard and post_backward, foreach_all_gather, foreach_reduce;
Reducer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshplan.assign import Placed, Unit
from meshplan.graph import DTYPE_BYTES
from meshplan.mesh import GRADIENT_AXES
from meshplan.plan import Plan
from meshplan.traffic.forward import Forward
from meshplan.traffic.types import Route, Traffic, along, one, trainable


@dataclass(frozen=True, slots=True)
class Passes:
    """What is done with the microbatches of one step.

    Args:
        order: "F" for a forward and "B" for a backward that needs the parameters, in order.
        splits: Backwards come in halves: parameters stay gathered and gradients unreduced until
            all are done.
        settles: Something follows the last backward, or what stands in for it.
    """

    order: tuple[str, ...]
    splits: bool = False
    settles: bool = True


def _numel(placed: Placed, plan: Plan, rank: int) -> int:
    return math.prod(placed.local_shape(plan.mesh, rank))


def agreement(plan: Plan, rank: int) -> Iterator[Traffic]:
    """What data ranks settle after the last backward: scalars, and which gradients there are."""
    if plan.assignment.wrapper != "units":
        return
    trained = [placed for placed in trainable(plan) if placed.info.numel]
    for placed in trained:
        if placed.reduced_alone:
            num_bytes = _numel(placed, plan, rank) * DTYPE_BYTES[placed.dtype]
            yield one(plan.mesh, "all_reduce", GRADIENT_AXES, num_bytes, placed.info.fqn)
    notes = 8 * (len(trained) + 2)
    what = "which parameters have a gradient, and which units were reduced"
    yield one(plan.mesh, "all_reduce", GRADIENT_AXES, notes, what)


def ddp(plan: Plan) -> Iterator[Traffic]:
    """Gradients in buckets once a step; buffers from rank 0, joined by dtype."""
    mesh, options = plan.mesh, plan.spec.ddp
    total = sum(p.info.numel * DTYPE_BYTES[p.dtype] for p in trainable(plan))
    route = Route("all_reduce", along(mesh, GRADIENT_AXES), total)
    yield Traffic(route=route, count=1, what="gradients, in buckets", is_split=True)
    if options.get("find_unused_parameters"):
        flags = 4 * len(trainable(plan))
        yield one(mesh, "all_reduce", GRADIENT_AXES, flags, "which parameters were used")
    if options.get("broadcast_buffers", True):
        by_dtype: Counter[str] = Counter()
        for placed in plan.assignment.tensors.values():
            if placed.info.is_buffer:
                by_dtype[placed.dtype] += placed.info.numel * DTYPE_BYTES[placed.dtype]
        for dtype, num_bytes in by_dtype.items():
            yield one(mesh, "broadcast", GRADIENT_AXES, num_bytes, f"{dtype} buffers")


def unit_traffic(
    plan: Plan, unit: Unit, forward: Forward | None, rank: int, passes: Passes
) -> Iterator[Traffic]:
    """FSDP2: gathered for forward and again for backward, gradients reduced."""
    mesh = plan.mesh
    managed = [p for p in plan.assignment.tensors.values() if p.unit == unit.fqn]
    trained = [p for p in managed if p.info.trainable]
    what = f"unit '{unit.fqn}'" if unit.fqn else "the root unit"
    shards = mesh.size(*unit.shard_axes)

    def num_bytes(placed: Placed, dtype: str) -> int:
        elements = _numel(placed, plan, rank)
        if shards > 1:  # Every rank sends as much as the one with most.
            elements = shards * placed.stored.padded_numel(
                placed.info.shape, mesh, unit.shard_axes, rank
            )
        return elements * DTYPE_BYTES[dtype]

    gathered = sum(num_bytes(p, p.compute_dtype) for p in managed)
    is_reached = _is_reached(unit, trained, forward)
    times = _gathers(bool(unit.reshard_after_forward), passes, is_reached)
    yield one(mesh, "all_gather", unit.shard_axes, gathered, f"parameters of {what}", times)
    reduced = sum(num_bytes(p, unit.precision.reduce or p.compute_dtype) for p in trained)
    # As `runtime.data.set_gradient_sync` says it: shards are reduced after every microbatch, but
    # a backward in two halves reduces nothing before the end.
    is_at_once = "gradient" in plan.assignment.strategy.cuts and not passes.splits
    scattered = passes.order.count("B") if is_at_once else 1
    yield one(mesh, "reduce_scatter", unit.shard_axes, reduced, f"gradients of {what}", scattered)
    part = reduced // shards
    yield one(mesh, "all_reduce", unit.replicate_axes, part, f"gradients of {what}")


def _gathers(reshards_after_forward: bool, passes: Passes, is_reached: bool) -> int:
    """How often a unit is gathered that lies in shards when the step begins."""
    count, is_whole = 0, False
    for kind in passes.order:
        if kind == "F" or is_reached:
            count += not is_whole
            is_whole = passes.splits if kind == "B" else not reshards_after_forward
    return count


def _is_reached(unit: Unit, trained: Sequence[Placed], forward: Forward | None) -> bool:
    """Whether backward comes to the unit: it need not, if nothing in it or before it is trained."""
    calls = forward.of(unit.fqn) if forward else ()
    return bool(trained) or not calls or any(t.needs_grad for call in calls for t in call.outputs)
