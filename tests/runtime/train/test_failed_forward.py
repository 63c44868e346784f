"""A forward without gradients that raises leaves training as it was.

Which seeded bug would this catch? Parameters that FSDP2 keeps gathered after a forward that raised,
and that later steps go on using with the values from before the optimizer's step.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshplan
from tests.helpers import parity


class Strict(nn.Module):
    """Takes two groups of samples that belong together, as an image and its patches do.

    Raises:
        ValueError: Samples of one group are beside samples of another.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not torch.equal(groups, groups.sort().values):
            raise ValueError("samples of one group must follow each other")
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)
    return torch.randn(8, 8), torch.arange(8), torch.randn(8, 8)


def trained(plan: dict[str, object], by_hand: bool) -> float:
    """The largest difference to one process after four steps, of losses and of parameters."""
    live, alone = meshplan.parallelize(Strict(), plan), Strict()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (live, alone)]
    apart = []
    for step in range(4):
        x, groups, y = batch(step)
        expected = F.mse_loss(alone(x, groups), y)
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        x, groups, y = meshplan.local_batch(live, (x, groups, y))
        if by_hand:
            error = F.mse_loss(live(x, groups), y, reduction="sum")
            mean = meshplan.global_mean(error, y.numel())
            mean.backward()
            with torch.no_grad(), contextlib.suppress(ValueError):
                live(x, groups.flip(0))
            optimizers[0].step()
            optimizers[0].zero_grad()
            loss = mean.item()
        else:
            loss = meshplan.train_step(live, optimizers[0], (x, groups), y, F.mse_loss)
        apart.append(abs(loss - expected.item()))
    whole = meshplan.full_state_dict(live)
    apart += [float((v - alone.state_dict()[n]).abs().max()) for n, v in whole.items()]
    return max(apart)


PLANS = [
    {"version": 1, "strategy": "full_shard"},
    {"version": 1, "strategy": "zero2"},
    {"version": 1, "strategy": "full_shard", "batch": {"accumulate": 2}},
]


@pytest.mark.parametrize("plan", PLANS, ids=["full_shard", "zero2", "accumulating"])
def test_checks_whose_forwards_raise_change_nothing(pool, plan):
    assert max(pool(2).run(trained, plan, by_hand=False)) <= parity.TOLERANCE


@pytest.mark.parametrize("plan", PLANS[:2], ids=["full_shard", "zero2"])
def test_an_evaluation_that_raises_changes_nothing(pool, plan):
    assert max(pool(2).run(trained, plan, by_hand=True)) <= parity.TOLERANCE
