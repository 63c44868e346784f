"""Callbacks that run before every optimizer step, in meshplan's training loop or the user's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

Look = Callable[[torch.optim.Optimizer], None]

_looks: list[Look] = []


def before_steps(look: Look) -> Callable[[], None]:
    """Call `look` with every optimizer that is about to step, until the returned function runs."""
    take_mixed_one_by_one()
    _looks.append(look)
    return lambda: _looks.remove(look)


def is_due(step: int) -> bool:
    """Return True if `step`, counted from 1, is a power of two.

    A costly check that runs in steps 1, 2, 4, 8, ... costs ever less per step on average.
    """
    return not step & (step - 1)


@functools.cache
def take_mixed_one_by_one() -> None:
    """Make optimizers update parameters one by one if a group mixes DTensors and plain tensors.

    On GPUs torch uses the foreach implementation by default, which raises for such a mixture. It
    occurs under a tp plan of rules, where parameters that no rule shards stay plain tensors. The
    hook registered here also calls the callbacks of `before_steps`. It is never removed, because
    torch cannot remove a hook while the hook runs.
    """

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if group.get("foreach", True) is None and not group.get("fused"):
                are_cut = {isinstance(param, DTensor) for param in group["params"]}
                if len(are_cut) > 1:
                    group["foreach"] = False
        for look in tuple(_looks):
            look(optimizer)

    register_optimizer_step_pre_hook(before)
