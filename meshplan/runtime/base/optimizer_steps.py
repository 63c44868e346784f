"""Callbacks before every optimizer step, in whatever training loop it happens."""

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
    """Call `look` with every optimizer that is about to step; return a function that ends that."""
    take_mixed_one_by_one()
    _looks.append(look)
    return lambda: _looks.remove(look)


def is_due(step: int) -> bool:
    """Return True for the steps 1, 2, 4, 8, ...: a check at these costs ever less per step."""
    return not step & (step - 1)


@functools.cache
def take_mixed_one_by_one() -> None:
    """Make optimizers update parameters one by one if a group mixes DTensors and plain tensors.

    On GPUs torch uses the foreach implementation by default, which refuses the mixture. With tp by
    rule, parameters that no rule shards stay plain. The same hook calls the callbacks of
    `before_steps`, and it stays registered, because torch cannot remove a hook while it runs.
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
