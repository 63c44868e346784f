"""Add what was derived besides styles to the decisions about tp."""

from __future__ import annotations

from dataclasses import replace

from meshplan.assign.auto.derive import Derived
from meshplan.assign.auto.stream import Stream
from meshplan.assign.base.tensor_cuts import TensorCut, TensorParallel
from meshplan.assign.base.types import LocalAttribute, StyleUse
from meshplan.layout.layout import Layout
from meshplan.layout.styles import GATHERED, GRADIENTS_ADDED
from meshplan.model.flow import Flow
from meshplan.model.graph import ModelGraph


def apply_derived(graph: ModelGraph, derived: Derived, out: TensorParallel) -> None:
    """Add derived layouts, replicated projections with summed gradients, and local attributes."""
    out.problems += derived.problems
    out.warnings += derived.notes
    for fqn, reason in derived.added.items():
        out.styles[fqn] = StyleUse(GRADIENTS_ADDED, "tp", reason)
        for tensor in graph.owned(fqn):
            if not tensor.is_buffer:
                whole = Layout.whole(len(tensor.shape))
                out.cuts[tensor.fqn] = TensorCut(whole, False, reason)
    if derived.stream is not None:
        _along_the_sequence(derived.stream, out)
    for fqn, use in derived.uses.items():
        layout = Layout.whole(len(graph.tensors[fqn].shape))
        if use.dim is not None:
            layout = layout.cut("tp", use.dim)
        out.cuts[fqn] = TensorCut(layout, False, use.reason, is_local=True)
    if graph.flow is not None:
        written = _written(graph.flow)
        for fqn, style in out.styles.items():
            if fqn in written:
                out.styles[fqn] = replace(style, is_written=True)
    # For proved modules, replace attributes found by name with those found by rehearsals.
    proved = {fqn.rpartition(".")[0] for fqn, entry in derived.preset.items() if entry.word != "R"}
    out.attributes = [a for a in out.attributes if a.module in out.styles or a.module not in proved]
    for (module, name), local in derived.attributes.items():
        info = graph.modules[module]
        number = info.numbers[name] if name in info.numbers else info.sizes[name]
        out.attributes.append(LocalAttribute(module, name, number, local))


def _along_the_sequence(stream: Stream, out: TensorParallel) -> None:
    """Change the styles of modules whose inputs or outputs are not shards of the sequence."""
    for fqn, use in out.styles.items():
        style = use.style
        if fqn in stream.inside:
            style = replace(style, input=(GATHERED, style.input[1]))
        elif fqn in stream.whole:
            style = replace(
                style, input=_whole(style.input), output=(style.output[0], _whole(style.output)[1])
            )
        elif style == GRADIENTS_ADDED:
            style = replace(style, input=("outside", style.input[1]))
        out.styles[fqn] = replace(use, style=style)


def _whole(flow: tuple[str, str]) -> tuple[str, str]:
    first, second = ("R" if word == "outside" else word for word in flow)
    return first, second


def _written(flow: Flow) -> set[str]:
    """Return the fqns of modules whose output another operation writes in place."""
    values = {value for op in flow.ops for value in op.mutates}
    return {call.module for call in flow.calls if any(v in values for _, v in call.outputs)}
