"""Replace the chosen plan's memory estimate with one from a trace of its model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from meshplan.memory.analytic.estimate import estimate_worst_routing
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.decision import Evaluated, PlanRequest

OVER: Final = "a trace of the model with this plan holds more than its config tells"


def certify_plan(request: PlanRequest, evaluated: Evaluated) -> Evaluated | None:
    """Return the plan with its memory as a trace of the model gives it; None if it does not fit.

    Without a model to trace, or if tracing fails, the plan keeps its estimate, and with ep the
    estimate also reports the worst expert routing. If tracing fails, the reason is added to the
    estimate's notes.

    Args:
        request: The request that the plan answers.
        evaluated: The plan that was chosen.
    """
    if request.traced is not None:
        memory = request.traced.certify(evaluated.plan)
    elif request.certify is not None:
        found = request.certify(request.read(overrides(evaluated.stated)))
        if isinstance(found, str):
            note = f"this plan was not certified by a trace of the model: {found}"
            estimate = _at_worst(evaluated).memory
            return replace(evaluated, memory=replace(estimate, notes=(*estimate.notes, note)))
        memory = found
    else:
        return _at_worst(evaluated)
    return replace(evaluated, memory=memory) if memory.fits else None


def words_of(evaluated: Evaluated) -> str:
    """Return the statements of a plan as JSON: a string that identifies the plan."""
    return json.dumps(dict(evaluated.stated), sort_keys=True)


def _at_worst(evaluated: Evaluated) -> Evaluated:
    """Return the plan; if it uses ep, its memory also reports the worst expert routing."""
    if evaluated.plan.mesh.size("ep") == 1:
        return evaluated
    return replace(evaluated, memory=estimate_worst_routing(evaluated.memory, evaluated.plan))
