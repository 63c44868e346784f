"""A parallelized model inside another strategy is refused before ranks exchange anything.

Which seeded bug would this catch? Gradients that are reduced twice, over ranks along tp and pp too,
because a line of the strategy before was left in a script; ranks that wait for ever, because a
wrapper sends the parameters of rank 0 to ranks of another stage.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel

import meshplan
from tests.runtime.checks.test_detours import PLANS, made
from tests.runtime.checks.test_outside import batch


class Holder(nn.Module):
    """A module of a trainer around the model, as a LightningModule is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def sharded(part: str, model: nn.Module) -> None:
    fully_shard(model.get_submodule(part))
    model(meshplan.local_batch(model, batch())[0])


def inner(model: nn.Module) -> nn.Module:
    return getattr(model, "module", model) if isinstance(model, DistributedDataParallel) else model


WAYS: dict[str, Any] = {
    "DataParallel": DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "DDP of the inner one": lambda model: DistributedDataParallel(inner(model)),
    "a holder in DDP": lambda model: DistributedDataParallel(Holder(model)),
    "fully_shard": lambda model: sharded("", model),
    "fully_shard of a part": lambda model: sharded("module.head", model),
}
SAID = {
    "DataParallel": "two strategies at once: DataParallel around a model that meshplan has",
    "DistributedDataParallel": "DistributedDataParallel around a model that meshplan has",
    "DDP of the inner one": "DistributedDataParallel around a model that meshplan has",
    "a holder in DDP": "around a Holder that holds a model that meshplan has parallelized",
    "fully_shard": "fully_shard of a model that meshplan has parallelized",
    "fully_shard of a part": "fully_shard of 'module.head', a part of a model that meshplan has",
}
CASES = [
    *((plan, way) for plan in PLANS for way in WAYS if "fully_shard" not in way),
    ("ddp", "fully_shard"), ("ddp", "fully_shard of a part"),
]  # fmt: skip


def said(plan: str, way: str) -> str:
    try:
        WAYS[way](made(plan))
    except meshplan.ApplyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("plan", "way"), CASES)
def test_a_second_strategy_is_refused(pool, plan, way):
    for text in pool(2).run(said, plan, way):
        assert SAID[way] in text
        assert "MeshplanAccelerator(plan=...)" in text


def held(plan: str) -> list[float]:
    """Losses of a model that a plain module holds, beside another model in torch's DDP."""
    model = made(plan)
    holder = Holder(model)
    other = nn.Linear(2, 2)
    DistributedDataParallel(other)(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(holder.model.parameters(), lr=0.1)
    x, y = meshplan.local_batch(model, batch())
    losses = [float(meshplan.train_step(model, optimizer, x, y, F.mse_loss)) for _ in range(3)]
    assert other.weight.grad is not None
    return losses


@pytest.mark.parametrize("plan", PLANS)
def test_models_beside_it_and_modules_that_hold_it_go_on(pool, plan):
    for losses in pool(2).run(held, plan):
        assert losses[2] < losses[0]
