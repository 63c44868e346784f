"""The graph and recorded forward of a model that is named on the command line."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from meshplan.errors import Origin
from meshplan.model.graph import ModelGraph
from meshplan.model.rehearsal import Rehearser
from meshplan.runtime.trace.entry import model_of_entry
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.spec import Spec


def live_graph(entry: str, origin: Origin, spec: Spec) -> tuple[ModelGraph, Rehearser | None]:
    """Build the model that "pkg.mod:function" names, and return (graph, rehearse).

    If the plan needs a recorded forward (`Spec.reads_flow`), the graph has it as `flow`, and
    `rehearse` runs the model on the shapes of one tp rank, to check a derived tp plan. Otherwise
    `flow` and `rehearse` are None.

    Args:
        entry: The function that builds the model, as "pkg.mod:function".
        origin: Place where the user named the function.
        spec: The plan.

    Raises:
        SpecError: The model cannot be built.
        PlanError: No input of the model is stated, or its forward fails on the stated input.
    """
    return _recorded(model_of_entry(entry, origin), spec, origin)


def live_graph_of_config(
    config: str | Path | None, spec: Spec
) -> tuple[ModelGraph, Rehearser | None]:
    """Build the model of a config with transformers, and return (graph, rehearse) of `live_graph`.

    Args:
        config: A Hugging Face config.json, or its folder; None for the one that the plan names.
        spec: The plan.

    Raises:
        SpecError: The model cannot be built.
        PlanError: No input of the model is stated, or its forward fails on the stated input.
    """
    from meshplan.runtime.estimate.request import built_without_memory
    from meshplan.runtime.estimate.scale_down import model_source_of

    source = model_source_of(spec, None, config)
    return _recorded(built_without_memory(source), spec, source.origin)


def _recorded(model: nn.Module, spec: Spec, origin: Origin) -> tuple[ModelGraph, Rehearser | None]:
    if not spec.reads_flow:
        return graph_of(model), None
    # Most plans read no forward. These modules load DTensor, which takes as long as half of torch.
    from meshplan.runtime.trace.rehearse import recorded

    return recorded(model, spec, origin)
