"""Check that the copies of a replicated parameter are equal on all ranks that have one.

Gradients are averaged and every rank takes the same step, so copies stay equal. They drift apart if
one of them is changed in another way: by a forward that renormalises its weights, a loop that loads
other values on one rank, or different samples along tp. Each rank then trains a different model.
Two sums of each copy are compared, before the optimizer steps and before a state is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.mesh import device, extremes, local_of, reduce_along, shard_axes, submesh
from meshplan.runtime.base.optimizer_steps import before_steps, is_due
from meshplan.runtime.base.parallel_models import ParallelModel, is_stepped, known_models

_EVERY: Final = 1024
"""Number of steps between two comparisons at most."""
_OF_DATA, _OF_TP, _HALF = 1e-5, 1e-2, 1e-2
"""Largest allowed relative differences of the sums: along the data axes, along tp, and along the
data axes in half precision. Along the data axes gradients are equal to the last bit. Along tp each
rank computes the gradient of its copy itself, and an optimizer that divides by gradients amplifies
the rounding. In half precision an optimizer may round at random."""


@dataclass(slots=True)
class _DriftWatch:
    found: ParallelModel
    steps: int = 0


def watch_drift(model: nn.Module) -> None:
    """Compare the copies of a model's parameters before steps 1, 2, 4, ... and every 1024."""
    found = next(each for each in reversed(known_models()) if each.model() is model)
    shares = isinstance(model, PipelinedModule) and any(model.shared.copies())
    if is_fake_execution() or not (shares or any(_replicated(model, found.plan))):
        return
    end = before_steps(partial(_before_step, _DriftWatch(found)))
    weakref.finalize(model, end)


def _before_step(watch: _DriftWatch, optimizer: torch.optim.Optimizer) -> None:
    model = watch.found.model()
    if model is None or not is_stepped(optimizer, watch.found):
        return
    watch.steps += 1
    if is_due(watch.steps) or watch.steps % _EVERY == 0:
        check_drift(model, watch.found.plan, watch.found.mesh)


def check_drift(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Check that all copies of each replicated parameter are equal; all ranks must call this.

    Raises:
        ApplyError: Copies differ. The error names the first of these parameters, and is raised on
            all ranks of its pipeline stage.
    """
    by_axes: dict[tuple[str, ...], dict[str, nn.Parameter]] = {}
    for axes, name, parameter in _replicated(model, plan):
        by_axes.setdefault(axes, {})[name] = parameter
    names = [name for _, found in sorted(by_axes.items()) for name in found]
    parted = [_parted(found, axes, mesh) for axes, found in sorted(by_axes.items())]
    wrong: list[str] = []
    if names:
        flags = torch.cat(parted)
        # All ranks of the stage must raise, because one that continued would wait for the others.
        stage = [axis for axis in mesh.mesh_dim_names or () if axis != "pp"]
        reduce_along(flags, mesh, stage, dist.ReduceOp.MAX)
        wrong = [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]
    if isinstance(model, PipelinedModule):
        for name, parameter, group in model.shared.copies():
            if not parameter.requires_grad:
                continue
            ends = extremes(_sums([parameter]), group)
            if _differ(*ends, _tolerance([parameter], ())).any():
                wrong.append(name)
    if wrong:
        others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ApplyError(
            Problem(
                f"several ranks hold a copy of {wrong[0]}{others}, and the copies are no longer "
                "equal: something other than the optimizer wrote to them, or ranks stepped on "
                "different gradients",
                fix="write the same values to parameters on all ranks, outside the forward; give "
                "ranks along tp and pp the same batch; step all ranks with the same optimizer",
            )
        )


def _replicated(
    model: nn.Module, plan: Plan
) -> Iterator[tuple[tuple[str, ...], str, nn.Parameter]]:
    """Yield (axes, name, parameter) of each parameter that is replicated along some axes.

    The axes are those along which all ranks must have equal values of it.
    """
    for name, parameter in model.named_parameters():
        fqn = name.partition("@")[0].removeprefix("module.")
        placed = plan.assignment.tensors.get(fqn) or plan.assignment.tensors.get(name)
        cut = {*shard_axes(parameter), *(placed.stored.axes if placed else ())}
        # Apart from tp, each axis that shards a parameter is a data axis or borrows ranks from one.
        wanted = ("dp_replicate",) if cut - {"tp"} else GRADIENT_AXES
        axes = plan.mesh.present((*wanted, *(() if "tp" in cut else ("tp",))))
        axes = tuple(axis for axis in axes if plan.mesh.size(axis) > 1)
        if axes and parameter.numel() and placed is not None:
            yield axes, name, parameter


def _parted(
    found: dict[str, nn.Parameter], axes: tuple[str, ...], mesh: DeviceMesh
) -> torch.Tensor:
    """Return 1 for each parameter whose copies differ along one of the axes, 0 for the others.

    Shape: (parameters,)
    """
    parameters = list(found.values())
    sums = _sums(parameters)
    out = torch.zeros(len(parameters), device=device())
    for axis in axes:
        ends = extremes(sums, submesh(mesh, (axis,)).get_group())
        out = torch.maximum(out, _differ(*ends, _tolerance(parameters, (axis,))).float())
    return out


def _sums(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Return the sum of each parameter's elements, and the sum of their squares.

    Shape: (parameters, 2), float64
    """
    rows = []
    for parameter in parameters:
        own = local_of(parameter.detach())
        own = torch.view_as_real(own) if own.is_complex() else own
        wide = own.sum(dtype=torch.float64), own.float().norm().double().square()
        rows.append(torch.stack(wide).to(device()))
    return torch.stack(rows)


def _differ(low: torch.Tensor, high: torch.Tensor, tolerance: torch.Tensor) -> torch.Tensor:
    """Return a mask of the parameters whose copies differ; copies with NaN count as equal.

    Args:
        low: Smallest `_sums` over ranks.
        high: Largest `_sums` over ranks.
        tolerance: Largest allowed relative difference for each parameter.

    Shape: low and high (parameters, 2), tolerance (parameters,) -> (parameters,)
    """
    apart, size = high - low, high[:, 1].sqrt()
    return (apart[:, 0] > tolerance * size) | (apart[:, 1] > 2 * tolerance * size.square())


def _tolerance(parameters: list[nn.Parameter], axes: tuple[str, ...]) -> torch.Tensor:
    def of(parameter: nn.Parameter) -> float:
        is_half = parameter.is_floating_point() and torch.finfo(parameter.dtype).bits < 32
        return _OF_TP if "tp" in axes else _HALF if is_half else _OF_DATA

    return torch.tensor([of(p) for p in parameters], dtype=torch.float64, device=device())
