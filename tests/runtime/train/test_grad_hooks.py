"""Hooks on gradients: called once a step with the whole gradient, whatever cuts it.

Which seeded bug would this catch? A hook that is called by each rank, or by each microbatch, clamps
parts of the gradient; one that torch keeps on a sharded parameter is never called.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import meshplan
from tests.helpers import parity
from tests.runtime.checks.test_outside import Plain, batch

NAMES = ("layers.0.linear.weight", "head.weight")


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    """Not linear: clamped parts do not add up to what is clamped whole."""
    return gradient.clamp(-0.01, 0.02)


def train(
    plan: dict[str, Any], how: str, norm: float | None = None, loop: str = "train_step"
) -> tuple[str, float, int]:
    """(what was refused, largest difference from one process, calls on this rank)."""
    calls = 0

    def counted(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return clamp(gradient)

    def accumulated(param: torch.Tensor) -> None:
        param.grad.copy_(counted(param.grad))

    torch.manual_seed(0)
    alone = Plain()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for name in NAMES:
        alone.get_parameter(name).register_hook(clamp)
    try:
        torch.manual_seed(0)
        model = meshplan.parallelize(Plain(), {"version": 1, **plan}, example_inputs=batch()[0])
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        for name in NAMES:
            if how == "meshplan":
                meshplan.register_grad_hook(model, name, counted)
                continue
            # A stage holds one of the two.
            param = dict(getattr(model, "module", model).named_parameters()).get(name)
            if param is None:
                continue
            if how == "accumulated":
                param.register_post_accumulate_grad_hook(accumulated)
            else:
                param.register_hook(counted)
        for _ in range(3):
            x, y = meshplan.local_batch(model, batch())
            if loop == "train_step":
                meshplan.train_step(model, sgd, x, y, F.mse_loss)
            else:
                F.mse_loss(model(x), y).backward()
                if norm is not None:
                    meshplan.clip_grad_norm_(model, norm)
                sgd.step()
                sgd.zero_grad()
            x, y = batch()
            F.mse_loss(alone(x), y).backward()
            if norm is not None:
                torch.nn.utils.clip_grad_norm_(alone.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
        live, state = meshplan.full_state_dict(model), alone.state_dict()
        apart = max((abs(live[n] - state[n]).max().item() for n in live), default=0.0)
        return "", apart, calls
    except meshplan.ApplyError as error:
        return error.problems[0].what, 0.0, calls


HEAD = [{"match": "head", "place": {"tp": "colwise_gather_output"}}]
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "ddp, accumulated": (2, {"strategy": "ddp", "batch": {"accumulate": 2}}),
    "full_shard": (2, {"strategy": "full_shard"}),
    "hybrid_shard": (4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "tp": (2, {"mesh": {"tp": 2}, "rules": HEAD}),
    "tp x full_shard": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "rules": HEAD}),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_hook_sees_the_whole_gradient_once_a_step(pool, plan):
    world, words = PLANS[plan]
    results = pool(world).run(train, {**words, "clip_grad_norm": 0.02}, "meshplan", 0.02)
    for refused, apart, calls in results:
        assert (refused, apart <= parity.TOLERANCE) == ("", True), (refused, apart)
        assert calls == (3 if plan == "pp" else 6)  # A stage holds one of the two parameters.


@pytest.mark.parametrize("norm", [None, 0.02])
def test_also_in_a_loop_by_hand(pool, norm):
    for refused, apart, calls in pool(2).run(
        train, PLANS["full_shard"][1], "meshplan", norm, "by hand"
    ):
        assert (refused, apart <= parity.TOLERANCE, calls) == ("", True, 6)


@pytest.mark.parametrize("plan", ["full_shard", "hybrid_shard", "tp x full_shard"])
def test_torchs_own_hooks_on_sharded_parameters_are_called(pool, plan):
    world, words = PLANS[plan]
    for refused, apart, calls in pool(world).run(train, words, "torch"):
        assert (refused, apart <= parity.TOLERANCE, calls) == ("", True, 6), (refused, apart)


@pytest.mark.parametrize("plan", ["ddp", "ddp, accumulated"])
def test_torchs_own_hooks_on_parts_of_the_batch_are_refused(pool, plan):
    world, words = PLANS[plan]
    for refused, _, _ in pool(world).run(train, words, "torch"):
        assert "has a gradient hook, which torch calls with a partial gradient" in refused


@pytest.mark.parametrize("plan", PLANS)
def test_hooks_on_accumulated_gradients_are_right_or_refused(pool, plan):
    world, words = PLANS[plan]
    told = pool(world).run(train, words, "accumulated")
    if "ddp" in plan or plan == "pp":
        assert all("with a partial gradient" in refused for refused, _, _ in told), told
    for refused, apart, _ in told:
        assert refused or apart <= parity.TOLERANCE, told


def hooked_before() -> str:
    model = Plain()
    model.head.weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(meshplan.PlanError) as caught:
        meshplan.parallelize(model, {"version": 1, "strategy": "ddp"})
    return str(caught.value)


def test_so_are_those_of_before_parallelize(pool):
    assert all("head.weight has a gradient hook" in told for told in pool(2).run(hooked_before))


def unknown() -> str:
    model = meshplan.parallelize(Plain(), {"version": 1, "strategy": "full_shard"})
    with pytest.raises(meshplan.ApplyError) as caught:
        meshplan.register_grad_hook(model, "layers.9.weight", clamp)
    handle = meshplan.register_grad_hook(model, NAMES[0], lambda gradient: 1 / 0)
    handle.remove()
    x, y = meshplan.local_batch(model, batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meshplan.train_step(model, optimizer, x, y, F.mse_loss)
    return str(caught.value)


def test_unknown_names_are_told_and_hooks_can_be_removed(pool):
    assert all("no parameter layers.9.weight" in text for text in pool(2).run(unknown))
