"""Loops that do something else between the steps: averages, accumulation, freezing, copies."""

from __future__ import annotations

import contextlib
import copy
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import swa_utils

from tests.helpers.own_loops import Env, loop, loss_of

_EPS = {"eps": 1e-3}

Result = tuple[nn.Module, list[float]]


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), fused=True, **_EPS)


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.1, 0.9)


@loop
def muon(env: Env) -> Result:
    """Its products are of float64 here, for the rounding of bfloat16 depends on their order."""
    model = env.net()
    both = [
        optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2),
        optim.AdamW([p for p in model.parameters() if p.ndim != 2], fused=True, **_EPS),
    ]
    for x, y in env.batches(model):
        loss_of(model, x, y).backward()
        with mock.patch.object(Tensor, "bfloat16", Tensor.double):
            for each in both:
                each.step()
                each.zero_grad()
    return model, []


@loop
def grads_kept(env: Env) -> Result:
    """Gradients are set to zero instead of None."""
    model = env.net()
    optimizer = adamw(model)
    for x, y in env.batches(model):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model, []


@loop
def accumulated(env: Env) -> Result:
    model = env.net()
    optimizer = adamw(model)
    for number, (x, y) in enumerate(env.batches(model)):
        (loss_of(model, x, y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model, []


@loop
def accumulated_unsynced(env: Env) -> Result:
    model = env.net()
    optimizer = adamw(model)
    for number, (x, y) in enumerate(env.batches(model)):
        off = getattr(model, "no_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if number % 2 else off():
            (loss_of(model, x, y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model, []


@loop
def backward_twice(env: Env) -> Result:
    model = env.net()
    optimizer = sgd(model)
    for x, y in env.batches(model):
        loss_of(model, x, y).backward()
        loss_of(model, -x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@loop
def graph_retained(env: Env) -> Result:
    model = env.net()
    optimizer = sgd(model)
    for x, y in env.batches(model):
        output = model(x)
        F.mse_loss(output, y).backward(retain_graph=True)
        F.l1_loss(output, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@loop
def forward_twice(env: Env) -> Result:
    """Two forwards, one backward of their sum."""
    model = env.net()
    optimizer = sgd(model)
    for x, y in env.batches(model):
        (loss_of(model, x, y) + loss_of(model, -x, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@loop
def gradient_penalty(env: Env) -> Result:
    model = env.net()
    optimizer = sgd(model)
    for x, y in env.batches(model):
        x = x.clone().requires_grad_(True)
        output = model(x)
        slope = torch.autograd.grad(output.sum(), x, create_graph=True)[0]
        (F.mse_loss(output, y) + slope.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@loop
def input_gradient(env: Env) -> Result:
    """Adversarial training: a step along the gradient of the input."""
    model = env.net()
    optimizer = sgd(model)
    for x, y in env.batches(model):
        x = x.clone().requires_grad_(True)
        slope = torch.autograd.grad(loss_of(model, x, y), x)[0]
        loss_of(model, (x + 0.1 * slope.sign()).detach(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@loop
def weight_penalty(env: Env) -> Result:
    """L2 of all parameters in the loss."""
    model = env.net()
    optimizer = sgd(model)
    for x, y in env.batches(model):
        penalty = sum(p.square().sum() for p in model.parameters())
        (loss_of(model, x, y) + 0.01 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@loop
def weight_penalty_full(env: Env) -> Result:
    model = env.net()
    optimizer = sgd(model)
    for x, y in env.batches(model):
        parts: list[Any] = [p.square().sum() for p in model.parameters()]
        penalty = sum(p.full_tensor() if hasattr(p, "full_tensor") else p for p in parts)
        (loss_of(model, x, y) + 0.01 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@loop
def decay_by_hand(env: Env) -> Result:
    model = env.net()
    optimizer = sgd(model)
    for x, y in env.batches(model):
        env.step(model, optimizer, x, y)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)
                p.data.mul_(0.99)
                p.data = p.data * 0.99
    return model, []


@loop
def sgd_by_hand(env: Env) -> Result:
    model = env.net()
    for x, y in env.batches(model):
        loss_of(model, x, y).backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
                p.grad = None
    return model, []


@loop
def sgd_by_data(env: Env) -> Result:
    model = env.net()
    for x, y in env.batches(model):
        model.zero_grad()
        loss_of(model, x, y).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad.data, alpha=-0.1)
    return model, []


@loop
def gradients_changed(env: Env) -> Result:
    model = env.net()
    optimizer = adamw(model)
    for x, y in env.batches(model):
        loss_of(model, x, y).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5).nan_to_num_()
            p.grad = p.grad / 2
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@loop
def ema_by_hand(env: Env) -> Result:
    """The average ends as the parameters of the model."""
    model = env.net()
    optimizer = sgd(model)
    average = [p.detach().clone() for p in model.parameters()]
    for x, y in env.batches(model):
        env.step(model, optimizer, x, y)
        for a, p in zip(average, model.parameters(), strict=True):
            a.mul_(0.9).add_(p.detach(), alpha=0.1)
            a.lerp_(p.data, 0.1)
    with torch.no_grad():
        for a, p in zip(average, model.parameters(), strict=True):
            p.copy_(a)
    return model, []


@loop
def ema_foreach(env: Env) -> Result:
    model = env.net()
    optimizer = sgd(model)
    average = [p.detach().clone() for p in model.parameters()]
    for x, y in env.batches(model):
        env.step(model, optimizer, x, y)
        torch._foreach_mul_(average, 0.9)
        torch._foreach_add_(average, [p.detach() for p in model.parameters()], alpha=0.1)
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
    with torch.no_grad():
        for a, p in zip(average, model.parameters(), strict=True):
            p.copy_(a)
    return model, []


@loop
def ema_of_state(env: Env) -> Result:
    """A dict of copies, as many scripts keep it, loaded at the end."""
    model = env.net()
    optimizer = sgd(model)
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for x, y in env.batches(model):
        env.step(model, optimizer, x, y)
        for name, value in model.state_dict().items():
            average[name] = 0.9 * average[name] + 0.1 * value
    model.load_state_dict(average)
    return model, []


@loop
def ema_averaged_model(env: Env) -> Result:
    model = env.net()
    optimizer = sgd(model)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for x, y in env.batches(model):
        env.step(model, optimizer, x, y)
        average.update_parameters(model)
    return average.module, []


@loop
def swa_two_models(env: Env) -> Result:
    """The average is a second model under the same plan."""
    model, average = env.net(), env.net()
    optimizer = sgd(model)
    update = swa_utils.get_ema_multi_avg_fn(0.9)
    for x, y in env.batches(model):
        env.step(model, optimizer, x, y)
        update(
            [p.detach() for p in average.parameters()], [p.detach() for p in model.parameters()], 1
        )
    return average, []


@loop
def deepcopied(env: Env) -> Result:
    model = env.net()
    return copy.deepcopy(model), []


@loop
def reloaded(env: Env) -> Result:
    """The best state is kept in memory and put back."""
    model = env.net()
    optimizer = adamw(model)
    kept: Any = None
    for number, (x, y) in enumerate(env.batches(model)):
        env.step(model, optimizer, x, y)
        if number == 1:
            kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        if number == 2:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
    return model, []


@loop
def rebuilt_optimizer(env: Env) -> Result:
    """A new optimizer takes over the state of the old one."""
    model = env.net()
    optimizer = adamw(model)
    for number, (x, y) in enumerate(env.batches(model)):
        env.step(model, optimizer, x, y)
        if number == 1:
            state = optimizer.state_dict()
            optimizer = adamw(model)
            optimizer.load_state_dict(state)
    return model, []


@loop
def frozen_and_thawed(env: Env) -> Result:
    model = env.net()
    optimizer = adamw(model)
    for number, (x, y) in enumerate(env.batches(model, 6)):
        for name, p in model.named_parameters():
            if "blocks.0" in name:
                p.requires_grad_(number not in (2, 3))
        env.step(model, optimizer, x, y)
    return model, []


@loop
def group_added(env: Env) -> Result:
    """The head is trained first, the rest joins."""
    model = env.net()
    head = [p for n, p in model.named_parameters() if "head" in n]
    rest = [p for n, p in model.named_parameters() if "head" not in n]
    for p in rest:
        p.requires_grad_(False)
    optimizer = optim.AdamW(head, fused=True, **_EPS)
    for number, (x, y) in enumerate(env.batches(model)):
        if number == 2:
            for p in rest:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": rest, "lr": 3e-3})
        env.step(model, optimizer, x, y)
    return model, []


@loop
def hooks_of_optimizer(env: Env) -> Result:
    """A pre-hook halves the rate and the gradients, a post-hook clamps the parameters."""
    model = env.net()
    optimizer = adamw(model)

    def before(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad * 0.5

    def after(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.2, 0.2)
                    optimizer.state[p]["exp_avg"].mul_(0.9)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    for x, y in env.batches(model):
        env.step(model, optimizer, x, y)
    return model, []


@loop
def clip_in_optimizer_hook(env: Env) -> Result:
    model = env.net()
    optimizer = adamw(model)

    def before(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)

    optimizer.register_step_pre_hook(before)
    for x, y in env.batches(model):
        env.step(model, optimizer, x, y)
    return model, []


@loop
def step_in_backward(env: Env) -> Result:
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    model = env.net()
    by_param = {p: optim.AdamW([p], fused=True, **_EPS) for p in model.parameters()}

    def step(p: Tensor) -> None:
        by_param[p].step()
        by_param[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x, y in env.batches(model):
        loss_of(model, x, y).backward()
    return model, []


@loop
def evaluated_between(env: Env) -> Result:
    model = env.net()
    optimizer = adamw(model)
    seen = []
    for x, y in env.batches(model):
        model.train()
        env.step(model, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            seen.append(env.mean(loss_of(model, x, y)))
        with torch.inference_mode():
            seen.append(env.mean(loss_of(model, x, y)))
    return model, seen


@loop
def cast_after(env: Env) -> Result:
    model = env.net().half()
    return model, []


@loop
def compiled(env: Env) -> Result:
    model = env.net()
    called = torch.compile(model, backend="aot_eager")
    optimizer = adamw(model)
    losses = []
    for x, y in env.batches(model):
        loss = F.mse_loss(called(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(env.mean(loss))
    return model, losses


@loop
def autocast(env: Env) -> Result:
    model = env.net()
    optimizer = sgd(model)
    for x, y in env.batches(model, 2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@loop
def sam(env: Env) -> Result:
    """Sharpness-aware: a step up along the gradient, a gradient there, and back."""
    model = env.net()
    optimizer = sgd(model)
    for x, y in env.batches(model):
        loss_of(model, x, y).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        with torch.no_grad():
            ups = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]  # type: ignore[operator]
            for p, up in zip(model.parameters(), ups, strict=True):
                p.add_(up)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        with torch.no_grad():
            for p, up in zip(model.parameters(), ups, strict=True):
                p.sub_(up)
        optimizer.step()
        optimizer.zero_grad()
    return model, []
