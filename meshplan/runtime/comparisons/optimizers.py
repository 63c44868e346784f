"""Check that an optimizer has no parameters outside of the parallelized models.

An optimizer that was created before `parallelize` has parameters that the model no longer has. They
get no gradient, so its steps would change nothing.

The weights of a criterion that was created outside of the model belong to no plan. Nothing averages
their gradients over ranks, so they become different on every rank, and the model is then trained on
a different loss on every rank.

Optimizers that DTensor cannot run, or that look at all parameters at once, are refused by name.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.runtime.base.optimizer_steps import before_steps
from meshplan.runtime.base.parallel_models import (
    ParallelModel,
    is_stepped,
    known_models,
    known_parameters,
)

_FIX = (
    "move the module that owns them (such as a criterion) into the model; or parallelize that "
    "module too, meshplan.parallelize(criterion, {'version': 1, 'strategy': 'ddp'}), and create "
    "the optimizer with the parameters of both"
)

_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

_replaced: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""Parameters in place of which parallelized models have others, by `id`."""


def note_replaced(before: Iterable[weakref.ref[nn.Parameter]], model: nn.Module) -> None:
    """Record the parameters that a model had before a plan was applied, and does not have now."""
    own = {id(p) for p in model.parameters()}
    alive = (each() for each in before)
    _replaced.update({id(p): p for p in alive if p is not None and id(p) not in own})


@functools.cache
def watch_optimizers() -> None:
    """Check every optimizer before its first step, and again after parameters were added to it.

    The step raises an ApplyError if the optimizer trains a parameter that belongs to no
    parallelized model, or that a parallelized model has replaced by another.
    """
    before_steps(_look)


def _look(optimizer: torch.optim.Optimizer) -> None:
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    if _seen.get(optimizer) == len(optimized):
        return
    if any(p.requires_grad and id(p) in _replaced for p in optimized):
        raise ApplyError(
            Problem(
                "the optimizer was created before parallelize, from parameters in place of which "
                "the model has others now: nothing would be trained",
                fix="create the optimizer from model.parameters() after parallelize",
            )
        )
    models = [each for each in known_models() if is_stepped(optimizer, each)]
    if problem := _whole_problem(optimizer, optimized, models):
        raise ApplyError(problem)
    if not any(each.plan.mesh.size(*GRADIENT_AXES) > 1 for each in models):
        return
    unknown = unknown_to_plans(optimizer)
    if not unknown:
        _seen[optimizer] = len(optimized)
        return
    if any(p.grad is not None for p in unknown):
        raise ApplyError(_problem(unknown))


def _whole_problem(
    optimizer: torch.optim.Optimizer, optimized: list[nn.Parameter], models: list[ParallelModel]
) -> Problem | None:
    """Return the problem of an optimizer whose update of a shard depends on the other shards."""
    name = type(optimizer).__name__
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in optimized}
    if isinstance(optimizer, torch.optim.Adafactor) and meshes - {None}:
        return Problem(
            f"{name} takes means over the rows and columns of a parameter, which torch cannot do "
            "in place with sharded parameters",
            fix="use an optimizer that updates each element by itself, such as AdamW or SGD, or "
            "strategy: ddp without tp",
        )
    has_stages = any(each.plan.mesh.size("pp") > 1 for each in models)
    if isinstance(optimizer, torch.optim.LBFGS) and (has_stages or len(meshes) > 1):
        return Problem(
            f"{name} takes all parameters for one vector, but here they are on several meshes or "
            "pipeline stages",
            fix="use strategy: full_shard or ddp without tp and pp, or another optimizer",
        )
    return None


def unknown_to_plans(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the trainable parameters of an optimizer that are in no parallelized model."""
    known = known_parameters()
    optimized = (p for group in optimizer.param_groups for p in group["params"])
    return [p for p in optimized if p.requires_grad and id(p) not in known]


def unknown_to_model(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters of an optimizer that are not in this model.

    Return [] if the optimizer trains no parameter of this model.
    """
    own = {id(p) for p in model.parameters()}
    optimized = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    others = [p for p in optimized if id(p) not in own]
    return others if len(others) < len(optimized) else []


def _problem(unknown: list[nn.Parameter]) -> Problem:
    others = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    return Problem(
        f"the optimizer trains a parameter of shape {list(unknown[0].shape)}{others} that "
        "belongs to no parallelized model: its gradient comes from this rank's samples only",
        fix=_FIX,
    )
