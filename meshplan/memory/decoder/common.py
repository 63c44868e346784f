"""Common parts of transformer blocks: norms, rotary positions, and what one rank computes.

Source: transformers 5.23, models/<family>/modeling_*.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from meshplan.memory.decoder.cp_all_gather import SequenceChunks
from meshplan.memory.decoder.experts import ONE_RANK, Spread
from meshplan.memory.decoder.tp_ops import TpPlanOnTape
from meshplan.memory.tape.op import Grad
from meshplan.memory.tape.ops import TapeBuilder

_FP32: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockContext:
    """The share of a block that one rank computes.

    Args:
        tp: Number of ranks that heads and feed-forward are sharded over, where no style says so.
        is_sequence: If True, activations between tensor-parallel regions are sharded over the same
            ranks along the sequence.
        cos, sin: Values of the rotation; -1 if positions are learned.
        caches: If True, keys and values are copied into a cache, as transformers does unless
            `use_cache` is off.
        given: Values that every block is called with and does not read.
        told: Values that the model is called with and its blocks are not.
        styled: Modules that tp shards, with their styles.
        seq_len: Tokens of a sequence that attention sees.
        cp: Number of context-parallel ranks. Each has a part of the sequence and, unless
            `gathered`, attends over all of it for a part of the heads.
        is_fused: If True, a fused kernel computes attention.
        spread: Distribution of experts over ranks.
        gathered: Chunks of the sequence that this rank has, if it all-gathers keys and values;
            otherwise None.
    """

    tp: int = 1
    is_sequence: bool = False
    cos: int = -1
    sin: int = -1
    caches: bool = False
    given: tuple[int, ...] = ()
    told: tuple[int, ...] = ()
    styled: TpPlanOnTape = field(default_factory=TpPlanOnTape)
    seq_len: int = 1
    cp: int = 1
    is_fused: bool = True
    spread: Spread = ONE_RANK
    gathered: SequenceChunks | None = None


def number_of(fqn: str) -> int:
    """Return the number of a block."""
    return int(fqn.rpartition(".")[2])


def rms_norm(w: TapeBuilder, x: int, width: int, name: str) -> int:
    """Apply the RMSNorm that is written out in fp32: `LlamaRMSNorm` and its copies."""
    at = w.at(f"{w.module}.{name}" if w.module else name)
    ratio = _FP32 / w.element_bytes
    wide = at.cast(x, ratio)
    size = at.size(wide)
    row = size // width
    square = at.row(
        "pow",
        (wide,),
        size,
        keeps=(wide,),
        workspace_backward_bytes=2 * size,
        grads=(Grad(wide, size),),
    )
    mean = at.row("mean", (square,), row, grads=(Grad(square, size),))
    deviation = at.unary("rsqrt", at.shift(mean), keeps_out=True, workspace_backward_bytes=2 * row)
    product = at.mul(wide, deviation)
    narrow = at.cast(product, 1 / ratio)
    size = at.size(narrow)
    out = at.row(
        "mul",
        (narrow,),
        size,
        keeps=(narrow,),
        workspace_backward_bytes=size,
        grads=(Grad(narrow, size),),
        parameters=((f"{at.module}.weight", width * w.parameter_bytes),),
    )
    w.touch(x, mean, product)  # The caller's frame references x.
    return out


def rotate(w: TapeBuilder, x: int, part: BlockContext) -> int:
    """Append `apply_rotary_pos_emb` of queries or keys."""
    size = w.size(x)
    turned = w.times(x, part.cos)
    low, high = w.slice(x, size // 2), w.slice(x, size // 2)
    rotated = w.cat(w.scale(high, "neg"), low)
    return w.add(turned, w.times(rotated, part.sin))
