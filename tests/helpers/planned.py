"""Models for the planner of live models: large ones to plan for, small ones of the same names."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn

import meshplan
from tests.helpers import models, staged

LARGE: Final = {
    "HIDDEN": 512, "FFN": 2048, "VOCAB": 4096, "SEQ_LEN": 256, "LAYERS": 4, "IMAGE": 64,
    "FEATURES": 2048, "HEAD_DIM": 64,
}  # fmt: skip


class Odd(models.Odd):
    """Takes one tensor: shared modules, frozen parameters, parameters of the root, buffers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, torch.ones_like(x))


class UNet(nn.Module):
    """Blocks of which no two are alike; what goes down is met again on the way up."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList([models.ConvBlock(a, b, 1) for a, b in pairs])
        self.up = nn.ModuleList([models.ConvBlock(2 * b, a, 1) for a, b in reversed(pairs)])
        self.head = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.up:
            x = block(torch.cat((x, skips.pop()), 1))
        return self.head(x)


class Constant(nn.Module):
    """Of which no output depends on what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x)
        return x * 2


def _large(name: str) -> nn.Module:
    with mock.patch.multiple(models, **LARGE):
        return Odd() if name == "odd" else models.BUILDERS[name]()


def large_unet() -> nn.Module:
    return UNet((64, 128, 192))


large_vit = functools.partial(_large, "vit")
large_t5 = functools.partial(_large, "t5")
large_odd = functools.partial(_large, "odd")


def large_t5_of_1026_tokens() -> nn.Module:
    """Four ranks of tp share its vocabulary, of which no rank has a quarter."""
    model = _large("t5")
    model.resize_token_embeddings(1026)
    return model


NAMES: Final = ("unet", "vit", "t5", "odd")
INPUTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "unet": {"input": {"shape": [2, 3, 256, 256], "dtype": "fp32"}},
    "vit": {},
    "t5": {"batch": {"seq_len": 256}},
    "t5_of_1026_tokens": {"batch": {"seq_len": 256}},
    "odd": {"input": {"shape": [2, 2048], "dtype": "fp32"}},
}
"""What the plan of a large model says of its input."""


def small(name: str) -> nn.Module:
    """With numbers, the same in every process."""
    torch.manual_seed(0)
    if name == "unet":
        return UNet((8, 12, 16)).train()
    if name == "uneven":
        return staged.Hybrid(4, 8, (False, True, True))
    return Odd().train() if name == "odd" else models.build(name)


def batch(name: str, size: int = 8) -> tuple[Any, Tensor]:
    """A global batch of a small model."""
    generator = torch.Generator().manual_seed(1)
    if name in ("vit", "t5"):
        return models.batch(name, 0, size)
    shape = {"unet": (3, 8, 8), "uneven": (4, 8, 8)}.get(name, (models.FEATURES,))
    inputs = torch.randn(size, *shape, generator=generator)
    if name == "unet":
        return inputs, torch.randn(size, 3, 8, 8, generator=generator)
    return inputs, torch.randint(models.CLASSES, (size,), generator=generator)


def loss(output: Any, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return (output.double() - targets).square().mean()
    return models.loss(output, targets)


def trained(name: str, plan: Mapping[str, Any], steps: int = 2) -> tuple[list[float], float]:
    """(losses, the largest difference of a parameter from one process's) on this rank."""
    alone = small(name)
    sgd = models.optimizer(alone)
    inputs, targets = batch(name)
    expected = []
    for _ in range(steps):
        value = loss(models.call(alone, inputs), targets)
        value.backward()
        sgd.step()
        sgd.zero_grad()
        expected.append(value.item())
    model = meshplan.parallelize(small(name), plan)
    sgd = models.optimizer(model)
    local = meshplan.local_batch(model, (inputs, targets))
    found = [meshplan.train_step(model, sgd, *local, loss) for _ in range(steps)]
    apart = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    state = meshplan.full_state_dict(model)
    if not state:
        return apart, 0.0
    whole = alone.state_dict()
    return apart, max((state[n].double() - whole[n].double()).abs().max().item() for n in whole)


def parallel_while_planning(plan: Mapping[str, Any]) -> list[Any]:
    """What a plan with everything open becomes on a rank, of a model that has numbers."""
    model = meshplan.parallelize(small("unet"), dict(plan))
    decided = model.meshplan.plan
    return [str(decided.mesh), decided.assignment.strategy.name, decided.micro, decided.digest()]


def fails_while_planning(plan: Mapping[str, Any]) -> str:
    try:
        meshplan.parallelize(small("unet"), dict(plan))
    except meshplan.MeshplanError as error:
        return str(error)
    return ""


class NoProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Convolves(nn.Module):
    """Most of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(16, 512, 3), nn.Conv1d(512, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Normalizes(nn.Module):
    """Two blocks with a BatchNorm each, of 16 and of 24 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(16, 16, 3), nn.BatchNorm1d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv1d(16, 24, 3), nn.BatchNorm1d(24), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Alone(nn.Module):
    """No blocks, and for one sample another course than for several."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 4096), nn.Linear(4096, 512)

    def forward(self, x: Tensor) -> Tensor:
        # Laid out anew, unless there is but one sample.
        return self.down(torch.relu(self.up(x)).transpose(0, 1).contiguous().transpose(0, 1))
