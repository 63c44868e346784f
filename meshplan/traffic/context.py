"""Predict the traffic of context parallelism: attention over shards of the sequence.

Source: `runtime.apply.context.attention` and `parts`. With `all_gather`, keys and values are
gathered, and their gradients reduce-scattered. Otherwise (Ulysses), all-to-alls turn queries, keys
and values from shards of the sequence into shards of the heads, and turn the result back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.model.graph import is_inside
from meshplan.plan.plan import Plan
from meshplan.traffic.forward import AttentionCall, Forward, TensorUse
from meshplan.traffic.tensor_parallel import is_repeated
from meshplan.traffic.types import Traffic, one

FLAG_BYTES = 4
"""Bytes of the flag that every forward reduces over all ranks."""
_PROJECTIONS = ("linear", "conv1d")
"""Kinds of the modules that project queries, keys and values."""


def attention(plan: Plan, forward: Forward) -> Iterator[Traffic]:
    """Yield the collectives of attention along cp, and the flags that each forward reduces."""
    context = plan.assignment.context
    assert context is not None
    refused = plan.accumulate * (1 + forward.has_mask)
    what = "whether a rank met something that cp does not support"
    yield one(plan.mesh, "all_reduce", plan.mesh.names, FLAG_BYTES, what, refused)
    for call in _over_sequence(forward):
        ranks = _ranks_of_heads(plan, forward, call)
        if ranks is None:
            continue  # Reported by `unknown_heads`.
        if context.attention == "all_gather":
            yield from _gathered(plan, forward, call, ranks)
        else:
            yield from _exchanged(plan, forward, call, ranks)


def unknown_heads(plan: Plan, forward: Forward | None) -> Iterator[str]:
    """Yield a line of text, with the reason, for each traffic along cp that cannot be predicted."""
    if plan.mesh.size("cp") == 1:
        return
    if forward is None:
        yield "what attention sends along cp (needs a recorded forward)"
        return
    unclear = [c.fqn for c in _over_sequence(forward) if _ranks_of_heads(plan, forward, c) is None]
    for fqn in dict.fromkeys(unclear):
        yield f"what attention in '{fqn}' sends along cp (tp shards only some of its heads)"


def _over_sequence(forward: Forward) -> Iterator[AttentionCall]:
    """Yield the calls of self-attention over the sequence. Other attention sends nothing."""
    for call in forward.attentions:
        queries, keys, _ = (tensor.shape[-2] for tensor in call.tensors)
        if queries == keys == forward.length:
            yield call


def _ranks_of_heads(plan: Plan, forward: Forward, call: AttentionCall) -> int | None:
    """Return the number of tp ranks that share a call's heads; None if they share only some."""
    tp = plan.mesh.size("tp")
    if tp == 1:
        return 1
    begin = max(v.begin for v in forward.of(call.fqn) if v.begin < call.begin)
    before = [
        visit.fqn
        for visit in forward.calls
        if begin < visit.begin and visit.end < call.begin and is_inside(visit.fqn, call.fqn)
    ]
    uses = [
        plan.assignment.styles.get(fqn)
        for fqn in before
        if plan.graph.modules[fqn].kind in _PROJECTIONS
    ]
    cut = {use is not None and use.style.output[1] == "S(-1)" for use in uses}
    if cut == {False}:
        return 1
    has_whole_heads = all(len(t.shape) > 3 and not t.shape[-3] % tp for t in call.tensors)
    return tp if cut == {True} and has_whole_heads else None


def _local_bytes(tensor: TensorUse, ranks: int) -> int:
    """Return the bytes of a tensor whose heads are sharded over `ranks` ranks, on one of them."""
    return math.prod(tensor.shape) // ranks * DTYPE_BYTES[tensor.dtype]


def _gathered(plan: Plan, forward: Forward, call: AttentionCall, ranks: int) -> Iterator[Traffic]:
    """Yield the collectives of one call under `all_gather`, whose heads `ranks` tp ranks share."""
    mesh = plan.mesh
    times = 1 + is_repeated(plan, forward, call.fqn, call.begin)
    for tensor, name in zip(call.tensors[1:], ("keys", "values"), strict=True):
        num_bytes = _local_bytes(tensor, ranks) * mesh.size("cp")
        what = f"{name} of {call.fqn}"
        yield one(mesh, "all_gather", ("cp",), num_bytes, what, times * plan.accumulate)
        if tensor.needs_grad:
            what = f"gradients of {what}"
            yield one(mesh, "reduce_scatter", ("cp",), num_bytes, what, plan.accumulate)


def _exchanged(plan: Plan, forward: Forward, call: AttentionCall, ranks: int) -> Iterator[Traffic]:
    """Yield the all-to-alls of one call under Ulysses, whose heads `ranks` tp ranks share."""
    queries, keys, values = call.tensors
    needs_grad = any(tensor.needs_grad for tensor in call.tensors)
    result = TensorUse((*queries.shape[:-1], values.shape[-1]), queries.dtype, needs_grad)
    for tensor, name, event in (
        (queries, "queries", call.begin),
        (keys, "keys", call.begin),
        (values, "values", call.begin),
        (result, "results", call.end),
    ):
        times = 1 + is_repeated(plan, forward, call.fqn, event) + tensor.needs_grad
        num_bytes = _local_bytes(tensor, ranks)
        what = f"{name} of {call.fqn}"
        yield one(plan.mesh, "all_to_all", ("cp",), num_bytes, what, times * plan.accumulate)
