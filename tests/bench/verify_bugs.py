"""Bugs that `verify` must find: each changes what ranks compute, and never the one process.

They are planted into what `verify` calls to train together, on every rank alike or on one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.pipeline.shared import SharedTensors
from meshplan.runtime.apply.wrap import own_module
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.base.mesh import local_of
from meshplan.runtime.trace.sample import results
from meshplan.runtime.train import step as train
from meshplan.runtime.verify import verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step is called with, for a bug to change."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Any
    targets: Any
    loss_fn: Callable[[Any, Any], Tensor]
    number: int

    def run(self, **changed: Any) -> float:
        """Run it with something in place of what it was called with."""
        names = ("model", "optimizer", "inputs", "targets", "loss_fn")
        return train.train_step(*(changed.get(name, getattr(self, name)) for name in names))


def _is_second() -> bool:
    return dist.get_rank() == 1


def _scaled(step: Step, factor: float) -> float:
    """A gradient times a number, and the loss as it is."""

    def loss_fn(output: Any, targets: Any) -> Tensor:
        loss = step.loss_fn(output, targets)
        return loss * factor + loss.detach() * (1 - factor)

    return step.run(loss_fn=loss_fn)


def _turned(value: Any) -> Any:
    return mapped(value, lambda tensor: tensor.flip(0) if tensor.ndim else tensor)


def _parts(model: nn.Module) -> list[nn.Module]:
    return model.stage_modules if isinstance(model, PipelinedModule) else [own_module(model)]


def _params(step: Step) -> list[nn.Parameter]:
    """Largest first; equal on all ranks that hold the same stage."""
    found = [p for part in _parts(step.model) for p in part.parameters() if local_of(p).numel()]
    return sorted(found, key=lambda p: -p.numel())


def _other_inputs(step: Step) -> float:
    return step.run(inputs=_turned(step.inputs) if _is_second() else step.inputs)


def _other_targets(step: Step) -> float:
    return step.run(targets=_turned(step.targets) if _is_second() else step.targets)


def _half_the_samples(step: Step) -> float:
    def loss_fn(output: Any, targets: Any) -> Tensor:
        part = len(results(output)[0]) // 2
        return step.loss_fn(*(mapped(x, lambda t: t[:part]) for x in (output, targets)))

    return step.run(loss_fn=loss_fn)


def _rounded_output(step: Step) -> float:
    def loss_fn(output: Any, targets: Any) -> Tensor:
        return step.loss_fn(mapped(output, lambda t: t.bfloat16().float()), targets)

    return step.run(loss_fn=loss_fn)


def _kept(step: Step, tensors: list[Tensor]) -> float:
    """A step that leaves these as they were."""
    before = [local_of(t).detach().clone() for t in tensors]
    loss = step.run()
    with torch.no_grad():
        for tensor, was in zip(tensors, before, strict=True):
            local_of(tensor).copy_(was)
    return loss


def _stale_weight(step: Step) -> float:
    return _kept(step, _params(step)[:1])


def _stale_on_one_rank(step: Step) -> float:
    return _kept(step, _params(step)[:1] if _is_second() else [])


def _lost_buffers(step: Step) -> float:
    return _kept(step, [b for part in _parts(step.model) for b in part.buffers()])


def _other_buffer(step: Step) -> float:
    """A constant of the model that one rank has otherwise."""
    if step.number == 0:
        with torch.no_grad():
            next(b for p in _parts(step.model) for b in p.buffers() if b.is_floating_point()).add_(
                0.3
            )
    return step.run()


def _lost_momentum(step: Step) -> float:
    loss = step.run()
    step.optimizer.state.clear()
    return loss


def _other_start(step: Step) -> float:
    if step.number == 0 and _is_second():
        with torch.no_grad():
            local_of(_params(step)[0]).mul_(1.2)
    return step.run()


def _damped_layer(step: Step) -> float:
    """A module whose output one rank halves."""
    part = next(iter(_parts(step.model)))
    leaf = [m for m in part.modules() if any(True for _ in m.parameters(recurse=False))][-1]

    def halve(module: nn.Module, args: Any, output: Any) -> Any:
        return mapped(output, lambda t: t / 2 if t.is_floating_point() else t)

    handle = leaf.register_forward_hook(halve if _is_second() else lambda *_: None)
    try:
        return step.run()
    finally:
        handle.remove()


def _at_gradients(step: Step, change: Callable[[list[nn.Parameter]], None]) -> float:
    """A step before whose update gradients are changed."""

    def before(*_: Any) -> None:
        with torch.no_grad():
            change([p for p in _params(step) if p.grad is not None])

    handle = step.optimizer.register_step_pre_hook(before)
    try:
        return step.run()
    finally:
        handle.remove()


def _doubled_gradient(step: Step) -> float:
    return _at_gradients(step, lambda params: local_of(params[0].grad).mul_(2))


def _lost_gradient(step: Step) -> float:
    return _at_gradients(step, lambda params: local_of(params[0].grad).zero_())


def _shuffled_gradient(step: Step) -> float:
    def turn(params: list[nn.Parameter]) -> None:
        own = local_of(params[0].grad)
        own.copy_(own.flip(0).clone())

    return _at_gradients(step, turn)


def _signed_gradient(step: Step) -> float:
    def turn(params: list[nn.Parameter]) -> None:
        if _is_second():
            local_of(params[0].grad).neg_()

    return _at_gradients(step, turn)


def _extra_state(step: Step) -> float:
    loss = step.run()
    for parameter, state in step.optimizer.state.items():
        state["beside"] = torch.zeros_like(local_of(parameter))
    return loss


def _extra_collective(step: Step) -> float:
    dist.all_reduce(torch.zeros(64))
    return step.run()


def _faster(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.4 * rate, momentum=0.9)


def _decayed(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=0.3)


def _frozen(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    trained = sorted(model.parameters(), key=lambda p: -p.numel())[1:]
    return torch.optim.SGD(trained, lr=rate, momentum=0.9)


def _own_part(
    output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> None:
    output.copy_(input.view(-1).chunk(group.size())[group.rank()].view_as(output))


def _unreduced(step: Step) -> float:
    if isinstance(step.model, DistributedDataParallel):
        with step.model.no_sync():
            return step.run()
    name = "reduce_scatter_single"  # As FSDP2 of torch 2.13 calls it.
    name = name if hasattr(dist, name) else "reduce_scatter_tensor"
    with mock.patch.object(dist, name, _own_part):
        return step.run()


_CLIP: Final = train.clip_grad_norm_


def _loose_clip(model: nn.Module, limit: float) -> Any:
    return _CLIP(model, 3 * limit)


STEPS: Final[Mapping[str, Callable[[Step], float]]] = {
    "other inputs on a rank": _other_inputs,
    "other targets on a rank": _other_targets,
    "gradients twice": lambda step: _scaled(step, 2.0),
    "gradients half": lambda step: _scaled(step, 0.5),
    "the gradients of one rank left out": lambda step: _scaled(step, 1.0 - _is_second()),
    "the gradients of one rank twice": lambda step: _scaled(step, 1.0 + _is_second()),
    "gradients 5% too large": lambda step: _scaled(step, 1.05),
    "half of the samples": _half_the_samples,
    "gradients not reduced": _unreduced,
    "outputs in bfloat16": _rounded_output,
    "a stale weight": _stale_weight,
    "a stale weight on one rank": _stale_on_one_rank,
    "lost buffers": _lost_buffers,
    "another constant": _other_buffer,
    "lost momentum": _lost_momentum,
    "another start on one rank": _other_start,
    "an output halved on one rank": _damped_layer,
    "one gradient twice": _doubled_gradient,
    "one gradient lost": _lost_gradient,
    "rows of a gradient shuffled": _shuffled_gradient,
    "a gradient's sign on one rank": _signed_gradient,
    "state beside the optimizer's": _extra_state,
    "a collective too many": _extra_collective,
}
OPTIMIZERS: Final[Mapping[str, Callable[[nn.Module, float], torch.optim.Optimizer]]] = {
    "a learning rate 1.4 times": _faster,
    "weight decay": _decayed,
    "a frozen weight": _frozen,
}
CALLS: Final[Mapping[str, tuple[Any, str, Callable[..., Any]]]] = {
    "clipped at another norm": (train, "clip_grad_norm_", _loose_clip),
    "gradients of a shared weight not added": (
        SharedTensors, "add_gradients", lambda shared: None,
    ),
}  # fmt: skip


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """With a bug in what `verify` trains under the plan; none where the name is empty."""
    if bug in STEPS:
        number = -1

        def step(*args: Any) -> float:
            nonlocal number
            number += 1
            names = ("model", "optimizer", "inputs", "targets", "loss_fn")
            return STEPS[bug](Step(**dict(zip(names, args, strict=True)), number=number))

        patch = mock.patch.object(verify, "train_step", step)
    elif bug in OPTIMIZERS:
        patch = mock.patch.object(verify, "sgd", OPTIMIZERS[bug])
    elif bug:
        patch = mock.patch.object(*CALLS[bug])
    else:
        yield
        return
    with patch:
        yield
