"""Batches that fit together: what ranks must agree on before they compute with them.

Ranks of one replica of the model (along tp, cp, pp) share every activation, and a collective of
tensors of different shapes aborts the process or adds the wrong elements. Data ranks must hold
equally many samples: the mean over the global batch is the mean of their means.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import ApplyError, Problem
from meshplan.mesh import DATA_AXES, GRADIENT_AXES
from meshplan.plan import Plan
from meshplan.runtime.mesh import device, objects_along, reduce_along, submesh
from meshplan.runtime.pretend import numbers


def open_groups(plan: Plan, mesh: DeviceMesh) -> None:
    """Make the process group that a step compares in, while no rank can have failed yet."""
    if plan.mesh.size(*GRADIENT_AXES) > 1:
        submesh(mesh, GRADIENT_AXES, flat=True)


def _peer_axes(plan: Plan) -> tuple[str, ...]:
    """The axes along which ranks hold the same samples."""
    return tuple(a for a in plan.mesh.names if a not in DATA_AXES and plan.mesh.size(a) > 1)


def check_peers(batch: Any, plan: Plan, mesh: DeviceMesh) -> None:
    """Every rank of a replica of the model holds a batch of the same shapes.

    One number per step is compared, along the axes that are not data axes.

    Raises:
        ApplyError: On every rank of the replica, with the shapes of two that differ.
    """
    axes = _peer_axes(plan)
    if not axes:
        return
    words = _shapes(batch)
    number = zlib.crc32(words.encode())
    both = torch.tensor([number, -number], device=device())
    reduce_along(both, mesh, axes, dist.ReduceOp.MAX)
    high, low = numbers(both, [number, -number])
    if high != -low:
        every = objects_along((dist.get_rank(), words), mesh, axes)
        raise ApplyError(_differ(every, f"along {' and '.join(axes)}"))


def mean_over_ranks(
    mean: torch.Tensor,
    batch: Any,
    plan: Plan,
    mesh: DeviceMesh,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float | None]:
    """The mean of this rank's mean over all ranks that see other tokens.

    Args:
        count: What this rank's loss was summed over, if the loss function says it.

    Returns:
        The mean, and the sum of the counts.

    Raises:
        ApplyError: On every data rank, when they do not hold equally many samples.
    """
    ranks = plan.mesh.size(*GRADIENT_AXES)
    if ranks == 1:
        return mean, None if count is None else float(numbers(count, 1.0))
    group = submesh(mesh, GRADIENT_AXES, flat=True).get_group()
    samples = num_samples(batch)
    told = [0, samples, samples**2] + ([] if count is None else [0])
    sums = torch.tensor(told, dtype=torch.float64, device=device())
    sums[0] = mean
    if count is not None:
        sums[3] = count
    dist.all_reduce(sums, group=group)
    _, number, squares, *counts = numbers(sums, [each * ranks for each in told])
    if ranks * squares != number**2:  # Whole numbers, so exact.
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, (dist.get_rank(), f"{samples} samples"), group=group)
        raise ApplyError(_differ(every, "of the data axes"))
    return sums[0] / ranks, counts[0] if counts else None


def _differ(every: Sequence[tuple[int, str]], where: str) -> Problem:
    """Name two ranks that hold different things."""
    rank, words = every[0]
    other, others = next(each for each in every if each[1] != words)
    return Problem(
        f"the ranks {where} must be given batches of one size, but rank {rank} has {words} and "
        f"rank {other} has {others}",
        fix="cut the global batch with local_batch, and leave out a last batch that is smaller",
    )


def _shapes(value: Any) -> str:
    """The shapes and dtypes in a batch, as text."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shapes(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_shapes, value)) + ")"
    return type(value).__name__


def num_samples(value: Any) -> int:
    """Samples of a batch: the size of dim 0 of the first tensor that has one."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.ndim else 0
    items = value.values() if isinstance(value, Mapping) else value
    if isinstance(items, str) or not hasattr(items, "__iter__"):
        return 0
    return next((n for n in map(num_samples, items) if n), 0)
