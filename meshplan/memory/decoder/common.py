"""What blocks of transformers have in common: norms, rotated positions, the part that is computed.

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
    """What one rank computes of a block.

    Args:
        tp: Ranks that heads and feed-forward are cut over, where no style says so.
        is_sequence: Whether the parts between them are cut over the same ranks by tokens.
        cos, sin: Values of the rotation; -1 where positions are learned.
        caches: Whether keys and values are copied into a cache, as transformers does
            unless `use_cache` is off.
        given: What every block is called with and does not read.
        told: What the model is called with and no block is.
        styled: Which modules tp cuts.
        seq_len: Tokens of a sequence that attention sees.
        cp: Ranks that have parts of it, and in attention all of it, of parts of the heads.
        is_fused: Whether a fused kernel computes it.
        gathered: Which chunks of a sequence this rank has, if it gathers the keys of all.
        spread: How experts are spread over ranks.
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
    """Of a block."""
    return int(fqn.rpartition(".")[2])


def rms_norm(w: TapeBuilder, x: int, width: int, name: str) -> int:
    """Written out in fp32: `LlamaRMSNorm` and its copies."""
    at = w.at(f"{w.module}.{name}" if w.module else name)
    ratio = _FP32 / w.element_bytes
    wide = at.cast(x, ratio)
    size = at.size(wide)
    row = size // width
    square = at.row(
        "pow", (wide,), size, keeps=(wide,), takes_back=2 * size, grads=(Grad(wide, size),)
    )
    mean = at.row("mean", (square,), row, grads=(Grad(square, size),))
    deviation = at.unary("rsqrt", at.shift(mean), keeps_out=True, takes_back=2 * row)
    product = at.mul(wide, deviation)
    narrow = at.cast(product, 1 / ratio)
    size = at.size(narrow)
    out = at.row(
        "mul", (narrow,), size, keeps=(narrow,), takes_back=size, grads=(Grad(narrow, size),),
        parameters=((f"{at.module}.weight", width * w.parameter_bytes),),
    )  # fmt: skip
    w.touch(x, mean, product)  # Who calls it holds what it is called with.
    return out


def rotate(w: TapeBuilder, x: int, part: BlockContext) -> int:
    """`apply_rotary_pos_emb` of queries or of keys."""
    size = w.size(x)
    turned = w.times(x, part.cos)
    low, high = w.slice(x, size // 2), w.slice(x, size // 2)
    rotated = w.cat(w.scale(high, "neg"), low)
    return w.add(turned, w.times(rotated, part.sin))
