"""Models whose tensor parallelism nobody wrote down: each has one turn that a guess gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.odd_attention import (
    WIDTH,
    Attention,
    CountedConstant,
    CountedScale,
    CountedSlopes,
    CrossAttention,
    DividesWidth,
    FixedSlopes,
    Fused,
    LearnedSlopes,
    OneKeyHead,
    RelativeTable,
    ReturnsWeights,
    Split,
    TalkingHeads,
)
from tests.helpers.odd_projections import (
    Chain,
    FusedGate,
    GainInAndOut,
    GateInAndOut,
    GateOfOne,
    InterleavedGate,
    Mlp,
    NormInside,
    ScaleInside,
    Square,
    TiedBackwards,
    TiedTwins,
    TurnedFeatures,
    Twice,
    WritesInto,
)


class Parallel(nn.Module):
    """Attention and feed-forward beside each other, from one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attn.attend(h, h)[0] + self.mlp.down(F.gelu(self.mlp.up(h)))


BUILDERS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "fused": lambda: Fused(by_head=False),
    "fused by head": lambda: Fused(by_head=True),
    **{
        cls.__name__: cls
        for cls in (
            Attention, CrossAttention, OneKeyHead, ReturnsWeights, TalkingHeads, LearnedSlopes,
            FixedSlopes, CountedSlopes, CountedScale, CountedConstant, RelativeTable, Split, Mlp,
            NormInside, ScaleInside, GainInAndOut, GateOfOne, GateInAndOut, FusedGate,
            InterleavedGate, TurnedFeatures, DividesWidth,
            Square, Parallel, Twice, TiedBackwards, TiedTwins, WritesInto, Chain,
        )
    },
}  # fmt: skip


class Model(nn.Module):
    """Two blocks of one kind, so that a pattern is a pattern, between plain projections."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(BUILDERS[kind]() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.norm(self.first(x))
        more = []
        for block in self.blocks:
            out = block(x)
            x, *rest = out if isinstance(out, tuple) else (out,)
            more += rest
        return x, *more


def build(kind: str) -> nn.Module:
    """The model with the same numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Model(kind)


def batch(step: int = 0) -> Tensor:
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(step))
