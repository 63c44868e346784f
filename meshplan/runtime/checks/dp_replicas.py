"""A check of gradients for parameters that are replicated along the data axes.

FSDP2 and DDP average gradients through hooks in forward and backward. A training loop can bypass
these hooks: by two forwards before two backwards, a second backward of one graph,
`torch.autograd.grad`, or a call of the module inside DistributedDataParallel. Each rank then trains
on its own samples alone, without any error. So gradients that must be equal on several ranks are
compared before an optimizer steps.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.base.mesh import device, extremes, local_of, shard_axes, submesh
from meshplan.runtime.base.optimizer_steps import before_steps, is_due

_TOLERANCE: Final = 1e-3
"""Largest allowed relative difference of two norms. Averaged gradients are equal to the last bit on
all ranks; gradients of different samples differ by far more than this."""

_ABSENT: Final = -1.0
"""The norm that stands for a missing gradient: no gradient has a negative norm."""


_UNUSED: Final = "set ddp: {find_unused_parameters: true}, or freeze parameters that are never used"
_LOOP: Final = (
    "call the module that parallelize returned, and run one backward for each forward before the "
    "next forward; add losses up instead of calling backward twice, and do not compute the "
    "gradients of a step with torch.autograd.grad"
)


@dataclass(slots=True)
class _DpReplicas:
    """A model whose gradients are compared."""

    model: weakref.ref[nn.Module]
    plan: Plan
    mesh: DeviceMesh
    own: frozenset[int]
    """`id` of each sharded parameter of the model. While a unit is gathered, FSDP2 puts other
    parameter objects in their place."""
    steps: int = 0
    has_run: bool = False
    """True if a forward was recorded for backward since the last step."""


def watch_replicas(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Compare gradients along the data axes when an optimizer steps on this model.

    Args:
        model: The module inside DistributedDataParallel, if that is used.
        plan: The plan applied to the model.
        mesh: The DeviceMesh that the plan is applied on.
    """
    if plan.mesh.size(*GRADIENT_AXES) > 1:
        own = frozenset(id(p) for p in model.parameters())
        watch = _DpReplicas(weakref.ref(model), plan, mesh, own)
        weakref.finalize(model, before_steps(partial(_before_step, watch)))

        def note_forward(*unused: Any) -> None:
            watch.has_run |= torch.is_grad_enabled()

        model.register_forward_pre_hook(note_forward)


def _before_step(watch: _DpReplicas, optimizer: torch.optim.Optimizer) -> None:
    model = watch.model()
    if model is None:
        return
    optimized = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    own = [optimized[each] for each in watch.own if each in optimized]
    has_run, watch.has_run = watch.has_run, watch.has_run and not own
    trained = [p for p in own if p.requires_grad]
    if not trained:
        return  # A stage of a pipeline may be frozen as a whole.
    if has_run and all(p.grad is None for p in trained):
        raise ApplyError(_without_gradients())
    watch.steps += 1
    if not is_due(watch.steps):
        return  # Gradients are compared again in later steps, because a loop may change.
    found = {n: p for n, p in model.named_parameters() if id(p) in optimized and p.requires_grad}
    alike: dict[tuple[str, ...], dict[str, nn.Parameter]] = {}
    for name, parameter in found.items():
        alike.setdefault(_replica_axes(name, parameter, watch.plan), {})[name] = parameter
    for axes in sorted(axes for axes in alike if axes):
        _compare(alike[axes], axes, watch)


def _without_gradients() -> Problem:
    return Problem(
        "the model ran, but no parameter of the optimizer has a gradient, so the step would change "
        "nothing: gradients were computed for gathered copies of the parameters, or not at all",
        fix=_LOOP,
    )


def _replica_axes(name: str, parameter: nn.Parameter, plan: Plan) -> tuple[str, ...]:
    """Return the data axes along which a parameter is replicated."""
    placed = plan.assignment.tensors.get(name)
    cut = {*shard_axes(parameter), *(placed.stored.axes if placed else ())} - {"tp"}
    # Apart from tp, each axis that shards a parameter is a data axis or borrows ranks from one.
    return plan.mesh.present(("dp_replicate",) if cut else GRADIENT_AXES)


def _compare(found: dict[str, nn.Parameter], axes: tuple[str, ...], watch: _DpReplicas) -> None:
    """Raise an ApplyError, on every rank along `axes`, if gradients differ between these ranks.

    Args:
        found: Parameters that are replicated along `axes`, by name.
        axes: Data axes, possibly with cp.
        watch: The model of these parameters.
    """
    norms = torch.stack([_norm(parameter) for parameter in found.values()])
    low, high = extremes(norms, submesh(watch.mesh, axes, flat=True).get_group())
    differs = (high - low > _TOLERANCE * high.abs()) & (high > torch.finfo(high.dtype).tiny)
    if not differs.any():
        return
    wrong = [name for name, is_wrong in zip(found, differs.tolist(), strict=True) if is_wrong]
    others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    unused = next((name for name, parameter in found.items() if parameter.grad is None), None)
    fix = _LOOP
    if unused is not None and watch.plan.assignment.wrapper == "ddp":
        fix = f"{unused} got no gradient, but DistributedDataParallel waits for one: {_UNUSED}"
    raise ApplyError(
        Problem(
            f"gradients of replicated parameters differ between ranks along {' and '.join(axes)}: "
            f"{wrong[0]}{others}; these gradients were not averaged, so each rank would train on "
            "its own samples only",
            fix=fix,
        )
    )


def _norm(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        return torch.full((), _ABSENT, device=device())
    return local_of(parameter.grad.detach()).float().norm()
