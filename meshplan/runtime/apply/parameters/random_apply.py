"""Rejection of `model.apply(fn)` where the function draws values for parts of a model.

Each rank would draw for its own shards or stages: other numbers than one process draws, and on CPUs
the same ones on every rank, so that the shards of a tensor were alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.apply.parameters.randomness import random_states


@contextmanager
def refusing_draws(fn: Callable[[nn.Module], Any], done: str, numbers: str) -> Iterator[None]:
    """Reject random numbers that are drawn in the `with` block.

    Args:
        fn: The function that is called in it.
        done: What was done to the model before, such as `cut into stages`.
        numbers: What is wrong with the numbers besides that one process draws others.

    Raises:
        ApplyError: The state of a generator has changed.
    """
    before = random_states()
    yield
    if any(not was.equal(now) for was, now in zip(before, random_states(), strict=True)):
        name = getattr(fn, "__name__", type(fn).__name__)
        what = f"model.apply({name}) drew random numbers after the model was {done}: "
        what += f"other ones than in one process, and {numbers}"
        fix = f"call it before: model.apply({name}), then model = meshplan.parallelize(model, ...)"
        fix += "; a model on meta starts with what its reset_parameters or _init_weights draw"
        raise ApplyError(Problem(what, fix=fix))


def refuse_random_apply(wrapped: nn.Module) -> None:
    """Make `apply` of a model with sharded parameters reject functions that draw numbers.

    The module of a pipeline does so by itself.
    """
    shards = [each for each in wrapped.parameters() if isinstance(each, DTensor)]
    if type(wrapped).apply is not nn.Module.apply:
        return
    if all(each.device_mesh.size() == 1 for each in shards):
        return
    apply = wrapped.apply

    def checked(fn: Callable[[nn.Module], Any]) -> nn.Module:
        with refusing_draws(fn, "sharded", "on CPUs the same ones for each shard"):
            return apply(fn)

    wrapped.apply = checked
