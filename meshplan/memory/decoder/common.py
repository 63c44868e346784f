"""Common parts of transformer blocks: RMSNorm, rotary positions, and a block's context on a rank.

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
    """The settings with which one rank computes a block, the same for all blocks.

    Args:
        tp: Number of ranks over which heads and feed-forward are sharded, in blocks without styles.
        is_sequence: If True, activations between tensor-parallel regions are sharded over the same
            ranks along the sequence.
        cos, sin: Numbers of the values that queries and keys are rotated with; -1 if positions are
            learned.
        caches: If True, keys and values are copied into a cache, as transformers does unless
            `use_cache` is off.
        given: Numbers of the arguments of every block that no operation in the block reads.
        extra_inputs: Numbers of the arguments of the model that it does not pass on to its blocks.
        styled: Tensor-parallel styles of the model's modules.
        seq_len: Tokens of a sequence over which attention runs.
        cp: Number of context-parallel ranks, which shard the sequence. With `gathered`, each rank
            attends from its tokens to all; otherwise from all tokens to all, for a share of the
            heads.
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
    extra_inputs: tuple[int, ...] = ()
    styled: TpPlanOnTape = field(default_factory=TpPlanOnTape)
    seq_len: int = 1
    cp: int = 1
    is_fused: bool = True
    spread: Spread = ONE_RANK
    gathered: SequenceChunks | None = None


def number_of(fqn: str) -> int:
    """Return the number of a block, the last component of its fqn."""
    return int(fqn.rpartition(".")[2])


def rms_norm(w: TapeBuilder, x: int, width: int, name: str) -> int:
    """Append an RMSNorm written as single operators in float32: `LlamaRMSNorm` and its copies.

    Args:
        w: The builder to append to.
        x: Input of the norm.
        width: Features over which the norm is computed.
        name: Name of the norm inside the current module.
    """
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
    """Append `apply_rotary_pos_emb` for queries or keys `x`, and return the rotated tensor."""
    size = w.size(x)
    turned = w.times(x, part.cos)
    low, high = w.slice(x, size // 2), w.slice(x, size // 2)
    rotated = w.cat(w.scale(high, "neg"), low)
    return w.add(turned, w.times(rotated, part.sin))
