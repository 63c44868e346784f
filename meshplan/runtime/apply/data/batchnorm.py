"""BatchNorm over the samples of all data ranks.

`nn.SyncBatchNorm` refuses CPU tensors. This implementation needs only a differentiable all-reduce,
and computes the same on CPU and GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.base.mesh import submesh


def apply_sync_batchnorm(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Make the plan's synchronized BatchNorms use statistics of all data ranks, in place."""
    if plan.mesh.size(*GRADIENT_AXES) == 1:
        return
    for fqn in plan.assignment.synchronized:
        module = model.get_submodule(fqn)
        assert isinstance(module, _BatchNorm)
        group = submesh(mesh, GRADIENT_AXES, flat=True).get_group()
        module.forward = partial(_forward, module, module.forward, group)


def _forward(module: _BatchNorm, alone: Any, group: dist.ProcessGroup, x: torch.Tensor) -> Any:
    """Compute the module's forward with statistics over all data ranks.

    Evaluation with running statistics runs the original forward, without communication.

    Args:
        module: The BatchNorm module.
        alone: The module's original forward.
        group: The data ranks.
        x: The input.

    Shape: x (samples, channels, ...) -> the same.
    """
    if not module.training and module.running_mean is not None:
        return alone(x)
    module._check_input_dim(x)
    dims = [0, *range(2, x.ndim)]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = torch.full((1,), x.numel() / x.shape[1], dtype=wide.dtype, device=x.device)
    sums = _Sum.apply(torch.cat((wide.sum(dims), count)), group)
    total = sums[-1].detach()
    centred = wide - _along_channels(sums[:-1] / total, x)
    # Two passes, as one process does: E[x^2] - E[x]^2 suffers from cancellation.
    variance = _Sum.apply(centred.square().sum(dims), group) / total
    if module.training and module.track_running_stats:
        _update(module, (sums[:-1] / total).detach(), variance.detach() * (total / (total - 1)))
    out = centred * _along_channels((variance + module.eps).rsqrt(), x)
    if module.affine:
        out = out * _along_channels(module.weight, x) + _along_channels(module.bias, x)
    return out.to(x.dtype)


def _along_channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *(1,) * (like.ndim - 2))


@torch.no_grad()
def _update(module: _BatchNorm, mean: torch.Tensor, unbiased: torch.Tensor) -> None:
    """Update the running statistics by nn.BatchNorm's rule: a moving or cumulative average."""
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    share = module.momentum
    if share is None:
        share = 1.0 / float(module.num_batches_tracked)
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), share)
    module.running_var.lerp_(unbiased.to(module.running_var.dtype), share)


class _Sum(torch.autograd.Function):
    """The sum over a group. All ranks' losses depend on it, so backward sums gradients too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = gradient.contiguous().clone()
        dist.all_reduce(out, group=ctx.group)
        return out, None
