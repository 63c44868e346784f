"""Models whose tensor parallelism nobody wrote down: each has one turn that a guess gets wrong.

All take (batch, sequence, WIDTH) and return that, or a tuple that begins with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, HEAD, FFN = 32, 4, 8, 64


def project(features: int = WIDTH, inputs: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, features, bias=bias)


class Attention(nn.Module):
    """Says its numbers of heads and features outright."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_dim, self.width = HEADS, kv_heads, HEAD, WIDTH
        self.q = project()
        self.k = project(kv_heads * HEAD)
        self.v = project(kv_heads * HEAD)
        self.o = project()

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.head_dim).transpose(1, 2)

    def mix(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def attend(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        q = self.split(self.q(x), self.num_heads)
        k, v = self.split(self.k(memory), self.kv_heads), self.split(self.v(memory), self.kv_heads)
        if self.kv_heads == 1:
            k, v = k.expand_as(q), v.expand_as(q)
        weights = self.mix(q @ k.transpose(-1, -2) / math.sqrt(self.head_dim))
        out = (weights @ v).transpose(1, 2)
        return self.o(out.reshape(x.shape[0], x.shape[1], self.width)), weights

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, x)[0]


class CrossAttention(Attention):
    """Keys and values come from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = project()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, self.memory(x).tanh())[0]


class OneKeyHead(Attention):
    """All heads of queries share one head of keys and one of values."""

    def __init__(self) -> None:
        super().__init__(kv_heads=1)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)


class ReturnsWeights(Attention):
    """Hands its heads to the caller."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out, weights = self.attend(x, x)
        return x + out, weights


class TalkingHeads(Attention):
    """Mixes the heads' scores."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Linear(HEADS, HEADS, bias=False)

    def mix(self, scores: Tensor) -> Tensor:
        return self.talk(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)


class LearnedSlopes(Attention):
    """A number per head that is learned, and one temperature for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.linspace(0.1, 1.0, HEADS))
        self.temperature = nn.Parameter(torch.tensor([1.5]))

    def mix(self, scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[-1], device=scores.device)
        far = (places[None, :] - places[:, None]).abs()
        return (scores * self.temperature - self.slopes[:, None, None] * far).softmax(-1)


class FixedSlopes(Attention):
    """A number per head in a buffer, which every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.linspace(0.1, 1.0, HEADS))

    def mix(self, scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[-1], device=scores.device)
        far = (places[None, :] - places[:, None]).abs()
        return (scores - self.slopes[:, None, None] * far).softmax(-1)


class CountedSlopes(Attention):
    """A number per head that is made from the number of heads."""

    def mix(self, scores: Tensor) -> Tensor:
        slopes = torch.tensor([2.0 ** -(8 * i / self.num_heads) for i in range(self.num_heads)])
        return (scores * slopes[:, None, None]).softmax(-1)


class CountedScale(Attention):
    """Its code computes with the number of heads, which it splits by as well."""

    def mix(self, scores: Tensor) -> Tensor:
        return (scores / math.sqrt(self.num_heads)).softmax(-1)


class CountedConstant(Attention):
    """The same, as a tensor."""

    def mix(self, scores: Tensor) -> Tensor:
        return (scores * torch.tensor(self.num_heads**-0.5)).softmax(-1)


class RelativeTable(Attention):
    """A learned bias per distance and head, looked up by number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(33, HEADS) * 0.1)

    def mix(self, scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[-1], device=scores.device)
        index = places[None, :] - places[:, None] + 16
        return (scores + self.table[index].permute(2, 0, 1)).softmax(-1)


class Fused(nn.Module):
    """q, k and v in one weight, one after the other or head by head."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.by_head = HEADS, HEAD, by_head
        self.qkv, self.o = project(3 * WIDTH), project()

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        if self.by_head:
            fused = self.qkv(x).view(b, s, self.num_heads, 3 * self.head_dim)
            q, k, v = (t.transpose(1, 2) for t in fused.chunk(3, -1))
        else:
            fused = self.qkv(x).view(b, s, 3, self.num_heads, self.head_dim)
            q, k, v = (t.squeeze(2).transpose(1, 2) for t in fused.chunk(3, 2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(out.transpose(1, 2).reshape(b, s, self.num_heads * self.head_dim))


class Split(nn.Module):
    """q, k and v cut out of one weight by a number of features."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.features = HEADS, WIDTH
        self.qkv, self.o = project(3 * WIDTH), project()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in self.qkv(x).split(self.features, dim=-1)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.o(out.transpose(1, 2).flatten(-2))


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


class Parallel(nn.Module):
    """Attention and feed-forward beside each other, from one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attn.attend(h, h)[0] + self.mlp.down(F.gelu(self.mlp.up(h)))


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


class WritesInto(Mlp):
    """Writes into what its projections return."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.mul_(0.5)
        h[:, :1] = 0.1
        out = self.down(F.gelu(h))
        out += x
        return out


class Chain(nn.Module):
    """Three projections: only two of them are a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = project(FFN), project(FFN, FFN), project(WIDTH, FFN)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


BUILDERS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "fused": lambda: Fused(by_head=False),
    "fused by head": lambda: Fused(by_head=True),
    **{
        cls.__name__: cls
        for cls in (
            Attention, CrossAttention, OneKeyHead, ReturnsWeights, TalkingHeads, LearnedSlopes,
            FixedSlopes, CountedSlopes, CountedScale, CountedConstant, RelativeTable, Split, Mlp,
            NormInside, ScaleInside, GainInAndOut, GateOfOne, GateInAndOut, FusedGate,
            InterleavedGate, TurnedFeatures,
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
