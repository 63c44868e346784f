"""Recomputed modules whose forward writes buffers: as one process that computes them once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import meshplan
from tests.helpers import parity


class Counts(nn.Module):
    """Computes with a buffer that it writes, in place or by another tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.inner, self.in_place = nn.Linear(8, 8), in_place
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return x + self.inner(x) / (1 + self.calls)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.inner(x))


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


KINDS: dict[str, Any] = {
    "in place": lambda: Counts(True),
    "replaced": lambda: Counts(False),
    "spectral norm": spectral,
    "batch norm": Normed,
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *(KINDS[kind]() for _ in range(3)))


def train(kind: str, strategy: str, mode: str) -> float:
    """The largest difference from one process, of losses, parameters and buffers."""
    plan = {
        "version": 1,
        "strategy": strategy,
        "rules": [{"match": "{1,2,3}", "activation_checkpointing": mode}],
        **({"sync_batchnorm": True} if kind == "batch norm" else {}),
    }
    alone, model = build(kind), meshplan.parallelize(build(kind), plan)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    apart = 0.0
    for step in range(3):
        x, y = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)), torch.ones(8, 8)
        if step == 1:  # Frozen for a step, as in fine-tuning.
            model.eval(), alone.eval()
        found = meshplan.train_step(
            model, optimizers[0], *meshplan.local_batch(model, (x, y)), F.mse_loss
        )
        expected = F.mse_loss(alone(x), y)
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        model.train(), alone.train()
        apart = max(apart, abs(found - expected.item()))
    live = meshplan.full_state_dict(model)
    if dist.get_rank() == 0:
        state = alone.state_dict()
        apart = max(apart, *((live[n] - t).abs().max().item() for n, t in state.items()))
    return apart


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("strategy", "mode"), [("ddp", "full"), ("full_shard", "selective")])
def test_buffers_are_written_once(pool, kind, strategy, mode):
    assert max(pool(2).run(train, kind, strategy, mode)) <= parity.TOLERANCE
