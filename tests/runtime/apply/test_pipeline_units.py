"""Stages that begin or end inside a unit of sharding, or call its forward by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import meshplan
from tests.helpers import parity


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


class Net(nn.Module):
    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.by_name = by_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block.forward(x) if self.by_name else block(x)
        return self.last(x)


def build(by_name: bool) -> nn.Module:
    torch.manual_seed(0)
    return Net(by_name)


def train(by_name: bool, plan: dict[str, Any]) -> float:
    """The largest difference from one process."""
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    alone = build(by_name)
    model = meshplan.parallelize(build(by_name), {"version": 1, **plan}, example_inputs=x)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    apart = 0.0
    for _ in range(3):
        found = meshplan.train_step(
            model, optimizers[0], *meshplan.local_batch(model, (x, y)), F.mse_loss
        )
        expected = F.mse_loss(alone(x), y)
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        apart = max(apart, abs(found - expected.item()))
    live = meshplan.full_state_dict(model)
    if dist.get_rank() == 0:
        assert live.keys() == alone.state_dict().keys()
        apart = max(
            apart, *((live[n] - t).abs().max().item() for n, t in alone.state_dict().items())
        )
    return apart


INSIDE = [["first", "blocks.0", "blocks.1.up"], ["blocks.1.down", "blocks.2", "blocks.3", "last"]]
CASES: dict[str, tuple[bool, dict[str, Any], str]] = {
    "cut inside": (False, {"split": INSIDE}, "full_shard"),
    "cut inside, by name": (True, {"split": INSIDE}, "zero2"),
    "by name": (True, {}, "full_shard"),
    "by name, interleaved": (True, {"schedule": "Interleaved1F1B", "virtual": 2}, "full_shard"),
    "by name, replicas": (True, {}, "zero1"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_unit_that_is_not_called_as_a_whole(pool, case):
    by_name, pipeline, strategy = CASES[case]
    plan = {
        "mesh": {"pp": 2, "dp_shard": 2},
        "strategy": strategy,
        "pipeline": {"schedule": "1F1B", "microbatches": 2} | pipeline,
    }
    assert max(pool(4).run(train, by_name, plan)) <= parity.TOLERANCE
