"""A check of the first gradients for parameters that are replicated along tp.

A parameter that tp does not shard is equal on every rank of tp, and must get equal gradients. Its
gradients differ if its module computes on shards: a norm inside sharded heads or on a part of the
sequence, a key projection left replicated under sharded queries, attention over a part of the
sequence. Nothing else would show the mistake, because the loss still falls. So the first optimizer
step compares these gradients before it updates anything, and later steps compare the gradients that
were zero so far.
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
from meshplan.runtime.base.mesh import (
    device,
    extremes,
    local_of,
    reduce_along,
    submesh,
    without_partial,
)
from meshplan.runtime.base.optimizer_steps import before_steps, is_due

_TOLERANCE: Final = (1e-2, 5e-2)
"""Largest allowed relative difference, in (single, half) precision [Empirical]. Rounding stays
below it. In a dozen wrong plans on small models, where each rank had a part of the gradient's sum,
the gradients differed by 0.1 and more."""


@dataclass(slots=True)
class _TpReplicas:
    """A model with replicated parameters whose gradients have not been compared yet.

    Attributes:
        waiting: Names of these parameters; all their gradients so far were missing or zero.
        steps: Number of optimizer steps so far.
        end: Ends the checks before optimizer steps.
    """

    model: weakref.ref[nn.Module]
    plan: Plan
    mesh: DeviceMesh
    waiting: set[str]
    steps: int = 0
    end: Callable[[], None] = lambda: None


def watch_first_step(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Compare gradients of tp-replicated parameters before optimizer steps on this model.

    The comparison runs in steps 1, 2, 4, 8, ..., until each of these parameters has had a nonzero
    gradient.
    """
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
        if not is_due(watch.steps):  # A parameter that is never used keeps the check alive.
            return
        watch.waiting -= check_replicas(model, watch.plan, watch.mesh, watch.waiting)
        if not watch.waiting:
            watch.end()


def check_replicas(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, names: Collection[str]
) -> set[str]:
    """Check that the named parameters have equal gradients on all ranks of tp.

    Returns:
        The names of parameters with a nonzero gradient. A zero gradient proves nothing: every
        parameter of a block whose last layer starts at zero has one.

    Raises:
        ApplyError: Gradients differ. The error is raised on every rank, and names the parameters
            that differ most.
    """
    tp = submesh(mesh, ("tp",))
    found_names, gradients = _replicas(model, names)
    present = torch.tensor([g is not None for g in gradients], dtype=torch.int32, device=device())
    # Ranks of other pipeline stages have other parameters, so pp is left out of the reductions.
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
    # Ignore differences below the rounding of the largest gradient: a gradient that is zero up to
    # rounding may have any relative difference.
    noise = norms.max() * torch.finfo(coarsest_dtype(plan)).eps
    verdict = torch.where(apart > noise, apart / norms.clamp(min=1e-30), 0.0)
    # All ranks must come to the same result, but a shard of a gradient may be zero on some of them.
    for each in (verdict, norms):
        reduce_along(each, mesh, axes, dist.ReduceOp.MAX)
    shares = zip((name for name, _, _ in found), verdict.tolist(), strict=True)
    wrong = sorted(((s, n) for n, s in shares if s > _tolerance(plan)), reverse=True)
    if wrong:
        raise ApplyError(_problem(wrong))
    return {name for (name, _, _), norm in zip(found, norms.tolist(), strict=True) if norm > 0}


def check_loss(loss: torch.Tensor, plan: Plan, mesh: DeviceMesh) -> None:
    """Check that the loss is equal on all ranks of tp.

    The loss differs if the model's output is sharded, such as the logits of an lm_head with style
    colwise: each rank then computes the loss of its shard.

    Raises:
        ApplyError: The loss differs. The error is raised on every rank.
    """
    low, high = extremes(loss.detach(), submesh(mesh, ("tp",)).get_group())
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
    """Return the sorted names of those parameters that the live model has, and their gradients.

    A gradient is None if the parameter has none.
    """
    live = dict(model.named_parameters())
    found = sorted(name for name in names if name in live)
    return found, [live[name].grad for name in found]


def _difference(gradient: torch.Tensor, tp: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm of this rank's gradient minus the mean over tp, norm of that mean)."""
    # The gradient of an offloaded parameter is in host memory.
    own = local_of(gradient.detach()).float().to(device())
    mean = own.clone()
    dist.all_reduce(mean, group=tp.get_group())
    mean /= tp.size()
    return (own - mean).norm(), mean.norm()


def coarsest_dtype(plan: Plan) -> torch.dtype:
    """Return the floating-point dtype of the plan's computation with the largest rounding error."""
    words = {placed.compute_dtype for placed in plan.assignment.tensors.values()}
    floats = [
        dtype for dtype in (getattr(torch, word) for word in words) if dtype.is_floating_point
    ]
    return max(floats, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _tolerance(plan: Plan) -> float:
    single, half = _TOLERANCE
    return half if torch.finfo(coarsest_dtype(plan)).bits < 32 else single


def _problem(wrong: list[tuple[float, str]]) -> Problem:
    """Return one problem for all wrong gradients, the largest relative differences first.

    One mistake also changes the gradients of earlier modules, though by less, so the first names
    are the likely cause.

    Args:
        wrong: (relative difference, fqn of the parameter), largest first.
    """
    shown = ", ".join(f"{name} ({share:.0%})" for share, name in wrong[:4])
    others = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return Problem(
        f"gradients of replicated parameters differ between ranks of tp: {shown}{others}; their "
        "modules compute on shards, and would be trained on wrong gradients",
        fix="set a style for the module (sequence_parallel for a norm on a part of the sequence, "
        "replicated_with_grad_allreduce for a module inside sharded heads), or shard the modules "
        "around it together: q, k, v and output projection",
    )
