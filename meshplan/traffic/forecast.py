"""The traffic of parameters, gradients and buffers, and of `train_step` itself.

Knows what FSDP2 and DistributedDataParallel do with a layout, call by call. Refuses to guess:
what follows from no layout is named in `Forecast.unknown`.

Source: torch 2.13: FSDPParamGroup.unshard and post_backward, foreach_all_gather, foreach_reduce;
Reducer. `tests/test_traffic.py` counts on real runs and compares.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from meshplan.assign import Placed, Unit
from meshplan.graph import DTYPE_BYTES
from meshplan.mesh import DATA_AXES, EXPERT_SHARD, GRADIENT_AXES
from meshplan.plan import Plan
from meshplan.traffic.tensor_parallel import activations, gathered_at_use, partial_gradients
from meshplan.traffic.types import Forecast, Forward, Route, Traffic, along, one, trainable

_KNOWN_AXES: Final = (*DATA_AXES, EXPERT_SHARD, "tp")
_WORD: Final = re.compile(r"R|P|outside|S\(-?\d+\)")


def forecast(plan: Plan, forward: Forward | None = None, rank: int = 0) -> Forecast:
    """What `rank` sends and receives in one step.

    Args:
        forward: A forward of the unparallelized model with one microbatch of one rank; needed for
            what activations send, that is, for tp.

    Assumes: every parameter gets a gradient.
    """
    mesh = plan.mesh
    unknown = _unknown(plan)
    traffic = [*_step(plan), *_clipping(plan), *_agreement(plan, rank)]
    if plan.assignment.wrapper == "ddp":
        traffic += _ddp(plan)
    for unit in plan.assignment.units.values():
        traffic += _unit(plan, unit, forward, rank)
    if mesh.size("tp") > 1:
        if forward is None:
            unknown.append("what activations send along tp, without a record of the forward")
        else:
            traffic += activations(plan, forward)
            traffic += gathered_at_use(plan, forward)
        traffic += partial_gradients(plan)
    kept = tuple(t for t in traffic if t.count and t.route.axes and t.route.num_bytes)
    return Forecast(kept, tuple(unknown))


def _unknown(plan: Plan) -> list[str]:
    """What this room has no rule for, whoever decided it."""
    mesh, decided = plan.mesh, plan.assignment
    axes = [name for name in mesh.names if mesh.size(name) > 1]
    for placed in decided.tensors.values():
        axes += (*placed.stored.axes, *placed.computed.axes, *placed.gradient.axes)
    for unit in decided.units.values():
        axes += (*unit.shard_axes, *unit.replicate_axes)
    axes += (use.axis for use in decided.styles.values())
    out = [f"what the axis {axis} sends" for axis in dict.fromkeys(axes) if axis not in _KNOWN_AXES]
    words = {
        word: use.style.name
        for use in decided.styles.values()
        for word in (*use.style.input, *use.style.output)
    }
    out += [
        f"what the style {name} sends to lay activations as '{word}'"
        for word, name in words.items()
        if not _WORD.fullmatch(word)
    ]
    if plan.spec.loss_parallel:
        out.append("what a loss over parts of the vocabulary sends")
    if plan.spec.sync_batchnorm:
        out.append("what BatchNorm sends for its statistics")
    return out + [f"what '{code}' does to '{fqn}'" for fqn, code, _ in decided.apply]


def _step(plan: Plan) -> Iterator[Traffic]:
    """What `train_step` itself sends."""
    mesh, precision = plan.mesh, plan.spec.precision
    others = [name for name in mesh.names if name not in DATA_AXES]
    yield one(mesh, "all_reduce", GRADIENT_AXES, 3 * 8, "the loss and the number of samples")
    yield one(mesh, "all_reduce", others, 2 * 8, "whether the batches fit together")
    if precision.param == "float16" and precision.is_mixed:
        yield one(mesh, "all_reduce", mesh.names, 4, "whether a gradient overflowed")


def _clipping(plan: Plan) -> Iterator[Traffic]:
    """One number per group of gradients that are cut alike, along each axis that cuts them."""
    if plan.spec.clip_grad_norm is None:
        return
    mesh = plan.mesh
    cut_alike = {frozenset(p.stored.axes) for p in trainable(plan)}
    for axes in cut_alike:
        for axis in sorted(axes):
            yield one(mesh, "all_reduce", (axis,), 4, "the norm of the gradients")


def _numel(placed: Placed, plan: Plan, rank: int) -> int:
    return math.prod(placed.local_shape(plan.mesh, rank))


def _agreement(plan: Plan, rank: int) -> Iterator[Traffic]:
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


def _ddp(plan: Plan) -> Iterator[Traffic]:
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


def _unit(plan: Plan, unit: Unit, forward: Forward | None, rank: int) -> Iterator[Traffic]:
    """FSDP2: gathered for forward and again for backward, gradients reduced."""
    mesh, k = plan.mesh, plan.accumulate
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
    again = unit.reshard_after_forward and _is_reached(unit, trained, forward)
    times = k * (2 if again else 1)
    yield one(mesh, "all_gather", unit.shard_axes, gathered, f"parameters of {what}", times)
    reduced = sum(num_bytes(p, unit.precision.reduce or p.compute_dtype) for p in trained)
    # As `runtime.data.set_gradient_sync` says it: shards are reduced after every microbatch.
    scattered = k if "gradient" in plan.assignment.strategy.cuts else 1
    yield one(mesh, "reduce_scatter", unit.shard_axes, reduced, f"gradients of {what}", scattered)
    part = reduced // shards
    yield one(mesh, "all_reduce", unit.replicate_axes, part, f"gradients of {what}")


def _is_reached(unit: Unit, trained: Sequence[Placed], forward: Forward | None) -> bool:
    """Whether backward comes to the unit: it need not, if nothing in it or before it is trained."""
    calls = forward.of(unit.fqn) if forward else ()
    return bool(trained) or not calls or any(call.output_needs_grad for call in calls)
