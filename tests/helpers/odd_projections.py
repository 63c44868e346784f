"""Pairs of projections that a guess gets wrong: what lies between them, and who else uses them.

All take (batch, sequence, WIDTH) and return that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.odd_attention import WIDTH, project

FFN = 64


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = project(FFN), project(WIDTH, FFN)

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.middle(self.up(x)))


class NormInside(Mlp):
    """A norm across the features between the two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FFN)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(F.gelu(h))


class ScaleInside(Mlp):
    """A learned scale per feature and one for all features."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, FFN))
        self.gain = nn.Parameter(torch.tensor([0.7]))

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h * self.gain) * self.scale


class GainInAndOut(ScaleInside):
    """That scale is used on whole values too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class GateOfOne(Mlp):
    """A whole projection of one feature multiplies the cut ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)) * self.gate(x).sigmoid())


class GateInAndOut(GateOfOne):
    """That projection multiplies whole values too."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid()
        return x * gate + self.down(F.gelu(self.up(x)) * gate)


class FusedGate(nn.Module):
    """Gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = project(2 * FFN), project(WIDTH, FFN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class InterleavedGate(FusedGate):
    """Gate and up take turns."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate_up(x)
        return x + self.down(F.silu(h[..., ::2]) * h[..., 1::2])


class TurnedFeatures(Mlp):
    """The features change places between the projections."""

    def middle(self, h: Tensor) -> Tensor:
        return F.gelu(h).flip(-1)


class Square(nn.Module):
    """As wide inside as outside, with a residual around only one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), project(), project()

    def forward(self, x: Tensor) -> Tensor:
        h = x + F.gelu(self.up(self.norm(x)))
        return x + self.down(h)


class Chain(nn.Module):
    """Three projections: only two of them are a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = project(FFN), project(FFN, FFN), project(WIDTH, FFN)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


class WritesInto(Mlp):
    """Writes into what its projections return."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.mul_(0.5)
        h[:, :1] = 0.1
        out = self.down(F.gelu(h))
        out += x
        return out


class Twice(nn.Module):
    """One module called twice, and once more by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.again = self.mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.mlp(self.mlp(x)))


class TiedBackwards(nn.Module):
    """The second projection is the first one's weight, turned over outside of any module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = project(FFN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.up(x)) @ self.up.weight


class TiedTwins(nn.Module):
    """Two pairs of projections with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Mlp(), Mlp()
        self.two.up.weight, self.two.down.weight = self.one.up.weight, self.one.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))
