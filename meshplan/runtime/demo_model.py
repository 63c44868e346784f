"""A small Llama-style language model over bytes: the model of the demo and of the recipes.

Ordinary PyTorch that does not import meshplan. The plans in `plans/` refer to its module names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLlamaConfig:
    """Sizes of the model. The default 0.8 M parameters learn English spelling in a minute."""

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    ffn_dim: int = 352
    rope_base: float = 10_000.0


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ByteLlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.group = config.num_heads // config.num_kv_heads
        kv_dim = config.num_kv_heads * self.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Shape: x (batch, seq, dim), rope (2, seq, head_dim / 2) -> (batch, seq, dim)."""
        # -1: the number of heads follows from the shape. Under tp, a rank has only some of them.
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """A SwiGLU feed-forward layer."""

    def __init__(self, config: ByteLlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (..., dim) -> (..., dim)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, config: ByteLlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.dim, eps=1e-6)
        self.attn = Attention(config)
        self.norm2 = nn.RMSNorm(config.dim, eps=1e-6)
        self.ffn = FeedForward(config)

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Shape: x (batch, seq, dim) -> (batch, seq, dim)."""
        x = x + self.attn(self.norm1(x), rope)
        return x + self.ffn(self.norm2(x))


class ByteLlama(nn.Module):
    """A decoder that maps bytes to the logits of the next byte."""

    def __init__(self, config: ByteLlamaConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ByteLlamaConfig()
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape: tokens (batch, seq) int64 -> logits (batch, seq, vocab)."""
        x = self.embed(tokens)
        rope = rope_table(tokens.shape[1], self.config, x)
        for layer in self.layers:
            x = layer(x, rope)
        return self.head(self.norm(x))


def rope_table(seq: int, config: ByteLlamaConfig, like: torch.Tensor) -> torch.Tensor:
    """Return the cosines and sines of the rotary angles.

    Shape: (2, seq, head_dim / 2).
    Source: Su et al. 2021, RoFormer, section 3.2.2.
    """
    half = config.dim // config.num_heads // 2
    rate = config.rope_base ** (-torch.arange(half, device=like.device) / half)
    angle = torch.outer(torch.arange(seq, device=like.device), rate)
    return torch.stack((angle.cos(), angle.sin())).to(like.dtype)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate channel pairs by the angles in `rope`. Shape: x (batch, heads, seq, head_dim)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = rope
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def build() -> ByteLlama:
    """Build the model of the recipes in `plans/`."""
    return ByteLlama()


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per byte.

    Shape: logits (batch, seq, vocab), targets (batch, seq).
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
