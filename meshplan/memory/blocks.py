"""Decoder blocks of transformers, operation by operation, as its modeling files write them.

A frame of Python holds what it names until it returns: `touch` says where that is. What a block is
cut into by tp, and which block follows which, `memory.analytic` says.

Source: transformers 5.23, models/<family>/modeling_*.py, activations.py, cache_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshplan.memory.rows import Writer
from meshplan.memory.shape import Shape
from meshplan.memory.tape import Grad

_FP32: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank computes of a block.

    Args:
        tp: Ranks that heads and feed-forward are cut over.
        is_sequence: Whether the parts between them are cut over the same ranks by tokens.
        cos, sin: Values of the rotation; -1 where positions are learned.
        caches: Whether keys and values are copied into a cache, as transformers does
            unless `use_cache` is off.
        given: What every block is called with and does not read.
    """

    tp: int = 1
    is_sequence: bool = False
    cos: int = -1
    sin: int = -1
    caches: bool = False
    given: tuple[int, ...] = ()


def enter(w: Writer, x: int, part: Part) -> int:
    """All tokens, where parts of features begin to be computed."""
    return w.gather(x, part.tp) if part.is_sequence else w.enter(x, part.tp)


def leave(w: Writer, x: int, part: Part) -> int:
    """The sum over ranks, where they end."""
    return w.reduce_scatter(x, part.tp) if part.is_sequence else w.all_reduce(x, part.tp)


def rms_norm(w: Writer, x: int, width: int, name: str) -> int:
    """Written out in fp32: `LlamaRMSNorm` and its copies."""
    at = w.at(f"{w.module}.{name}" if w.module else name)
    ratio = _FP32 / w.element_bytes
    wide = at.cast(x, ratio)
    size = at.size(wide)
    row = size // width
    square = at.row(
        "pow", (wide,), size, keeps=(wide,), takes_back=2 * size, grads=(Grad(wide, size),)
    )
    mean = at.row("mean", (square,), row, grads=(Grad(square, size),))
    deviation = at.unary("rsqrt", at.shift(mean), keeps_out=True, takes_back=2 * row)
    product = at.mul(wide, deviation)
    narrow = at.cast(product, 1 / ratio)
    size = at.size(narrow)
    out = at.row(
        "mul", (narrow,), size, keeps=(narrow,), takes_back=size, grads=(Grad(narrow, size),),
        parameters=((f"{at.module}.weight", width * w.parameter_bytes),),
    )  # fmt: skip
    w.touch(mean, product)
    return out


def rotate(w: Writer, x: int, part: Part) -> int:
    """`apply_rotary_pos_emb` of queries or of keys."""
    size = w.size(x)
    turned = w.times(x, part.cos)
    low, high = w.slice(x, size // 2), w.slice(x, size // 2)
    rotated = w.cat(w.scale(high, "neg"), low)
    return w.add(turned, w.times(rotated, part.sin))


def activate(w: Writer, x: int, name: str) -> int:
    """One of `ACT2FN`."""
    if name != "gelu_new":
        return w.unary(name, x)
    size, half = w.size(x), w.scale(x)
    cube = w.row("pow", (x,), size, keeps=(x,), takes_back=2 * size, grads=(Grad(x, size),))
    inner = w.add(x, w.scale(cube))
    bent = w.shift(w.unary("tanh", w.scale(inner), keeps_out=True))
    out = w.mul(half, bent)
    w.touch(x)
    return out


def attend(w: Writer, shape: Shape, q: int, k: int, v: int, part: Part) -> int:
    """Attention by torch's fused kernel, with a copy of keys and values in a cache before it."""
    if part.caches:
        k, v = w.cat(k), w.cat(v)
    return w.attention(q, k, v, shape.heads // part.tp, shape.head_dim)


def llama_attention(w: Writer, shape: Shape, x: int, part: Part) -> int:
    """`LlamaAttention`, with norms of queries and keys where the family has them."""
    q_width, kv_width = shape.q_width // part.tp, shape.kv_width // part.tp
    q = w.linear(x, shape.hidden, q_width, "q_proj", bias=shape.qkv_bias)
    if shape.qk_norm:
        q = rms_norm(w, q, shape.head_dim, "q_norm")
    k = w.linear(x, shape.hidden, kv_width, "k_proj", bias=shape.qkv_bias)
    if shape.qk_norm:
        k = rms_norm(w, k, shape.head_dim, "k_norm")
    v = w.linear(x, shape.hidden, kv_width, "v_proj", bias=shape.qkv_bias)
    turned_q = rotate(w, q, part)
    turned_k = rotate(w, k, part)
    w.touch(q, k)
    out = attend(w, shape, turned_q, turned_k, v, part)
    out = w.linear(out, q_width, shape.hidden, "o_proj", bias=shape.o_bias)
    w.touch(turned_q, turned_k, v)
    return out


def gated_mlp(w: Writer, shape: Shape, x: int, part: Part) -> int:
    """`LlamaMLP`."""
    mlp = shape.mlp // part.tp
    gate = w.linear(x, shape.hidden, mlp, "gate_proj", bias=shape.mlp_bias)
    bent = activate(w.at(f"{w.module}.act_fn"), gate, shape.activation)
    up = w.linear(x, shape.hidden, mlp, "up_proj", bias=shape.mlp_bias)
    return w.linear(w.mul(bent, up), mlp, shape.hidden, "down_proj", bias=shape.mlp_bias)


def llama_block(w: Writer, shape: Shape, x: int, part: Part) -> int:
    """`LlamaDecoderLayer`, and the layers of its shape."""
    names = ("input_layernorm", "post_attention_layernorm")
    halves = ((llama_attention, "self_attn"), (gated_mlp, "mlp"))
    first = x
    for norm, (half, name) in zip(names, halves, strict=True):
        normed = enter(w, rms_norm(w, x, shape.hidden, norm), part)
        out = leave(w, half(w.at(f"{w.module}.{name}"), shape, normed, part), part)
        w.touch(normed)
        residual, x = x, w.add(x, out)
        w.touch(residual)
    w.touch(first)
    return x


def gpt2_block(w: Writer, shape: Shape, x: int, part: Part) -> int:
    """`GPT2Block`: one projection for queries, keys and values, LayerNorm, two dropouts."""
    first, hidden, width = x, shape.hidden, shape.q_width // part.tp
    normed = enter(w, w.layer_norm(x, hidden, "ln_1"), part)
    at = w.at(f"{w.module}.attn")
    fused = at.linear(normed, hidden, 3 * width, "c_attn", bias=True)
    size = at.size(fused) // 3
    q, k, v = at.chunk(fused, size, size, size)
    out = attend(at, shape, q, k, v, part)
    out = leave(at, at.linear(out, width, hidden, "c_proj", bias=True), part)
    out = at.dropout(out, shape.dropout)
    w.touch(fused)
    x = w.add(out, x)
    w.touch(out)
    w.touch(normed)
    normed = enter(w, w.layer_norm(x, hidden, "ln_2"), part)
    at, mlp = w.at(f"{w.module}.mlp"), shape.mlp // part.tp
    inner = at.linear(normed, hidden, mlp, "c_fc", bias=True)
    bent = activate(at.at(f"{at.module}.act"), inner, shape.activation)
    out = leave(at, at.linear(bent, mlp, hidden, "c_proj", bias=True), part)
    out = at.dropout(out, shape.dropout)
    w.touch(normed)
    x = w.add(x, out)
    w.touch(first)
    return x
