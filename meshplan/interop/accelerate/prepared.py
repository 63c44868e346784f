"""Optimizers and schedulers as `prepare` returns them, with the steps of a plan."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from meshplan.errors import ApplyError, Problem
from meshplan.interop.external_step import ExternalStep
from meshplan.runtime.apply.wrap import own_module
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.watch.guard import guarded
from meshplan.state.held import plain_name

_MAKE_LATER = (
    "prepare the model alone, then make the optimizer: model = accelerator.prepare(model), "
    "optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))"
)


class PlannedOptimizer(AcceleratedOptimizer):
    """An optimizer that steps once the gradients of a parallelized model are complete.

    Args:
        optimizer: An optimizer of the model's parameters.
        step: The steps of the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, step: ExternalStep) -> None:
        super().__init__(optimizer, device_placement=False)  # Its states are where the shards are.
        self._planned_step = step

    def step(self, closure: Any = None) -> None:
        """Take a step in the last microbatch, unless a gradient overflowed float16."""
        if closure is not None:
            what = "optimizer.step was given a closure, which would run backward again"
            raise ApplyError(Problem(what, fix="call accelerator.backward before it"))
        if not self.gradient_state.sync_gradients:
            return
        with guarded("optimizer.step"):
            self._is_overflow = not self._planned_step.before_step(self.optimizer)
            if not self._is_overflow:
                self.optimizer.step()
            self._planned_step.finish()


class PlannedScheduler(AcceleratedScheduler):
    """A scheduler that takes a step for each data rank, where accelerate takes one for each rank.

    Args:
        scheduler: The scheduler.
        optimizer: The prepared optimizer, or several.
        num_steps: Steps that it takes in each step of the optimizer.
        step_with_optimizer: As for the Accelerator.
    """

    def __init__(
        self, scheduler: Any, optimizer: Any, *, num_steps: int, step_with_optimizer: bool
    ) -> None:
        # With split_batches, each call of `step` is one step.
        super().__init__(scheduler, optimizer, step_with_optimizer, split_batches=True)
        self._num_steps = num_steps

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Take the steps of one step of the optimizer."""
        follows = self.step_with_optimizer and self.gradient_state.sync_gradients
        last = getattr(self.scheduler, "total_steps", math.inf)  # OneCycleLR raises after it.
        for number in range(self._num_steps if follows else 1):
            if number == 0 or self.scheduler._step_count <= last:
                super().step(*args, **kwargs)


class ReplacedParameters:
    """The parameters of a model before and after a plan was applied to it, by name.

    Args:
        model: The model before the plan is applied.
    """

    def __init__(self, model: nn.Module) -> None:
        # Weak references: the whole model must not stay in memory beside its shards.
        self._before = [(weakref.ref(each), name) for name, each in model.named_parameters()]
        self._after: dict[str, nn.Parameter] = {}

    def see(self, wrapped: nn.Module) -> None:
        """Note the parameters of the model after the plan was applied."""
        found = own_module(wrapped).named_parameters(remove_duplicate=False)
        self._after = {plain_name(name): each for name, each in found}

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer that was made before the plan was applied train the new parameters.

        Raises:
            ApplyError: It has states or other references of the parameters before.
        """
        own = {id(each) for each in self._after.values()}
        names = {id(each): name for ref, name in self._before if (each := ref()) is not None}
        replaced = {key: name for key, name in names.items() if key not in own}
        groups = optimizer.param_groups
        if not any(id(each) in replaced for group in groups for each in group["params"]):
            return
        rest = {
            key: value
            for key, value in vars(optimizer).items()
            if key not in ("param_groups", "state")
        }
        kind, what = type(optimizer).__name__, ""
        if optimizer.state:
            what = f"{kind} has states of the parameters that prepare replaces"
        elif any(id(each) in replaced for _, each in tensors_in(rest)):
            what = f"{kind} keeps references of its own to the parameters that prepare replaces"
        if what:
            raise ApplyError(Problem(what, fix=_MAKE_LATER))
        for group in groups:
            group["params"] = [
                self._after[replaced[id(each)]] if id(each) in replaced else each
                for each in group["params"]
            ]
