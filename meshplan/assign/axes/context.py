"""The cp axis: choose the kind of attention over sequence shards, and check the sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from meshplan.assign.base.types import ContextParallel, Reason
from meshplan.errors import Problem
from meshplan.layout.mesh import Mesh
from meshplan.model.graph import ModelGraph
from meshplan.spec.spec import Context, Spec

_HIDDEN_ATTENTION: Final = "MultiheadAttention"
"""Class name of torch's attention module, which computes attention inside one torch call. cp cannot
exchange keys and values there.
"""

_HEADS: Final = (
    ("num_attention_heads", "heads"),
    ("num_key_value_heads", "key-value heads"),
)


def assign_context(
    spec: Spec, graph: ModelGraph, mesh: Mesh
) -> tuple[ContextParallel | None, list[Problem]]:
    """Return how attention is computed over cp (None without cp), and the problems with that."""
    if mesh.size("cp") == 1:
        return None, list(_no_effect(spec, mesh))
    stated = spec.context or Context()
    balance = stated.attention == "all_gather" if stated.balance is None else stated.balance
    is_stated = spec.context is not None
    text = f"context: {stated.attention}" if is_stated else f"mesh ({stated.attention})"
    context = ContextParallel(
        attention=stated.attention,
        balance=balance,
        reason=Reason(text, spec.origin("context" if is_stated else "mesh.cp")),
    )
    problems = [
        *_sequence(spec, mesh, context),
        *_heads(spec, graph, mesh, context),
        *_hidden_attention(spec, graph),
    ]
    return context, problems


def _no_effect(spec: Spec, mesh: Mesh) -> Iterator[Problem]:
    if spec.context is not None:
        yield Problem(
            f"'context' has no effect without a cp axis (the mesh has {mesh})",
            spec.origin("context"),
            "add cp to the mesh, or remove context",
        )


def _sequence(spec: Spec, mesh: Mesh, context: ContextParallel) -> Iterator[Problem]:
    """Yield a problem if the sequence does not divide into chunks of equal length."""
    chunks, length = context.num_chunks(mesh.size("cp")), spec.batch.seq_len
    if length is None or not length % chunks:
        return
    fix = f"use a multiple of {chunks}"
    if context.balance and not length % mesh.size("cp"):
        fix += ", or write context: {balance: false}"
    parts = f"{chunks} chunks, two per" if context.balance else f"{chunks} parts, one per"
    yield Problem(
        f"a sequence of {length} cannot be divided into {parts} cp rank",
        spec.origin("batch.seq_len"),
        fix,
    )


def _heads(
    spec: Spec, graph: ModelGraph, mesh: Mesh, context: ContextParallel
) -> Iterator[Problem]:
    """Yield a problem if all_to_all cannot give each rank of cp the same number of whole heads.

    Numbers of heads are known only from a config. For a live model the first forward checks them.
    """
    if context.attention != "all_to_all":
        return
    for key, noun in _HEADS:
        count = graph.config.get(key, 0)
        if count % mesh.size("cp"):
            yield Problem(
                f"{count} {noun} do not divide by cp {mesh.size('cp')}, but all_to_all gives each "
                "rank whole heads",
                spec.origin("context.attention"),
                "write context: {attention: all_gather}, or use a smaller cp",
            )
            return


def _hidden_attention(spec: Spec, graph: ModelGraph) -> Iterator[Problem]:
    found = next((m for m in graph.modules.values() if m.type == _HIDDEN_ATTENTION), None)
    if found is not None:
        yield Problem(
            f"{found.fqn} ({found.type}) computes attention inside a single torch call, where cp "
            "cannot exchange the parts of the sequence",
            spec.origin("mesh.cp"),
            "use modules that call torch.nn.functional.scaled_dot_product_attention, or leave cp "
            "out",
        )
