"""Attention that tensor parallelism by a guess gets wrong: who counts heads, and who mixes them.

All take (batch, sequence, WIDTH) and return that, or a tuple that begins with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, HEAD = 32, 4, 8


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


class DividesWidth(Attention):
    """Computes the features of a head from the width of its input, and counts its heads."""

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, WIDTH // heads).transpose(1, 2)


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
