"""nanotron as its scaling benchmark ran it: what one rank allocates, step after step.

Precision: parameters in bf16, gradients accumulated in one flat fp32 buffer, fp32 master copy and
Adam in flat buffers that ZeRO-1 cuts over data ranks; without ZeRO, DDP's buckets besides. Sequence
first, tokens between the parts that tp cuts in pieces, gathered into a buffer that is never freed.

Source: huggingface/nanotron, January 2025: models/llama.py, parallel/tensor_parallel/functional.py,
optim/gradient_accumulator.py, optim/zero.py, parallel/pipeline_parallel/engine.py, trainer.py
(`make_ddp`), parallel/pipeline_parallel/utils.py; scripts/scaling_benchmarks.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.log.events import Term
from meshplan.memory.tape.ops import TapeBuilder
from meshplan.memory.tape.tape import Grad, Tape

_BF16: Final = 2
_FP32: Final = 4
_ID: Final = 8


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pipeline rank holds.

    Args:
        layers: How many blocks.
        first, last: Whether the embedding, or the head and the loss, are here.
    """

    layers: int
    first: bool
    last: bool

    def parameters(self, shape: Shape, tp: int) -> list[int]:
        """Elements of each that one of tp ranks holds; norms are on all of them."""
        hidden, table = shape.hidden, shape.vocab * shape.hidden // tp
        block = [
            hidden,
            hidden * (shape.q_width + 2 * shape.kv_width) // tp,
            shape.q_width * hidden // tp,
            hidden,
            2 * shape.mlp * hidden // tp,
            shape.mlp * hidden // tp,
        ]
        head = [hidden] if shape.tied and self.first else [hidden, table]
        return [table] * self.first + block * self.layers + head * self.last


def stages(shape: Shape, pp: int, *, is_past: bool = False) -> tuple[Stage, ...]:
    """Blocks by what they cost to compute: a rank is left once it has its share.

    The head is on the last rank, with the loss. By nanotron's public code it would be on the one
    before where that has not got its share: in 16 stages of 8B with two blocks, 56 ms of work by
    constants that tell 4 and 8 stages within 1 %, and microbatches took 37 to 45.

    Args:
        is_past: Whether only once it has more than that, as jobs that stall do (`nanotron_pace`)
            and nanotron, models/base.py (`build_model`) says.
    """
    block = 4 * shape.q_width * shape.hidden + 3 * shape.mlp * shape.hidden
    costs = [0, *[block] * shape.layers, 0, shape.vocab * shape.hidden, 0, 0]
    total, rank = sum(costs), 0
    held: list[list[int]] = [[] for _ in range(pp)]
    for number, cost in enumerate(accumulate(costs)):
        held[min(rank, pp - 1)].append(number)
        if cost * pp >= total * (rank + 1) + is_past:
            rank += 1
    return tuple(
        Stage(sum(1 <= n <= shape.layers for n in each), 0 in each, place == pp - 1)
        for place, each in enumerate(held)
    )


def tape_of(shape: Shape, stage: Stage, batch: int, seq_len: int, tp: int) -> Tape:
    """One microbatch of a stage."""
    tape = Tape()
    w = TapeBuilder(tape, _BF16, _BF16, is_cuda=True)
    tokens, hidden = batch * seq_len, shape.hidden
    ids = tape.value(tokens * _ID)
    tape.before[ids] = Term.INPUTS
    if stage.first:
        x = _embedding(w, shape, ids, tp)
    else:
        x = w.row("recv", (ids,), tokens * hidden * _BF16 // tp)
    for number in range(stage.layers):
        x = _block(w.at(f"model.decoder.{number}"), shape, x, batch, tp)
    if not stage.last:
        tape.loss_start = len(tape.rows)
        w.row("send", (x,), 0, keeps=(x,), grads=(Grad(x, w.size(x)),))
        return tape
    x = w.rms_norm(x, hidden, "final_layer_norm")
    logits = _column(w, x, hidden, shape.vocab // tp, "lm_head", tp)
    if shape.tied and stage.first:
        row = tape.rows[-1]
        name = "token_embedding.weight"
        tape.rows[-1] = row._replace(parameters=((name, row.parameters[0][1]),))
    wide = w.cast(logits, _FP32 / _BF16)
    tape.loss_start = len(tape.rows)
    # Its backward turns the probabilities into the gradient where they lie.
    softmax = w.row("sharded_cross_entropy", (wide,), w.size(wide), grads=(Grad(wide, 0),))
    w.row("loss", (softmax, ids), _FP32, keeps=(softmax,), grads=(Grad(softmax, w.size(wide)),))
    w.touch(wide)
    return tape


def _embedding(w: TapeBuilder, shape: Shape, ids: int, tp: int) -> int:
    x = w.embedding(ids, shape.vocab // tp, shape.hidden, "token_embedding")
    return w.reduce_scatter(x, tp)


def _column(w: TapeBuilder, x: int, into: int, out: int, name: str, tp: int) -> int:
    """Keeps its part of the input; the whole is gathered into a buffer that is always there."""
    at = w.at(f"{w.module}.{name}" if w.module else name)
    tokens = w.size(x) * tp // (into * _BF16)
    return at.row(
        "column", (x,), tokens * out * _BF16, keeps=(x,), grads=(Grad(x, w.size(x)),),
        parameters=((f"{at.module}.weight", into * out * _BF16),),
        workspace_backward_bytes=w.size(x) * tp if tp > 1 else 0,
    )  # fmt: skip


def _row(w: TapeBuilder, x: int, into: int, out: int, name: str, tp: int) -> int:
    at = w.at(f"{w.module}.{name}")
    tokens = w.size(x) // (into * _BF16)
    whole = tokens * out * _BF16
    return at.row(
        "row",
        (x,),
        whole // tp,
        keeps=(x,),
        grads=(Grad(x, w.size(x)),),
        parameters=((f"{at.module}.weight", into * out * _BF16),),
        workspace_bytes=whole if tp > 1 else 0,
    )


def _block(w: TapeBuilder, shape: Shape, x: int, batch: int, tp: int) -> int:
    hidden = shape.hidden
    first = x
    normed = w.rms_norm(x, hidden, "input_layernorm")
    out = _attention(w.at(f"{w.module}.attn"), shape, normed, batch, tp)
    w.touch(normed)
    x = w.add(out, x)
    w.touch(out)
    normed = w.rms_norm(x, hidden, "post_attention_layernorm")
    at = w.at(f"{w.module}.mlp")
    merged = _column(at, normed, hidden, 2 * shape.mlp // tp, "gate_up_proj", tp)
    half = at.size(merged) // 2
    gate, up = at.chunk(merged, half, half)
    product = at.mul(at.unary("silu", gate), up)
    w.touch(merged)
    out = _row(at, product, shape.mlp // tp, hidden, "down_proj", tp)
    w.touch(normed, merged)
    residual, x = x, w.add(out, x)
    w.touch(residual, first, out)
    return x


def _attention(w: TapeBuilder, shape: Shape, x: int, batch: int, tp: int) -> int:
    q_size, kv_size = shape.q_width // tp, shape.kv_width // tp
    fused = _column(w, x, shape.hidden, q_size + 2 * kv_size, "qkv_proj", tp)
    tokens = w.size(fused) // ((q_size + 2 * kv_size) * _BF16)
    one, two = tokens * q_size * _BF16, 2 * tokens * kv_size * _BF16
    copied = w.row(
        "permute_contiguous", (fused,), w.size(fused), grads=(Grad(fused, w.size(fused)),)
    )
    q, kv = w.chunk(copied, one, two)
    joined = w.row("cat", (kv,), two, grads=(Grad(kv, 0),))
    pair = w.row("permute_contiguous", (joined,), two, grads=(Grad(joined, 0),))
    k, v = w.chunk(pair, two // 2, two // 2)
    w.touch(copied)
    scratch = one * _FP32 // _BF16
    # Rotated in place, queries keep the whole copy alive.
    out = w.attention(q, k, v, shape.heads // tp, shape.head_dim, workspace_backward_bytes=scratch)
    result = _row(w, out, q_size, shape.hidden, "o_proj", tp)
    w.touch(fused, pair)
    return result
