"""Causal attention as torch computes it: the kernel that is chosen, and its workspace.

Source: torch 2.13, aten/native/transformers: cuda/sdp_utils.cpp, `select_sdp_backend`;
attention.cpp, `_scaled_dot_product_attention_math`; cuda/flash_attn/flash_api.cpp, `mha_bwd`;
cuda/attention_backward.cu.
"""

from __future__ import annotations

from typing import Final

from meshplan.memory.tape.op import Grad
from meshplan.memory.tape.ops import TapeBuilder

_FP32: Final = 4
_NARROW: Final = 128
"""Features of a head up to which the gradients of keys and values stay in registers."""
_TILE: Final = (128, 64)
"""Rows and keys of one block of the kernel for wider heads."""
_LOCK: Final = 4
"""Elements of a tile in addition to the gradient itself."""
_MOST_SPLITS: Final = 200


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
    """Append causal attention and return its output. If `k` is smaller than `q`, queries share it.

    Args:
        q, k, v: Queries, keys and values.
        head_dim: Features of one head of queries and keys.
        seq_len: Tokens of one sequence.
        is_fused: If True, one kernel does it all; see `memory.decoder.attention_kernel`.
        value_dim: Features of one head of values; 0 if the same as of keys.
    """
    if not is_fused:
        return _in_full(w, q, k, v, head_dim, seq_len)
    if value_dim and value_dim != head_dim:
        rows = w.size(q) // (head_dim * w.element_bytes)
        workspace_bytes = efficient_backward(
            rows // seq_len, seq_len, seq_len, head_dim, value_dim, w.element_bytes
        )
        made = rows * value_dim * w.element_bytes
        return w.attention(
            q, k, v, 1, head_dim, workspace_backward_bytes=sum(workspace_bytes), nbytes=made
        )
    workspace_backward_bytes = _flash_backward(w, q, k, head_dim, seq_len) if w.is_cuda else 0
    return w.attention(
        q, k, v, w.size(q) // w.size(k), head_dim, workspace_backward_bytes=workspace_backward_bytes
    )


def _flash_backward(w: TapeBuilder, q: int, k: int, head_dim: int, seq_len: int) -> int:
    """Bytes of workspace of flash attention's backward.

    The workspace has sums of rows, the gradient of queries in fp32, and the gradients of keys and
    values for every query head. In fp32 memory-efficient attention runs instead, which needs only
    the sums.
    """
    rows = w.size(q) // (head_dim * w.element_bytes)
    if w.element_bytes == _FP32:
        return rows // seq_len * _up(seq_len, 32) * _FP32
    sums = rows // seq_len * _up(seq_len, 128) * _FP32
    width = _up(head_dim, 32 if head_dim <= 128 else 64)
    repeated = 2 * w.size(q) if w.size(k) != w.size(q) else 0
    return sums + sums * width + repeated


def efficient_backward(
    num: int, rows: int, keys: int, head_dim: int, value_dim: int, element_bytes: int
) -> tuple[int, ...]:
    """Bytes of workspace of memory-efficient attention's backward: sums of rows, gradients in fp32.

    In half precision, heads of more than 128 features also need gradients of keys and values.

    Args:
        num: Heads of all samples together.
        rows: Queries of one sequence.
        keys: Keys of one sequence.
        head_dim: Features of one head of queries and keys.
        value_dim: Features of one head of values.

    Returns:
        Bytes of each tensor of the workspace.

    Source: torch 2.13, attention_backward.cu, `_efficient_attention_backward`, for how many parts
    keys are split into; mem_eff_attention/kernel_backward.h, `workspace_size`, and
    kernels/cutlassB.h for the sizes of blocks.
    """
    sums = _FP32 * num * _up(rows, 32)
    if element_bytes == _FP32:
        return (sums,)
    if max(head_dim, value_dim) <= _NARROW:
        return (sums, _FP32 * num * _up(rows, 64) * _up(head_dim, 32))
    down, across = _TILE
    splits = max(1, min(-(-keys // across), _MOST_SPLITS // num))
    apart = splits * across * (_up(head_dim, down) + _up(value_dim, down))
    tiles = -(-rows // down) * -(-head_dim // across) * (_LOCK + down * across)
    return (sums, _FP32 * num * (apart + tiles))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _in_full(w: TapeBuilder, q: int, k: int, v: int, head_dim: int, seq_len: int) -> int:
    """Append attention as separate products: no fused kernel takes grouped queries in fp32."""
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
    laid = w.shift(scaled, "clone")
    masked = w.shift(product(laid, shrunk, scores))
    shares = w.row(
        "_safe_softmax", (masked,), scores, keeps_out=True, grads=(Grad(masked, scores),)
    )
    out = product(shares, values, size)
    w.touch(scaled, keys, bias)
    return w.row("clone", (out,), size, grads=(Grad(out, size),))
