"""Optimizers step on local tensors, and nothing can be told from steps on DTensors but the time.

Which seeded bug would this catch? State that is left on local tensors or in another layout, a
gradient that a failed step leaves behind, a closure whose gradients are not seen, a scheduler that
loses the step it counts, and an optimizer that updates more than one element at a time.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshplan
from meshplan.runtime.torch_private import local_steps
from tests.helpers import models, parity

PLANS: dict[str, dict[str, Any]] = {
    "full_shard": {"version": 1, "mesh": {"dp_shard": 2}, "strategy": "full_shard"},
    "tp": {"version": 1, "mesh": {"tp": 2}, "rules": models.tp_rules("own_llama")},
}
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamw": (optim.AdamW, {"maximize": True}),
    "adamw at once": (optim.AdamW, {"foreach": True}),
    "adagrad": (optim.Adagrad, {}),
    "adadelta": (optim.Adadelta, {}),
    "adamax": (optim.Adamax, {}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "rmsprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "asgd": (optim.ASGD, {}),
}


def test_every_elementwise_optimizer_is_tried():
    assert {kind for kind, _ in OPTIMIZERS.values()} == local_steps.ELEMENTWISE


def prepared(plan: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    live = meshplan.parallelize(models.build("own_llama"), PLANS[plan])
    inputs, targets = meshplan.local_batch(live, models.batch("own_llama", 0))
    return live, inputs, targets


def backward(live: nn.Module, inputs: Any, targets: Any) -> None:
    models.loss(models.call(live, inputs), targets).backward()


def trained(plan: str, name: str, kinds: frozenset[Any]) -> tuple[list[Any], list[Any], int]:
    """Parameters, state and the number of steps on local tensors of four steps."""
    kind, options = OPTIMIZERS[name]
    live, inputs, targets = prepared(plan)
    optimizer = kind(live.parameters(), **options)
    made = mock.patch.object(local_steps, "_local_step", wraps=local_steps._local_step)
    with mock.patch.object(local_steps, "ELEMENTWISE", kinds), made as steps:
        for _ in range(4):
            backward(live, inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
    state = [(k, v) for p in live.parameters() for k, v in optimizer.state[p].items()]
    return [*live.parameters()], state, steps.call_count


def differences(plan: str, name: str) -> list[str]:
    params, state, ours = trained(plan, name, local_steps.ELEMENTWISE)
    others, other_state, theirs = trained(plan, name, frozenset())
    found = [] if (ours, theirs) == (3, 0) else [f"{ours} and {theirs} steps on local tensors"]
    found += [f"{k} and {other}" for (k, _), (other, _) in zip(state, other_state, strict=True)
              if k != other]  # fmt: skip
    values = [*params, *(v for _, v in state)]
    for ours, theirs in zip(values, [*others, *(v for _, v in other_state)], strict=True):
        if type(ours) is not type(theirs):
            found.append(f"{type(ours)} and {type(theirs)}")
        elif isinstance(ours, DTensor):
            if (ours.placements, ours.shape) != (theirs.placements, theirs.shape):
                found.append("another layout")
            if not torch.equal(ours.to_local(), theirs.to_local()):
                found.append("other values")
        elif isinstance(ours, torch.Tensor) and not torch.equal(ours, theirs):
            found.append("other plain values")
    return found


CASES = [
    pytest.param(plan, name, marks=[pytest.mark.wide] if number % 3 else [])
    for plan in PLANS
    for number, name in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("plan", "name"), CASES)
def test_steps_give_every_bit_that_steps_on_dtensors_give(pool, plan, name):
    assert pool(2).run(differences, plan, name) == [[], []]


class _StepError(KeyboardInterrupt):
    """Raised in the middle of a step, like an error or Ctrl-C."""


def after_a_failure() -> tuple[bool, ...]:
    """What an optimizer has after a step that fails, and in the step after it."""
    live, inputs, targets = prepared("full_shard")
    optimizer = optim.AdamW(live.parameters())
    for _ in range(2):
        backward(live, inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
    backward(live, inputs, targets)
    before = [p for group in optimizer.param_groups for p in group["params"]]
    seen: list[type] = []

    def fail(params: Any, *args: Any, **kwargs: Any) -> None:
        seen.extend(map(type, params))
        raise _StepError

    with mock.patch("torch.optim.adam.adam", fail), pytest.raises(_StepError):
        optimizer.step()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads_stand = all(p.grad is not None for p in params)
    optimizer.zero_grad()
    backward(live, inputs, targets)
    optimizer.step()
    return (
        DTensor not in seen and len(seen) > 0,
        all(a is b for a, b in zip(params, before, strict=True)),
        grads_stand,
        all(p._local_tensor.grad is None for p in params),
        set(optimizer.state) == set(params),
    )


def test_a_step_that_fails_leaves_the_optimizer_as_it_was(pool):
    assert pool(2).run(after_a_failure) == [(True,) * 5] * 2


def with_closures(kinds: frozenset[Any]) -> torch.Tensor:
    live, inputs, targets = prepared("full_shard")
    optimizer = optim.AdamW(live.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = models.loss(models.call(live, inputs), targets)
        loss.backward()
        return loss

    with mock.patch.object(local_steps, "ELEMENTWISE", kinds):
        for _ in range(3):
            optimizer.step(closure)
    return next(live.parameters()).full_tensor().detach()


def test_a_closure_computes_the_gradients_of_its_step(pool):
    for ours, theirs in zip(
        pool(2).run(with_closures, local_steps.ELEMENTWISE),
        pool(2).run(with_closures, frozenset()),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def scheduled(is_late: bool) -> tuple[float, int, bool]:
    live, inputs, targets = prepared("full_shard")
    optimizer = optim.AdamW(live.parameters(), lr=1.0)
    made = mock.patch.object(local_steps, "_local_step", wraps=local_steps._local_step)
    scheduler = None if is_late else optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with made as steps:
        for _ in range(4):
            backward(live, inputs, targets)
            optimizer.step()
            scheduler = scheduler or optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            scheduler.step()
    return optimizer.param_groups[0]["lr"], steps.call_count, optimizer._opt_called


@pytest.mark.parametrize("is_late", [False, True])
def test_a_scheduler_counts_steps_whenever_it_was_made(pool, is_late):
    assert pool(2).run(scheduled, is_late) == [(0.5**4, 3, True)] * 2


def looked_at() -> tuple[list[bool], int]:
    """True for each step whose own hook sees DTensors."""
    live, inputs, targets = prepared("full_shard")
    optimizer = optim.AdamW(live.parameters())
    seen: list[bool] = []

    def look(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"]))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    for _ in range(3):
        backward(live, inputs, targets)
        optimizer.step()
    return seen, len(optimizer.state)


def test_hooks_of_an_optimizer_see_dtensors(pool):
    for seen, num_states in pool(2).run(looked_at):
        assert seen == [True] * 6
        assert num_states > 10


def kept() -> tuple[bool, bool, bool, bool]:
    """Whether an optimizer keeps its state, can be copied and pickled, and is let go at once."""
    live, inputs, targets = prepared("full_shard")
    optimizer = optim.AdamW(live.parameters())
    seen = []
    for _ in range(3):
        backward(live, inputs, targets)
        optimizer.step()
        state = optimizer.state[next(live.parameters())]
        seen.append((id(state), id(state["exp_avg"])))
    states = optimizer.state_dict()["state"]
    torch.save(optimizer, io.BytesIO())
    twin = copy.copy(optimizer)
    gc.collect()
    gc.disable()
    try:
        reference = weakref.ref(optimizer)
        del optimizer
        return (
            len({*seen}) == 1,
            all(isinstance(each["exp_avg"], DTensor) for each in states.values()),
            type(twin) is optim.AdamW,
            reference() is None,
        )
    finally:
        gc.enable()


def test_an_optimizer_is_copied_saved_and_let_go(pool):
    assert pool(2).run(kept) == [(True,) * 4] * 2


def begun_late() -> list[type]:
    """The types of the state of a parameter that gets its first gradient in a later step."""
    live, inputs, targets = prepared("full_shard")
    optimizer = optim.AdamW(live.parameters())
    late = next(live.parameters())
    for step in range(3):
        backward(live, inputs, targets)
        if step < 2:
            late.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return [type(optimizer.state[late][name]) for name in ("exp_avg", "exp_avg_sq")]


def test_state_that_begins_in_a_local_step_is_of_dtensors(pool):
    assert pool(2).run(begun_late) == [[DTensor] * 2] * 2


class Trusting(optim.SGD):
    """Divides each gradient by its norm, which is not elementwise, before torch's own step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    norm = param.grad.norm()
                    param.grad /= norm.full_tensor() if isinstance(norm, DTensor) else norm
        return super().step(closure)


def trusting() -> float:
    """The largest difference of parameters to one process."""
    live, inputs, targets = prepared("tp")
    torch.manual_seed(0)
    alone = models.build("own_llama")
    optimizers = [Trusting(model.parameters(), lr=0.1) for model in (live, alone)]
    for _ in range(3):
        for model, optimizer in zip((live, alone), optimizers, strict=True):
            backward(model, inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
    whole = meshplan.full_state_dict(live)
    state = alone.state_dict()
    return max([0.0, *(float((value - state[name]).abs().max()) for name, value in whole.items())])


def test_a_step_of_a_subclass_sees_whole_parameters(pool):
    assert max(pool(2).run(trusting)) <= parity.TOLERANCE


def with_partial_gradients() -> float:
    """The value of a parameter that three steps with gradients of 1 + 1 take from 0."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = nn.Parameter(
        DTensor.from_local(torch.zeros(4), mesh, [Replicate()], run_check=False)
    )
    optimizer = optim.SGD([parameter], lr=1.0)
    local_steps.step_on_local_tensors()
    with mock.patch.object(local_steps, "known_parameters", return_value={id(parameter)}):
        for _ in range(3):
            parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
            optimizer.step()
    return float(parameter.to_local().min())


def test_partial_gradients_are_summed_before_they_are_stepped(pool):
    assert pool(2).run(with_partial_gradients) == [-6.0] * 2


def untouched() -> int:
    """Steps on local tensors of an optimizer whose model has no plan."""
    live, inputs, targets = prepared("full_shard")
    backward(live, inputs, targets)
    other = nn.Linear(4, 4)
    optimizer = optim.AdamW(other.parameters())
    made = mock.patch.object(local_steps, "_local_step", wraps=local_steps._local_step)
    with made as steps:
        for _ in range(3):
            other(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return steps.call_count + ("step" in vars(optimizer))


def test_optimizers_of_other_models_stay_as_they_are(pool):
    assert pool(2).run(untouched) == [0, 0]
