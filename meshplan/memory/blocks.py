"""Decoder blocks of transformers, operation by operation, as its modeling files write them.

A frame of Python holds what it names until it returns: `touch` says where that is. What a block is
cut into by tp, and which block follows which, `memory.analytic` says.

Source: transformers 5.23, models/<family>/modeling_*.py, activations.py, cache_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from meshplan.memory.activations import activate
from meshplan.memory.attention import attend
from meshplan.memory.experts import ONE_RANK, Spread, sparse_mlp
from meshplan.memory.gathered import Gathered, attend_to_gathered, lay
from meshplan.memory.rows import Writer
from meshplan.memory.shape import Shape
from meshplan.memory.styled import Entered, Styled, cut_otherwise, project
from meshplan.memory.tape import Grad

_FP32: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank computes of a block.

    Args:
        tp: Ranks that heads and feed-forward are cut over, where no style says so.
        is_sequence: Whether the parts between them are cut over the same ranks by tokens.
        cos, sin: Values of the rotation; -1 where positions are learned.
        caches: Whether keys and values are copied into a cache, as transformers does
            unless `use_cache` is off.
        given: What every block is called with and does not read.
        told: What the model is called with and no block is.
        styled: Which modules tp cuts.
        seq_len: Tokens of a sequence that attention sees.
        cp: Ranks that have parts of it, and in attention all of it, of parts of the heads.
        is_fused: Whether a fused kernel computes it.
        gathered: Which chunks of a sequence this rank has, if it gathers the keys of all.
        spread: How experts are spread over ranks.
    """

    tp: int = 1
    is_sequence: bool = False
    cos: int = -1
    sin: int = -1
    caches: bool = False
    given: tuple[int, ...] = ()
    told: tuple[int, ...] = ()
    styled: Styled = field(default_factory=Styled)
    seq_len: int = 1
    cp: int = 1
    is_fused: bool = True
    spread: Spread = ONE_RANK
    gathered: Gathered | None = None


def enter(w: Writer, x: int, part: Part) -> int:
    """All tokens, where parts of features begin to be computed."""
    return w.gather(x, part.tp) if part.is_sequence else w.enter(x, part.tp)


def leave(w: Writer, x: int, part: Part) -> int:
    """The sum over ranks, where they end."""
    return w.reduce_scatter(x, part.tp) if part.is_sequence else w.all_reduce(x, part.tp)


def number_of(fqn: str) -> int:
    """Of a block."""
    return int(fqn.rpartition(".")[2])


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


def _attend(w: Writer, shape: Shape, q: int, k: int, v: int, part: Part) -> int:
    """Attention, with a copy of keys and values in a cache before it."""
    is_cut = w.size(q) < w.tokens * shape.q_width * w.element_bytes
    # Ranks whose queries need the same keys and values all compute them.
    kv_width = shape.kv_width // (min(part.styled.tp, shape.kv_heads) if is_cut else 1)
    if not w.size(k) == w.size(v) == w.tokens * kv_width * w.element_bytes:
        raise cut_otherwise(w.module)
    if part.caches:
        k, v = w.cat(k), w.cat(v)
    if part.gathered is not None:
        return attend_to_gathered(w, q, k, v, shape.head_dim, part.seq_len, part.gathered, part.cp,
                                  is_fused=part.is_fused)  # fmt: skip
    if part.cp > 1:
        return _attend_to_whole(w, shape, q, k, v, part)
    return attend(w, q, k, v, shape.head_dim, part.seq_len, is_fused=part.is_fused)


def _attend_to_whole(w: Writer, shape: Shape, q: int, k: int, v: int, part: Part) -> int:
    """Parts of the sequence are exchanged for parts of the heads, and back.

    Source: `runtime.context.parts`; sdpa_attention.py of transformers, which lays the result anew.
    """
    q, k, v = (w.exchange(each) for each in (q, k, v))
    out = attend(w, q, k, v, shape.head_dim, part.seq_len, is_fused=part.is_fused)
    own = w.exchange(out)
    w.touch(q, k, v, out)
    return w.shift(own, "clone")


def llama_attention(w: Writer, shape: Shape, x: int, part: Part) -> int:
    """`LlamaAttention`, with norms of queries and keys where the family has them."""
    entered, hidden = Entered(), shape.hidden

    def made(width: int, name: str, norm: str = "") -> int:
        out = project(w, part.styled, entered, x, hidden, width, name, bias=shape.qkv_bias)
        if not norm or not shape.qk_norm:
            return out
        return head_norm(w, part, out, shape.head_dim, norm)

    q = made(shape.q_width, "q_proj", "q_norm")
    k = made(shape.kv_width, "k_proj", "k_norm")
    v = made(shape.kv_width, "v_proj")
    if part.gathered is not None:
        q, k, v = (lay(w, x) for x in (q, k, v))
    turned_q = rotate(w, q, part)
    turned_k = rotate(w, k, part)
    w.touch(q, k)
    out = _attend(w, shape, turned_q, turned_k, v, part)
    out = project(w, part.styled, entered, out, shape.q_width, hidden, "o_proj", bias=shape.o_bias)
    w.touch(turned_q, turned_k, v)
    return out


def head_norm(w: Writer, part: Part, x: int, width: int, name: str) -> int:
    """Of every head. Where ranks have parts of the heads, its gradients are added up over them."""
    out = rms_norm(w, x, width, name)
    if part.styled.adds_up(f"{w.module}.{name}"):
        w.tape.lay(f"{w.module}.{name}.weight", width * w.parameter_bytes)
    return out


def gated_mlp(w: Writer, shape: Shape, x: int, part: Part) -> int:
    """`LlamaMLP`."""
    entered, bias = Entered(), shape.mlp_bias
    gate = project(w, part.styled, entered, x, shape.hidden, shape.mlp, "gate_proj", bias=bias)
    bent = activate(w.at(f"{w.module}.act_fn"), gate, shape.activation)
    up = project(w, part.styled, entered, x, shape.hidden, shape.mlp, "up_proj", bias=bias)
    if w.size(bent) != w.size(up):
        raise cut_otherwise(w.module)
    product = w.mul(bent, up)
    return project(
        w, part.styled, entered, product, shape.mlp, shape.hidden, "down_proj", bias=bias
    )


def expert_mlp(w: Writer, shape: Shape, x: int, part: Part) -> int:
    """In the place of `gated_mlp`."""
    return sparse_mlp(w, shape, x, part.spread)


def llama_block(w: Writer, shape: Shape, x: int, part: Part) -> int:
    """`LlamaDecoderLayer`, and the layers of its shape."""
    names = ("input_layernorm", "post_attention_layernorm")
    feed = expert_mlp if shape.is_sparse(number_of(w.module)) else gated_mlp
    halves = ((llama_attention, "self_attn"), (feed, "mlp"))
    first = x
    for norm, (half, name) in zip(names, halves, strict=True):
        normed = rms_norm(w, x, shape.hidden, norm)
        out = half(w.at(f"{w.module}.{name}"), shape, normed, part)
        w.touch(normed)
        residual, x = x, w.add(x, out)
        w.touch(residual)
    w.touch(first)
    return x


def gpt2_block(w: Writer, shape: Shape, x: int, part: Part) -> int:
    """`GPT2Block`: one projection for queries, keys and values, LayerNorm, two dropouts."""
    first, hidden = x, shape.hidden

    def conv(at: Writer, entered: Entered, x: int, into: int, out: int, name: str) -> int:
        return project(at, part.styled, entered, x, into, out, name, bias=True)

    normed = w.layer_norm(x, hidden, "ln_1")
    at, entered = w.at(f"{w.module}.attn"), Entered()
    fused = conv(at, entered, normed, hidden, 3 * shape.q_width, "c_attn")
    size = at.size(fused) // 3
    q, k, v = at.chunk(fused, size, size, size)
    if part.gathered is not None:
        q, k, v = (lay(at, x) for x in (q, k, v))
    out = _attend(at, shape, q, k, v, part)
    out = conv(at, entered, out, shape.q_width, hidden, "c_proj")
    out = at.dropout(out, shape.dropout)
    w.touch(fused)
    x, attended = w.add(out, x), out
    w.touch(normed)
    normed = w.layer_norm(x, hidden, "ln_2")
    at, entered = w.at(f"{w.module}.mlp"), Entered()
    inner = conv(at, entered, normed, hidden, shape.mlp, "c_fc")
    bent = activate(at.at(f"{at.module}.act"), inner, shape.activation)
    out = conv(at, entered, bent, shape.mlp, hidden, "c_proj")
    out = at.dropout(out, shape.dropout)
    w.touch(normed)
    x = w.add(x, out)
    w.touch(first, attended)
    return x
