"""`gather_batch`: losses that compare samples with one another have one process's gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshplan
from tests import parity

WIDTH = 16


class Clip(nn.Module):
    """Two towers and a temperature; the forward gives the logits of all pairs of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        left, right = meshplan.gather_batch(left), meshplan.gather_batch(right)
        return self.scale.exp() * left @ right.T


class SimClr(nn.Module):
    """One tower; the loss function compares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack((self.tower(a), self.tower(b)), 1)


def clip_loss(logits: Tensor, _: Any) -> Tensor:
    labels = torch.arange(len(logits))
    return F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)


def local_simclr(z: Tensor, _: Any) -> Tensor:
    z = F.normalize(z.transpose(0, 1).flatten(0, 1), dim=-1)
    n = len(z) // 2
    logits = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(2 * n).roll(n))


def simclr_loss(z: Tensor, targets: Any) -> Tensor:
    return local_simclr(meshplan.gather_batch(z), targets)


KINDS: dict[str, tuple[Any, Any]] = {
    "clip": (Clip, clip_loss),
    "simclr": (SimClr, simclr_loss),
    "alone": (SimClr, local_simclr),
}
TP = [
    {"match": "*.0", "place": {"tp": "colwise"}},
    {"match": "*.2", "place": {"tp": "rowwise"}},
]
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "full_shard": (2, {"strategy": "full_shard"}),
    "hybrid": (4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "tp x fsdp": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "rules": TP}),
}


def batch(step: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(step)
    a = torch.randn(8, WIDTH, generator=generator)
    return (a, a + 0.3 * torch.randn(8, WIDTH, generator=generator)), torch.zeros(8)


def train(kind: str, plan: dict[str, Any]) -> tuple[float, float, str]:
    build, loss_fn = KINDS[kind]
    alone = build()
    model = meshplan.parallelize(build(), {"version": 1, **plan})
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    losses, expected = [], []
    for step in range(3):
        inputs, targets = batch(step)
        left = alone(*inputs) if kind != "clip" else _clip_alone(alone, *inputs)
        loss = (clip_loss if kind == "clip" else local_simclr)(left, targets)
        loss.backward()
        sgd[1].step()
        sgd[1].zero_grad()
        expected.append(loss.item())
        try:
            mine = meshplan.local_batch(model, (inputs, targets))
            losses.append(meshplan.train_step(model, sgd[0], *mine, loss_fn))
        except meshplan.ApplyError as error:
            return 0.0, 0.0, str(error)
    live, state = meshplan.full_state_dict(model), alone.state_dict()
    apart = max([0.0, *((live[n] - state[n]).abs().max().item() for n in live)])
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True)), apart, ""


def _clip_alone(model: Clip, a: Tensor, b: Tensor) -> Tensor:
    left, right = F.normalize(model.left(a), dim=-1), F.normalize(model.right(b), dim=-1)
    return model.scale.exp() * left @ right.T


CELLS = [(kind, plan) for kind in ("clip", "simclr") for plan in PLANS]


@pytest.mark.parametrize(("kind", "plan"), CELLS)
def test_gradients_are_those_of_one_process(pool, kind, plan):
    world, stated = PLANS[plan]
    for loss, state, told in pool(world).run(train, kind, stated):
        assert told == ""
        assert loss <= 1e-5
        assert state <= parity.TOLERANCE
