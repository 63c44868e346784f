"""What was chosen, as its model does it and not as it was told or put together."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from meshplan.memory.analytic.estimate import estimate_worst_routing
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.decision import Evaluated, PlanRequest

OVER: Final = "a trace of the model with this plan holds more than its config tells"


def certify_plan(question: PlanRequest, way: Evaluated) -> Evaluated | None:
    """The same with what a trace says of its memory, where there is a model; None if it is over."""
    if question.traced is not None:
        memory = question.traced.certify(way.plan)
    elif question.certify is not None:
        found = question.certify(question.read(overrides(way.stated)))
        if isinstance(found, str):
            note = f"no trace of the model certifies this: {found}"
            told = _at_worst(way).memory
            return replace(way, memory=replace(told, notes=(*told.notes, note)))
        memory = found
    else:
        return _at_worst(way)
    return replace(way, memory=memory) if memory.fits else None


def words_of(way: Evaluated) -> str:
    """What it states, to be known again by."""
    return json.dumps(dict(way.stated), sort_keys=True)


def _at_worst(way: Evaluated) -> Evaluated:
    """The same, saying what the worst routing would need."""
    if way.plan.mesh.size("ep") == 1:
        return way
    return replace(way, memory=estimate_worst_routing(way.memory, way.plan))
