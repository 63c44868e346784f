"""Parameters that are frozen or unfrozen while a model trains.

Fine-tuning guides do both: train a head first, then unfreeze the rest. DistributedDataParallel has
buckets for the parameters that were trainable when it was made, and FSDP2 notes then in which dtype
a unit reduces. What was noted is noted anew before the first forward that finds a change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.tensor_parallel import align_gradients
from meshplan.runtime.torch_private.private import renew_reducer, renew_reduction_dtypes
from meshplan.runtime.watch.guard import come_together


def follow_trainability(model: nn.Module, plan: Plan, renew: Callable[[], None]) -> None:
    """Prepare a wrapped model for what is trained now, whenever that has changed.

    Args:
        model: What is called to train: a DistributedDataParallel, or the module itself.
        renew: Called after a change.
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
        if plan.assignment.stages is None:  # Stages run one after the other, and tell each other.
            _compare({name for name, is_trained in zip(params, now, strict=True) if is_trained})
        if isinstance(model, DistributedDataParallel):
            renew_reducer(model)
        elif plan.assignment.wrapper == "units":
            for fqn in plan.assignment.units:
                renew_reduction_dtypes(model.get_submodule(fqn))
        align_gradients(model, plan)
        renew()

    model.register_forward_pre_hook(look, prepend=True)  # Before anything is gathered.


def _compare(trained: set[str]) -> None:
    """Refuse parameters that are trained on some ranks only.

    Raises:
        ApplyError: On every rank, with one of them.
    """
    come_together("the first forward after parameters were frozen or unfrozen")
    told: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(told, trained)
    for rank, others in enumerate(told):
        if differ := sorted(others ^ told[0]):
            has, lacks = (0, rank) if differ[0] in told[0] else (rank, 0)
            raise ApplyError(
                Problem(
                    f"{differ[0]} requires a gradient on rank {has}, but not on rank {lacks}",
                    fix="freeze and unfreeze the same parameters on every rank, before the same "
                    "step",
                )
            )
