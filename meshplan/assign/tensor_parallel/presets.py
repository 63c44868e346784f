"""`tp_plan: hf`: styles from the tp plan that transformers ships for a model; rules override them.

This module maps transformers' style names to equivalent styles. A name without an equivalent is
refused, unless a rule states a style for that module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from meshplan.assign.base.cascade import Cascade
from meshplan.assign.base.missing_axis import without_tp
from meshplan.assign.base.types import Preset, Reason
from meshplan.errors import Problem
from meshplan.layout.mesh import Mesh
from meshplan.model.graph import ModelGraph, pattern_of
from meshplan.spec.spec import Spec

_HF_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "colwise": "colwise",
        "rowwise": "rowwise",
        "packed_colwise": "packed_colwise",
        "colwise_gather_output": "colwise_gather_output",
        "colwise_rep": "colwise_gather_output",
        "rowwise_split_input": "rowwise_split_input",
        "rowwise_rep": "rowwise_split_input",
        "embedding_rowwise": "vocab",
        "embedding_colwise": "colwise_gather_output",
        "replicated_with_grad_allreduce": "replicated_with_grad_allreduce",
        "replicate": "R",
    }
)
"""meshplan's style or placement, by transformers' style name.

Source: transformers 5.23, `distributed/tensor_parallel.py`, ALL_PARALLEL_STYLES."""


@dataclass(slots=True)
class Presets:
    """Styles from transformers' tp plan by module fqn, and the problems with it."""

    by_module: dict[str, Preset] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def presets_of(spec: Spec, graph: ModelGraph, cascade: Cascade, mesh: Mesh) -> Presets:
    """Return the styles of `tp_plan: hf`; empty for any other `tp_plan`."""
    out = Presets()
    if spec.tp_plan != "hf":
        return out
    origin = spec.origin("tp_plan")
    if "tp" not in mesh.names:
        out.problems.append(without_tp(origin))
        return out
    reason = Reason("tp_plan: hf", origin)
    problem = None if graph.tp_preset else Problem(
        f"transformers has no tp plan for {graph.name}",
        origin,
        "write rules with colwise and rowwise, or try tp_plan: auto",
    )  # fmt: skip
    for fqn, theirs in _applied(graph):
        word = _HF_WORDS.get(theirs)
        if word is not None and fqn in graph.modules:
            out.by_module[fqn] = Preset(word, reason)
        elif problem is None and not _is_overridden(fqn, graph, cascade):
            module = fqn if fqn in graph.modules else fqn.rpartition(".")[0]
            problem = Problem(
                f"transformers' tp plan has '{theirs}' for {fqn}, which is not available yet in "
                "this version",
                origin,
                f"replicate it with a rule: {{match: '{pattern_of(module)}', place: {{tp: R}}}}",
            )
    out.problems += [problem] if problem else []
    return out


def _applied(graph: ModelGraph) -> Iterator[tuple[str, str]]:
    """Yield (fqn of a module or parameter, its style name in transformers' tp plan)."""
    for fqn in (*graph.modules, *(t.fqn for t in graph.parameters)):
        word = graph.tp_preset.get(pattern_of(fqn))
        if word is not None:
            yield fqn, word


def _is_overridden(fqn: str, graph: ModelGraph, cascade: Cascade) -> bool:
    """Return True if a rule decides the tp axis of this module or parameter."""
    if fqn not in graph.modules:
        if cascade.param(graph.tensors[fqn], "place.tp") is not None:
            return True
        fqn = graph.first_name(fqn.rpartition(".")[0])
    around = cascade.inherited(fqn, "place.tp")
    return cascade.own(fqn, "place.tp") is not None or (around is not None and around.value == "R")
