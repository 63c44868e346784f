"""Causal attention as ops: the kernel that torch chooses, and the kernel's workspace.

Source: torch 2.13, aten/native/transformers: cuda/sdp_utils.cpp, `select_sdp_backend`;
attention.cpp, `_scaled_dot_product_attention_math`; cuda/flash_attn/flash_api.cpp, `mha_bwd`;
cuda/attention_backward.cu.
"""

from __future__ import annotations

from typing import Final

from meshplan import kernels
from meshplan.memory.tape.op import Grad
from meshplan.memory.tape.ops import TapeBuilder

_FP32: Final = 4


def attend(
    w: TapeBuilder,
    q: int,
    k: int,
    v: int,
    head_dim: int,
    seq_len: int,
    *,
    is_fused: bool = True,
    value_dim: int = 0,
) -> int:
    """Append causal attention and return its output.

    Args:
        w: The builder to append to.
        q, k, v: Queries, keys and values. If `k` is smaller than `q`, several heads of queries
            share one head of keys and values.
        head_dim: Features of one head of queries and keys.
        seq_len: Tokens of one sequence.
        is_fused: If True, one kernel computes attention; see `memory.decoder.attention_kernel`.
        value_dim: Features of one head of values; 0 for `head_dim`.
    """
    if not is_fused:
        return _in_full(w, q, k, v, head_dim, seq_len)
    num = w.size(q) // (head_dim * w.element_bytes) // seq_len
    is_narrow = bool(value_dim) and value_dim != head_dim
    made, workspace = 0, tuple[int, ...]()
    if is_narrow:
        made = num * seq_len * value_dim * w.element_bytes
    # No flash kernel computes in float32, or with heads of values of another width than of keys.
    if is_narrow or (w.is_cuda and w.element_bytes == _FP32):
        workspace = kernels.efficient_backward(
            num, seq_len, seq_len, head_dim, value_dim or head_dim, w.element_bytes
        )
    elif w.is_cuda:
        is_grouped = w.size(k) != w.size(q)
        workspace = kernels.flash_backward(
            num, seq_len, seq_len, head_dim, w.element_bytes, is_grouped=is_grouped
        )
    heads = 1 if is_narrow else w.size(q) // w.size(k)
    return w.attention(
        q, k, v, heads, head_dim, workspace_backward_bytes=sum(workspace), nbytes=made
    )


def _in_full(w: TapeBuilder, q: int, k: int, v: int, head_dim: int, seq_len: int) -> int:
    """Append attention as separate products, for grouped queries in float32.

    No fused kernel supports these.
    """
    size = w.size(q)
    scores = size // head_dim * seq_len

    def product(a: int, b: int, nbytes: int) -> int:
        grads = (Grad(a, w.size(a)), Grad(b, w.size(b)))
        is_kept = "bmm" in w.saves
        return w.row("bmm", (a, b), nbytes, keeps=(a, b), grads=grads, is_kept=is_kept)

    def repeated(x: int) -> int:
        return w.row("clone", (x,), size, grads=(Grad(x, w.size(x)),))

    scaled = w.scale(q)
    mask = w.row("tril", (), seq_len * seq_len, workspace_bytes=seq_len * seq_len)
    bias = w.row("where", (mask,), seq_len * seq_len * w.element_bytes)
    keys, values = repeated(k), repeated(v)
    shrunk = w.scale(keys)
    contiguous = w.shift(scaled, "clone")
    masked = w.shift(product(contiguous, shrunk, scores))
    shares = w.softmax(masked, scores, "_safe_softmax")
    out = product(shares, values, size)
    w.touch(scaled, keys, bias)
    return w.row("clone", (out,), size, grads=(Grad(out, size),))
