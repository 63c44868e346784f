"""A plan on real ranks: what is predicted that one step sends, and what it sends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import meshplan
from meshplan.runtime.count import counting
from meshplan.runtime.visits import record_forward
from meshplan.traffic import Forecast, Route, forecast
from tests import models, moe, test_batchnorm


def build(name: str) -> nn.Module:
    """A model of any page of the tests, by name."""
    if name == "batchnorms":
        return test_batchnorm.net()
    return moe.build(name) if name in moe.BUILDERS else models.build(name)


def batch(name: str) -> tuple[Any, torch.Tensor]:
    """A global batch of eight samples."""
    if name == "batchnorms":
        return test_batchnorm.batch(0)
    return models.batch("mixtral" if name in moe.BUILDERS else name, 0)


def told_and_counted(name: str, plan: dict[str, Any]) -> tuple[Forecast, Counter[Route]]:
    """The forecast of this rank, and what its third step really sent."""
    spec = meshplan.load_spec({"version": 1, **plan})
    model = meshplan.parallelize(build(name), spec, example_inputs=batch(name)[0])
    decided, sgd = model.meshplan.plan, models.optimizer(model)
    mine = meshplan.local_batch(model, batch(name))
    forward = record_forward(build(name), decided, *mine, models.loss)
    for _ in range(2):
        meshplan.train_step(model, sgd, *mine, models.loss)
    with counting(decided.mesh) as counted:
        meshplan.train_step(model, sgd, *mine, models.loss)
    return forecast(decided, forward, dist.get_rank()), counted
