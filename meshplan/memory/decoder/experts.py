"""A mixture of experts as ops: the router, and the experts as grouped matrix products.

`grouped_mm` is transformers' default. Every token is repeated for each expert to which it is
routed, the copies ("slots") are sorted by expert, and one grouped product computes all experts. So
the sizes of tensors do not depend on the routing.

Source: transformers 5.23, integrations/moe.py, `grouped_mm_experts_forward`, and
models/<family>/modeling_*.py, `<Family>TopKRouter`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from meshplan import kernels
from meshplan.memory.decoder.activations import activate
from meshplan.memory.decoder.routing import route, route_by_groups
from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.tape.op import Grad, TapeOp
from meshplan.memory.tape.ops import TapeBuilder

_FP32: Final = 4
_ID: Final = 8


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of experts over ranks (expert parallelism).

    Args:
        ranks: Number of ranks of ep.
        arriving: Number of slots that a rank receives, divided by the number that it sends; 1 for
            an even share.
        is_unit: If True, a block's experts are a separate FSDP unit.
    """

    ranks: int = 1
    arriving: float = 1.0
    is_unit: bool = False


ONE_RANK: Final = Spread()
"""Without expert parallelism: every rank has all experts."""


def sparse_mlp(
    w: TapeBuilder, shape: Shape, x: int, spread: Spread
) -> tuple[int, tuple[int, ...]]:  # fmt: skip
    """Append the router and experts of `MixtralSparseMoeBlock` and blocks of the same structure.

    Args:
        w: The builder to append to, at the module of the mixture.
        shape: Sizes of the model.
        x: Tokens.
        spread: Distribution of experts over ranks.

    Returns:
        (output of the experts, values that the caller's Python frame references).
    """
    choose = route_by_groups if shape.groups is not None else route
    logits, weights, index = choose(w.at(f"{w.module}.gate"), shape, x)
    at, start = w.at(f"{w.module}.experts"), len(w.tape.rows)
    if spread.ranks > 1:
        out = _dispatch(at, shape, x, index, weights, spread)
    else:
        out = compute(at, shape, x, weights, slots=shape.top_k)
    if spread.is_unit:
        w.tape.units.append((at.module, start, len(w.tape.rows)))
    return out, (logits, weights, index)


def most_arriving(shape: Shape, ranks: int) -> float:
    """Return `Spread.arriving` for the worst case, in which one rank receives every token."""
    return ranks * min(shape.top_k, shape.experts // ranks) / shape.top_k


def _dispatch(
    w: TapeBuilder, shape: Shape, x: int, index: int, weights: int, spread: Spread
) -> int:  # fmt: skip
    """Append expert parallelism: send slots to the rank of their expert, compute, send back.

    Source: `runtime.apply.experts.experts._Dispatch`; the ops follow its lines.
    """
    tape, table = w.tape, shape.experts * _ID
    size, ids = w.size(x) * shape.top_k, w.size(index)
    arrived = round(ids // _ID * spread.arriving)
    width = shape.hidden * w.element_bytes
    counts = w.row("where", (index,), table, workspace_bytes=2 * ids + 1)
    theirs = w.row("all_to_all", (counts,), table, is_sent=True)
    both = w.row("cat", (counts, theirs), 2 * table)
    _, order = _sort(w, ids)
    repeated = w.row("clone", (x,), size, grads=(Grad(x, w.size(x)),))
    own, own_weights = _select(w, repeated, order), _select(w, weights, order)
    rows = tape.value(arrived * width)
    scores = tape.value(arrived * (w.size(weights) // (ids // _ID)))
    tape.add(
        TapeOp("all_to_all", w.module, (own, own_weights), (rows, scores),
            grads=(Grad(own, w.size(own)), Grad(own_weights, w.size(own_weights))),
            workspace_backward_bytes=max(0, w.size(rows) - w.size(own_weights)), is_sent=True)
    )  # fmt: skip
    here = w.row("repeat", (), table, workspace_bytes=table // spread.ranks)
    ids_here = w.row("index_select", (here,), arrived * _ID, workspace_bytes=arrived * _ID)
    local = replace(shape, experts=shape.experts // spread.ranks)
    computed = compute(w, local, rows, scores, slots=1)
    shown = w.slice(computed, w.size(computed))
    back = w.row(
        "all_to_all",
        (shown,),
        size,
        grads=(Grad(shown, w.size(computed)),),
        workspace_backward_bytes=size,
        is_sent=True,
    )
    inverse = w.row("empty_like", (), ids)
    tape.add(TapeOp("index_put", w.module, (order,), (), workspace_bytes=ids))
    out = _sum(w, _select(w, back, inverse), shape.top_k)
    w.touch(counts, theirs, both, order, rows, scores, here, ids_here, computed, back, inverse)
    return out


def _select(w: TapeBuilder, x: int, index: int) -> int:
    """Append an `index_select` that puts all rows of `x` in another order."""
    size = w.size(x)
    grads, apart = (Grad(x, size),), w.apart(size)
    return w.row(
        "index_select",
        (x, index),
        size,
        keeps=(index,),
        grads=grads,
        workspace_backward_bytes=apart,
    )


def _sort(w: TapeBuilder, size: int) -> tuple[int, int]:
    """Append a sort of `size` bytes of int64 numbers; return (sorted values, order)."""
    out = w.tape.value(size), w.tape.value(size)
    workspace = sum(kernels.sort(size // _ID)) if w.is_cuda else 0
    w.tape.add(TapeOp("sort", w.module, (), out, workspace_bytes=workspace))
    return out


def _sum(w: TapeBuilder, x: int, slots: int) -> int:
    """Append a sum over the slots of each token.

    Each slot's gradient is that of the sum: expanded in a new tensor, or shared for one slot.
    """
    new = w.size(x) if slots > 1 else 0
    return w.row("sum", (x,), w.size(x) // slots, grads=(Grad(x, new),))


def compute(w: TapeBuilder, shape: Shape, x: int, weights: int, *, slots: int) -> int:
    """Append `grouped_mm_experts_forward`, and return its output.

    Args:
        w: The builder to append to, at the module of the experts.
        shape: Sizes of the model, with the number of experts on this rank.
        x: Tokens.
        weights: Router weights of the experts to which each token is routed.
        slots: Number of experts for each token.
    """
    size = w.size(x) * slots
    number = size // (shape.hidden * w.element_bytes)
    ids = number * _ID
    tape, at = w.tape, w.module
    by_expert, order = _sort(w, ids)
    tokens = w.row("floor_divide", (order,), ids)
    rows = _take(w, x, tokens, size)
    own_weights = _take(w, weights, order, w.size(weights))
    numbers = w.row("_to_copy", (by_expert,), number * _FP32)
    count = w.row("histc", (numbers,), shape.experts * _FP32)
    ends = w.row("cumsum", (count,), shape.experts * _FP32)
    into, inner = shape.hidden, shape.expert_mlp
    fused = _grouped(w, shape, rows, ends, into, 2 * inner, "gate_up_proj")
    gate, up = w.chunk(fused, w.size(fused) // 2, w.size(fused) // 2)
    activated = activate(w.at(f"{at}.act_fn"), gate, shape.activation)
    made = _grouped(w, shape, w.mul(activated, up), ends, inner, into, "down_proj")
    out = _weigh(w, shape, made, own_weights)
    back = w.row("empty_like", (), ids)
    tape.add(TapeOp("index_put", at, (order,), (), workspace_bytes=ids))
    out = _take(w, out, back, w.size(out))
    summed = _sum(w, out, slots)
    summed = w.cast(summed, w.size(x) / w.size(summed))
    w.touch(by_expert, order, rows, own_weights, numbers, count, ends, made, out, back)
    return summed


def _take(w: TapeBuilder, x: int, index: int, nbytes: int) -> int:
    """Append an indexing of rows, whose backward adds the gradients of the rows to new zeros.

    Args:
        w: The builder to append to.
        x: The rows.
        index: Indices of the rows to take.
        nbytes: Bytes of the result.
    """
    inside = sum(kernels.index_add(w.size(index) // _ID)) if w.is_cuda else 0
    return w.row(
        "index", (x, index), nbytes, keeps=(index,), grads=(Grad(x, w.size(x)),),
        workspace_backward_bytes=w.apart(w.size(x)) + inside,
    )  # fmt: skip


def _grouped(
    w: TapeBuilder, shape: Shape, x: int, ends: int, into: int, out: int, name: str
) -> int:
    """Append the product of each row with the weight matrix of its expert.

    Args:
        w: The builder to append to.
        shape: Sizes of the model.
        x: Rows, sorted by expert.
        ends: For each expert, the index after its last row.
        into, out: Input and output features.
        name: Name of the stacked weights inside the current module.
    """
    weights = shape.experts * into * out * w.parameter_bytes
    return w.row(
        "grouped_mm", (x, ends), w.size(x) // into * out, keeps=(x, ends),
        grads=(Grad(x, w.size(x)),), parameters=((f"{w.module}.{name}", weights),),
        is_kept="mm" in w.saves,
    )  # fmt: skip


def _weigh(w: TapeBuilder, shape: Shape, made: int, weights: int) -> int:
    """Append the product of each row with its router weight, in the wider of the two dtypes.

    One weight multiplies a whole row, so its gradient is a sum over the row.
    """
    size, own = w.size(made), w.size(weights)
    is_wider = shape.has_wide_weights and w.element_bytes < _FP32
    wide = size * _FP32 // w.element_bytes if is_wider else size
    # Backward casts the gradient of the rows to the narrow dtype first, then sums the gradient of
    # the weights. A recomputed tensor is freed when it is unpacked, which is before that sum.
    workspace_backward_bytes = (
        2 * wide - own - (size if w.is_recomputed else 0) if is_wider else size
    )
    return w.row(
        "mul",
        (made, weights),
        wide,
        keeps=(made, weights),
        workspace_backward_bytes=workspace_backward_bytes,
        grads=(Grad(made, size), Grad(weights, own)),
    )
