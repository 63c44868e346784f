"""torchtitan's Llama, operation by operation: what PyTorch's own published runs trained.

Rotation in complex numbers, keys and values repeated for grouped queries, torch's fused attention
and RMSNorm, logits cast to fp32 by the loss; blocks recomputed whole, or but for chosen operations.
Names are those of transformers' Llama, so that its blueprint fits.

Source: pytorch/torchtitan, models/llama3/model and infra/parallelize.py, December 2024 and October
2025 (`_save_list`: every second product, attention, reduce-scatters).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshplan.memory.decoder.blocks import enter, leave
from meshplan.memory.decoder.common import BlockContext
from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.log.events import Term
from meshplan.memory.tape.ops import TapeBuilder
from meshplan.memory.tape.tape import Grad, Tape, TapeOp

_BF16: Final = 2
_FP32: Final = 4
_ID: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a rank trains.

    Args:
        batch: Sequences of a microbatch.
        tokens: Of one sequence, that this rank has.
        tp: Ranks that heads and feed-forward are cut over; sequences between them likewise.
        recompute: "none", "full", "ops" or "second" (every second block, whole).
        is_compiled: Whether each block is compiled: element-wise operations are fused, and what
            backward does not need is not kept.
        cuts_loss: Whether logits stay cut over the vocabulary.
        chunks: Pieces that logits and loss are computed in, 1 for none.
        holds_logits: Whether the loop holds the logits, in fp32, through backward.
        casts_logits: Whether the loss is of logits in fp32.
        fuses_loss: Whether cast and loss are one kernel, which keeps the logits alone.
        norms_in_fp32: Whether norms are written out, operation by operation, in fp32.
    """

    batch: int
    tokens: int
    tp: int = 1
    recompute: str = "none"
    is_compiled: bool = False
    cuts_loss: bool = True
    chunks: int = 1
    holds_logits: bool = False
    casts_logits: bool = True
    fuses_loss: bool = False
    norms_in_fp32: bool = False


def tape_of(shape: Shape, how: Training) -> Tape:
    """One microbatch."""
    tape = Tape()
    w = TapeBuilder(tape, _BF16, _BF16, is_cuda=True)
    tokens, hidden, tp = how.batch * how.tokens, shape.hidden, how.tp
    ids, targets = tape.value(tokens * _ID), tape.value(tokens * _ID)
    angles = tape.value(how.tokens * shape.head_dim * _FP32)
    tape.before |= {ids: Term.INPUTS, targets: Term.INPUTS, angles: Term.BUFFERS}
    part = BlockContext(tp=tp, is_sequence=True, cos=angles)
    x = w.at("model").embedding(ids, shape.vocab // tp, hidden, "embed_tokens")
    x = w.reduce_scatter(x, tp)
    for number in range(shape.layers):
        start, fqn = len(tape.rows), f"model.layers.{number}"
        x = _block(w.at(fqn), shape, x, part, how)
        tape.units.append((fqn, start, len(tape.rows)))
        if how.recompute in ("full", "ops") or (how.recompute == "second" and not number % 2):
            w.recomputed(start, keeps_chosen=how.recompute == "ops")
    normed = _norm(w.at("model"), x, hidden, "norm", how)
    w.touch(x)
    _head(w, shape, how, w.gather(normed, tp), targets)
    return tape


def _head(w: TapeBuilder, shape: Shape, how: Training, x: int, targets: int) -> None:
    """Logits and loss, chunk by chunk."""
    tape, size = w.tape, w.size(x) // how.chunks
    name = "model.embed_tokens" if shape.tied else "lm_head"
    pieces = [x] if how.chunks == 1 else [tape.value(size, of=x) for _ in range(how.chunks)]
    if how.chunks > 1:
        tape.add(TapeOp("chunk", w.module, (x,), tuple(pieces), grads=(Grad(x, w.size(x)),)))
    logits = []
    for piece in pieces:
        out = w.linear(piece, shape.hidden, shape.vocab // how.tp, name)
        logits.append(out if how.cuts_loss else w.gather(out, how.tp))
    tape.loss_start = len(tape.rows)
    losses = [_loss(w, each, targets, how) for each in logits]
    if len(losses) > 1:
        w.row("sum", tuple(losses), _FP32, grads=tuple(Grad(each, 0) for each in losses))
    w.touch(*logits)


def _loss(w: TapeBuilder, logits: int, targets: int, how: Training) -> int:
    if not how.fuses_loss:
        return w.cross_entropy(
            logits, targets, _BF16, holds=how.holds_logits, casts=how.casts_logits
        )
    grads = (Grad(logits, w.size(logits)),)
    return w.row("cross_entropy", (logits, targets), _FP32, keeps=(logits, targets), grads=grads)


def _norm(w: TapeBuilder, x: int, width: int, name: str, how: Training) -> int:
    """Written out it keeps the input in fp32 and what is scaled, and not the input."""
    if not how.norms_in_fp32:
        return w.rms_norm(x, width, name)
    at = w.at(f"{w.module}.{name}")
    wide = at.cast(x, _FP32 / _BF16)
    normed = at.row(
        "rsqrt_mul",
        (wide,),
        w.size(wide),
        keeps=(wide,),
        workspace_backward_bytes=w.size(wide),
        grads=(Grad(wide, w.size(wide)),),
    )
    narrow = at.cast(normed, _BF16 / _FP32)
    return at.row("mul", (narrow,), w.size(x), keeps=(narrow,), grads=(Grad(narrow, w.size(x)),),
                  parameters=((f"{at.module}.weight", width * _BF16),))  # fmt: skip


def _block(w: TapeBuilder, shape: Shape, x: int, part: BlockContext, how: Training) -> int:
    first = x
    normed = enter(w, _norm(w, x, shape.hidden, "input_layernorm", how), part)
    out = leave(w, _attention(w.at(f"{w.module}.self_attn"), shape, normed, part, how), part)
    w.touch(normed)
    x = w.add(first, out)
    w.touch(out)
    normed = enter(w, _norm(w, x, shape.hidden, "post_attention_layernorm", how), part)
    out = leave(w, _feed_forward(w.at(f"{w.module}.mlp"), shape, normed, part, how), part)
    w.touch(normed)
    y = w.add(x, out)
    w.touch(out, first, x)
    return y


def _attention(w: TapeBuilder, shape: Shape, x: int, part: BlockContext, how: Training) -> int:
    q_width, kv_width = shape.q_width // part.tp, shape.kv_width // part.tp
    q = w.linear(x, shape.hidden, q_width, "q_proj", is_kept=True, bias=shape.qkv_bias)
    k = w.linear(x, shape.hidden, kv_width, "k_proj", bias=shape.qkv_bias)
    v = w.linear(x, shape.hidden, kv_width, "v_proj", is_kept=True, bias=shape.qkv_bias)
    turned = [_rotate(w, each, part, how) for each in (q, k)]
    w.touch(q, k)
    group = shape.heads // shape.kv_heads
    keys, values = (_repeat(w, each, group) for each in (turned[1], v))
    # The kernel sums gradients of queries in fp32.
    scratch = w.size(turned[0]) * _FP32 // _BF16
    out = w.attention(
        turned[0],
        keys,
        values,
        shape.heads // part.tp,
        shape.head_dim,
        workspace_backward_bytes=scratch,
    )
    out = w.linear(out, q_width, shape.hidden, "o_proj")
    w.touch(*turned, keys, values, v)
    return out


def _rotate(w: TapeBuilder, x: int, part: BlockContext, how: Training) -> int:
    if how.is_compiled:
        return w.times(x, part.cos)
    wide = w.cast(x, _FP32 / _BF16)
    turned = w.times(wide, part.cos)
    out = w.cast(turned, _BF16 / _FP32)
    w.touch(wide, turned)
    return out


def _repeat(w: TapeBuilder, x: int, group: int) -> int:
    if group == 1:
        return x
    return w.row("repeat_kv", (x,), w.size(x) * group, grads=(Grad(x, w.size(x)),))


def _feed_forward(w: TapeBuilder, shape: Shape, x: int, part: BlockContext, how: Training) -> int:
    mlp = shape.mlp // part.tp
    gate = w.linear(x, shape.hidden, mlp, "gate_proj", is_kept=True)
    if how.is_compiled:
        up = w.linear(x, shape.hidden, mlp, "up_proj")
        size = w.size(gate)
        product = w.row(
            "silu_mul", (gate, up), size, keeps=(gate, up), grads=(Grad(gate, size), Grad(up, size))
        )
    else:
        bent = w.unary("silu", gate)
        product = w.mul(bent, w.linear(x, shape.hidden, mlp, "up_proj"))
    # Compiled, nothing keeps what no backward reads.
    return w.linear(product, mlp, shape.hidden, "down_proj", is_kept=not how.is_compiled)
