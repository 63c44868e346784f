"""A check that every parameter and buffer of a live model is sharded as the plan states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshplan.assign import Placed
from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import Mesh
from meshplan.plan.plan import Plan
from meshplan.runtime.base.mesh import cut_dims, local_of


def check_live(model: nn.Module, plan: Plan) -> None:
    """Check that every parameter and buffer has the plan's shape, local shape, dtype and sharding.

    Raises:
        ApplyError: Some tensors differ, are missing, or are not in the plan; the error lists all of
            them.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    live = dict(inner.named_parameters()) | dict(inner.named_buffers())
    planned = plan.assignment.tensors
    problems = [
        Problem(f"{fqn} is in the plan but not in the live model")
        for fqn in planned
        if fqn not in live
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
        "sharding": _spell({a: placed.stored.dim_of(a) for a in placed.stored.axes}, mesh),
    }
    found = {
        "shape": tuple(tensor.shape),
        "local shape": tuple(local_of(tensor).shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "sharding": _spell(cut_dims(tensor), mesh),
    }
    return [
        Problem(f"{fqn}: {what} is {found[what]}, but the plan states {expected[what]}")
        for what in expected
        if found[what] != expected[what]
    ]


def _spell(cuts: Mapping[str, int | None], mesh: Mesh) -> str:
    """Return {axis: dim} as text, such as `dp_shard on dim 0, tp on dim 1`, or `none`.

    Axes of size 1 are left out, because they shard nothing.
    """
    words = sorted(f"{axis} on dim {dim}" for axis, dim in cuts.items() if mesh.size(axis) > 1)
    return ", ".join(words) or "none"
