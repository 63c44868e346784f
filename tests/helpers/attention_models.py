"""Attention as people write it: fused, grouped, head by head, with heads counted by attributes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM, HEADS, HEAD_DIM, FFN, VOCAB, LENGTH = 32, 8, 4, 48, 64, 12


class FusedAttention(nn.Module):
    """q, k and v in one weight, one after the other; fewer kv heads than heads if asked."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, kv_heads, HEAD_DIM
        self.num_key_value_groups = HEADS // kv_heads
        self.qkv = nn.Linear(DIM, (HEADS + 2 * kv_heads) * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for t in self.qkv(x).split(sizes, dim=-1)
        )
        k, v = (t.repeat_interleave(self.num_key_value_groups, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2)
        return self.out(out.reshape(*out.shape[:2], self.num_heads * self.head_dim))


class HeadByHeadAttention(nn.Module):
    """Megatron's order: each head's q, k and v lie together."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.n_head, self.head_dim = HEADS, HEAD_DIM
        self.query_key_value = nn.Linear(DIM, 3 * HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.query_key_value(x).view(*x.shape[:2], self.n_head, 3, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in fused.unbind(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(-2))


class SeparateAttention(nn.Module):
    """Projections apart, with kv heads repeated by a plain number."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = HEADS, kv_heads, HEAD_DIM
        self.n_rep = HEADS // kv_heads
        self.q = nn.Linear(DIM, HEADS * HEAD_DIM)
        self.k = nn.Linear(DIM, kv_heads * HEAD_DIM)
        self.v = nn.Linear(DIM, kv_heads * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        k, v = (t.repeat_interleave(self.n_rep, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(b, s, -1))


class GatedMlp(nn.Module):
    """Gate and up projection in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(DIM, 2 * FFN)
        self.down = nn.Linear(FFN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn, self.mlp = attention, GatedMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, kind: type[nn.Module], kv_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(kind(kv_heads)) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


KINDS = {"fused": FusedAttention, "by_head": HeadByHeadAttention, "apart": SeparateAttention}


def build(kind: str, kv_heads: int = HEADS) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Decoder(KINDS[kind], kv_heads)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (4, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
