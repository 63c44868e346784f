"""Nothing hangs: what goes wrong on one rank is an error on every rank that names it.

Without the guard each of these jobs would wait for the pool's time-out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshplan
from meshplan.runtime import guard
from tests import models

CULPRIT = 1
SECONDS = 20.0

PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "full_shard": {"strategy": "full_shard"},
    "tp and hybrid": {
        "mesh": {"dp_replicate": 2, "tp": 2},
        "rules": models.tp_rules("own_llama"),
    },
}


class Mishap(Exception):
    """What a user's code raises, of a type that nobody else knows."""


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Mishap("in backward")


def failing_step(plan: dict[str, Any], where: str, culprits: tuple[int, ...] = (CULPRIT,)) -> Any:
    """(type, text, seconds) of what a step raises when `where` fails on the culprits, and then
    (type, text) of what the next call raises."""
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, **plan})
    sgd = models.optimizer(model)
    is_culprit = dist.get_rank() in culprits
    inputs, targets = meshplan.local_batch(model, models.batch("own_llama", 0))
    meshplan.train_step(model, sgd, inputs, targets, models.loss)

    def fail(*_: Any) -> None:
        raise Mishap(f"in {where}")

    if is_culprit and where == "forward":
        inner = model.module if hasattr(model, "module") else model
        inner.layers[2].register_forward_pre_hook(fail)

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if is_culprit and where == "loss":
            fail()
        if is_culprit and where == "backward":
            output = FailInBackward.apply(output)
        return models.loss(output, targets)

    def loader() -> Any:
        if is_culprit and where == "data":
            fail()
        return inputs, targets

    began = time.monotonic()
    try:
        with meshplan.guarded():
            batch = loader()
            meshplan.train_step(model, sgd, *batch, loss)
    except Exception as error:
        first = (type(error).__name__, str(error), time.monotonic() - began)
    else:
        return "nothing was raised"
    try:
        meshplan.train_step(model, sgd, inputs, targets, models.loss)
    except Exception as error:
        return first, (type(error).__name__, str(error))
    return first, ("", "")


CASES = [
    *((name, where) for name in PLANS for where in ("forward", "loss")),
    ("ddp", "backward"), ("full_shard", "backward"), ("full_shard", "data"), ("ddp", "data"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "where"), CASES)
def test_a_failure_on_one_rank_is_told_to_all(pool, name, where):
    results = pool(4).run(failing_step, PLANS[name], where, timeout=SECONDS)
    pool(4).close()
    for rank, ((kind, text, seconds), (later, later_text)) in enumerate(results):
        assert seconds < SECONDS / 2
        if rank == CULPRIT:
            assert (kind, text) == ("Mishap", f"in {where}")
        else:
            assert kind == "ApplyError"
            assert f"rank {CULPRIT} failed: Mishap: in {where}" in text
        assert later == "ApplyError"
        assert f"the process group is dead since rank {CULPRIT} failed" in later_text


def test_what_fails_on_every_rank_leaves_the_group_alive(pool):
    for where in ("loss", "forward"):
        results = pool(4).run(
            failing_step, PLANS["full_shard"], where, (0, 1, 2, 3), timeout=SECONDS
        )
        for (kind, text, _), later in results:
            assert (kind, text) == ("Mishap", f"in {where}")
            assert "dead" not in later[1]
    assert pool(4).run(dist.get_rank) == [0, 1, 2, 3]
    assert pool(4).run(total_of_ranks) == [6.0] * 4


def total_of_ranks() -> float:
    dist.all_reduce(total := torch.tensor(float(dist.get_rank())))
    return total.item()
