"""The full state dict of a pipelined model, gathered on rank 0."""

from __future__ import annotations

from collections.abc import Container

import torch
import torch.distributed as dist

from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.base.mesh import device, full


def gather_stages(
    model: PipelinedModule, names: Container[str] | None = None
) -> dict[str, torch.Tensor]:
    """Gather every tensor of every stage on rank 0; all ranks must call it.

    The ranks of one stage that holds a tensor gather its shards, and send it along pp to rank 0.

    Args:
        model: The pipelined model.
        names: The names of the tensors to gather; None for all.

    Returns:
        On rank 0, full CPU tensors by their name in the model's state dict; `{}` on other ranks.
    """
    stages, placed = model.pipeline, model.plan.assignment.tensors
    first = {name: fqn for fqn, p in placed.items() for name in p.info.names}
    group = model.group
    place, is_first = dist.get_rank(group), dist.get_rank() == 0
    is_column = 0 in dist.get_process_group_ranks(group)
    own = {s: m.state_dict(keep_vars=True) for s, m in model.stages.items()}
    out: dict[str, torch.Tensor] = {}
    gathered: dict[str, torch.Tensor] = {}
    for name in model.names:
        fqn = first.get(name)
        if fqn is None or (names is not None and name not in names):
            continue
        if fqn not in gathered:
            # A buffer is taken from the last stage that holds it: earlier stages end their forward
            # early, and may not have updated it.
            stage = stages.tensors[fqn][-1 if placed[fqn].info.is_buffer else 0]
            holder = stages.rank_of(stage)
            info = placed[fqn].info
            whole = torch.empty(0 if info.numel else info.shape, dtype=getattr(torch, info.dtype))
            if place == holder:
                whole = full(own[stage][name].detach())
            if holder and is_column and info.numel:
                if place == holder:
                    dist.send(whole.contiguous(), dst=0, group=group)
                elif is_first:
                    dtype = getattr(torch, placed[fqn].dtype)
                    whole = torch.empty(info.shape, dtype=dtype, device=device())
                    source = dist.get_global_rank(group, holder)
                    dist.recv(whole, src=source, group=group)
            gathered[fqn] = whole.to("cpu", copy=True) if is_first else torch.empty(0)
        if is_first:
            out[name] = gathered[fqn]
    return out
