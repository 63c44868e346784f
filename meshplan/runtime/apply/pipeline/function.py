"""`nn.Module.apply` of a model whose stages are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import nn

from meshplan.runtime.apply.parameters.random_apply import refusing_draws

T = TypeVar("T", bound=nn.Module)


def apply_to_stages(model: T, stages: Iterable[nn.Module], fn: Callable[[nn.Module], None]) -> T:
    """Call a function on the modules that run in some stages, inner ones first.

    A module around units of two stages, such as a ModuleList, is given to the function by each.

    Args:
        model: The module of the rank, whose `modules()` are those that run in its stages.
        stages: Modules of its stages, which also have modules of other stages, without values.
        fn: The function.

    Returns:
        The model.

    Raises:
        ApplyError: The function drew random numbers: all ranks would draw the same ones, so that
            layers of different stages were alike and copies of a tied tensor were not.
    """
    running = set(model.modules())

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        if module in running:
            fn(module)

    with refusing_draws(fn, "cut into stages", "the same ones in each stage"):
        for stage in stages:
            visit(stage)
    return model
