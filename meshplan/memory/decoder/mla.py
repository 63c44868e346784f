"""Multi-head latent attention as ops: keys and values of all heads come from one latent vector.

Some features of each head are rotated by position. Those of keys are the same for all heads. The
rotated and the other features of keys are copied into one new tensor.

Source: transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, `DeepseekV3Attention`; torch
2.13, csrc/autograd/functions/tensor.cpp, `CopySlices`, for the workspace of a copy into a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from meshplan.memory.decoder.attention import attend
from meshplan.memory.decoder.common import BlockContext, rms_norm, rotate
from meshplan.memory.decoder.sizes import Latent, Shape
from meshplan.memory.decoder.tp_ops import Entered, project, style_mismatch
from meshplan.memory.tape.op import Grad, TapeOp
from meshplan.memory.tape.ops import TapeBuilder

_FP32: Final = 4
_Made = Callable[[int, int, int, str], int]
"""Maps (input, input features, output features, name) of a projection to its output."""


def latent_attention(w: TapeBuilder, shape: Shape, x: int, part: BlockContext) -> int:
    """Append `DeepseekV3Attention`, and return its output."""
    latent, hidden, entered = shape.latent, shape.hidden, Entered()
    assert latent is not None
    each = w.tokens * w.element_bytes
    straight, turned = latent.straight, latent.turned

    def made(x: int, into: int, out: int, name: str, *, bias: bool = False) -> int:
        return project(w, part.styled, entered, x, into, out, name, bias=bias)

    if latent.q_rank:
        narrow = made(x, hidden, latent.q_rank, "q_a_proj", bias=latent.bias)
        normed = rms_norm(w, narrow, latent.q_rank, "q_a_layernorm")
        queries = made(normed, latent.q_rank, shape.q_width, "q_b_proj")
    else:
        queries = made(x, hidden, shape.q_width, "q_proj")
    if w.size(queries) != each * shape.q_width:
        raise style_mismatch(w.module)
    own = each * shape.heads
    q_pass, q_rot = w.chunk(queries, own * straight, own * turned)
    both = made(x, hidden, latent.kv_rank + turned, "kv_a_proj_with_mqa", bias=latent.bias)
    narrow, k_rot = w.chunk(both, each * latent.kv_rank, each * turned)
    narrow = rms_norm(w, narrow, latent.kv_rank, "kv_a_layernorm")
    turn = _rotate_pairs if latent.is_interleaved else rotate
    turned_q, turned_k = turn(w, q_rot, part), turn(w, k_rot, part)
    q = w.cat(q_pass, turned_q)
    k, v = _expanded(w, shape, latent, narrow, turned_k, made)
    out = attend(
        w, q, k, v, shape.head_dim, part.seq_len, is_fused=part.is_fused, value_dim=latent.value
    )
    if latent.value == shape.head_dim and (w.element_bytes < _FP32 or not w.is_cuda):
        # Flash attention's output has the memory layout of the queries, head by head, and is copied
        # to be contiguous. The outputs of other kernels are contiguous already.
        out = w.shift(out, "clone")
    out = made(out, shape.heads * latent.value, hidden, "o_proj", bias=latent.bias)
    w.touch(queries, both, narrow, turned_q, turned_k, q, k, v)
    return out


def _rotate_pairs(w: TapeBuilder, x: int, part: BlockContext) -> int:
    """Append `apply_rotary_pos_emb_interleave` for queries or keys `x`."""
    half = w.size(x) // 2
    even, odd = w.slice(x, half), w.slice(x, half)

    def turned(a: int, b: int, op: str) -> int:
        left, right = w.times(a, part.cos), w.times(b, part.sin)
        back = half if op == "sub" else 0
        return w.row(op, (left, right), half, grads=(Grad(left, 0), Grad(right, back)))

    out = w.cat(turned(even, odd, "sub"), turned(odd, even, "add"))
    w.touch(even, odd)
    return out


def _expanded(
    w: TapeBuilder, shape: Shape, latent: Latent, narrow: int, turned_k: int, made: _Made
) -> tuple[int, int]:
    """Append `expand_kv` and return (keys, values) of all heads.

    Args:
        w: The builder to append to.
        shape: Sizes of the model.
        latent: Sizes of latent attention.
        narrow: The normalised latent vectors.
        turned_k: The rotated features of keys, which all heads share.
        made: Appends a projection.
    """
    own = w.tokens * w.element_bytes * shape.heads
    width = latent.straight + latent.value
    wide = made(narrow, latent.kv_rank, shape.heads * width, "kv_b_proj")
    if w.size(wide) != own * width:
        raise style_mismatch(w.module)
    straight, values = w.chunk(wide, own * latent.straight, own * latent.value)
    for_all = w.tape.value(own * latent.turned, of=turned_k)
    grads = (Grad(turned_k, w.size(turned_k)),)
    w.tape.add(TapeOp("expand", w.module, (turned_k,), (for_all,), grads=grads))
    keys = w.row("new_empty", (), own * shape.head_dim)
    # The backward of `CopySlices` copies the whole gradient, and zeros the slice that was written.
    first = _copied(w, keys, (straight,), workspace_backward_bytes=w.size(keys))
    return _copied(w, first, (for_all, first), workspace_backward_bytes=w.size(for_all)), values


def _copied(
    w: TapeBuilder, into: int, reads: tuple[int, ...], *, workspace_backward_bytes: int
) -> int:
    """Append a copy into a slice of `into`, and return a view of `into`."""
    out = w.tape.value(w.size(into), of=into)
    grads = tuple(Grad(value, w.size(value)) for value in reads)
    w.tape.add(
        TapeOp(
            "copy_", w.module, (into, *reads), (out,), (), grads, (), 0, workspace_backward_bytes
        )
    )
    return out
