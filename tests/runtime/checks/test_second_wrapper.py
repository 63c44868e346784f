"""A parallelized model inside another strategy is refused before ranks exchange anything.

Which seeded bug would this catch? Gradients that are reduced twice, over ranks along tp and pp too,
because a line of the strategy before was left in a script; ranks that wait for ever, because a
wrapper sends the parameters of rank 0 to ranks of another stage.
"""

from __future__ import annotations

import tempfile
from typing import Any
from unittest import mock

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


def said_by_trainer(plan: str) -> tuple[str, str]:
    """What the first step of transformers' own Trainer ends in, and the class that it was of.

    It is on a machine with GPUs as far as accelerate knows, where DTensors were refused first.
    """
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    from tests.helpers.lit import launched

    model = made(plan)
    rows = [{"x": torch.ones(2), "labels": torch.ones(2)}] * 8
    with tempfile.TemporaryDirectory() as folder, launched():
        arguments = TrainingArguments(
            folder, use_cpu=True, report_to=[], remove_unused_columns=False
        )
        with mock.patch.object(Accelerator, "multi_device", True):
            try:
                Trainer(model, arguments, train_dataset=rows).train()
            except Exception as error:
                return type(error).__name__, str(error)
    return "", ""


@pytest.mark.wide
@pytest.mark.parametrize("plan", PLANS)
def test_the_plain_trainer_of_transformers_is_refused(pool, plan):
    for package in ("accelerate", "lightning"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[dev]'")
    for kind, text in pool(2).run(said_by_trainer, plan):
        assert kind == "ApplyError", text
        assert "Accelerator.prepare, which the Trainer of transformers calls, around a" in text
        assert "meshplan.trainer(Trainer)" in text


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
