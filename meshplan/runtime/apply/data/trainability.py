"""Parameters that are frozen or unfrozen while a model trains.

Some fine-tuning recipes train a head first, and then unfreeze the rest. DistributedDataParallel
makes buckets for the parameters that are trainable when it is constructed, and `fully_shard`
records the dtype in which a unit reduces. Both are updated before the first forward after a change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.tensor_parallel.tensor_parallel import align_gradients
from meshplan.runtime.base.mesh import gathered
from meshplan.runtime.torch_private.private import renew_reducer, renew_reduction_dtypes
from meshplan.runtime.watch.guard import come_together


def follow_trainability(model: nn.Module, plan: Plan, renew: Callable[[], None]) -> None:
    """Update a wrapped model whenever the set of trainable parameters has changed.

    Args:
        model: The module that is called to train: a DistributedDataParallel, or the model itself.
        plan: The plan that was applied.
        renew: Called after a change, once the model is updated.
    """
    params = dict(model.named_parameters())
    known = [param.requires_grad for param in params.values()]

    def look(*_: Any) -> None:
        nonlocal known
        if not torch.is_grad_enabled():
            return
        now = [param.requires_grad for param in params.values()]
        if now == known:
            return
        known = now
        if plan.assignment.stages is None:  # Stages exchange this with their shapes.
            _compare({name for name, is_trained in zip(params, now, strict=True) if is_trained})
        if isinstance(model, DistributedDataParallel):
            renew_reducer(model)
        elif plan.assignment.wrapper == "units":
            for fqn in plan.assignment.units:
                renew_reduction_dtypes(model.get_submodule(fqn))
        align_gradients(model, plan)
        renew()

    model.register_forward_pre_hook(look, prepend=True)  # Before FSDP gathers anything.


def _compare(trained: set[str]) -> None:
    """Raise an ApplyError unless the same parameters are trained on all ranks.

    Args:
        trained: Fqns of the parameters trained on this rank.

    Raises:
        ApplyError: On every rank, naming one parameter that differs.
    """
    come_together("the first forward after parameters were frozen or unfrozen")
    every = gathered(trained)
    for rank, others in enumerate(every):
        if differ := sorted(others ^ every[0]):
            has, lacks = (0, rank) if differ[0] in every[0] else (rank, 0)
            raise ApplyError(
                Problem(
                    f"{differ[0]} requires a gradient on rank {has}, but not on rank {lacks}",
                    fix="freeze and unfreeze the same parameters on every rank, before the same "
                    "step",
                )
            )
