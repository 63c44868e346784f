"""Small modules whose blocks a pipeline can cut, and one whose forward it cannot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, VOCAB = 256, 512
INPUTS = {
    "alike": {"shape": [8, 512, 1024]},
    "unlike": {"shape": [8, 16, 32, 32]},
    "uneven": {"shape": [8, 16, 32, 32]},
    "looped": {"shape": [8, WIDTH]},
    "five": {"shape": [8, 512, 512]},
    "keeping": {"shape": [8, 512, 1024]},
    "tied": {"shape": [8, 1024], "dtype": "int64"},
    "repeating": {"shape": [8, 1024], "dtype": "int64"},
}


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mixing(nn.Module):
    """A convolution, or attention over all pixels."""

    def __init__(self, channels: int, attends: bool) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.attends = attends
        if attends:
            self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        else:
            self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.attends:
            return x + self.conv(F.silu(self.norm(x)))
        # On one sample, fewer operators copy: some of these views are contiguous then.
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(pixels).chunk(3, -1)
        mixed = torch.softmax(q @ k.transpose(1, 2), -1) @ v
        return x + self.out(mixed).transpose(1, 2).reshape(x.shape)


class Alike(nn.Module):
    def __init__(self, hidden: tuple[int, ...], width: int = WIDTH) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.layers = nn.ModuleList(Mlp(width, each) for each in hidden)
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Keeping(Mlp):
    """It keeps what it computed in its first forward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.scale: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = torch.ones(x.shape[1:], device=x.device, dtype=x.dtype)
        return super().forward(x * self.scale)


class Hybrid(nn.Module):
    """Convolutions and attention in turns, as unlike blocks of one list."""

    def __init__(self, channels: int, inner: int, attends: tuple[bool, ...]) -> None:
        super().__init__()
        self.inp = nn.Conv2d(channels, inner, 1)
        self.layers = nn.ModuleList(Mixing(inner, each) for each in attends)
        self.head = nn.Linear(inner, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


class Looped(Alike):
    """All blocks run twice, so no cut leaves all runs of a block on one side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.head(x)


class Tied(nn.Module):
    """The head has the weight of the embedding, so the first and the last stage both need it."""

    def __init__(self, hidden: tuple[int, ...], width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Mlp(width, each) for each in hidden)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def alike() -> nn.Module:
    return Alike((4096, 4096, 4096), 1024)


def five() -> nn.Module:
    return Alike((1024, 4096, 2048, 4096, 1024), 512)


def keeping() -> nn.Module:
    model = alike()
    model.layers = nn.ModuleList(Keeping(1024, 4096) for _ in range(3))
    return model


def deep() -> nn.Module:
    return Alike((4096,) * 8, 1024)


def unlike() -> nn.Module:
    return Hybrid(16, 64, (False, True, False))


def uneven() -> nn.Module:
    return Hybrid(16, 64, (False, True, True))


def looped() -> nn.Module:
    return Looped((1024, 2048))


def repeating() -> nn.Module:
    """The first and the last block have one weight, which no two stages may share."""
    model = Tied((1024, 2048, 1024))
    model.layers[2].up.weight = model.layers[0].up.weight
    return model


def tied() -> nn.Module:
    return Tied((1024, 2048, 4096))
