"""Models whose code does not run on parts, or not at all: `check` must tell by which line."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Fused(nn.Module):
    """As nanoGPT writes it: pieces of a width that one process has."""

    def __init__(self, chunks: bool = False) -> None:
        super().__init__()
        self.chunks = chunks
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        C = x.shape[-1]
        if self.chunks:
            q, k, v = self.c_attn(x).chunk(3, dim=2)
        else:
            q, k, v = self.c_attn(x).split(C, dim=2)  # LINE: split
        q, k, v = (t.unflatten(2, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.c_proj(y.transpose(1, 2).flatten(2))


class Heads(nn.Module):
    """It counts the heads that one process has."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        y = self.q(x).view(B, T, self.n_head, C // self.n_head)  # LINE: view
        return self.o(torch.tanh(y).flatten(2))


class Scaled(nn.Module):
    """It multiplies by as many factors as one process has features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("factors", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = y * self.factors  # LINE: factors
        return self.down(y)


class Broken(nn.Module):
    """No process runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x))
        return y[:, :, :, 0]  # LINE: broken


class Asking(Broken):
    """What it computes depends on numbers."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x))
        return y if y.sum().item() > 0 else -y


def fused() -> nn.Module:
    return Fused()


def chunked() -> nn.Module:
    return Fused(chunks=True)
