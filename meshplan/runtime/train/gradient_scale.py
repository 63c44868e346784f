"""Scaling of gradients before an optimizer step.

Gradients are multiplied by the part of the loss weight that is known only after the last loss,
divided by the fp16 loss scale, and clipped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.apply.data.data import params_on_host
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import Applied, applied
from meshplan.runtime.base.fake_mode import numbers
from meshplan.runtime.base.host_copies import to_device, to_host
from meshplan.runtime.base.mesh import device, local_of, shard_axes, submesh, without_partial
from meshplan.runtime.train.grad_hooks import call_grad_hooks
from meshplan.runtime.watch.guard import guarded

_MOST_IN_FLOAT32: Final = 1 << 20
"""Elements of a tensor on CPU whose norm is added up in float32. torch adds its squares one after
the other: the norm of 50 million elements is half a percent too small. GPUs add them in a tree."""
_SCALE_WINDOW: Final = 2000
"""Steps without overflow after which the fp16 loss scale doubles, as in torch.amp.GradScaler."""


@guarded("clip_grad_norm_")
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` raises if parameters are on different meshes. This function
    counts each element once, whatever mesh its parameter is sharded over.

    Args:
        model: The module that `parallelize` returned.
        max_norm: The largest norm allowed. With infinity, the norm is only measured.
        norm_type: p of the p-norm; with `inf`, the norm is the largest absolute value.
        error_if_nonfinite: If True, raise instead of clipping by a norm that is NaN or infinite.

    Returns:
        The norm before clipping, equal on all ranks.

    Raises:
        ApplyError: The norm is not finite. It is raised on all ranks, and no gradient was changed.
    """
    mesh = applied(model).mesh
    call_grad_hooks(model)
    gradients = _gradients(model)
    pipeline = model if isinstance(model, PipelinedModule) else None
    on_host = _on_host(model)
    by_axes: dict[tuple[tuple[str, ...], bool], list[torch.Tensor]] = {}
    for parameter, gradient in gradients:
        if pipeline is None or pipeline.shared.is_counted(parameter):
            key = shard_axes(gradient), parameter in on_host
            by_axes.setdefault(key, []).append(local_of(gradient))
    powers = []
    for (axes, is_there), parts in sorted(by_axes.items()):
        own = _power_sum(parts, norm_type)
        own = to_device(own) if is_there else own  # NCCL reduces only tensors on the device.
        powers.append(_sum_over(own, axes, mesh, norm_type))
    stacked = torch.stack([*powers, torch.zeros((), device=device())])
    power = stacked.max() if math.isinf(norm_type) else stacked.sum()
    if pipeline is not None:  # Include the other pipeline stages.
        # Stages may have parameters of other dtypes, or none.
        power = _sum_over(power.double(), ("pp",), mesh, norm_type).to(power.dtype)
    norm = power if math.isinf(norm_type) else power ** (1.0 / norm_type)
    if error_if_nonfinite and not math.isfinite(numbers(norm, 0.0)):
        what = f"the norm of the gradients is {norm.item()}, so that they cannot be clipped"
        fix = "look for the loss or the layer that overflows, or skip this step"
        raise ApplyError(Problem(what, fix=fix))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    here = [local_of(g) for p, g in gradients if p not in on_host]
    there = [local_of(g) for p, g in gradients if p in on_host]
    if here:
        torch._foreach_mul_(here, factor)
    if there:
        torch._foreach_mul_(there, to_host(factor))
    return norm


@guarded("clip_grad_value_")
def clip_grad_value_(model: nn.Module, clip_value: float) -> None:
    """Clamp every element of every gradient into [-clip_value, clip_value].

    `torch.nn.utils.clip_grad_value_` clamps the parts of a gradient whose sum is not taken yet.
    This function takes such sums first.

    Args:
        model: The module that `parallelize` returned.
        clip_value: The largest absolute value allowed.
    """
    call_grad_hooks(model)
    gradients = [local_of(gradient) for _, gradient in _gradients(model)]
    if gradients:
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)


def _on_host(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose gradients are in host memory."""
    return set(params_on_host(model, applied(model).plan))


def _gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return (parameter, gradient) pairs, after reducing every `Partial` gradient in place.

    Args:
        optimizer: If given, its parameters outside the model, such as a criterion's, are included.
    """
    out = []
    groups = optimizer.param_groups if optimizer is not None else ()
    others = (p for group in groups for p in group["params"])
    for parameter in dict.fromkeys((*model.parameters(), *others)):
        if parameter.grad is not None:
            parameter.grad = without_partial(parameter.grad)
            out.append((parameter, parameter.grad))
    return out


def _power_sum(parts: Iterable[torch.Tensor], p: float) -> torch.Tensor:
    """Return the sum of |x|^p over all elements, or the largest |x| if p is infinite; a scalar."""
    parts = list(parts)
    # Of all parts, so that ranks that have no elements of them reduce the same dtype.
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts), torch.float32)
    parts = [part for part in parts if part.numel()]
    if not parts:
        return torch.zeros((), device=device(), dtype=dtype)
    norms = torch.stack([n.to(dtype) for n in _norms(parts, p)])
    return norms.max() if math.isinf(p) else (norms**p).sum()


def _norms(parts: list[torch.Tensor], p: float) -> list[torch.Tensor]:
    """Return the p-norm of each tensor, in any order."""
    long = [t for t in parts if t.device.type == "cpu" and t.numel() > _MOST_IN_FLOAT32]
    if not long:
        return list(torch._foreach_norm(parts, p))
    short = [t for t in parts if t.numel() <= _MOST_IN_FLOAT32]
    found = torch._foreach_norm(long, p, dtype=torch.float64)
    return [*found, *(torch._foreach_norm(short, p) if short else ())]


def _sum_over(
    value: torch.Tensor, axes: tuple[str, ...], mesh: DeviceMesh, p: float
) -> torch.Tensor:
    """All-reduce a `_power_sum` in place over the mesh axes that shard its gradients; return it."""
    for axis in axes:
        op = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
        dist.all_reduce(value, op=op, group=submesh(mesh, (axis,)).get_group())
    return value


def unscale(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Applied, factor: float
) -> bool:
    """Multiply gradients by `factor`, divide them by the fp16 loss scale, and adapt that scale.

    Args:
        model: The module that `parallelize` returned.
        optimizer: Its optimizer. Gradients of its parameters outside the model are scaled too.
        state: The model's `Applied`, which has the loss scale.
        factor: The factor that weighting the losses has left over (`Weights.factor`).

    Returns:
        True; False if a gradient overflowed on any rank, so that the step must be skipped.

    Source: Micikevicius et al. 2018, section 3.2 (dynamic loss scaling).
    """
    is_scaled, factor = state.plan.spec.precision.scales_loss, factor / state.loss_scale
    if factor == 1.0 and not is_scaled:
        return True
    on_host = _on_host(model)
    found = _gradients(model, optimizer)
    here = [local_of(g) for p, g in found if p not in on_host]
    there = [local_of(g) for p, g in found if p in on_host]
    for gradients in (here, there):
        if gradients:
            torch._foreach_mul_(gradients, factor)
    if not is_scaled:
        return True
    finite = _are_finite(here) if here else torch.ones((), device=device())
    if there:
        finite = torch.minimum(finite, to_device(_are_finite(there)))
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    if not numbers(finite, 1.0):
        state.loss_scale, state.steps_without_overflow = max(1.0, state.loss_scale / 2), 0
        return False
    state.steps_without_overflow += 1
    if state.steps_without_overflow == _SCALE_WINDOW:
        state.loss_scale, state.steps_without_overflow = state.loss_scale * 2, 0
    return True


def _are_finite(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return a float scalar: 1 if all elements of all gradients are finite, 0 otherwise."""
    return torch.stack([g.isfinite().all() for g in gradients]).all().float()
