"""Frozen weights of a class of their own, with scales beside them, as bitsandbytes has them.

Which seeded bug would this catch? A check that evaluates a layer which packs its weights for good
in its first evaluation, and from then on gives no gradients: training stands still without a word.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshplan

WIDTH = 16


class Scaled(nn.Parameter):
    """An int8 weight whose scale is an attribute."""

    scale: torch.Tensor

    def __new__(cls, weight: torch.Tensor) -> Scaled:
        scale = weight.abs().amax() / 127
        made = torch.Tensor._make_subclass(cls, (weight / scale).round().to(torch.int8), False)
        made.scale = scale
        return made


class Quantised(nn.Module):
    """A linear layer that is packed for inference in its first evaluation, and stays so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Scaled(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.weight.is_packed = True
        out = F.linear(x, self.weight.to(torch.float32) * self.weight.scale)
        return out.detach() if hasattr(self.weight, "is_packed") else out


class Adapted(nn.Module):
    """Trained layers between frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.base, self.last = nn.Linear(WIDTH, WIDTH), Quantised(), Quantised()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.base(self.first(x)).tanh())


def made() -> Adapted:
    torch.manual_seed(0)
    return Adapted()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 8, WIDTH, generator=generator)
    return x, y


def losses(plan: dict[str, object]) -> list[float]:
    model = meshplan.parallelize(made(), {"version": 1, **plan})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    x, y = meshplan.local_batch(model, batch())
    return [float(meshplan.train_step(model, optimizer, x, y, F.mse_loss)) for _ in range(4)]


def alone() -> list[float]:
    model = made()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    x, y = batch()
    out = []
    for _ in range(4):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def test_layers_that_an_evaluation_packs_go_on_training(pool):
    expected = alone()
    assert expected[3] < expected[0] - 1e-3
    for found in pool(2).run(losses, {"strategy": "ddp"}):
        assert found == pytest.approx(expected, abs=1e-6)


def refused(plan: dict[str, object]) -> str:
    try:
        meshplan.parallelize(made(), {"version": 1, **plan})
    except meshplan.PlanError as error:
        return str(error)
    return ""


def test_units_that_would_lose_the_scales_are_refused(pool):
    for text in pool(2).run(refused, {"strategy": "full_shard"}):
        assert "base.weight is of the class Scaled, one of 2 such weights: class and" in text
        assert "use strategy: ddp, which keeps frozen quantised weights whole" in text
