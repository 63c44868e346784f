"""Predict the traffic of a pipeline: sends between stages, and all-reduces along pp.

Source: `runtime.apply.pipeline`, which runs the actions of `layout.schedules`. A value that a later
stage reads is sent through every stage in between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshplan.assign.base.types import Stages
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.schedules import SCHEDULES, Action, actions
from meshplan.model.flow import Call, Flow
from meshplan.model.stage_boundary import UnitFlow, stages_of, unit_calls
from meshplan.plan.plan import Plan
from meshplan.traffic.forward import Forward, ModuleVisit, TensorUse
from meshplan.traffic.sequence import SequenceCuts
from meshplan.traffic.types import Traffic, one

FLAGS_BYTES = 2 * 4
"""Bytes of the flags by which ranks learn if every stage succeeded."""
LOSS_BYTES = 8
"""Bytes of the loss that the last stage passes to the others."""
IS_THERE_BYTES = 4
"""Bytes of the flag that a rank has a gradient for a shared parameter."""


def steps_of(plan: Plan, rank: int) -> tuple[Action, ...]:
    """Return the actions of a rank in one run of the schedule, over all its microbatches."""
    stages = plan.assignment.stages
    assert stages is not None
    rows = actions(
        SCHEDULES[stages.schedule], stages.num_ranks, stages.virtual, stages.microbatches
    )
    return rows[plan.mesh.index(rank, ("pp",))]


@dataclass(frozen=True, slots=True)
class StageForward:
    """One stage of a recorded forward.

    Args:
        forward: The part of the forward that runs in the stage.
        sends: The tensors of one microbatch that each rank of tp sends to the next stage, with
            their local shapes.
    """

    forward: Forward
    sends: tuple[TensorUse, ...]


def sent_dtype(plan: Plan, recorded: str) -> str:
    """Return the dtype in which stages exchange a value of the recorded forward.

    Args:
        plan: The plan.
        recorded: Dtype of the value in the recorded forward, which casts nothing.
    """
    precision, is_float = plan.spec.precision, "float" in recorded
    return precision.param if precision.is_mixed and precision.param and is_float else recorded


def sent_bytes(plan: Plan, values: Sequence[int]) -> int:
    """Return the bytes of some values of the recorded forward, as one rank of tp sends them.

    A value that may be sharded along the sequence or not counts as unsharded.

    Args:
        plan: The plan of a model with a recorded forward.
        values: Ids of the values.
    """
    flow, total = plan.graph.flow, 0
    assert flow is not None
    cuts = SequenceCuts(plan, flow)
    for number in values:
        value = flow.values[number]
        shape = cuts.shape(number, value.shape)
        dtype = sent_dtype(plan, value.dtype)
        total += math.prod(value.shape if shape is None else shape) * DTYPE_BYTES[dtype]
    return total


def crossing_values(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the ids of the values that each stage but the last sends to the next one.

    Args:
        plan: A plan with a pipeline, of a model with a recorded forward.
    """
    flow, stages = plan.graph.flow, plan.assignment.stages
    assert flow is not None
    assert stages is not None
    calls = unit_calls(flow, stages.opened, stages.free)
    places = [place for place in stages_of(calls, stages.units) if place is not None]
    return UnitFlow(flow, calls).relay(places, stages.num).crossing


def stage_forwards(plan: Plan, forward: Forward | None) -> tuple[StageForward, ...] | str:
    """Return the recorded forward of each pipeline stage; the reason as text if it has no split."""
    stages = plan.assignment.stages
    assert stages is not None
    if forward is None or forward.flow is None:
        return "needs a recorded forward"
    flow = forward.flow
    calls = unit_calls(flow, stages.opened, stages.free)
    places = [place for place in stages_of(calls, stages.units) if place is not None]
    visits = _visits(flow, calls, forward)
    if len(places) < len(calls) or visits is None:
        return "the recorded forward differs from the one that was split into stages"
    seen = {
        value: tensor
        for call, visit in zip(calls, visits, strict=True)
        for (_, value), tensor in zip(call.outputs, visit.outputs, strict=True)
    }
    cuts = SequenceCuts(plan, flow)
    out = []
    for stage, values in enumerate((*UnitFlow(flow, calls).relay(places, stages.num).crossing, ())):
        sends = [cuts.local(value, seen[value]) for value in values]
        known = tuple(tensor for tensor in sends if tensor is not None)
        if len(known) < len(sends):
            return "values sent between stages may be whole or sharded along the sequence"
        others = [v for v, place in zip(visits, places, strict=True) if place != stage]
        out.append(StageForward(_without(forward, others), known))
    return tuple(out)


def _visits(flow: Flow, units: Sequence[Call], forward: Forward) -> list[ModuleVisit] | None:
    """Return the recorded call of each of `units`; None if `flow` and `forward` do not match."""
    visits = {fqn: iter(forward.of(fqn)) for fqn in {call.module for call in flow.calls}}
    found = {call.id: next(visits[call.module], None) for call in flow.calls}
    out = [found[call.id] for call in units]
    pairs = zip(units, out, strict=True)
    if any(visit is None or len(visit.outputs) != len(call.outputs) for call, visit in pairs):
        return None
    return [visit for visit in out if visit is not None]


def _without(forward: Forward, visits: Sequence[ModuleVisit]) -> Forward:
    """Return a forward without these calls and without all events inside them."""

    def is_left(begin: int, end: int) -> bool:
        return not any(visit.begin <= begin and end <= visit.end for visit in visits)

    return replace(
        forward,
        calls=tuple(call for call in forward.calls if is_left(call.begin, call.end)),
        saves=tuple(save for save in forward.saves if is_left(save, save)),
        attentions=tuple(call for call in forward.attentions if is_left(call.begin, call.end)),
    )


def pipeline(plan: Plan, rank: int, cut: Sequence[StageForward]) -> Iterator[Traffic]:
    """Yield the traffic of a rank along pp in one step.

    Args:
        plan: The plan of the whole model.
        rank: The global rank.
        cut: The recorded forward of each stage.

    Assumes: every parameter that several stages share gets a gradient in one of them.
    """
    stages, mesh, times = plan.assignment.stages, plan.mesh, plan.accumulate
    assert stages is not None
    counted: Counter[tuple[str, int, str]] = Counter()
    for action in steps_of(plan, rank):
        direction, _, way = action.kind.partition("_")
        if not way:
            continue
        is_onward = way == "F"
        # Let `stage` be the one before the boundary that is crossed, in either direction.
        is_from_here = (direction == "SEND") == is_onward
        stage = action.stage if is_from_here else action.stage - 1
        kind = "activations" if is_onward else "gradients"
        what = f"{kind} between stages {stage} and {stage + 1}"
        for tensor in cut[stage].sends:
            if is_onward or tensor.needs_grad:
                num_bytes = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
                counted[direction.lower(), num_bytes, what] += 1
    for (kind, num_bytes, what), count in counted.items():
        yield one(mesh, kind, ("pp",), num_bytes, what, count * times)
    yield one(mesh, "all_reduce", ("pp",), FLAGS_BYTES, "whether every stage succeeded", times)
    yield one(mesh, "all_reduce", ("pp",), LOSS_BYTES, "the loss of the last stage", times)
    yield from _shared(plan, stages, rank)


def _shared(plan: Plan, stages: Stages, rank: int) -> Iterator[Traffic]:
    """Yield the all-reduces of gradients of parameters that stages on several ranks share."""
    place = plan.mesh.index(rank, ("pp",))
    for fqn, holders in stages.tensors.items():
        placed = plan.assignment.tensors[fqn]
        places = {stages.rank_of(stage) for stage in holders}
        if len(places) > 1 and place in places and placed.info.trainable:
            num_bytes = math.prod(placed.local_shape(plan.mesh, rank)) * DTYPE_BYTES[placed.dtype]
            what = f"the gradient of {fqn}, shared between stages"
            yield one(plan.mesh, "all_reduce", ("pp",), IS_THERE_BYTES, what)
            yield one(plan.mesh, "all_reduce", ("pp",), num_bytes, what)


def counted_once(plan: Plan, rank: int) -> set[str]:
    """Return the trainable parameters that a rank counts in the gradient norm of the whole model.

    A parameter that several stages share is counted on the rank of its first stage.
    """
    stages = plan.assignment.stages
    trainable = {p.info.fqn for p in plan.assignment.tensors.values() if p.info.trainable}
    if stages is None:
        return trainable
    place = plan.mesh.index(rank, ("pp",))
    return {fqn for fqn in trainable if stages.rank_of(stages.tensors[fqn][0]) == place}
