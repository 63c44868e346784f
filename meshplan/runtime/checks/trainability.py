"""Parameters that are frozen or unfrozen while a model trains.

Fine-tuning guides do both: train a head first, then unfreeze the rest. DistributedDataParallel has
buckets for the parameters that were trainable when it was made, and FSDP2 notes then in which dtype
a unit reduces. What was noted is noted anew before the first forward that finds a change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshplan.plan import Plan
from meshplan.runtime.private import renew_reducer, renew_reduction_dtypes
from meshplan.runtime.shard import lay_gradients


def follow_trainability(model: nn.Module, plan: Plan, renew: Callable[[], None]) -> None:
    """Prepare a wrapped model for what is trained now, whenever that has changed.

    Args:
        model: What is called to train: a DistributedDataParallel, or the module itself.
        renew: Called after a change.

    Assumes: all ranks freeze and unfreeze the same parameters before the same forward.
    """
    params = list(model.parameters())
    known = [param.requires_grad for param in params]

    def look(*_: Any) -> None:
        nonlocal known
        if not torch.is_grad_enabled():
            return
        now = [param.requires_grad for param in params]
        if now == known:
            return
        known = now
        if isinstance(model, DistributedDataParallel):
            renew_reducer(model)
        elif plan.assignment.wrapper == "units":
            for fqn in plan.assignment.units:
                renew_reduction_dtypes(model.get_submodule(fqn))
        lay_gradients(model, plan)
        renew()

    model.register_forward_pre_hook(look, prepend=True)  # Before anything is gathered.
