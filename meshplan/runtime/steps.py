"""What is to be looked at before an optimizer steps, in whatever loop it does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

Look = Callable[[torch.optim.Optimizer], None]

_looks: list[Look] = []


def before_steps(look: Look) -> Callable[[], None]:
    """Call `look` with every optimizer that is about to step; returns what ends that."""
    _register()
    _looks.append(look)
    return lambda: _looks.remove(look)


@functools.cache
def _register() -> None:
    """One hook for good: torch cannot remove one while it runs."""

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for look in tuple(_looks):
            look(optimizer)

    register_optimizer_step_pre_hook(before)
