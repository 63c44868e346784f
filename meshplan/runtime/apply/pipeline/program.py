"""The work of each stage for inputs of one form (structure, shapes, dtypes), equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from meshplan.assign.base.types import Stages
from meshplan.errors import ApplyError, Problem
from meshplan.model.flow import Call
from meshplan.model.stage_boundary import UnitFlow, stages_of, unit_calls
from meshplan.runtime.apply.pipeline.stage import Program
from meshplan.runtime.base.pytree import opaque_in
from meshplan.runtime.trace.ops import record


def make_program(skeleton: nn.Module, stages: Stages, inputs: Any) -> Program:
    """Record the forward on these inputs and find the values that cross the cuts.

    Args:
        skeleton: The whole model, with or without values, in the mode (training or evaluation) that
            the stages are in.
        stages: The assignment of units to stages.
        inputs: One microbatch.

    Raises:
        ApplyError: The recorded forward does not fit the plan's stages.
    """
    forms: dict[int, Any] = {}
    flow = record(skeleton, inputs, forms)
    calls = unit_calls(flow, stages.opened, stages.free)
    places = _stages_of(calls, stages)
    cut = UnitFlow(flow, calls)
    problems = list(_problems(cut, places, stages, forms))
    if problems:
        raise ApplyError(problems)
    return Program(
        flow=flow,
        calls=calls,
        stages=tuple(places),
        forms=tuple(forms[call.id] for call in calls),
        relay=cut.relay(places, stages.num),
        written=frozenset(cut.written),
        keeps_state=cut.keeps_state(),
        last=stages.num - 1,
        answer=forms[flow.calls[0].id],
    )


def _stages_of(calls: tuple[Call, ...], stages: Stages) -> list[int]:
    """Return the stage of each call.

    Raises:
        ApplyError: The plan assigns the module of a call to no stage.
    """
    places = stages_of(calls, stages.units)
    for call, place in zip(calls, places, strict=True):
        if place is None:
            raise ApplyError(
                Problem(
                    f"'{call.module}' is called with these inputs, but was not when the plan "
                    "was made",
                    stages.reason.origin,
                    "pass example_inputs to parallelize that take the same path through the model",
                )
            )
    return [place for place in places if place is not None]


def _problems(
    cut: UnitFlow, places: list[int], stages: Stages, forms: dict[int, Any]
) -> Iterator[Problem]:
    """Yield the reasons why the model cannot be cut at these places."""
    origin = stages.reason.origin
    for bond in cut.bonds():
        if places[bond.first] != places[bond.last]:
            first, last = cut.units[bond.first].module, cut.units[bond.last].module
            yield Problem(
                f"the pipeline is cut between '{first}' and '{last}': {bond.why}",
                origin,
                "put both into one stage",
            )
    for call in cut.units:
        for kind in opaque_in(forms[call.id]):
            yield Problem(
                f"'{call.module}' returns a {kind}, which stages that do not run this module "
                "cannot rebuild",
                origin,
                "cut inside this module, or let it return only tensors",
            )
            break
    for stage, names in enumerate(cut.relay(places, stages.num).reads):
        for name in sorted(names):
            if stage not in stages.tensors.get(name, ()):
                yield Problem(
                    f"stage {stage} reads {name} with these inputs, but the plan places {name} in "
                    "other stages only",
                    origin,
                    "pass example_inputs to parallelize that take the same path through the model",
                )
