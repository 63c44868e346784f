"""Compute the `MicrobatchTrace` of a model from its sizes alone, without building the model.

The rules of the wrappers (`memory.replay`) apply to such a trace as to that of a real model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.layout.styles import LOGITS
from meshplan.memory.decoder.blocks import gpt2_block, head_norm, llama_block
from meshplan.memory.decoder.chunked_loss import chunked_cross_entropy
from meshplan.memory.decoder.common import BlockContext
from meshplan.memory.decoder.cp_all_gather import SequenceChunks
from meshplan.memory.decoder.experts import ONE_RANK, Spread
from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.decoder.sp_boundary import cut, end
from meshplan.memory.decoder.tp_ops import Entered, TpPlanOnTape, look_up, project
from meshplan.memory.log.events import COMPILED_OUTPUT, Term
from meshplan.memory.tape.op import TapeOp
from meshplan.memory.tape.ops import TapeBuilder
from meshplan.memory.tape.tape import Grad, Tape
from meshplan.spec.spec import PRODUCTS

_ID: Final = 8
_FP32: Final = 4
_CHOSEN: Final = frozenset(PRODUCTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchSpec:
    """Settings with which one rank computes a microbatch.

    Args:
        batch: Number of sequences of the microbatch.
        seq_len: Tokens of one sequence on this rank, a share of the sequence under cp.
        cp: Number of context-parallel ranks over which a sequence is sharded.
        element_bytes: Bytes of one element in the compute dtype.
        tp: Number of ranks over which `Shape.styles` shard; used only if `styled` is None.
        is_sequence: If True, activations between styled modules are sharded along the sequence.
            There are no rules for that, and `tape_of` raises a `PlanError`, because transformers'
            own code does not compute the same from a shard.
        caches: If True, keys and values are copied into a cache, as transformers does unless
            `use_cache` is off.
        recomputed: Numbers of the blocks that backward recomputes.
        keeps_chosen: If True, recomputed blocks save the outputs of matrix products and attention.
        is_cuda: If True, CUDA kernels run; otherwise CPU kernels.
        in_place: If True, several gradients of one value are added up in place; see `tape.play`.
        styled: Modules that tp shards, with their styles; None for the styles of `Shape.styles`.
        is_fused: If True, a fused kernel computes attention.
        relaid_at_once: Fqns of parameters whose gradients no unit reduces.
        spread: Distribution of experts over ranks.
        gathered: Chunks of the sequence that this rank has, if it all-gathers keys and values;
            otherwise None.
        saves: By number of a block: the words of `save:` whose ops the recomputed block saves,
            instead of the default that `keeps_chosen` selects.
        loss_chunks: Number of chunks of tokens over which head and loss are computed one by one.
        offloaded: Numbers of the blocks whose saved activations are kept in host memory.
        is_compiled: If True, blocks are compiled: the ops that make their outputs are named
            `COMPILED_OUTPUT`, because a compiler cannot fuse these tensors away.
        is_chain: If True, all blocks consist of equal ops: the ops that shard the sequence before
            the first block and gather it after the last one do not belong to the units of these
            blocks, although in a real step they do.
    """

    batch: int
    seq_len: int
    cp: int = 1
    element_bytes: int = 4
    tp: int = 1
    is_sequence: bool = False
    caches: bool = False
    recomputed: frozenset[int] = frozenset()
    keeps_chosen: bool = False
    is_cuda: bool = True
    in_place: bool = True
    styled: TpPlanOnTape | None = None
    is_fused: bool = True
    relaid_at_once: frozenset[str] = frozenset()
    spread: Spread = ONE_RANK
    gathered: SequenceChunks | None = None
    saves: Mapping[int, frozenset[str]] = field(default_factory=dict)
    loss_chunks: int = 1
    offloaded: frozenset[int] = frozenset()
    is_compiled: bool = False
    is_chain: bool = False

    def saved(self, number: int) -> frozenset[str]:
        """Return the words of `save:` whose ops the recomputed block with this number saves."""
        return self.saves.get(number, _CHOSEN if self.keeps_chosen else frozenset())


def tape_of(shape: Shape, run: MicrobatchSpec, *, only: Collection[int] | None = None) -> Tape:
    """Return the tape of a causal language model of transformers, loss included.

    Args:
        shape: Sizes of the model.
        run: Settings of the microbatch.
        only: Numbers of the blocks to write in full, which must include the first and the last.
            Each other block is a single op that makes the output. None for all blocks.

    Raises:
        PlanError: There are no rules for a setting of `run`, or tp does not divide a size.
    """
    if run.is_sequence:
        what = "transformers' own code does not run with sequence_parallel"
        raise PlanError(Problem(what, fix="remove sequence_parallel from the plan"))
    tape = Tape()
    tokens = run.batch * run.seq_len
    size = run.element_bytes
    w = TapeBuilder(
        tape, size, size, run.is_cuda, tokens=tokens, samples=run.batch, in_place=run.in_place
    )
    ids, targets = tape.value(tokens * _ID), tape.value(tokens * _ID)
    tape.before |= {ids: Term.INPUTS, targets: Term.INPUTS}
    is_llama = not shape.positions
    body = w.at("model" if is_llama else "transformer")
    begin = _rotary if is_llama else _learned
    x, part, in_frame = begin(body, shape, run, ids)
    block, blocks = (llama_block, "layers") if is_llama else (gpt2_block, "h")
    for number in range(shape.layers):
        start, fqn = len(tape.rows), f"{body.module}.{blocks}.{number}"
        if only is not None and number not in only:
            x = w.at(fqn).row("block", (x,), w.size(x), grads=(Grad(x, w.size(x)),))
            tape.units.append((fqn, start, len(tape.rows)))
            continue
        saved, is_recomputed = run.saved(number), number in run.recomputed
        embedded, on_host = x, number in run.offloaded
        if part.styled.has_stream and number == 0:
            x = cut(w.at(fqn), x, part.styled.tp)
            start = len(tape.rows) if run.is_chain else start
        entered, begun = x, len(tape.rows)
        at = replace(w.at(fqn), saves=saved or _CHOSEN, is_recomputed=is_recomputed)
        x = block(at, shape, x, part)
        if run.is_compiled:
            assert x in tape.rows[-1].makes
            tape.rows[-1] = tape.rows[-1]._replace(op=COMPILED_OUTPUT)
        if is_recomputed:
            w.recomputed(
                begun, keeps_chosen=bool(saved), given=part.given, on_host=on_host, enters=entered
            )
        elif on_host:
            w.offloaded(begun)
        if part.styled.has_stream and number == 0:
            w.touch(embedded)
        last_row = len(tape.rows)
        if part.styled.ends and number == shape.layers - 1:
            x = end(w.at(fqn), x, part.styled.tp)
            last_row = last_row if run.is_chain else len(tape.rows)
        tape.units.append((fqn, start, last_row))
    last = x
    if is_llama:
        x = head_norm(body, part, x, shape.hidden, "norm")
    else:
        x = body.layer_norm(x, shape.hidden, "ln_f")
    w.touch(last, *in_frame)
    tied = f"{body.module}.{'embed_tokens' if is_llama else 'wte'}.weight" if shape.tied else ""
    if run.loss_chunks > 1:
        tape.loss_start = len(tape.rows)
        chunked_cross_entropy(
            w.at("lm_head"), x, targets, chunks=run.loss_chunks, hidden=shape.hidden,
            vocab=shape.vocab, weight=tied or "lm_head.weight",
        )  # fmt: skip
        tape.hold(x)
        tape.relaid_at_once |= run.relaid_at_once
        return tape
    logits = project(
        w, part.styled, Entered(), x, shape.hidden, shape.vocab, "lm_head", weight=tied
    )
    logits = w.scale(logits, "div") if shape.scales else logits
    w.touch(x)  # The model's frame references x, even if the head has gathered a copy.
    if run.cp > 1:  # The call of the model references its inputs until it returns.
        w.touch(*part.given, *part.extra_inputs)
    tape.loss_start = len(tape.rows)
    if part.styled.of("lm_head") == LOGITS:
        cross_entropy_of_parts(w, logits, targets)
    else:
        w.cross_entropy(logits, targets, run.element_bytes)
    # The training loop references the logits until it has the loss.
    tape.hold(logits)
    tape.logits = tape.base[logits]
    tape.relaid_at_once |= run.relaid_at_once
    return tape


def _rotary(
    w: TapeBuilder, shape: Shape, run: MicrobatchSpec, ids: int
) -> tuple[int, BlockContext, tuple[int, ...]]:
    """Append the embedding, and the sines and cosines with which every block rotates.

    Returns:
        (hidden states, context of the blocks, values that the model's frame references).
    """
    frequencies = w.tape.value(2 * -(-shape.turned // 2) * _FP32)
    w.tape.before[frequencies] = Term.BUFFERS
    part = _part(shape, run)
    positions, extra_inputs = _given_positions(w, run)
    x = look_up(w, part.styled, ids, shape.vocab, shape.hidden, "embed_tokens")
    x = w.scale(x) if shape.scales else x
    if positions is None:
        positions = w.row("arange", (), run.seq_len * _ID)
    at, size = w.at(f"{w.module}.rotary_emb"), run.seq_len * shape.turned
    cos, sin = (at.row(name, (positions,), size * run.element_bytes) for name in ("cos", "sin"))
    part = replace(part, cos=cos, sin=sin, given=(positions,), extra_inputs=extra_inputs)
    in_frame: tuple[int, ...] = (positions, cos, sin, x)
    if shape.has_mask:
        in_frame = (*in_frame, w.row("bitwise_and", (), run.seq_len**2))
    return x, part, in_frame


def _learned(
    w: TapeBuilder, shape: Shape, run: MicrobatchSpec, ids: int
) -> tuple[int, BlockContext, tuple[int, ...]]:
    """Append the embeddings of tokens and of learned positions.

    The gradient of the embedded positions is summed over the batch.

    Returns:
        (hidden states, context of the blocks, values that the model's frame references).
    """
    part = _part(shape, run)
    positions, extra_inputs = _given_positions(w, run)
    words = look_up(w, part.styled, ids, shape.vocab, shape.hidden, "wte")
    if positions is None:
        positions = w.row("arange", (), run.seq_len * _ID)
    places = look_up(w, part.styled, positions, shape.positions, shape.hidden, "wpe")
    total = w.row(
        "add", (words, places), w.size(words),
        grads=(Grad(words, 0), Grad(places, w.size(places) if run.batch > 1 else 0)),
    )  # fmt: skip
    x = w.at(f"{w.module}.drop").dropout(total, shape.embed_dropout)
    part = replace(part, given=(positions,), extra_inputs=extra_inputs)
    return x, part, (words, positions, places)


def _given_positions(w: TapeBuilder, run: MicrobatchSpec) -> tuple[int | None, tuple[int, ...]]:
    """Append the positions that the model is called with under cp.

    If this rank's tokens are contiguous, they are a view of the positions of the whole sequence.

    Returns:
        (positions, or None without cp; further inputs). The further input is a mask, which marks
        positions with a gap as one sample.
    """
    if run.cp == 1:
        return None, ()
    size = run.seq_len * _ID
    whole = w.row("arange", (), size * run.cp)
    if run.gathered is None or len(run.gathered.chunks) == 1:
        return w.tape.value(size, of=whole), ()
    return w.row("cat", (whole,), size), (w.row("ones_like", (), size),)


def _part(shape: Shape, run: MicrobatchSpec) -> BlockContext:
    styled = run.styled or TpPlanOnTape(run.tp, shape.styles)
    return BlockContext(
        tp=styled.tp,
        caches=run.caches,
        styled=styled,
        seq_len=run.seq_len * run.cp,
        cp=run.cp,
        is_fused=run.is_fused,
        spread=run.spread,
        gathered=run.gathered,
    )


def cross_entropy_of_parts(w: TapeBuilder, logits: int, ids: int) -> int:
    """Append the mean cross-entropy of sharded logits, which are cast to float32 first.

    The ops follow the lines of `runtime.apply.loss.vocab_parallel_loss`.

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
