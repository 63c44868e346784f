"""Ten small models that nobody prepared, as users write them: what `verify_verdicts` judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(24, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU(),
            nn.Linear(48, 8),
        )  # fmt: skip


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        size = x.shape[2] // self.heads
        q, k, v = (f(y).unflatten(2, (-1, size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, 32), nn.Embedding(8, 32)
        self.blocks = nn.ModuleList(GptBlock(32, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def twice(channels: int, out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for given in (channels, out):
        layers += [nn.Conv2d(given, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = twice(3, width), twice(width, 2 * width)
        self.bottom = twice(2 * width, 4 * width)
        self.up2, self.merge2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), twice(32, 16)
        self.up1, self.merge1 = nn.ConvTranspose2d(2 * width, width, 2, 2), twice(16, 8)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        y = self.bottom(F.max_pool2d(second, 2))
        y = self.merge2(torch.cat((self.up2(y), second), 1))
        return self.out(self.merge1(torch.cat((self.up1(y), first), 1)))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1))
            for _ in range(3)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 24)
        self.rnn = nn.LSTM(24, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(tokens))[0])


class Experts(nn.Module):
    """Every sample passes all experts, weighed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(24, 32), nn.Linear(32, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)
        )
        self.norm, self.head = nn.RMSNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        weights = self.gate(x).softmax(-1)
        found = torch.stack([expert(x) for expert in self.experts], -1)
        return self.head(self.norm(x + (found * weights.unsqueeze(-2)).sum(-1)))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 4, 4)
        self.tokens = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(2))
        self.channels = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.head = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2)
        for tokens, norm, channels in zip(self.tokens, self.norms, self.channels, strict=True):
            x = x + F.gelu(tokens(x))
            x = x + F.gelu(channels(norm(x.transpose(1, 2)))).transpose(1, 2)
        return self.head(x.mean(2))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Twins(nn.Module):
    """One tower reads both halves of a sample, as in metric learning."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 16))
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("shift", torch.full((16,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.tower(half) for half in x.chunk(2, -1))
        return (first - second).abs() * self.scale + self.shift


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(2, 8, 3, 2, 1), nn.BatchNorm1d(8), nn.ELU(), nn.Conv1d(8, 16, 3, 2, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(16, 8, 4, 2, 1), nn.ELU(), nn.ConvTranspose1d(8, 2, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the bench.

    Args:
        make: Its class.
        shape: Of one sample.
        reads_tokens: Whether it takes whole numbers.
        cut: Axes that it can be cut along besides data axes.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    reads_tokens: bool = False
    cut: tuple[str, ...] = ("pp",)

    def words(self) -> dict[str, Any]:
        """What a plan says of it."""
        dtype = "int64" if self.reads_tokens else "float32"
        return {
            "version": 1,
            "model": {"entry": f"tests.bench.verify_models:{self.make.__name__}"},
            "input": {"shape": [1, *self.shape], "dtype": dtype},
        }


MODELS: Final[Mapping[str, Model]] = {
    "mlp": Model(make=Mlp, shape=(24,), cut=("pp", "tp")),
    "gpt": Model(make=Gpt, shape=(8,), reads_tokens=True, cut=("pp", "tp")),
    "unet": Model(make=UNet, shape=(3, 16, 16)),
    "convolutions": Model(make=Convolutions, shape=(3, 8, 8)),
    "tagger": Model(make=Tagger, shape=(8,), reads_tokens=True, cut=()),
    "experts": Model(make=Experts, shape=(24,), cut=("pp", "tp")),
    "mixer": Model(make=Mixer, shape=(3, 16, 16)),
    "encoder": Model(make=Encoder, shape=(8, 32), cut=("pp", "tp")),
    "twins": Model(make=Twins, shape=(24,), cut=()),
    "autoencoder": Model(make=Autoencoder, shape=(2, 32)),
}
