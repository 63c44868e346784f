"""Models for `estimate -f`: few blocks and many, uneven parts, and what cannot be traced."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, VOCAB = 48, 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """A table of tokens, equal blocks and a head."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tower() -> nn.Module:
    return Tower(3)


def high_tower() -> nn.Module:
    return Tower(24)


class Uneven(nn.Module):
    """A width that four ranks do not divide, so that the last ones hold less."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 10)
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Asks(Block):
    """Reads a number in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().mean().item() > 1e6:
            return x
        return super().forward(x)


class Picks(Block):
    """Computes with as many tokens as numbers say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[..., 0] > 0
        out = x.clone()
        out[chosen] = super().forward(x[chosen])
        return out


class Fills(Block):
    """Makes a tensor that is the larger the fewer tokens are picked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[x[..., 0] > 0]
        rest = torch.ones(x.shape[0] * x.shape[1] + 64 - chosen.shape[0], WIDTH)
        return super().forward(x) + rest.mean() + chosen.mean()


def filling() -> nn.Module:
    model = Tower(3)
    model.blocks[1] = Fills()
    return model


class Repeats(Block):
    """Computes with as many tokens as numbers add up to: no mask bounds them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = (x[..., 0] > 0).long().flatten()
        return super().forward(x) + x.flatten(0, 1).repeat_interleave(counts, 0).mean()


def repeating() -> nn.Module:
    model = Tower(3)
    model.blocks[0] = Repeats()
    return model


def asking() -> nn.Module:
    model = Tower(3)
    model.blocks[1] = Asks()
    return model


class Recurrent(nn.Module):
    """Keeps a buffer of which only cuDNN knows the size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.layer = nn.LSTM(32, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layer(self.table(tokens))[0])
        return out


def recurrent() -> nn.Module:
    return Recurrent()


def picking() -> nn.Module:
    model = Tower(3)
    model.blocks[2] = Picks()
    return model


@torch.library.custom_op("meshplan_tests::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class Ruleless(Block):
    """Computes with an operator of which nobody says what it makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(half(x))


def ruleless() -> nn.Module:
    model = Tower(3)
    model.blocks[0] = Ruleless()
    return model


def slow_tower() -> nn.Module:
    """Whose trace takes long: what is interrupted."""
    return nn.Sequential(Tower(2), *(nn.Identity() for _ in range(2)), *slow_blocks())


def slow_blocks() -> list[nn.Module]:
    return [Changing(n) for n in range(400)]


class Changing(nn.Module):
    """A block that is no other block's equal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer = nn.Linear(VOCAB, VOCAB)
        self.factor = 1.0 + number % 7 * number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor


def interrupting() -> nn.Module:
    """Is interrupted in code that is executed as a string, as sympy's and torch's at times is."""
    exec("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(10): pass")
    return Tower(1)


def dropping() -> nn.Module:
    """Reads numbers while it is built, as timm's models do for their drop rates."""
    model = Tower(3)
    for block, rate in zip(model.blocks, torch.linspace(0, 0.5, 3), strict=True):
        block.rate = rate.item()
    return model
