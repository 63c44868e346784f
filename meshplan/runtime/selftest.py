"""The first gradients tell whether replicas along tp are replicas.

A parameter that tp does not cut is the same on every rank of tp, and must get the same gradient
there. It does not if it computes on parts: a norm inside cut heads or on a part of the sequence,
a key projection left whole under cut queries, attention over a part of the sequence. Nothing
else would show: the loss falls, only the numbers are wrong. So the first optimizer step compares
these gradients, once, before anything is updated.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshplan.errors import ApplyError, Problem
from meshplan.plan import Plan
from meshplan.runtime.mesh import device, local_of, submesh, without_partial

_TOLERANCE: Final = (1e-2, 5e-2)
"""Relative difference in single and in half precision that rounding does not make and parts of a
sum do [Empirical]: in a dozen wrong plans on small models the parts differed by 0.1 and more."""


@dataclass(frozen=True, slots=True)
class _Watch:
    """A model whose first step is still to come."""

    model: weakref.ref[nn.Module]
    plan: Plan
    mesh: DeviceMesh


_watches: list[_Watch] = []


def watch_first_step(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Compare the replicas' gradients when an optimizer first steps on this model."""
    if plan.mesh.size("tp") == 1:
        return
    _register()
    _watches.append(_Watch(weakref.ref(model), plan, mesh))


@functools.cache
def _register() -> None:
    """One hook for good: torch cannot remove one while it runs."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for watch in tuple(_watches):
        model = watch.model()
        if model is None:
            _watches.remove(watch)
            continue
        own = {id(p) for p in model.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            _watches.remove(watch)
            check_replicas(model, watch.plan, watch.mesh)


def check_replicas(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Every parameter that tp does not cut has one gradient on all ranks of tp.

    Raises:
        ApplyError: On every rank, with each parameter whose gradient differs.
    """
    tp = submesh(mesh, ("tp",))
    names, gradients = _replicas(model, plan)
    present = torch.tensor([g is not None for g in gradients], dtype=torch.int32, device=device())
    dist.all_reduce(present, op=dist.ReduceOp.MIN)
    found = [
        (name, *_difference(without_partial(gradient), tp))
        for name, gradient, everywhere in zip(names, gradients, present.tolist(), strict=True)
        if everywhere and gradient is not None
    ]
    if not found:
        return
    apart, norms = (torch.stack(column) for column in list(zip(*found, strict=True))[1:])
    # A gradient that is zero but for rounding may differ by all of itself.
    noise = norms.max() * torch.finfo(_dtype(plan)).eps
    verdict = torch.where(apart > noise, apart / norms.clamp(min=1e-30), 0.0)
    dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
    problems = [
        _problem(name, share)
        for (name, _, _), share in zip(found, verdict.tolist(), strict=True)
        if share > _tolerance(plan)
    ]
    if problems:
        raise ApplyError(problems)


def check_loss(loss: torch.Tensor, plan: Plan, mesh: DeviceMesh) -> None:
    """The loss is one number on all ranks of tp.

    It is not if the model's output is cut, as that of a colwise head is: each rank then takes
    the loss of its part.

    Raises:
        ApplyError: On every rank of tp.
    """
    group = submesh(mesh, ("tp",)).get_group()
    low, high = loss.detach().clone(), loss.detach().clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    if high - low > _tolerance(plan) * high.abs():
        raise ApplyError(
            Problem(
                f"the loss is {low:.6g} on one rank of tp and {high:.6g} on another: the output of "
                "the model is cut, and each rank takes the loss of its part",
                fix="give the last projection the style vocab or colwise_gather_output",
            )
        )


def _replicas(model: nn.Module, plan: Plan) -> tuple[list[str], list[torch.Tensor | None]]:
    """The parameters that tp does not cut, and their gradients."""
    names, gradients = [], []
    for name, parameter in model.named_parameters():
        fqn = name if name in plan.assignment.tensors else name.removeprefix("module.")
        placed = plan.assignment.tensors[fqn]
        if placed.info.trainable and placed.stored.dim_of("tp") is None:
            names.append(fqn)
            gradients.append(parameter.grad)
    return names, gradients


def _difference(gradient: torch.Tensor, tp: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """(distance of this rank's gradient from the mean over tp, norm of that mean)."""
    own = local_of(gradient.detach()).float()
    mean = own.clone()
    dist.all_reduce(mean, group=tp.get_group())
    mean /= tp.size()
    return (own - mean).norm(), mean.norm()


def _dtype(plan: Plan) -> torch.dtype:
    """The coarsest dtype that anything computes with."""
    words = {placed.compute_dtype for placed in plan.assignment.tensors.values()}
    floats = [
        dtype for dtype in (getattr(torch, word) for word in words) if dtype.is_floating_point
    ]
    return max(floats, key=lambda dtype: torch.finfo(dtype).eps)


def _tolerance(plan: Plan) -> float:
    single, half = _TOLERANCE
    return half if torch.finfo(_dtype(plan)).bits < 32 else single


def _problem(name: str, share: float) -> Problem:
    return Problem(
        f"{name} is whole on every rank of tp, but its gradients differ there by {share:.0%}: it "
        "computes on parts, so it would be trained on wrong numbers",
        fix="give its module a style that says so (sequence_parallel for a norm on a part of the "
        "sequence, replicated_with_grad_allreduce for one inside cut heads), or cut the modules "
        "around it as a whole: q, k, v and output projection together",
    )
