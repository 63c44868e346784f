"""Proof that the live model is what the plan says, parameter by parameter."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshplan.assign import Placed
from meshplan.errors import ApplyError, Problem
from meshplan.plan import Plan
from meshplan.runtime.mesh import local_of, shard_axes


def check_live(model: nn.Module, plan: Plan) -> None:
    """Every parameter and buffer has the plan's shape, local shape, dtype and axes.

    Raises:
        ApplyError: With every tensor that differs, or that is missing, or that was not planned.
    """
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    live = {name.removeprefix("module."): tensor for name, tensor in live.items()}
    planned = plan.assignment.tensors
    problems = [
        Problem(f"{fqn} is in the plan but not in the live model")
        for fqn in planned.keys() - live.keys()
    ]
    for fqn, tensor in live.items():
        placed = planned.get(fqn)
        if placed is None:
            problems.append(Problem(f"{fqn} is in the live model but not in the plan"))
        else:
            problems += _differences(fqn, tensor, placed, plan)
    if problems:
        raise ApplyError(problems)


def _differences(fqn: str, tensor: torch.Tensor, placed: Placed, plan: Plan) -> list[Problem]:
    mesh = plan.mesh
    expected = {
        "shape": placed.info.shape,
        "local shape": placed.local_shape(mesh, dist.get_rank()),
        "dtype": placed.dtype,
        "cut by": sorted(a for a in placed.stored.axes if mesh.size(a) > 1),
    }
    found = {
        "shape": tuple(tensor.shape),
        "local shape": tuple(local_of(tensor).shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "cut by": sorted(a for a in shard_axes(tensor) if mesh.size(a) > 1),
    }
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() > mesh.world_size:
        return [Problem(f"{fqn} lies on a mesh larger than the plan's")]
    return [
        Problem(f"{fqn}: {what} is {found[what]}, but the plan says {expected[what]}")
        for what in expected
        if found[what] != expected[what]
    ]
