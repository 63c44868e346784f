"""What is to be looked at before an optimizer steps, in whatever loop it does."""

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
    """Call `look` with every optimizer that is about to step; returns what ends that."""
    take_mixed_one_by_one()
    _looks.append(look)
    return lambda: _looks.remove(look)


def is_due(step: int) -> bool:
    """Whether a step is one of 1, 2, 4, 8, ...: looking then costs ever less."""
    return not step & (step - 1)


@functools.cache
def take_mixed_one_by_one() -> None:
    """Let optimizers take parameters one by one where plain ones stand beside cut ones.

    On GPUs torch takes them all at once unless told otherwise, and then refuses the mixture; with
    tp by rule what no rule cuts is plain. Also the one hook that calls what `before_steps` is
    given, for good: torch cannot remove one while it runs.
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
