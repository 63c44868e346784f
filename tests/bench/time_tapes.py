"""Tapes of models that published runs trained and no room of meshplan describes.

Source: NVIDIA/Megatron-LM v2.6 to v3.0, megatron/model/transformer.py and fused_softmax.py:
attention with its scores written out, bias and GELU, and bias, dropout and sum in one kernel each.
"""

from __future__ import annotations

from typing import Final

from meshplan.memory.decoder.blocks import enter, leave
from meshplan.memory.decoder.common import BlockContext
from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.log.events import Term
from meshplan.memory.tape.ops import TapeBuilder
from meshplan.memory.tape.tape import Grad, Tape, TapeOp

CORE: Final = frozenset({"bmm", "scale_mask_softmax", "core_dropout"})
"""What selective recomputation of Megatron runs again. Source: Korthikanti 2022, section 5."""
_ID: Final = 8
_FP32: Final = 4
_HALF: Final = 2


def megatron_tape(shape: Shape, *, batch: int, seq_len: int, tp: int, is_sequence: bool) -> Tape:
    """One microbatch of a rank of tp, loss included."""
    tape = Tape()
    w = TapeBuilder(tape, _HALF, _HALF, is_cuda=True)
    tokens, hidden = batch * seq_len, shape.hidden
    ids = tape.value(tokens * _ID)
    tape.before[ids] = Term.INPUTS
    part = BlockContext(tp=tp, is_sequence=is_sequence and tp > 1)
    x = w.embedding(ids, shape.vocab // tp, hidden, "embedding")
    x = leave(w, x, part)
    x = _dropout(w, w.shift(x))
    for number in range(shape.layers):
        start, name = len(tape.rows), f"layers.{number}"
        x = _block(w.at(name), shape, x, part, seq_len)
        tape.units.append((name, start, len(tape.rows)))
    x = enter(w, w.layer_norm(x, hidden, "final_norm"), part)
    logits = w.linear(x, hidden, shape.vocab // tp, "embedding" if shape.tied else "head")
    tape.loss_start = len(tape.rows)
    for count in (1, 1, 1) if tp > 1 else ():
        out = tape.value(count * tokens * _FP32)
        tape.add(TapeOp("all_reduce", "", (logits,), (out,), is_sent=True))
    w.cross_entropy(logits, ids, _HALF)
    return tape


def _dropout(w: TapeBuilder, x: int) -> int:
    return w.dropout(x, 0.1)


def _block(w: TapeBuilder, shape: Shape, x: int, part: BlockContext, seq_len: int) -> int:
    hidden, tp = shape.hidden, part.tp
    normed = enter(w, w.layer_norm(x, hidden, "ln1"), part)
    width = shape.q_width // tp
    fused = w.linear(normed, hidden, 3 * width, "qkv", bias=True)
    size = w.size(fused) // 3
    q, k, v = w.chunk(fused, size, size, size)
    context = _core(w, shape, (q, k, v), shape.heads // tp, seq_len)
    out = leave(w, w.linear(context, width, hidden, "dense"), part)
    x = _add(w, out, x)
    normed = enter(w, w.layer_norm(x, hidden, "ln2"), part)
    inner = w.linear(normed, hidden, shape.mlp // tp, "up")
    bent = w.unary("bias_gelu", inner)
    out = leave(w, w.linear(bent, shape.mlp // tp, hidden, "down"), part)
    return _add(w, out, x)


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
