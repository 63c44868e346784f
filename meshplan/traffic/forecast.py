"""Predict all collectives and sends of one training step.

Nothing is guessed: traffic that follows neither from a layout nor from a recorded forward is listed
in `Forecast.unknown`. `tests/traffic/test_traffic.py` compares predictions with real runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from meshplan.layout.mesh import DATA_AXES, EXPERT_SHARD, GRADIENT_AXES
from meshplan.layout.schedules import SCHEDULES
from meshplan.layout.styles import GATHERED
from meshplan.plan.plan import Plan
from meshplan.plan.restrict import restrict
from meshplan.traffic.batchnorm import kept_statistics, statistics
from meshplan.traffic.context import attention, unknown_heads
from meshplan.traffic.data import agreement, ddp, unit_traffic
from meshplan.traffic.experts import Arrivals, dispatch, unknown_experts
from meshplan.traffic.forward import Forward
from meshplan.traffic.loss import token_losses, unknown_losses
from meshplan.traffic.pipeline import StageForward, counted_once, pipeline, stage_forwards, steps_of
from meshplan.traffic.tensor_parallel import (
    activations,
    gathered_at_use,
    partial_gradients,
    unknown_heads_together,
)
from meshplan.traffic.types import Forecast, Traffic, one
from meshplan.traffic.units import Passes, uses_of_units

_KNOWN_AXES: Final = (*DATA_AXES, EXPERT_SHARD, "pp", "cp", "tp", "ep")
"""Mesh axes whose traffic this package can predict."""
_WORD: Final = re.compile(r"R|P|outside|S\(-?\d+\)")
"""Words of a style for the layout of an activation whose traffic can be predicted."""


def forecast(
    plan: Plan,
    forward: Forward | None = None,
    rank: int = 0,
    *,
    arrivals: Arrivals | None = None,
) -> Forecast:
    """Predict the traffic of one rank in one call of `train_step`.

    Args:
        plan: The plan of the whole model.
        forward: A forward of this rank, recorded by `runtime.verify.module_calls.record_forward`;
            needed for the traffic of activations.
        rank: The global rank.
        arrivals: The slots that this rank receives along ep, call by call. If None, the traffic is
            that of balanced routing, with bounds for any other.

    Assumes: every parameter gets a gradient.
    """
    unknown = _unknown(plan, forward)
    traffic = [*_step(plan), *_clipping(plan, rank)]
    if plan.assignment.stages is None:
        traffic += _compute(plan, forward, rank, Passes(("F", "B") * plan.accumulate))
        traffic += dispatch(plan, forward, arrivals) if forward is not None else ()
    else:
        cut = stage_forwards(plan, forward)
        if isinstance(cut, str):
            unknown.append(f"what the stages send ({cut})")
            traffic += _stages(plan, rank, None, None)
        else:
            traffic += pipeline(plan, rank, cut)
            traffic += _stages(plan, rank, cut, arrivals)
    if forward is not None and _computes_loss(plan, rank):
        traffic += token_losses(plan, forward)
    return Forecast(tuple(filter(_is_sent, traffic)), tuple(unknown))


def _is_sent(traffic: Traffic) -> bool:
    """Return True if the collective takes place. An all-to-all does even if it sends no rows."""
    route = traffic.route
    has_bytes = route.num_bytes > 0 or route.kind == "all_to_all"
    return traffic.count > 0 and bool(route.axes) and has_bytes


def _computes_loss(plan: Plan, rank: int) -> bool:
    """Return True if the rank has the last pipeline stage, or if there are no stages."""
    stages = plan.assignment.stages
    return stages is None or stages.num - 1 in stages.of_rank(plan.mesh.index(rank, ("pp",)))


def _stages(
    plan: Plan, rank: int, cut: Sequence[StageForward] | None, arrivals: Arrivals | None
) -> Iterator[Traffic]:
    """Yield the traffic of a rank's pipeline stages, except that between stages.

    Args:
        plan: The plan of the whole model.
        rank: The global rank.
        cut: The recorded forward of each stage. If None, gradients are assumed to reach every
            stage, and traffic of activations is left out.
        arrivals: The slots that this rank receives along ep; None if not known.
    """
    stages, steps = plan.assignment.stages, steps_of(plan, rank)
    assert stages is not None
    splits = SCHEDULES[stages.schedule].splits_backward
    for stage in stages.of_rank(plan.mesh.index(rank, ("pp",))):
        # A stage without gradients of its inputs has no first half of backward (I): its parameters
        # are then needed in the second half (W).
        has_first_half = stage > 0 and _is_learned(cut, stage - 1)
        is_reached = stage == stages.num - 1 or _is_learned(cut, stage)
        words = {"F": "F"}
        if is_reached:
            words |= {"B": "B", ("I" if has_first_half else "W"): "B"}
        order = [words[s.kind] for s in steps if s.stage == stage and s.kind in words]
        passes = Passes(tuple(order) * plan.accumulate, splits, is_reached or splits)
        forward = None if cut is None else cut[stage].forward
        part = restrict(plan, stage)
        yield from _compute(part, forward, rank, passes)
        yield from dispatch(part, forward, arrivals) if forward is not None else ()


def _is_learned(cut: Sequence[StageForward] | None, stage: int) -> bool:
    """Return True if gradients come back for a tensor that the stage sends to the next one."""
    return cut is None or any(tensor.needs_grad for tensor in cut[stage].sends)


def _compute(plan: Plan, forward: Forward | None, rank: int, passes: Passes) -> Iterator[Traffic]:
    """Yield the traffic of all forwards and backwards, and of the reductions after the last.

    Args:
        plan: The plan of the model, or of one stage.
        forward: The recorded forward of the model or the stage; None leaves out activations.
        rank: The global rank.
        passes: The order of forwards and backwards.
    """
    if passes.reduces_at_end:
        yield from agreement(plan, rank)
    if plan.assignment.wrapper == "ddp":
        yield from ddp(plan)
    uses = uses_of_units(plan, forward, passes)
    for fqn, use in uses.items():
        yield from unit_traffic(plan, plan.assignment.units[fqn], use, rank)
    yield from partial_gradients(plan, passes, uses)
    if forward is not None:
        yield from activations(plan, forward)
        yield from gathered_at_use(plan, forward)
        yield from statistics(plan, forward)
        yield from kept_statistics(plan, forward)
        if plan.assignment.context is not None:
            yield from attention(plan, forward)


def _unknown(plan: Plan, forward: Forward | None) -> list[str]:
    """Return a line of text for each traffic that cannot be predicted for this plan."""
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
        f"what the style {name} sends to lay out activations as '{word}'"
        for word, name in words.items()
        if word != GATHERED and not _WORD.fullmatch(word)
    ]
    out += [
        *unknown_losses(plan, forward), *unknown_heads(plan, forward),
        *unknown_experts(plan, forward), *unknown_heads_together(plan, forward),
    ]  # fmt: skip
    if plan.assignment.synchronized and forward is None:
        out.append("what BatchNorm sends for its statistics (needs a recorded forward)")
    stages = decided.stages
    if stages is not None:
        cut = [fqn for fqn in decided.units if fqn and fqn in stages.opened]
        out += [f"what the unit '{fqn}' sends (several stages run it)" for fqn in cut]
        if mesh.size("cp") > 1:
            out.append("what the axis cp sends within stages")
    out += [f"what '{code}' does to '{fqn}'" for fqn, code, _ in decided.apply]
    if mesh.size("tp") > 1 and forward is None:
        out.append("what activations send along tp (needs a recorded forward)")
    return out


def _step(plan: Plan) -> Iterator[Traffic]:
    """Yield the collectives that `train_step` itself issues."""
    mesh, precision = plan.mesh, plan.spec.precision
    yield one(mesh, "all_reduce", GRADIENT_AXES, 3 * 8, "the loss and the number of samples")
    if plan.spec.loss == "tokens":
        yield one(mesh, "all_reduce", GRADIENT_AXES, 8, "the number of tokens")
    for axis in (name for name in mesh.names if name not in DATA_AXES):
        yield one(mesh, "all_reduce", (axis,), 2 * 8, "whether the batches fit together")
    if precision.scales_loss:
        yield one(mesh, "all_reduce", mesh.names, 4, "whether a gradient overflowed")


def _clipping(plan: Plan, rank: int) -> Iterator[Traffic]:
    """Yield the all-reduces of gradient clipping, of one number along each axis of each group."""
    if plan.spec.clip_grad_norm is None:
        return
    mesh, a = plan.mesh, plan.assignment
    layouts = [a.tensors[fqn] for fqn in counted_once(plan, rank)]
    # Gradients are grouped by the axes that shard them, and those in host memory separately.
    cut_alike = {(frozenset(placed.stored.axes), a.is_on_host(placed)) for placed in layouts}
    for axes, _ in cut_alike:
        for axis in sorted(axes):
            yield one(mesh, "all_reduce", (axis,), 4, "the norm of the gradients")
    # In float64, since stages may have parameters of other dtypes, or none.
    yield one(mesh, "all_reduce", ("pp",), 8, "the norm of the gradients of other stages")
