"""Build tapes of a decoder that is sharded over tp, for the cost model.

The code is that of the memory estimate (`memory.decoder`). Without a plan that states which modules
tp shards, these are the modules that `tp_plan: auto` would shard: attention, feed-forward and, if
tp divides its size, the vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.layout.styles import LOGITS, STYLES
from meshplan.memory.decoder.microbatch import MicrobatchSpec, tape_of
from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.decoder.tp_ops import TpPlanOnTape
from meshplan.memory.tape.tape import Tape

_VOCAB: Final = "vocab"


def decoder_tape(shape: Shape, run: MicrobatchSpec, *, cuts_loss: bool = False) -> Tape:
    """Return the tape of a microbatch on one rank of tp.

    Args:
        shape: Sizes of the decoder.
        run: Settings of the microbatch; its `seq_len` is the length of unsharded sequences.
        cuts_loss: If True, logits stay sharded over the vocabulary (`loss_parallel`).

    Raises:
        PlanError: `run.is_sequence` is set, so activations would be sharded along the sequence.
    """
    if run.tp == 1:
        return tape_of(shape, run)
    if run.is_sequence:
        what = "sequence_parallel does not run with transformers' own code"
        raise PlanError(Problem(what, fix="leave sequence_parallel out"))
    styles = dict(shape.styles)
    if shape.vocab % run.tp:
        styles = {fqn: style for fqn, style in styles.items() if style.name != _VOCAB}
    elif cuts_loss:
        head = STYLES[_VOCAB, "linear"]
        styles = {fqn: LOGITS if style == head else style for fqn, style in styles.items()}
    return tape_of(shape, replace(run, styled=TpPlanOnTape(run.tp, styles)))
