"""A mixture of experts as rows: the router, and experts by grouped products.

`grouped_mm` is what transformers takes where a config says nothing: every token stands once for
each expert it is sent to, sorted by expert, and one product serves all experts. So sizes do not
depend on the routing.

Source: transformers 5.23, integrations/moe.py, `grouped_mm_experts_forward`, and
models/<family>/modeling_*.py, `<Family>TopKRouter`; torch 2.13, native/cuda/Sort.cu,
`segmented_sort_large_segments`, and Indexing.cu, `index_put_with_sort_kernel`, for what CUDA takes.
"""

from __future__ import annotations

from typing import Final

from meshplan.memory.activations import activate
from meshplan.memory.row import Grad, Row
from meshplan.memory.rows import Writer
from meshplan.memory.shape import Shape

_FP32: Final = 4
_ID: Final = 8
_SORTED_IN_PLACE: Final = 4096
_TO_SORT: Final = 3
_TO_PUT: Final = 5
"""Lists of indices that sorting takes, and adding up rows at indices."""


def sparse_mlp(w: Writer, shape: Shape, x: int) -> int:
    """`MixtralSparseMoeBlock`, and the blocks of its shape."""
    logits, weights, index = _route(w.at(f"{w.module}.gate"), shape, x)
    out = compute(w.at(f"{w.module}.experts"), shape, x, weights, slots=shape.top_k)
    w.touch(logits, weights, index)
    return out


def _route(w: Writer, shape: Shape, x: int) -> tuple[int, int, int]:
    """(logits, weights, experts) of every token, as `<Family>TopKRouter` gives them."""
    tape, tokens = w.tape, w.tokens
    above, _, name = w.module.rpartition(".")
    logits = w.at(above).linear(x, shape.hidden, shape.experts, name)
    wide = w.cast(logits, _FP32 / w.element_bytes)
    size, chosen = w.size(wide), tokens * shape.top_k * _FP32
    shares = w.row("_softmax", (wide,), size, keeps_out=True, grads=(Grad(wide, size),))
    weights, index = tape.value(chosen), tape.value(tokens * shape.top_k * _ID)
    tape.add(
        Row("topk", w.module, (shares,), (weights, index), (index,), (Grad(shares, size),),
            takes_back=_apart(w, size))
    )  # fmt: skip
    if shape.scales_weights:
        weights = _to_sum_one(w, weights)
    if not shape.has_wide_weights:
        weights = w.cast(weights, w.element_bytes / _FP32)
    w.touch(shares)
    return logits, weights, index


def _to_sum_one(w: Writer, weights: int) -> int:
    """Divided in place, so that backward has a copy."""
    tape, size = w.tape, w.size(weights)
    total = w.row("sum", (weights,), w.tokens * _FP32, grads=(Grad(weights, 0),))
    copy, divided = tape.value(size), tape.value(size, of=weights)
    tape.add(
        Row("div", w.module, (weights, total), (copy, divided), (total, copy),
            (Grad(weights, size), Grad(total, w.size(total))), takes_back=3 * size)
    )  # fmt: skip
    return divided


def compute(w: Writer, shape: Shape, x: int, weights: int, *, slots: int) -> int:
    """`grouped_mm_experts_forward`.

    Args:
        x: Tokens.
        weights: Of the experts that each token is sent to.
        slots: Experts of one token.
    """
    size = w.size(x) * slots
    number = size // (shape.hidden * w.element_bytes)
    ids = number * _ID
    tape, at = w.tape, w.module
    is_long = w.is_cuda and number > _SORTED_IN_PLACE
    by_expert, order = tape.value(ids), tape.value(ids)
    tape.add(Row("sort", at, (), (by_expert, order), takes=_TO_SORT * ids if is_long else 0))
    tokens = w.row("floor_divide", (order,), ids)
    rows = _take(w, x, tokens, size)
    own_weights = _take(w, weights, order, w.size(weights))
    numbers = w.row("_to_copy", (by_expert,), number * _FP32)
    count = w.row("histc", (numbers,), shape.experts * _FP32)
    ends = w.row("cumsum", (count,), shape.experts * _FP32)
    into, inner = shape.hidden, shape.expert_mlp
    fused = _grouped(w, shape, rows, ends, into, 2 * inner, "gate_up_proj")
    gate, up = w.chunk(fused, w.size(fused) // 2, w.size(fused) // 2)
    bent = activate(w.at(f"{at}.act_fn"), gate, shape.activation)
    made = _grouped(w, shape, w.mul(bent, up), ends, inner, into, "down_proj")
    out = _weigh(w, shape, made, own_weights)
    back = w.row("empty_like", (), ids)
    tape.add(Row("index_put", at, (order,), (), takes=ids))
    w.touch(back)
    out = _take(w, out, back, w.size(out))
    summed = w.row("sum", (out,), w.size(out) // slots, grads=(Grad(out, w.size(out)),))
    summed = w.cast(summed, w.size(x) / w.size(summed))
    w.touch(by_expert, order, rows, own_weights, numbers, count, ends, made, out)
    return summed


def _take(w: Writer, x: int, index: int, nbytes: int) -> int:
    """Rows at an index; its gradient is zeros, to which rows are added."""
    inside = _TO_PUT * w.size(index) if w.is_cuda else 0
    return w.row(
        "index", (x, index), nbytes, keeps=(index,), grads=(Grad(x, w.size(x)),),
        takes_back=_apart(w, w.size(x)) + inside,
    )  # fmt: skip


def _apart(w: Writer, nbytes: int) -> int:
    """Zeros that are written to: a tensor more where something watches torch."""
    return 0 if w.in_place else nbytes


def _grouped(w: Writer, shape: Shape, x: int, ends: int, into: int, out: int, name: str) -> int:
    """Rows by the weights of their expert."""
    weights = shape.experts * into * out * w.parameter_bytes
    return w.row(
        "grouped_mm", (x, ends), w.size(x) // into * out, keeps=(x, ends),
        grads=(Grad(x, w.size(x)),), parameters=((f"{w.module}.{name}", weights),),
        is_kept="mm" in w.saves,
    )  # fmt: skip


def _weigh(w: Writer, shape: Shape, made: int, weights: int) -> int:
    """In the wider dtype of the two. One weight stands for a row, so its gradient is a sum."""
    size, own = w.size(made), w.size(weights)
    is_wider = shape.has_wide_weights and w.element_bytes < _FP32
    wide = size * _FP32 // w.element_bytes if is_wider else size
    # The gradient of rows is narrowed, and only then that of weights summed.
    takes_back = 2 * wide - own if is_wider else size
    return w.row(
        "mul", (made, weights), wide, keeps=(made, weights), takes_back=takes_back,
        grads=(Grad(made, size), Grad(weights, own)),
    )  # fmt: skip
