"""Parameters that are unfrozen or frozen while a model trains, beside one process.

Which seeded bug would this catch? Without `checks.trainability` DistributedDataParallel has no
bucket for what is unfrozen, so ranks drift, and units that began frozen reduce in a wrong dtype.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import meshplan
from tests.helpers import parity
from tests.runtime.checks.test_outside import Plain, batch

EARLY = "layers.0."


def switch(model: nn.Module, how: str) -> None:
    for name, parameter in model.named_parameters():
        if EARLY in name:
            parameter.requires_grad_(how == "unfreeze")


def train(
    plan: dict[str, Any],
    how: str,
    loop: str = "train_step",
    *,
    is_told: bool = True,
) -> tuple[str, float]:
    """(what was refused, largest difference of the state from one process) after five steps."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = Plain()
        if how == "unfreeze":
            switch(model, "freeze")
        return model

    try:
        model = meshplan.parallelize(made(), {"version": 1, **plan}, example_inputs=batch()[0])
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        alone = made()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(5):
            if step == 2:
                switch(alone, how)
                switch(model, how)
                if is_told:
                    model.train()
            x, y = meshplan.local_batch(model, batch())
            if loop == "train_step":
                meshplan.train_step(model, sgd, x, y, F.mse_loss)
            else:
                F.mse_loss(model(x), y).backward()
                sgd.step()
                sgd.zero_grad()
            x, y = batch()
            F.mse_loss(alone(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        live, state = meshplan.full_state_dict(model), alone.state_dict()
        return "", max((abs(live[n] - state[n]).max().item() for n in live), default=0.0)
    except meshplan.ApplyError as error:
        return error.problems[0].what, 0.0


HEAD = [{"match": "head", "place": {"tp": "colwise_gather_output"}}]
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "ddp, accumulated": (2, {"strategy": "ddp", "batch": {"accumulate": 2}}),
    "full_shard": (2, {"strategy": "full_shard"}),
    "tp": (2, {"mesh": {"tp": 2}, "rules": HEAD}),
    "tp x full_shard": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "rules": HEAD}),
    "pp": (
        2,
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}},
    ),
}


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        *((plan, "unfreeze") for plan in PLANS),
        ("ddp", "freeze"),
        pytest.param("full_shard", "freeze", marks=pytest.mark.wide),
        pytest.param("pp", "freeze", marks=pytest.mark.wide),
    ],
)
def test_what_is_trained_may_change(pool, plan, how):
    world, words = PLANS[plan]
    for refused, apart in pool(world).run(train, words, how):
        assert (refused, apart <= parity.TOLERANCE) == ("", True), (refused, apart)


@pytest.mark.parametrize("plan", ["ddp", "full_shard"])
def test_also_in_a_loop_by_hand(pool, plan):
    world, words = PLANS[plan]
    for refused, apart in pool(world).run(train, words, "unfreeze", "by hand"):
        assert (refused, apart <= parity.TOLERANCE) == ("", True), (refused, apart)


def test_stages_must_be_told(pool):
    _, words = PLANS["pp"]
    for refused, _ in pool(2).run(train, words, "unfreeze", is_told=False):
        assert "parameters of stage 0 or of an earlier stage were frozen or unfrozen" in refused


def differently(plan: str, names: list[str]) -> str:
    """What is said where each rank unfreezes one layer, or none."""
    _, words = PLANS[plan]
    frozen = Plain()
    switch(frozen, "freeze")
    model = meshplan.parallelize(frozen, {"version": 1, **words})
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = meshplan.local_batch(model, batch())
    try:
        for step in range(4):
            for name, parameter in model.named_parameters():
                if step == 2 and name.endswith(names[dist.get_rank()]):
                    parameter.requires_grad_()
            meshplan.train_step(model, sgd, x, y, F.mse_loss)
    except meshplan.ApplyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", ["ddp", "full_shard"])
@pytest.mark.parametrize("names", [["0.linear.weight", "0.linear.bias"], ["0.linear.bias", "-"]])
def test_ranks_that_train_other_parameters_are_told(pool, plan, names):
    ranks = pool(2)
    told = ranks.run(differently, plan, names, timeout=60)
    assert any("frozen" in text or "unfreeze" in text for text in told), told
    assert all(told), told
    ranks.close()


def mixed() -> set[str]:
    """Dtypes of gradients of units that were all frozen at first."""
    model = Plain()
    switch(model, "freeze")
    plan = {"version": 1, "strategy": "full_shard", "precision": "bf16-mixed"}
    model = meshplan.parallelize(model, plan)
    for step in range(2):
        if step:
            switch(model, "unfreeze")
        x, y = meshplan.local_batch(model, batch())
        F.mse_loss(model(x), y).backward()
    return {str(p.grad.dtype) for p in model.parameters()}


def test_units_that_began_frozen_reduce_in_the_plans_dtype(pool):
    assert pool(2).run(mixed) == [{"torch.float32"}, {"torch.float32"}]
