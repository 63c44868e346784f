"""Loops of one's own: gradients that were not averaged are refused, evaluation changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshplan
from tests.helpers import models, parity

RULES = models.tp_rules("own_llama")
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "zero2": (2, {"strategy": "zero2"}),
    "full_shard": (2, {"strategy": "full_shard"}),
    "hybrid": (4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "replicas x tp": (4, {"mesh": {"dp_replicate": 2, "tp": 2}, "rules": RULES}),
}


STAGES = {
    "mesh": {"pp": 2, "dp_shard": 2},
    "pipeline": {"schedule": "1F1B", "microbatches": 2},
    "strategy": "zero2",
}


def both(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return models.loss(model(x), y), models.loss(model(x.flip(1)), y.flip(1))


def two_graphs(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    first, second = both(model, x, y)
    first.backward()
    second.backward()


def one_by_one(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    models.loss(model(x), y).backward()
    models.loss(model(x.flip(1)), y.flip(1)).backward()


def summed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    sum(both(model, x, y)).backward()  # type: ignore[union-attr]


def twice_back(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = sum(both(model, x, y)) / 2
    loss.backward(retain_graph=True)
    loss.backward()


def past_the_wrapper(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    summed(getattr(model, "module", model), x, y)


def by_hand(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    parameters = list(model.parameters())
    found = torch.autograd.grad(sum(both(model, x, y)), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


def by_hand_of_copies(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = sum(both(model, x, y))
    parameters = list(model.parameters())  # Those that are gathered for backward.
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def train(plan: dict[str, Any], go: Callable[..., None]) -> tuple[str, float]:
    """(what was refused, the largest difference from one process) of a loop of one's own."""
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, **plan})
    alone = models.build("own_llama")
    optimizers = models.optimizer(model), models.optimizer(alone)
    for step in range(2):
        batch = models.batch("own_llama", step)
        summed(alone, *batch)
        try:
            go(model, *meshplan.local_batch(model, batch))
            optimizers[0].step()
        except meshplan.ApplyError as error:
            return str(error), 0.0
        optimizers[1].step()
        for each in optimizers:
            each.zero_grad()
    live = meshplan.full_state_dict(model)
    expected = alone.state_dict()
    return "", max([0.0, *((live[n] - expected[n]).abs().max().item() for n in live)])


LOOPS = [("ddp", one_by_one), ("ddp", summed), *((name, two_graphs) for name in PLANS)]


@pytest.mark.parametrize(("name", "go"), [*LOOPS, ("ddp", twice_back), ("hybrid", twice_back)])
def test_a_loop_of_ones_own_is_right_or_refused(pool, name, go):
    world, plan = PLANS[name]
    is_refused = name == "ddp" and go in (two_graphs, twice_back)
    for told, difference in pool(world).run(train, plan, go):
        assert ("these gradients were not averaged" in told) is is_refused
        assert difference <= parity.TOLERANCE


@pytest.mark.parametrize(
    ("go", "what"),
    [
        (past_the_wrapper, "model.module was called directly instead of through DistributedData"),
        (by_hand, "differ between ranks along dp_replicate: embed.weight and"),
    ],
)
def test_gradients_that_go_past_the_wrapper_are_refused(pool, go, what):
    for told, _ in pool(2).run(train, {"strategy": "ddp"}, go):
        assert what in told


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_gradients_of_gathered_copies_are_refused(pool, strategy):
    for told, _ in pool(2).run(train, {"strategy": strategy}, by_hand_of_copies):
        assert "no parameter of the optimizer has a gradient" in told


def frozen(plan: dict[str, Any]) -> tuple[str, float]:
    """(the wrapper, the largest difference of outputs) of a teacher, which nothing trains."""
    alone = models.build("own_llama").requires_grad_(False)
    model = models.build("own_llama").requires_grad_(False)
    model = meshplan.parallelize(model, {"version": 1, **plan})
    whole, _ = models.batch("own_llama", 0)
    x = meshplan.local_batch(model, whole)
    has_stages = "pp" in plan.get("mesh", {})
    apart = 0.0
    for is_graded in (True, False):
        with torch.set_grad_enabled(is_graded and not has_stages):
            found = model.eval_step(x) if has_stages else model(x)
        if found is not None:
            apart = max(apart, (found - alone(x)).abs().max().item())
    return model.meshplan.plan.assignment.wrapper, apart


@pytest.mark.parametrize("name", [*PLANS, "stages"])
def test_a_model_that_nothing_trains(pool, name):
    world, plan = PLANS.get(name, (4, STAGES))
    for wrapper, difference in pool(world).run(frozen, plan):
        assert wrapper == ("none" if name == "ddp" else "units")
        assert difference <= 1e-5


def called_with(plan: dict[str, Any], scale: float | None) -> str:
    """What a forward with other parameters than the model's own says."""
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, **plan})
    own = dict(model.named_parameters())
    given = own if scale is None else {name: p * scale for name, p in own.items()}
    x, _ = meshplan.local_batch(model, models.batch("own_llama", 0))
    try:
        torch.func.functional_call(model, given, (x,))
    except meshplan.ApplyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["zero1", "full_shard"])
def test_parameters_that_would_be_left_unused_are_refused(pool, strategy):
    for told in pool(2).run(called_with, {"strategy": strategy}, 0.5):
        assert "was replaced by another tensor for this forward" in told
    assert pool(2).run(called_with, {"strategy": strategy}, None) == ["", ""]


def train_after(plan: dict[str, Any], kind: str) -> tuple[str, float]:
    """(what was refused, the difference) where the optimizer is made after a forward."""
    model = meshplan.parallelize(models.build("own_llama"), {"version": 1, **plan})
    has_stages = "pp" in plan.get("mesh", {})

    def evaluate() -> None:
        x, _ = meshplan.local_batch(model, models.batch("own_llama", 0))
        modes = {
            "no_grad": torch.no_grad,
            "inference_mode": torch.inference_mode,
            "training": torch.enable_grad,
        }
        with modes[kind]():
            model.eval_step(x) if has_stages else model(x)

    evaluate()
    sgd = models.optimizer(model)
    losses = []
    for step in range(2):
        batch = meshplan.local_batch(model, models.batch("own_llama", step))
        try:
            losses.append(meshplan.train_step(model, sgd, *batch, models.loss))
        except meshplan.ApplyError as error:
            return str(error), 0.0
        if kind != "training":
            evaluate()
    expected, state = models.reference("own_llama", 2)
    live = meshplan.full_state_dict(model)
    apart = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    if dist.get_rank() == 0:
        apart += [(live[n] - t).abs().max().item() for n, t in state.items()]
    return "", max(apart)


@pytest.mark.parametrize("name", ["zero2", "full_shard", "replicas x tp", "stages"])
@pytest.mark.parametrize("kind", ["no_grad", "inference_mode"])
def test_an_evaluation_before_training_changes_nothing(pool, name, kind):
    world, plan = PLANS.get(name, (4, STAGES))
    for told, difference in pool(world).run(train_after, plan, kind):
        assert told == ""
        assert difference <= parity.TOLERANCE


def test_an_optimizer_of_gathered_parameters_is_refused(pool):
    for told, _ in pool(2).run(train_after, {"strategy": "full_shard"}, "training"):
        assert "or between a forward and its backward" in told
