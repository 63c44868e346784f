"""Predict the traffic of parameters, gradients and buffers along the data axes.

The functions count the collectives that FSDP2 and DistributedDataParallel issue for a layout.

Source: torch 2.13: `FSDPParamGroup.unshard` and `post_backward`, `foreach_all_gather`,
`foreach_reduce`; `Reducer` of DistributedDataParallel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from meshplan.assign import Placed, Unit
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.traffic.types import Route, Traffic, one, trainable
from meshplan.traffic.units import UnitUse


def _numel(placed: Placed, plan: Plan, rank: int) -> int:
    return math.prod(placed.local_shape(plan.mesh, rank))


def agreement(plan: Plan, rank: int) -> Iterator[Traffic]:
    """Yield the all-reduces after the last backward, for models with FSDP units.

    They cover gradients that no unit reduces (`reduced_alone`), and flags of which gradients exist.
    """
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
    """Yield DDP's traffic in a step: all-reduces of gradients, broadcasts of buffers by dtype."""
    mesh, options = plan.mesh, plan.spec.ddp
    total = sum(p.info.numel * DTYPE_BYTES[p.dtype] for p in trainable(plan))
    route = Route("all_reduce", mesh.spread(GRADIENT_AXES), total)
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


def unit_traffic(plan: Plan, unit: Unit, use: UnitUse, rank: int) -> Iterator[Traffic]:
    """Yield FSDP2's traffic of one unit in a step, on one rank.

    Args:
        plan: The plan.
        unit: The unit.
        use: The number of its all-gathers and reductions.
        rank: The global rank.
    """
    mesh = plan.mesh
    managed = [p for p in plan.assignment.tensors.values() if p.unit == unit.fqn]
    trained = [p for p in managed if p.info.trainable]
    what = f"unit '{unit.fqn}'" if unit.fqn else "the root unit"
    shards = mesh.size(*unit.shard_axes)

    def num_bytes(placed: Placed, dtype: str) -> int:
        elements = _numel(placed, plan, rank)
        if shards > 1:  # Every shard is padded to the size of the largest one.
            elements = shards * placed.stored.padded_numel(
                placed.info.shape, mesh, unit.shard_axes, rank
            )
        return elements * DTYPE_BYTES[dtype]

    gathered = sum(num_bytes(p, p.compute_dtype) for p in managed)
    parameters, gradients = f"parameters of {what}", f"gradients of {what}"
    yield one(mesh, "all_gather", unit.shard_axes, gathered, parameters, use.gathers)
    reduced = sum(num_bytes(p, unit.precision.reduce or p.compute_dtype) for p in trained)
    # As in `runtime.apply.data.data.set_gradient_sync`: if gradients are sharded, every microbatch
    # reduce-scatters them, otherwise only the last one.
    is_at_once = "gradient" in plan.assignment.strategy.cuts
    at_last = use.reductions[-1] if use.reductions else 0
    times = sum(use.reductions) if is_at_once else at_last
    yield one(mesh, "reduce_scatter", unit.shard_axes, reduced, gradients, times)
    yield one(mesh, "all_reduce", unit.replicate_axes, reduced // shards, gradients, at_last)
