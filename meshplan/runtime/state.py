"""State: the full state dict of a parallelized model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshplan.runtime.applied import applied
from meshplan.runtime.guard import guarded
from meshplan.runtime.mesh import full
from meshplan.runtime.pipeline.module import PipelinedModule
from meshplan.runtime.pipeline.state import gather_stages


@guarded()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer, whole, under its plain name.

    Returns:
        Full CPU tensors on rank 0, as one process's `state_dict()` would have them; `{}` on
        every other rank. All ranks must call it: each tensor is gathered in turn.
    """
    applied(model)
    if isinstance(model, PipelinedModule):
        return gather_stages(model)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    is_first = dist.get_rank() == 0
    out: dict[str, torch.Tensor] = {}
    gathered: dict[int, torch.Tensor] = {}
    for name, value in inner.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) not in gathered:  # A tied tensor is gathered once, and stays tied.
            whole = full(value.detach())
            # A copy, so that the next step does not change what the caller holds.
            gathered[id(value)] = whole.to("cpu", copy=True) if is_first else torch.empty(0)
        if is_first:
            out[name] = gathered[id(value)]
    return out
