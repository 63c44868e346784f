"""The two kinds of router as ops: top-k over all experts, and top-k within groups of experts.

Source: transformers 5.23, models/<family>/modeling_*.py, `<Family>TopKRouter`, and
models/deepseek_v3/modeling_deepseek_v3.py, `DeepseekV3TopkRouter`; torch 2.13, FunctionsManual.cpp
and TensorAdvancedIndexing.cpp, `gather_backward`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.log.events import Term
from meshplan.memory.tape.op import Grad, TapeOp
from meshplan.memory.tape.ops import TapeBuilder

_FP32: Final = 4
_ID: Final = 8
_BEST: Final = 2
"""A group's score is the sum of the scores of this many best experts."""


def route(w: TapeBuilder, shape: Shape, x: int) -> tuple[int, int, int]:
    """Append top-k routing over all experts.

    Args:
        w: The builder to append to, at the module of the router.
        shape: Sizes of the model.
        x: Tokens.

    Returns:
        (logits, weights, indices of the experts) of all tokens.
    """
    tape, tokens = w.tape, w.tokens
    above, _, name = w.module.rpartition(".")
    logits = w.at(above).linear(x, shape.hidden, shape.experts, name)
    wide = w.cast(logits, _FP32 / w.element_bytes)
    size, chosen = w.size(wide), tokens * shape.top_k * _FP32
    shares = w.softmax(wide, size)
    weights, index = tape.value(chosen), tape.value(tokens * shape.top_k * _ID)
    tape.add(
        TapeOp("topk", w.module, (shares,), (weights, index), (index,), (Grad(shares, size),),
            workspace_backward_bytes=w.apart(size))
    )  # fmt: skip
    if shape.scales_weights:
        weights, _ = _to_sum_one(w, weights)
    if not shape.has_wide_weights:
        weights = w.cast(weights, w.element_bytes / _FP32)
    w.touch(shares)
    return logits, weights, index


def _to_sum_one(w: TapeBuilder, weights: int, *, is_safe: bool = False) -> tuple[int, int]:
    """Append a division of each token's weights by their sum; return (weights, sums).

    The division is in place, so a copy is saved for backward.

    Args:
        w: The builder to append to.
        weights: Router weights of all tokens.
        is_safe: If True, a small number is added to the sum, so that it is not 0.
    """
    tape, size = w.tape, w.size(weights)
    total = w.row("sum", (weights,), w.tokens * _FP32, grads=(Grad(weights, 0),))
    if is_safe:
        total = w.shift(total)
    copy, divided = tape.value(size), tape.value(size, of=weights)
    tape.add(
        TapeOp("div", w.module, (weights, total), (copy, divided), (total, copy),
            (Grad(weights, size), Grad(total, w.size(total))), workspace_backward_bytes=3 * size)
    )  # fmt: skip
    return divided, total


def route_by_groups(w: TapeBuilder, shape: Shape, x: int) -> tuple[int, int, int]:
    """Append top-k routing over the experts of each token's best groups.

    A group's score is the sum of its best experts' scores. All ops compute in float32. The
    correction that is added to the scores to choose experts gets no gradient.

    Args:
        w: The builder to append to, at the module of the router.
        shape: Sizes of the model.
        x: Tokens.

    Returns:
        (logits, weights, indices of the experts) of all tokens.
    """
    assert shape.groups is not None
    tape, (count, chosen_groups) = w.tape, shape.groups
    each = w.tokens * _FP32
    logits = _wide_linear(w, shape, x)
    size = w.size(logits)
    scores = w.unary("sigmoid", logits, keeps_out=True)
    correction = tape.value(shape.experts * _FP32)
    tape.before[correction] = Term.BUFFERS
    corrected = w.row("add", (scores, correction), size)
    best = w.row("topk", (corrected,), each * count * _BEST)
    best_index = w.row("topk", (corrected,), w.tokens * count * _BEST * _ID)
    of_groups = w.row("sum", (best,), each * count)
    groups = w.row(
        "topk", (of_groups,), w.tokens * chosen_groups * _ID, workspace_bytes=each * chosen_groups
    )
    mask = w.row("zeros_like", (of_groups,), each * count)
    masks = w.row("clone", (mask,), size)
    elements = size // _FP32
    left_out = w.row("bitwise_not", (masks,), elements, workspace_bytes=elements)
    masked = w.row("masked_fill", (corrected, left_out), size)
    index = w.row(
        "topk", (masked,), w.tokens * shape.top_k * _ID, workspace_bytes=each * shape.top_k
    )
    weights = w.row(
        "gather", (scores, index), each * shape.top_k, keeps=(scores, index),
        grads=(Grad(scores, size),), workspace_backward_bytes=w.apart(size),
    )  # fmt: skip
    total = weights
    if shape.scales_weights:
        weights, total = _to_sum_one(w, weights, is_safe=True)
    scaled = w.scale(weights)
    w.touch(scores, masked, left_out, best_index, of_groups, groups, mask, masks, total)
    return logits, scaled, index


def _wide_linear(w: TapeBuilder, shape: Shape, x: int) -> int:
    """Append the router's linear layer in float32, with casts of input and weight if needed."""
    above, _, name = w.module.rpartition(".")
    fqn, into = f"{w.module}.weight", shape.hidden
    if w.element_bytes == _FP32:
        return w.at(above).linear(x, into, shape.experts, name)
    wide = w.cast(x, _FP32 / w.element_bytes)
    nbytes = into * shape.experts
    weight = w.row("_to_copy", (), nbytes * _FP32, parameters=((fqn, nbytes * w.parameter_bytes),))
    at = replace(w.at(above), element_bytes=_FP32, parameter_bytes=_FP32)
    logits = at.linear(wide, into, shape.experts, name, parts={fqn: weight})
    w.tape.in_float32.add(logits)
    return logits
