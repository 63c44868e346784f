"""Parameters that no unit reduces: scalars, empty ones and those kept whole inside of shards.

Their gradients are averaged when a backward has come to its end, all in one order: a parameter
may get its gradient at another moment on another rank, or none at all there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan.mesh import DATA_AXES
from meshplan.plan import Plan
from meshplan.runtime.mesh import after_backward, backward_id, device, local_of, submesh


def reduce_alone(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Average the gradients that no unit reduces over the data axes, after each backward.

    Averaging what is averaged already changes nothing, so accumulation stays right. A parameter
    that some rank did not use counts with zeros there; one that no rank used has no gradient.

    Assumes: the model has its memory. A parameter that is moved from meta drops its hooks.
    """
    alone = [
        model.get_parameter(fqn)
        for fqn, placed in sorted(plan.assignment.tensors.items())
        if placed.reduced_alone and placed.info.trainable
    ]
    if not alone:
        return
    group = submesh(mesh, DATA_AXES, flat=True).get_group()
    last = -1

    def begin(*_: Any) -> None:
        nonlocal last
        if backward_id() not in (-1, last):
            last = backward_id()
            after_backward(lambda: _average(alone, group))

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)

    # From the output, since a rank that uses none of these parameters must join in as well.
    model.register_forward_hook(watch)
    for param in alone:
        param.register_hook(begin)


def _average(alone: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    ranks = dist.get_world_size(group)
    used = torch.tensor([p.grad is not None for p in alone], dtype=torch.int32, device=device())
    dist.all_reduce(used, group=group)
    for param, count in zip(alone, used.tolist(), strict=True):
        if not count:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        gradient = local_of(param.grad)
        dist.all_reduce(gradient, group=group)  # gloo has no AVG.
        gradient /= ranks


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a module's output, whatever holds it."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))
