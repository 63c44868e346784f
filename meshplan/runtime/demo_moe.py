"""The demo's language model with a mixture of experts in every block: the model of `moe_ep`.

Ordinary PyTorch that imports nothing from meshplan but `demo_model`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from meshplan.runtime.demo_model import ByteLlama, ByteLlamaConfig, FeedForward

_NUM_EXPERTS, _TOP_K, _EXPERT_DIM = 8, 2, 96


class ExpertStack(nn.Module):
    """SwiGLU experts, stacked along the first dim of two parameters."""

    def __init__(self, num_experts: int, dim: int, expert_dim: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.w13 = nn.Parameter(torch.empty(num_experts, 2 * expert_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, expert_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw uniformly within 1 / sqrt(in_features), as nn.Linear does."""
        for weight in (self.w13, self.w2):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Shape: x (tokens, dim), index and weights (tokens, top_k) -> (tokens, dim)."""
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            gate, up = F.linear(x[token], self.w13[expert]).chunk(2, dim=-1)
            made = F.linear(F.silu(gate) * up, self.w2[expert])
            out = out.index_add(0, token, (made * weights[token, slot, None]).to(out.dtype))
        return out


class Mixture(nn.Module):
    """A router, the experts it chooses from, and a shared expert for every token."""

    def __init__(self, config: ByteLlamaConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.dim, _NUM_EXPERTS, bias=False)
        self.experts = ExpertStack(_NUM_EXPERTS, config.dim, _EXPERT_DIM)
        self.shared = FeedForward(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: (..., dim) -> (..., dim)."""
        tokens = x.flatten(0, -2)
        weights, index = self.router(tokens).softmax(-1).topk(_TOP_K, -1)
        return (self.experts(tokens, index, weights) + self.shared(tokens)).view_as(x)


class ByteMixture(ByteLlama):
    """A decoder with experts that maps bytes to the logits of the next byte."""

    def __init__(self, config: ByteLlamaConfig | None = None) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.ffn = Mixture(self.config)


def build() -> ByteMixture:
    """Build the model of the recipe `moe_ep`."""
    return ByteMixture()
