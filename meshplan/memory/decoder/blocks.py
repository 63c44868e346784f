"""Decoder blocks of transformers as ops, in the order of transformers' modeling files.

A local variable of a Python function keeps its tensor alive until the function returns. A call of
`touch` marks that place. `memory.decoder.tp_ops` has the ops of modules that tp shards, and
`memory.decoder.microbatch` puts blocks in order.

Source: transformers 5.23, models/<family>/modeling_*.py, activations.py, cache_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshplan.memory.decoder.activations import activate
from meshplan.memory.decoder.attention import attend
from meshplan.memory.decoder.common import BlockContext, number_of, rms_norm, rotate
from meshplan.memory.decoder.cp_all_gather import attend_to_gathered, lay
from meshplan.memory.decoder.experts import sparse_mlp
from meshplan.memory.decoder.mla import latent_attention
from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.decoder.sp_boundary import gather
from meshplan.memory.decoder.tp_ops import Entered, project, style_mismatch
from meshplan.memory.tape.ops import TapeBuilder


def enter(w: TapeBuilder, x: int, part: BlockContext) -> int:
    """Append the beginning of a tensor-parallel region, and return the input of all tokens."""
    return w.gather(x, part.tp) if part.is_sequence else w.enter(x, part.tp)


def leave(w: TapeBuilder, x: int, part: BlockContext) -> int:
    """Append the end of a tensor-parallel region, and return the sum of `x` over ranks."""
    return w.reduce_scatter(x, part.tp) if part.is_sequence else w.all_reduce(x, part.tp)


def _attend(w: TapeBuilder, shape: Shape, q: int, k: int, v: int, part: BlockContext) -> int:
    """Append attention, context-parallel if the plan is, and return its output.

    Keys and values are copied into a cache first, if the model uses one.
    """
    is_cut = w.size(q) < w.tokens * shape.q_width * w.element_bytes
    # With more tp ranks than kv heads, all ranks whose queries share a kv head compute that head.
    kv_width = shape.kv_width // (min(part.styled.tp, shape.kv_heads) if is_cut else 1)
    if not w.size(k) == w.size(v) == w.tokens * kv_width * w.element_bytes:
        raise style_mismatch(w.module)
    if part.caches:
        k, v = w.cat(k), w.cat(v)
    if part.gathered is not None:
        return attend_to_gathered(w, q, k, v, shape.head_dim, part.seq_len, part.gathered, part.cp,
                                  is_fused=part.is_fused)  # fmt: skip
    if part.cp > 1:
        return _attend_to_whole(w, shape, q, k, v, part)
    return attend(w, q, k, v, shape.head_dim, part.seq_len, is_fused=part.is_fused)


def _attend_to_whole(
    w: TapeBuilder, shape: Shape, q: int, k: int, v: int, part: BlockContext
) -> int:
    """Append attention under Ulysses, where ranks exchange shards of the sequence for heads.

    Source: `runtime.apply.context.parts`; sdpa_attention.py of transformers, which copies the
    result to another layout.
    """
    q, k, v = (w.exchange(each) for each in (q, k, v))
    out = attend(w, q, k, v, shape.head_dim, part.seq_len, is_fused=part.is_fused)
    own = w.exchange(out)
    w.touch(q, k, v, out)
    return w.shift(own, "clone")


def llama_attention(w: TapeBuilder, shape: Shape, x: int, part: BlockContext) -> int:
    """Append `LlamaAttention`, with norms of queries and keys if the model has them."""
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


def head_norm(w: TapeBuilder, part: BlockContext, x: int, width: int, name: str) -> int:
    """Append an RMSNorm over `width` features, which are those of the hidden state or of a head.

    If each rank normalises a shard, the gradients of the norm's weight are summed over ranks.
    """
    return norm_of_part(w, part, rms_norm(w, x, width, name), width, name)


def norm_of_part(
    w: TapeBuilder,
    part: BlockContext,
    out: int,
    width: int,
    name: str,
    leaves: tuple[str, ...] = ("weight",),
) -> int:
    """Mark the gradients of a norm as partial sums if each rank normalises a shard; return `out`.

    Args:
        w: The builder, at the parent module.
        part: Settings of the block.
        out: Output of the norm, which is the last op so far.
        width: Features that the norm's parameters have.
        name: Name of the norm inside the current module.
        leaves: Names of the norm's parameters.
    """
    if part.styled.adds_up(f"{w.module}.{name}"):
        for leaf in leaves:
            w.tape.lay(f"{w.module}.{name}.{leaf}", width * w.parameter_bytes)
    return out


def gated_mlp(w: TapeBuilder, shape: Shape, x: int, part: BlockContext) -> int:
    """Append `LlamaMLP`."""
    entered, bias = Entered(), shape.mlp_bias
    gate = project(w, part.styled, entered, x, shape.hidden, shape.mlp, "gate_proj", bias=bias)
    activated = activate(w.at(f"{w.module}.act_fn"), gate, shape.activation)
    up = project(w, part.styled, entered, x, shape.hidden, shape.mlp, "up_proj", bias=bias)
    if w.size(activated) != w.size(up):
        raise style_mismatch(w.module)
    product = w.mul(activated, up)
    return project(
        w, part.styled, entered, product, shape.mlp, shape.hidden, "down_proj", bias=bias
    )


def expert_mlp(w: TapeBuilder, shape: Shape, x: int, part: BlockContext) -> int:
    """Append a mixture of experts, with its shared expert if there is one."""
    if shape.gates_shared:
        return _beside_gated(w, shape, x, part)
    routed, in_frame = sparse_mlp(w, shape, x, part.spread)
    if not shape.shared_mlp:
        w.touch(*in_frame)
        return routed
    shared = replace(shape, mlp=shape.shared_mlp)
    own = gated_mlp(w.at(f"{w.module}.shared_experts"), shared, x, part)
    out = w.add(routed, own)
    w.touch(*in_frame)
    return out


def _beside_gated(w: TapeBuilder, shape: Shape, x: int, part: BlockContext) -> int:
    """Append `Qwen2MoeSparseMoeBlock`, whose shared expert has a gate."""
    at = w.at(f"{w.module}.shared_expert")
    shared = gated_mlp(at, replace(shape, mlp=shape.shared_mlp), x, part)
    routed, in_frame = sparse_mlp(w, shape, x, part.spread)
    weight = w.unary("sigmoid", w.linear(x, shape.hidden, 1, "shared_expert_gate"), keeps_out=True)
    weighed = w.mul(weight, shared)
    out = w.add(routed, weighed)
    w.touch(*in_frame, weighed, routed)
    return out


def llama_block(w: TapeBuilder, shape: Shape, x: int, part: BlockContext) -> int:
    """Append `LlamaDecoderLayer`, or a layer of the same structure."""
    names = ("input_layernorm", "post_attention_layernorm")
    feed = expert_mlp if shape.is_sparse(number_of(w.module)) else gated_mlp
    attention = latent_attention if shape.latent is not None else llama_attention
    halves = ((attention, "self_attn"), (feed, "mlp"))
    first = x
    for norm, (half, name) in zip(names, halves, strict=True):
        normed = head_norm(w, part, x, shape.hidden, norm)
        out = _whole_inside(w.at(f"{w.module}.{name}"), shape, normed, part, half)
        w.touch(normed)
        scaled = w.scale(out) if shape.scales else out
        residual, x = x, w.add(x, scaled)
        w.touch(out)
        w.touch(residual)
    w.touch(first)
    return x


def _whole_inside(
    w: TapeBuilder,
    shape: Shape,
    x: int,
    part: BlockContext,
    half: Callable[[TapeBuilder, Shape, int, BlockContext], int],
) -> int:
    """Append attention or feed-forward (`half`), which needs whole sequences.

    If the sequence is sharded over tp, `x` is gathered first.
    """
    if not part.styled.has_stream:
        return half(w, shape, x, part)
    whole = gather(w, x, part.styled.tp)
    out = half(w, shape, whole, part)
    w.touch(whole)
    return out


def gpt2_block(w: TapeBuilder, shape: Shape, x: int, part: BlockContext) -> int:
    """Append `GPT2Block`: one projection for queries, keys and values, LayerNorm, two dropouts."""
    first, hidden = x, shape.hidden

    def conv(at: TapeBuilder, entered: Entered, x: int, into: int, out: int, name: str) -> int:
        return project(at, part.styled, entered, x, into, out, name, bias=True)

    def norm(x: int, name: str) -> int:
        out = w.layer_norm(x, hidden, name)
        return norm_of_part(w, part, out, hidden, name, ("weight", "bias"))

    def attention(at: TapeBuilder, shape: Shape, x: int, part: BlockContext) -> int:
        return _gpt2_attention(at, shape, x, part, conv)

    def mlp(at: TapeBuilder, shape: Shape, x: int, part: BlockContext) -> int:
        entered = Entered()
        inner = conv(at, entered, x, hidden, shape.mlp, "c_fc")
        activated = activate(at.at(f"{at.module}.act"), inner, shape.activation)
        out = conv(at, entered, activated, shape.mlp, hidden, "c_proj")
        return at.dropout(out, shape.dropout)

    normed = norm(x, "ln_1")
    out = _whole_inside(w.at(f"{w.module}.attn"), shape, normed, part, attention)
    x, attended = w.add(out, x), out
    w.touch(normed)
    normed = norm(x, "ln_2")
    out = _whole_inside(w.at(f"{w.module}.mlp"), shape, normed, part, mlp)
    w.touch(normed)
    x = w.add(x, out)
    w.touch(first, attended)
    return x


def _gpt2_attention(
    at: TapeBuilder, shape: Shape, x: int, part: BlockContext, conv: Callable[..., int]
) -> int:
    """Append `GPT2Attention`; `conv` appends a projection with a bias."""
    entered, hidden = Entered(), shape.hidden
    fused = conv(at, entered, x, hidden, 3 * shape.q_width, "c_attn")
    size = at.size(fused) // 3
    q, k, v = at.chunk(fused, size, size, size)
    if part.gathered is not None:
        q, k, v = (lay(at, x) for x in (q, k, v))
    out = _attend(at, shape, q, k, v, part)
    out = conv(at, entered, out, shape.q_width, hidden, "c_proj")
    out = at.dropout(out, shape.dropout)
    at.touch(fused)
    return out
