"""The graph and data flow of a model named on the command line."""

from __future__ import annotations

from meshplan.errors import ApplyError, Origin, PlanError
from meshplan.model.graph import ModelGraph
from meshplan.model.rehearsal import Rehearse
from meshplan.runtime.trace.entry import model_of_entry
from meshplan.runtime.trace.inputs import find_example
from meshplan.runtime.trace.ops import record
from meshplan.runtime.trace.rehearse import rehearser
from meshplan.runtime.trace.structure import graph_of
from meshplan.runtime.trace.trace_errors import alone_problem
from meshplan.spec.spec import Spec


def live_graph(entry: str, origin: Origin, spec: Spec) -> tuple[ModelGraph, Rehearse | None]:
    """Return the graph of the model that "pkg.mod:function" makes, and a rehearser if flow is read.

    Args:
        entry: "pkg.mod:function".
        origin: Place where the user named it.
        spec: The plan, which decides if the data flow is read.

    Returns:
        The graph, with the data flow if the plan reads it, and else None as the second item.

    Raises:
        SpecError: The model cannot be made.
        PlanError: Nothing states what the model takes as input, or it cannot run on that.
    """
    model = model_of_entry(entry, origin)
    if not spec.reads_flow:
        return graph_of(model), None
    inputs = find_example(model, spec)
    try:
        flow = record(model, inputs)
    except ApplyError as error:
        if isinstance(error.__cause__, Exception):
            raise PlanError(alone_problem(error.__cause__, model, origin, inputs)) from None
        raise PlanError(error.problems) from None
    return graph_of(model, flow), rehearser(model, inputs)
