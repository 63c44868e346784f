"""Cross-entropy of logits that are sharded over the vocabulary, as ops.

Source: `runtime.apply.loss.vocab_parallel_loss`; the ops follow its lines.
"""

from __future__ import annotations

from typing import Final

from meshplan.memory.tape.op import Grad, TapeOp
from meshplan.memory.tape.ops import TapeBuilder

_FP32: Final = 4
_ID: Final = 8


def cross_entropy_of_parts(w: TapeBuilder, logits: int, ids: int) -> int:
    """Append the mean cross-entropy of sharded logits, which are cast to float32 first.

    Args:
        w: The builder to append to.
        logits: This rank's shard of the logits.
        ids: Token ids to predict.

    Returns:
        The loss.
    """
    tape, number = w.tape, w.tokens * _FP32
    wide = w.cast(logits, _FP32 / w.element_bytes)
    size = w.size(wide)
    is_kept = w.row("ne", (ids,), w.tokens)
    target = w.row("where", (is_kept, ids), w.tokens * _ID)
    highest = w.row("amax", (wide,), number)
    powers = w.row("exp", (w.row("sub", (wide, highest), size),), size)
    start = w.row("sub", (target,), w.tokens * _ID)
    is_here = w.row("bitwise_and", (start,), w.tokens, workspace_bytes=2 * w.tokens)
    index = w.row("where", (is_here, start), w.tokens * _ID)
    hit = w.row("where", (index,), number, workspace_bytes=2 * number)
    sums = w.row("stack", (hit,), 3 * number, workspace_bytes=2 * number)
    probabilities = w.row("div", (powers,), size)
    losses = tape.value(number)
    tape.add(
        TapeOp("cross_entropy", w.module, (probabilities, index, is_here), (losses,),
            (probabilities, index, is_here), (Grad(wide, size),), workspace_bytes=2 * number,
            workspace_backward_bytes=2 * number)
    )  # fmt: skip
    w.touch(highest, powers, sums, target)
    chosen = w.row("where", (is_kept, losses), number, keeps=(is_kept,),
                   grads=(Grad(losses, number),))  # fmt: skip
    total = w.row("sum", (chosen,), _FP32, grads=(Grad(chosen, 0),))
    count = w.row("sum", (is_kept,), _ID)
    loss = w.row("div", (total, count), _FP32, keeps=(count,), grads=(Grad(total, _FP32),))
    w.touch(losses, wide)
    return loss
