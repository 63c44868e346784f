"""A check of the first gradients for parameters that are replicated along tp.

A parameter that tp does not shard is equal on every rank of tp, and must get equal gradients. It
does not if it computes on shards: a norm inside sharded heads or on a part of the sequence, a key
projection left replicated under sharded queries, attention over a part of the sequence. Nothing
else would show the mistake: the loss falls, only the numbers are wrong. So the first optimizer step
compares these gradients before anything is updated, and later steps compare those that were zero.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.base.mesh import device, local_of, reduce_along, submesh, without_partial
from meshplan.runtime.base.optimizer_steps import before_steps

_TOLERANCE: Final = (1e-2, 5e-2)
"""Relative difference, in single and half precision, that rounding does not reach and parts of a
sum exceed [Empirical]: in a dozen wrong plans on small models the parts differed by 0.1 and
more."""


@dataclass(slots=True)
class _TpReplicas:
    """A model with replicated parameters that have had no gradient yet.

    Attributes:
        waiting: Names of these parameters.
        steps: Optimizer steps so far.
        end: Stops the check before steps.
    """

    model: weakref.ref[nn.Module]
    plan: Plan
    mesh: DeviceMesh
    waiting: set[str]
    steps: int = 0
    end: Callable[[], None] = lambda: None


def watch_first_step(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Compare gradients of replicated parameters when an optimizer first steps on this model."""
    if plan.mesh.size("tp") == 1:
        return
    waiting = {
        fqn
        for fqn, placed in plan.assignment.tensors.items()
        if not placed.info.is_buffer and placed.stored.dim_of("tp") is None
    }
    if not waiting:
        return
    watch = _TpReplicas(weakref.ref(model), plan, mesh, waiting)
    watch.end = before_steps(partial(_before_step, watch))


def _before_step(watch: _TpReplicas, optimizer: torch.optim.Optimizer) -> None:
    model = watch.model()
    if model is None:
        watch.end()
        return
    own = {id(p) for p in model.parameters()}
    if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        watch.steps += 1
        if watch.steps & (watch.steps - 1):
            return  # Compare in steps 1, 2, 4, 8, ..., so that unused parameters cost ever less.
        watch.waiting -= check_replicas(model, watch.plan, watch.mesh, watch.waiting)
        if not watch.waiting:
            watch.end()


def check_replicas(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, names: Collection[str]
) -> set[str]:
    """Check that the named parameters have equal gradients on all ranks of tp.

    Returns:
        The names of parameters with a nonzero gradient. A gradient of zero proves nothing, as in a
        block whose last layer starts at zero.

    Raises:
        ApplyError: Gradients differ. It is raised on every rank, with the parameters that differ
            most.
    """
    tp = submesh(mesh, ("tp",))
    found_names, gradients = _replicas(model, names)
    present = torch.tensor([g is not None for g in gradients], dtype=torch.int32, device=device())
    # Ranks that differ along pp have other stages.
    axes = [name for name in mesh.mesh_dim_names or () if name != "pp"]
    reduce_along(present, mesh, axes, dist.ReduceOp.MIN)
    found = [
        (name, *_difference(without_partial(gradient), tp))
        for name, gradient, everywhere in zip(found_names, gradients, present.tolist(), strict=True)
        if everywhere and gradient is not None
    ]
    if not found:
        return set()
    apart, norms = (torch.stack(column) for column in list(zip(*found, strict=True))[1:])
    # A gradient that is zero up to rounding may have any relative difference.
    noise = norms.max() * torch.finfo(coarsest_dtype(plan)).eps
    verdict = torch.where(apart > noise, apart / norms.clamp(min=1e-30), 0.0)
    # All ranks must get one answer, though a shard of a gradient may be zero on some ranks only.
    for each in (verdict, norms):
        reduce_along(each, mesh, axes, dist.ReduceOp.MAX)
    shares = zip((name for name, _, _ in found), verdict.tolist(), strict=True)
    wrong = sorted(((s, n) for n, s in shares if s > _tolerance(plan)), reverse=True)
    if wrong:
        raise ApplyError(_problem(wrong))
    return {name for (name, _, _), norm in zip(found, norms.tolist(), strict=True) if norm > 0}


def check_loss(loss: torch.Tensor, plan: Plan, mesh: DeviceMesh) -> None:
    """Check that the loss is equal on all ranks of tp.

    It differs if the model's output is sharded, as that of a colwise head is: each rank then
    computes the loss of its shard.

    Raises:
        ApplyError: The loss differs. It is raised on every rank.
    """
    group = submesh(mesh, ("tp",)).get_group()
    low, high = loss.detach().clone(), loss.detach().clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    differs = (high - low > _tolerance(plan) * high.abs()).float()
    # Raise on all ranks, so that no rank waits for another in the next step.
    reduce_along(differs, mesh, mesh.mesh_dim_names or (), dist.ReduceOp.MAX)
    if differs:
        raise ApplyError(
            Problem(
                f"the loss is {low:.6g} on one rank of tp and {high:.6g} on another: the "
                "model's output is sharded, and each rank computes the loss of its shard",
                fix="set the style of the last projection to vocab or colwise_gather_output",
            )
        )


def _replicas(
    model: nn.Module, names: Collection[str]
) -> tuple[list[str], list[torch.Tensor | None]]:
    """Return the named parameters that the live model has, sorted, and their gradients."""
    live = dict(model.named_parameters())
    found = sorted(name for name in names if name in live)
    return found, [live[name].grad for name in found]


def _difference(gradient: torch.Tensor, tp: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distance of this rank's gradient from the mean over tp, and that mean's norm."""
    own = local_of(gradient.detach()).float().to(device())  # It may be offloaded to the host.
    mean = own.clone()
    dist.all_reduce(mean, group=tp.get_group())
    mean /= tp.size()
    return (own - mean).norm(), mean.norm()


def coarsest_dtype(plan: Plan) -> torch.dtype:
    """Return the coarsest floating-point dtype in which the plan computes."""
    words = {placed.compute_dtype for placed in plan.assignment.tensors.values()}
    floats = [
        dtype for dtype in (getattr(torch, word) for word in words) if dtype.is_floating_point
    ]
    return max(floats, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _tolerance(plan: Plan) -> float:
    single, half = _TOLERANCE
    return half if torch.finfo(coarsest_dtype(plan)).bits < 32 else single


def _problem(wrong: list[tuple[float, str]]) -> Problem:
    """Return one message: a mistake also changes the gradients of what precedes it, but by less."""
    shown = ", ".join(f"{name} ({share:.0%})" for share, name in wrong[:4])
    others = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return Problem(
        f"gradients of replicated parameters differ between ranks of tp: {shown}{others}; their "
        "modules compute on shards, and would be trained on wrong gradients",
        fix="set a style for the module (sequence_parallel for a norm on a part of the sequence, "
        "replicated_with_grad_allreduce for a module inside sharded heads), or shard the modules "
        "around it together: q, k, v and output projection",
    )
