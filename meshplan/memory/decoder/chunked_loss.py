"""The output head and cross-entropy over one chunk of tokens after the other, as ops.

Source: `runtime.apply.loss.chunked_loss`; the ops follow its lines.
"""

from __future__ import annotations

from typing import Final

from meshplan.memory.tape.op import Grad, TapeOp
from meshplan.memory.tape.ops import TapeBuilder

_FP32: Final = 4
_ID: Final = 8


def chunked_cross_entropy(
    w: TapeBuilder, x: int, targets: int, *, chunks: int, hidden: int, vocab: int, weight: str
) -> int:
    """Append head and mean cross-entropy over all tokens, and return the loss.

    Args:
        w: The builder to append to, at the module of the head.
        x: Input of the head.
        targets: Token ids to predict.
        chunks: Number of chunks, as the plan states it.
        hidden: Features of the head's input.
        vocab: Rows of the head's weight.
        weight: Fqn of the head's weight.
    """
    tape, tokens = w.tape, w.tokens
    size = max(1, -(-tokens // chunks))
    weight_bytes = vocab * hidden * w.parameter_bytes
    is_kept = w.row("ne", (targets,), tokens)
    scale = w.row("sum", (is_kept,), _FP32)
    target = w.row("where", (is_kept, targets), tokens * _ID)
    dx = w.row("empty", (), w.size(x))
    total = w.row("zeros", (), _FP32)
    dw = -1
    for start in range(0, tokens, size):
        dw = _chunk(w, x, (is_kept, scale, target, dx, dw, total), min(size, tokens - start),
                    hidden, vocab, weight_bytes)  # fmt: skip
    w.touch(is_kept, scale, target)
    loss = tape.value(_FP32)
    # Forward has already computed the gradients of x and of the weight; backward returns them.
    tape.grad_from |= {(len(tape.rows), x): dx, (len(tape.rows), weight): dw}
    tape.add(
        TapeOp("chunked_cross_entropy", w.module, (x, total), (loss,), (dx, dw),
            (Grad(x, w.size(x)),), ((weight, weight_bytes),))
    )  # fmt: skip
    w.touch(dx, dw)
    return loss


def _chunk(
    w: TapeBuilder,
    x: int,
    in_frame: tuple[int, int, int, int, int, int],
    tokens: int,
    hidden: int,
    vocab: int,
    weight_bytes: int,
) -> int:
    """Append the logits, losses and gradients of one chunk of tokens.

    Args:
        w: The builder to append to.
        x: Input of the head for all tokens.
        in_frame: (mask of the tokens that count, scale of the mean, targets, gradient of `x`,
            gradient of the weight or -1, sum of losses), for all tokens.
        tokens: Number of tokens of the chunk.
        hidden: Features of the head's input.
        vocab: Rows of the head's weight.
        weight_bytes: Bytes of the head's weight.

    Returns:
        The gradient of the weight, accumulated up to this chunk.
    """
    is_kept, scale, target, dx, dw, total = in_frame
    number, flops = tokens * _FP32, 2.0 * tokens * hidden * vocab
    tape, part = w.tape, tokens * hidden * w.element_bytes
    logits = w.row("mm", (tape.value(part, of=x),), tokens * vocab * w.element_bytes, flops=flops,
                   weight_bytes=weight_bytes)  # fmt: skip
    z = _as(w, logits, tokens * vocab * _FP32)
    highest = w.row("amax_of_chunk", (z,), number)
    w.write("sub_", z, highest)
    hit = w.row("gather", (target,), number)
    losses = w.row("mul", (hit,), number)
    w.write("exp_", z)
    sums = w.row("sum", (z,), number)
    w.write("add_", losses, workspace_bytes=number)
    w.write("add_", total, is_kept, workspace_bytes=number + _FP32)
    factor = w.row("mul", (is_kept, scale), number)
    w.write("mul_", z, workspace_bytes=number)
    w.write("scatter_add_", factor, workspace_bytes=number)
    gradient = _as(w, z, tokens * vocab * w.element_bytes)
    w.touch(z, highest, hit, losses, sums, factor)
    tape.add(TapeOp("mm", w.module, (gradient,), (tape.value(part, of=dx),), flops=flops,
                 weight_bytes=weight_bytes))  # fmt: skip
    reads = (gradient, tape.value(part, of=x))
    if dw < 0:
        return w.row("mm", reads, weight_bytes, flops=flops)
    w.write("addmm_", *reads, flops=flops, weight_bytes=2 * weight_bytes)
    w.touch(dw)
    return dw


def _as(w: TapeBuilder, x: int, nbytes: int) -> int:
    """Append a cast of `x` to `nbytes` bytes, without a gradient; return `x` if sizes are equal."""
    return x if w.size(x) == nbytes else w.row("_to_copy", (x,), nbytes)
