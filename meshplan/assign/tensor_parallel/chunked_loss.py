"""Loss in chunks: find the module that computes the logits, and check that it can be chunked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from meshplan.assign.base.types import ChunkedLoss, Placed, Reason, StyleUse, Unit
from meshplan.errors import Problem
from meshplan.model.graph import ModelGraph, is_inside
from meshplan.spec.spec import Spec

_FIELD: Final = "loss_chunks"


def assign_chunked_loss(
    spec: Spec,
    graph: ModelGraph,
    styles: Mapping[str, StyleUse],
    packed: Collection[str],
    units: Mapping[str, Unit],
    tensors: Mapping[str, Placed],
) -> tuple[ChunkedLoss | None, list[Problem]]:
    """Return the head and its number of chunks (None without chunks), and the problems with that.

    Args:
        spec: The plan.
        graph: The model.
        styles: Tensor-parallel styles by module fqn.
        packed: Fqns of modules that are recomputed, or whose activations are offloaded.
        units: FSDP2 units by fqn.
        tensors: Layouts of the tensors by fqn.
    """
    chunks = spec.loss_chunks
    if not isinstance(chunks, int) or chunks == 1:
        return None, []
    origin = spec.origin(_FIELD)
    heads = heads_of(graph)
    if len(heads) != 1:
        names = " and ".join(f"'{head}'" for head in heads)
        what = f"{names} qualify" if heads else "none qualifies"
        return None, [
            Problem(
                f"'{_FIELD}' needs exactly one linear module that computes the logits, but {what}",
                origin,
                "remove loss_chunks, or make the head the only linear module outside the repeated "
                "blocks whose weight has as many rows as an embedding",
            )
        ]
    (head,) = heads
    what, fix = _trouble(spec, graph, head, styles, packed, units, tensors)
    if what:
        return None, [
            Problem(f"'{_FIELD}' calls '{head}' inside the loss, but {what}", origin, fix)
        ]
    return ChunkedLoss(head, chunks, Reason(f"{_FIELD}: {chunks}", origin)), []


def heads_of(graph: ModelGraph) -> list[str]:
    """Return the fqns of modules that may compute the logits.

    These are the linear modules outside of the repeated blocks with as many output features as an
    embedding has rows.
    """
    blocks = graph.blocks()
    rows = {
        tensor.shape[0]
        for fqn, info in graph.modules.items()
        if info.kind == "embedding"
        for tensor in graph.owned(fqn)
        if len(tensor.shape) == 2
    }
    found = [
        fqn
        for fqn, info in graph.modules.items()
        if info.kind == "linear"
        and any(len(t.shape) == 2 and t.shape[0] in rows for t in graph.owned(fqn))
        and not any(is_inside(fqn, block) for block in blocks)
    ]
    # If one shares its weight with an embedding, the others have this width by chance.
    tied = [fqn for fqn in found if any(len(t.names) > 1 for t in graph.owned(fqn))]
    return tied or found


def _unit_name(unit: Unit) -> str:
    return f"'{unit.fqn}'" if unit.fqn else "the root unit"


def _trouble(
    spec: Spec,
    graph: ModelGraph,
    head: str,
    styles: Mapping[str, StyleUse],
    packed: Collection[str],
    units: Mapping[str, Unit],
    tensors: Mapping[str, Placed],
) -> tuple[str, str]:
    """Return (why the head cannot be called inside the loss, the fix); ("", "") if it can."""
    own = [tensors[tensor.fqn] for tensor in graph.owned(head)]
    around = next((fqn for fqn in packed if is_inside(head, fqn)), None)
    if head in styles or any("tp" in placed.stored.axes for placed in own):
        return "tp shards it, while each loss chunk needs all logits of its tokens on one rank", (
            f"write loss_parallel: true instead of loss_chunks, or leave '{head}' out of tp"
        )
    if around is not None:
        return f"'{around}' is recomputed, or its activations are offloaded, as a whole", (
            "write activation_checkpointing: none and offload: {activations: false} in a rule that "
            f"matches '{around}'"
        )
    if any(placed.compute_dtype == "float16" for placed in own):
        return (
            "its gradients are computed before the loss is scaled, and small ones underflow in "
            "float16",
            "use precision: bf16-mixed",
        )
    for placed in own:
        unit = units.get(placed.unit) if placed.unit is not None else None
        if unit is None:
            continue
        if unit.fqn != head and unit.reshard_after_forward:
            return (
                f"by then {_unit_name(unit)} has resharded its weight",
                f'add rules: [{{match: "{head}", unit: true}}]'
                if len(placed.info.names) == 1
                else f"write reshard_after_forward: false for '{unit.fqn or '*'}'",
            )
        if unit.fqn == head and unit.precision.output:
            return (
                "a precision rule casts its output",
                f"leave '{head}' out of the precision rule",
            )
    if spec.ddp.get("find_unused_parameters") or spec.ddp.get("static_graph"):
        return (
            "DistributedDataParallel, with find_unused_parameters or static_graph, searches the "
            "model's output for the parameters in use",
            "remove find_unused_parameters and static_graph",
        )
    return "", ""
