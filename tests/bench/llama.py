"""A Llama as torchtitan trains it, for comparison with figures that were published for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model, under the names of the published rows."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


def rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[None, : x.shape[1], None]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.head = s.hidden // s.heads
        self.wq = nn.Linear(s.hidden, s.heads * self.head, bias=False)
        self.wk = nn.Linear(s.hidden, s.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(s.hidden, s.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(s.heads * self.head, s.hidden, bias=False)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, table), rotated(k, table)
        repeats = q.shape[2] // k.shape[2]
        if repeats > 1:
            k, v = (
                t[:, :, :, None, :]
                .expand(batch, length, -1, repeats, self.head)
                .reshape(batch, length, -1, self.head)
                for t in (k, v)
            )
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(s.hidden, s.ffn, bias=False)
        self.w2 = nn.Linear(s.ffn, s.hidden, bias=False)
        self.w3 = nn.Linear(s.hidden, s.ffn, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.attention = Attention(s)
        self.feed_forward = FeedForward(s)
        self.attention_norm = RMSNorm(s.hidden)
        self.ffn_norm = RMSNorm(s.hidden)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), table)
        return h + self.feed_forward(self.ffn_norm(h))


_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def every_second_product() -> Any:
    """Torchtitan's "selective op": attention is kept, and every second matrix product."""
    counts = {False: 0, True: 0}

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is torch.ops.aten.mm.default:
            counts[ctx.is_recompute] += 1
        is_second = func is torch.ops.aten.mm.default and counts[ctx.is_recompute] % 2 == 0
        keeps = func in _KEPT and not is_second
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    def __init__(self, s: Shape, *, recompute: str = "none") -> None:
        super().__init__()
        self.recompute = recompute
        self.tok_embeddings = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = RMSNorm(s.hidden)
        self.output = nn.Linear(s.hidden, s.vocab, bias=False)
        table = torch.empty(s.seq_len, s.hidden // s.heads // 2, dtype=torch.complex64)
        self.register_buffer("freqs_cis", table, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            call: Callable[..., Any] = layer
            if self.recompute != "none":
                call = partial(
                    checkpoint, layer, use_reentrant=False, preserve_rng_state=False,
                    **({"context_fn": every_second_product} if self.recompute == "ops" else {}),
                )  # fmt: skip
            h = call(h, self.freqs_cis)
        return self.output(self.norm(h)).float()


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))


class KeepsPrediction:
    """The loss in a loop whose prediction lives until the next one is there."""

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self._kept = logits
        return loss(logits, labels)
