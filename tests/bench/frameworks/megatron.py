"""Megatron-LM's GPT, operation by operation, whole or one stage of it.

Attention has its scores written out; bias and GELU, and bias, dropout and sum, are one kernel
each.

Source: NVIDIA/Megatron-LM v2.6 to v3.0, megatron/model/transformer.py, fused_softmax.py,
gpt_model.py and mpu/cross_entropy.py.
"""

from __future__ import annotations

from typing import Final

from meshplan.memory.decoder.blocks import enter, leave
from meshplan.memory.decoder.common import BlockContext
from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.log.events import Term
from meshplan.memory.tape.ops import TapeBuilder
from meshplan.memory.tape.tape import Grad, Tape, TapeOp
from tests.bench.frameworks.nanotron import Stage

CORE: Final = frozenset({"bmm", "scale_mask_softmax", "core_dropout"})
"""What selective recomputation of Megatron runs again. Source: Korthikanti 2022, section 5."""
_ID: Final = 8
_FP32: Final = 4
_HALF: Final = 2


def megatron_tape(shape: Shape, *, batch: int, seq_len: int, tp: int, is_sequence: bool) -> Tape:
    """One microbatch of a rank of tp, loss included."""
    w, ids, part = _begin(batch, seq_len, tp, is_sequence=is_sequence)
    x = _embed(w, shape, ids, part)
    for number in range(shape.layers):
        x = _block(w, shape, x, part, seq_len, number)
    logits = _logits(w, shape, x, part)
    w.tape.loss_start = len(w.tape.rows)
    _reduce(w, logits, batch * seq_len, tp)
    w.cross_entropy(logits, ids, _HALF)
    return w.tape


def stage_tape(
    shape: Shape, stage: Stage, *, batch: int, seq_len: int, tp: int, is_sequence: bool,
    recompute: str, holds_logits: bool,
) -> Tape:  # fmt: skip
    """One microbatch of one stage, with the loss as Megatron computes it.

    Args:
        recompute: "none", "full" (each block) or "core" (scores and softmax of attention).
        holds_logits: The last stage holds its logits, in float32, until its backward is done.
    """
    w, ids, part = _begin(batch, seq_len, tp, is_sequence=is_sequence)
    if stage.first:
        x = _embed(w, shape, ids, part)
    else:
        x = w.row(
            "recv",
            (ids,),
            batch * seq_len * shape.hidden * _HALF // (tp if part.is_sequence else 1),
        )
    for number in range(stage.layers):
        start = len(w.tape.rows)
        x = _block(w, shape, x, part, seq_len, number, recomputes_core=recompute == "core")
        if recompute == "full":
            w.recomputed(start)
    if not stage.last:
        w.tape.loss_start = len(w.tape.rows)
        w.row("send", (x,), 0, keeps=(x,), grads=(Grad(x, w.size(x)),))
        return w.tape
    wide = w.cast(_logits(w, shape, x, part), _FP32 / _HALF)
    w.tape.loss_start = len(w.tape.rows)
    # Its backward turns the probabilities into the gradient where they lie.
    softmax = w.row("vocab_parallel_cross_entropy", (wide,), w.size(wide), grads=(Grad(wide, 0),))
    w.row("loss", (softmax, ids), _FP32, keeps=(softmax,), grads=(Grad(softmax, w.size(wide)),))
    if holds_logits:
        w.tape.hold(wide, outlives=True)
    w.touch(wide)
    return w.tape


def _begin(
    batch: int, seq_len: int, tp: int, *, is_sequence: bool
) -> tuple[TapeBuilder, int, BlockContext]:
    """(builder, ids, how tp parts a block)."""
    tape = Tape()
    w = TapeBuilder(tape, _HALF, _HALF, is_cuda=True)
    ids = tape.value(batch * seq_len * _ID)
    tape.before[ids] = Term.INPUTS
    return w, ids, BlockContext(tp=tp, is_sequence=is_sequence and tp > 1)


def _embed(w: TapeBuilder, shape: Shape, ids: int, part: BlockContext) -> int:
    x = w.embedding(ids, shape.vocab // part.tp, shape.hidden, "embedding")
    return _dropout(w, w.shift(leave(w, x, part)))


def _logits(w: TapeBuilder, shape: Shape, x: int, part: BlockContext) -> int:
    x = enter(w, w.layer_norm(x, shape.hidden, "final_norm"), part)
    name = "embedding" if shape.tied else "head"
    return w.linear(x, shape.hidden, shape.vocab // part.tp, name)


def _reduce(w: TapeBuilder, logits: int, tokens: int, tp: int) -> None:
    """The three all-reduces of the loss of logits whose vocabulary tp shards."""
    for count in (1, 1, 1) if tp > 1 else ():
        out = w.tape.value(count * tokens * _FP32)
        w.tape.add(TapeOp("all_reduce", "", (logits,), (out,), is_sent=True))


def _dropout(w: TapeBuilder, x: int) -> int:
    return w.dropout(x, 0.1)


def _block(
    w: TapeBuilder, shape: Shape, x: int, part: BlockContext, seq_len: int, number: int, *,
    recomputes_core: bool = False,
) -> int:  # fmt: skip
    hidden, tp, start, name = shape.hidden, part.tp, len(w.tape.rows), f"layers.{number}"
    w = w.at(name)
    normed = enter(w, w.layer_norm(x, hidden, "ln1"), part)
    width = shape.q_width // tp
    fused = w.linear(normed, hidden, 3 * width, "qkv", bias=True)
    size = w.size(fused) // 3
    q, k, v = w.chunk(fused, size, size, size)
    core = len(w.tape.rows)
    context = _core(w, shape, (q, k, v), shape.heads // tp, seq_len)
    if recomputes_core:
        w.recomputed(core)
    out = leave(w, w.linear(context, width, hidden, "dense"), part)
    x = _add(w, out, x)
    normed = enter(w, w.layer_norm(x, hidden, "ln2"), part)
    inner = w.linear(normed, hidden, shape.mlp // tp, "up")
    bent = w.unary("bias_gelu", inner)
    out = leave(w, w.linear(bent, shape.mlp // tp, hidden, "down"), part)
    x = _add(w, out, x)
    w.tape.units.append((name, start, len(w.tape.rows)))
    return x


def _add(w: TapeBuilder, out: int, x: int) -> int:
    """Bias, dropout and the residual in one kernel."""
    size = w.size(x)
    mask, total = w.tape.value(size // _HALF), w.tape.value(size)
    w.tape.add(
        TapeOp("bias_dropout_add", w.module, (out, x), (mask, total), (mask,),
            (Grad(out, size), Grad(x, 0)))
    )  # fmt: skip
    return total


def _core(w: TapeBuilder, shape: Shape, qkv: tuple[int, ...], heads: int, seq_len: int) -> int:
    """Scores, softmax, dropout, and the sum of values."""
    q, k, v = qkv
    samples = w.size(q) // (seq_len * heads * shape.head_dim * _HALF)
    size = samples * heads * seq_len**2 * _HALF
    grads = tuple(Grad(each, w.size(each)) for each in (q, k))
    scores = w.row("bmm", (q, k), size, keeps=(q, k), grads=grads)
    probabilities = w.unary("scale_mask_softmax", scores, keeps_out=True)
    mask, dropped = w.tape.value(size // _HALF), w.tape.value(size)
    w.tape.add(
        TapeOp("core_dropout", w.module, (probabilities,), (mask, dropped), (mask,),
            (Grad(probabilities, size),))
    )  # fmt: skip
    grads = (Grad(dropped, size), Grad(v, w.size(v)))
    out = w.row("bmm", (dropped, v), w.size(v), keeps=(dropped, v), grads=grads)
    return w.scale(out, "contiguous")
