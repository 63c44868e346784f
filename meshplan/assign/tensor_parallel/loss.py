"""Loss parallel: find the output projections whose logits stay sharded over the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshplan.assign.base.tensor_cuts import TensorParallel
from meshplan.errors import Problem
from meshplan.layout.mesh import Mesh
from meshplan.layout.styles import LOGITS
from meshplan.model.graph import ModelGraph, is_inside
from meshplan.spec.spec import Spec

_HEADS: Final = ("vocab", "colwise_gather_output")
"""Styles of a linear module that all-gather its output, as is needed for logits by default."""


def assign_loss(spec: Spec, graph: ModelGraph, mesh: Mesh, tp: TensorParallel) -> list[Problem]:
    """Change the style of output projections so that logits stay sharded; return the problems.

    Args:
        spec: The plan.
        graph: The model.
        mesh: The mesh.
        tp: The decisions about tp; changed in place.
    """
    if not spec.loss_parallel:
        return []
    origin = spec.origin("loss_parallel")
    if mesh.size("tp") == 1:
        what = "'loss_parallel' has no effect without a tp axis"
        return [Problem(what, origin, "add tp to the mesh, or remove loss_parallel")]
    blocks = graph.blocks()
    heads = [
        fqn
        for fqn, use in tp.styles.items()
        if use.style.name in _HEADS
        and use.style.kind == LOGITS.kind
        and not any(is_inside(fqn, block) for block in blocks)
    ]
    if not heads:
        what = "'loss_parallel' needs logits sharded over the vocabulary, but tp shards no head"
        return [Problem(what, origin, "write place: {tp: vocab} for the model's last projection")]
    for fqn in heads:
        tp.styles[fqn] = replace(tp.styles[fqn], style=LOGITS)
    return []
