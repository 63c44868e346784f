"""Tapes of a decoder that is cut over tp, for what a step of it costs.

Without tp the tape is memory's own. With it, the table of words and the head are cut over the
vocabulary, as `tp_plan: auto` cuts them, where its rows divide.
"""

from __future__ import annotations

from typing import Final

from meshplan.memory.analytic import Run, tape_of
from meshplan.memory.blocks import Part, gpt2_block, llama_block, rms_norm
from meshplan.memory.log import Term
from meshplan.memory.rows import Writer
from meshplan.memory.shape import Shape
from meshplan.memory.tape import Grad, Row, Tape

GATHER_ONLY: Final = "all_gather_logits"
"""Gathered by ranks that go on with the same: the gradient is cut, not summed."""

_ID: Final = 8
_FP32: Final = 4
_SUMS: Final = 3


def decoder_tape(shape: Shape, run: Run, *, cuts_loss: bool = False) -> Tape:
    """A microbatch of one rank of tp.

    Args:
        run: Its `seq_len` is that of whole sequences.
        cuts_loss: Whether logits stay cut over the vocabulary (`loss_parallel`).
    """
    if run.tp == 1:
        return tape_of(shape, run)
    tape = Tape()
    w = Writer(tape, run.element_bytes, run.element_bytes, run.is_cuda)
    tokens = run.batch * run.seq_len
    ids, targets = tape.value(tokens * _ID), tape.value(tokens * _ID)
    tape.before |= {ids: Term.INPUTS, targets: Term.INPUTS}
    is_llama = not shape.positions
    body = w.at("model" if is_llama else "transformer")
    table = f"{body.module}.{'embed_tokens' if is_llama else 'wte'}"
    x = _words(w, shape, run, ids, table)
    cos = sin = -1
    if is_llama:
        size = run.seq_len * shape.head_dim * run.element_bytes
        at = w.at(f"{body.module}.rotary_emb")
        cos, sin = at.row("cos", (ids,), size), at.row("sin", (ids,), size)
    else:
        x = _places(body, shape, run, x)
    part = Part(tp=run.tp, is_sequence=run.is_sequence, cos=cos, sin=sin, caches=run.caches)
    block, blocks = (llama_block, "layers") if is_llama else (gpt2_block, "h")
    for number in range(shape.layers):
        start, fqn = len(tape.rows), f"{body.module}.{blocks}.{number}"
        x = block(w.at(fqn), shape, x, part)
        tape.units.append((fqn, start, len(tape.rows)))
    if is_llama:
        w.touch(cos, sin)
        x = rms_norm(body, x, shape.hidden, "norm")
    else:
        x = body.layer_norm(x, shape.hidden, "ln_f")
    _head(w, shape, run, x, targets, table if shape.tied else "lm_head", cuts_loss)
    return tape


def is_vocab_cut(shape: Shape, tp: int) -> bool:
    """Whether tp can cut the vocabulary into equal parts."""
    return tp > 1 and shape.vocab % tp == 0


def _words(w: Writer, shape: Shape, run: Run, ids: int, table: str) -> int:
    """Looked up in a part of the table, and summed over ranks."""
    if not is_vocab_cut(shape, run.tp):
        x = w.embedding(ids, shape.vocab, shape.hidden, table)
        return _part_of(w, x, run.tp) if run.is_sequence else x
    x = w.embedding(ids, shape.vocab // run.tp, shape.hidden, table)
    return w.reduce_scatter(x, run.tp) if run.is_sequence else w.all_reduce(x, run.tp)


def _part_of(w: Writer, x: int, ranks: int) -> int:
    """This rank's tokens of what every rank has; its gradient is gathered."""
    size = w.size(x)
    return w.row("split_tokens", (x,), size // ranks, grads=(Grad(x, size),), is_sent=True)


def _places(body: Writer, shape: Shape, run: Run, words: int) -> int:
    """Learned positions and a dropout."""
    size, tokens = body.size(words), run.seq_len // (run.tp if run.is_sequence else 1)
    at = body.at(f"{body.module}.wpe")
    positions = at.row("arange", (), tokens * _ID)
    places = body.embedding(positions, shape.positions, shape.hidden, "wpe")
    back = body.size(places) if run.batch > 1 else 0
    total = body.row("add", (words, places), size, grads=(Grad(words, 0), Grad(places, back)))
    return body.at(f"{body.module}.drop").dropout(total, shape.dropout)


def _head(
    w: Writer, shape: Shape, run: Run, x: int, targets: int, name: str, cuts_loss: bool
) -> None:
    """Logits and loss."""
    tape, is_cut = w.tape, is_vocab_cut(shape, run.tp)
    whole = w.gather(x, run.tp) if run.is_sequence else x
    if is_cut and not run.is_sequence:
        whole = w.enter(x, run.tp)
    logits = w.linear(whole, shape.hidden, shape.vocab // (run.tp if is_cut else 1), name)
    if is_cut and not cuts_loss:
        size = w.size(logits)
        logits = w.row(
            GATHER_ONLY, (logits,), size * run.tp, grads=(Grad(logits, size),), is_sent=True
        )
    tape.loss_start = len(tape.rows)
    if is_cut and cuts_loss:
        one = run.batch * run.seq_len * _FP32
        for size in (one, _SUMS * one):
            tape.add(Row("all_reduce", "", (logits,), (tape.value(size),), is_sent=True))
    w.cross_entropy(logits, targets, run.element_bytes)
    tape.hold(logits)
