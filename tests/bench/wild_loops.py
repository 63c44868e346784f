"""Loops that people write by hand around one model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.bench.wild_cases import BATCH, Block, Env, Wild, ce, mlp, rows, whole, wild


class Net(nn.Module):
    """Four blocks and a head: what the loops train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.blocks = nn.ModuleList(mlp(16, 32, 16) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def looped(loop: Any, model: nn.Module | None = None) -> Wild:
    return Wild(model or Net(), rows(12), whole(5), F.cross_entropy, loop)


def first(made: Wild) -> Any:
    return made.inputs[:BATCH]


@wild
def loop_by_hand() -> Wild:
    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            sgd.zero_grad()
            made.loss(model(x), y).backward()
            sgd.step()
        return {"": model}

    return looped(loop)


@wild
def loop_with_evaluation_between() -> Wild:
    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            env.step(model, sgd, x, y, made.loss)
            env.evaluate(model, first(made)[:4])
        return {"": model}

    return looped(loop)


@wild
def loop_accumulating() -> Wild:
    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            (made.loss(model(x), y) / 3).backward()
        sgd.step()
        return {"": model}

    return looped(loop)


@wild
def loop_clipping_and_schedule() -> Wild:
    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda n: 0.5**n)
        for x, y in env.batches(made.inputs, made.targets):
            made.loss(model(x), y).backward()
            env.clip(model, 0.1)
            sgd.step()
            schedule.step()
            sgd.zero_grad()
        return {"": model}

    return looped(loop)


@wild
def loop_torch_clipping() -> Wild:
    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            made.loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            sgd.step()
            sgd.zero_grad()
        return {"": model}

    return looped(loop)


@wild
def loop_clip_value() -> Wild:
    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            made.loss(model(x), y).backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            sgd.step()
            sgd.zero_grad()
        return {"": model}

    return looped(loop)


def unfreezing(made: Wild, env: Env) -> Mapping[str, nn.Module]:
    made.model.embed.requires_grad_(False)
    made.model.blocks[0].requires_grad_(False)
    model = env.spread(made.model, first(made))
    sgd = env.sgd(model)
    for number, (x, y) in enumerate(env.batches(made.inputs, made.targets)):
        if number == 1:
            for p in model.parameters():
                p.requires_grad_(True)
        env.step(model, sgd, x, y, made.loss)
    return {"": model}


@wild
def loop_unfreezing() -> Wild:
    return looped(unfreezing)


@wild
def loop_unfreezing_new_group() -> Wild:
    """The optimizer learns of the unfrozen parameters by add_param_group."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        made.model.embed.requires_grad_(False)
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model, [(n, p) for n, p in model.named_parameters() if p.requires_grad])
        for number, (x, y) in enumerate(env.batches(made.inputs, made.targets)):
            if number == 1:
                frozen = [p for p in model.parameters() if not p.requires_grad]
                for p in frozen:
                    p.requires_grad_(True)
                if frozen:
                    sgd.add_param_group({"params": frozen})
            env.step(model, sgd, x, y, made.loss)
        return {"": model}

    return looped(loop)


@wild
def loop_freezing() -> Wild:
    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for number, (x, y) in enumerate(env.batches(made.inputs, made.targets)):
            if number == 1:
                for name, p in model.named_parameters():
                    if "embed" in name:
                        p.requires_grad_(False)
            env.step(model, sgd, x, y, made.loss)
        return {"": model}

    return looped(loop)


@wild
def loop_gradient_hooks() -> Wild:
    """A hook on a gradient, registered on the parameter that the model then has."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        for name, p in model.named_parameters():
            if name.endswith("head.weight"):
                p.register_hook(lambda g: 0.5 * g)
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            env.step(model, sgd, x, y, made.loss)
        return {"": model}

    return looped(loop)


@wild
def loop_gradient_noise_mask() -> Wild:
    """Gradients are masked between backward and the step."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            made.loss(model(x), y).backward()
            for name, p in model.named_parameters():
                if "blocks" in name and p.grad is not None:
                    p.grad.mul_(0.25)
            sgd.step()
            sgd.zero_grad()
        return {"": model}

    return looped(loop)


@wild
def loop_ema_copy() -> Wild:
    """An average of the weights, kept as a state by hand."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        ema = {n: p.detach().clone() for n, p in model.named_parameters()}
        for x, y in env.batches(made.inputs, made.targets):
            env.step(model, sgd, x, y, made.loss)
            with torch.no_grad():
                for n, p in model.named_parameters():
                    ema[n].lerp_(p.detach(), 0.3)
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(ema[n])
        return {"": model}

    return looped(loop)


@wild
def loop_averaged_model() -> Wild:
    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        average = torch.optim.swa_utils.AveragedModel(model)
        for x, y in env.batches(made.inputs, made.targets):
            env.step(model, sgd, x, y, made.loss)
            average.update_parameters(model)
        with torch.no_grad():
            for p, q in zip(model.parameters(), average.parameters(), strict=True):
                p.copy_(q)
        return {"": model}

    return looped(loop)


@wild
def loop_deepcopy_teacher() -> Wild:
    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        teacher = copy.deepcopy(model).eval()
        for x, y in env.batches(made.inputs, made.targets):
            with torch.no_grad():
                wanted = teacher(x).softmax(-1)
            env.step(
                model,
                sgd,
                x,
                (y, wanted),
                lambda o, t: F.cross_entropy(o, t[0]) + F.cross_entropy(o, t[1]),
            )
        return {"": model}

    return looped(loop)


@wild
def loop_module_called_directly() -> Wild:
    """model.module where there is one: what DDP users write for evaluation, here for training."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            sgd.zero_grad()
            made.loss(getattr(model, "module", model)(x), y).backward()
            sgd.step()
        return {"": model}

    return looped(loop)


@wild
def loop_calls_a_method() -> Wild:
    """model.features and model.head in place of model."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            inner: Any = getattr(model, "module", model)
            sgd.zero_grad()
            made.loss(inner.head(inner.features(x)), y).backward()
            sgd.step()
        return {"": model}

    return looped(loop)


@wild
def loop_two_forwards_one_backward() -> Wild:
    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            a, b = model(x), model(x + 0.1)
            (made.loss(a, y) + F.mse_loss(a, b)).backward()
            sgd.step()
            sgd.zero_grad()
        return {"": model}

    return looped(loop)


@wild
def loop_adversarial_inputs() -> Wild:
    """FGSM: the gradient of the input makes the batch of the step."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            x = x.clone().requires_grad_(True)
            made.loss(model(x), y).backward()
            assert x.grad is not None
            moved = (x + 0.1 * x.grad.sign()).detach()
            sgd.zero_grad()
            made.loss(model(moved), y).backward()
            sgd.step()
            sgd.zero_grad()
        return {"": model}

    return looped(loop)


@wild
def loop_lbfgs_closure() -> Wild:
    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):

            def closure(x: Any = x, y: Any = y) -> Tensor:
                sgd.zero_grad()
                loss = made.loss(model(x), y)
                loss.backward()
                return loss

            sgd.step(closure)
        return {"": model}

    return looped(loop)


@wild
def loop_weight_penalty() -> Wild:
    """An L1 penalty on the weights, added to the loss."""

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for x, y in env.batches(made.inputs, made.targets):
            penalty = sum(p.abs().sum() for p in model.parameters())
            (made.loss(model(x), y) + 1e-3 * penalty).backward()
            sgd.step()
            sgd.zero_grad()
        return {"": model}

    return looped(loop)


@wild
def loop_changing_lengths() -> Wild:
    """Batches of other sequence lengths from step to step."""

    class Lm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(20, 16), nn.Linear(16, 20)
            self.blocks = nn.ModuleList(Block(16, causal=True) for _ in range(2))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.out(x)

    def loop(made: Wild, env: Env) -> Mapping[str, nn.Module]:
        model = env.spread(made.model, first(made))
        sgd = env.sgd(model)
        for number, (x, y) in enumerate(env.batches(made.inputs, made.targets)):
            n = 8 - 2 * number
            env.step(model, sgd, x[:, :n], y[:, :n], ce)
        return {"": model}

    return Wild(Lm(), whole(20, 8), whole(20, 8, seed=5), ce, loop)
