"""The full state dict of a parallelized model, and a check of state dicts loaded into it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import applied
from meshplan.runtime.base.mesh import device, full
from meshplan.runtime.comparisons.drift import check_drift
from meshplan.runtime.watch.guard import come_together, guarded


@guarded("full_state_dict")
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer unsharded, under its name before `parallelize`.

    Raises:
        ApplyError: Copies of a parameter on several ranks are no longer equal.

    Returns:
        Full CPU tensors on rank 0, as one process's `state_dict()` would have them; `{}` on every
        other rank. All ranks must call this function, which gathers one tensor after another.
    """
    state = applied(model)
    come_together("full_state_dict")
    check_drift(model, state.plan, state.mesh)
    return gather_tensors(model)


def gather_tensors(
    model: nn.Module, names: Container[str] | None = None
) -> dict[str, torch.Tensor]:
    """Gather tensors of the state dict on rank 0, one after another; all ranks must call this.

    Args:
        model: The module that `parallelize` returned.
        names: The names of those to gather; None for all.

    Returns:
        Full CPU tensors on rank 0, `{}` on every other rank.
    """
    if isinstance(model, PipelinedModule):
        return gather_stages(model, names)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    is_first = dist.get_rank() == 0
    out: dict[str, torch.Tensor] = {}
    gathered: dict[int, torch.Tensor] = {}
    for name, value in inner.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or (names is not None and name not in names):
            continue
        if id(value) not in gathered:  # Gather a tied tensor once, and keep it tied.
            whole = full(value.detach())
            # Copy, so that the next step does not change the caller's tensors.
            gathered[id(value)] = whole.to("cpu", copy=True) if is_first else torch.empty(0)
        if is_first:
            out[name] = gathered[id(value)]
    return out


def refuse_whole_tensors(model: nn.Module) -> None:
    """Make `load_state_dict` reject full tensors for sharded parameters before it loads any."""
    roots = model.stage_modules if isinstance(model, PipelinedModule) else [model]
    for root in roots:
        root.register_load_state_dict_pre_hook(_check_loaded)


def _check_loaded(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Raise ApplyError if `state` has a full tensor for a sharded parameter of `module`."""
    for name, own in module.named_parameters():
        given = state.get(prefix + name)
        if isinstance(own, DTensor) and given is not None and not isinstance(given, DTensor):
            raise ApplyError(
                Problem(
                    f"load_state_dict was given the full tensor of {name}, but this rank holds a "
                    "shard of it",
                    fix="load the state dict before parallelize, which shards the loaded tensors",
                )
            )


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
