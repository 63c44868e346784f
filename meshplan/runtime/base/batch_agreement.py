"""Checks that the batches of different ranks fit together, before any rank computes with them.

Ranks of one replica of the model (along tp, cp, pp) share every activation. With tensors of
different shapes a collective aborts the process or adds the wrong elements; with other samples the
results are wrong without any error. Data ranks must have equal numbers of samples, because the
mean over the global batch is the mean of their means.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import DATA_AXES, GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.base.digest import digest, elements, marks
from meshplan.runtime.base.fake_mode import is_fake_execution, numbers
from meshplan.runtime.base.mesh import device, gathered, objects_along, reduce_along, submesh
from meshplan.runtime.base.optimizer_steps import is_due
from meshplan.runtime.base.pytree import tensors_in

SAMPLER: Final = (
    "use a sampler over the data ranks only, DistributedSampler(data, *meshplan.data_rank(model))"
)


def open_groups(plan: Plan, mesh: DeviceMesh) -> None:
    """Create the process group of the data axes and cp before the first step.

    Steps average losses and compare ranks in this group. Every rank must take part in its creation,
    which in a step would wait for a rank that failed.
    """
    if plan.mesh.size(*GRADIENT_AXES) > 1:
        submesh(mesh, GRADIENT_AXES, flat=True)


def _peer_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes larger than 1 along which ranks have the same samples."""
    return tuple(a for a in plan.mesh.names if a not in DATA_AXES and plan.mesh.size(a) > 1)


def check_batches_agree(batch: Any, plan: Plan, mesh: DeviceMesh, step: int = 1) -> None:
    """Check that all ranks of a replica have the same batch, or parts of the same batch along cp.

    Each step compares one number along every axis that is not a data axis. The number covers the
    shapes and a sample of the elements; in steps 1, 2, 4, 8, ... it covers all elements. Ranks
    along cp have different elements, so there it covers the shapes and the global batch from which
    `local_batch` cut the parts.

    Args:
        batch: Inputs and targets of this rank.
        step: Number of the step, from 1.

    Raises:
        ApplyError: The batches differ. It is raised on every rank of the replica and names two
            ranks and what differs between them.
    """
    axes = _peer_axes(plan)
    if not axes:
        return
    words = _shapes(batch)
    number = zlib.crc32(words.encode())
    if is_fake_execution():
        both = torch.tensor([number, -number], device=device())
        reduce_along(both, mesh, axes, dist.ReduceOp.MAX)
        return
    alike = tuple(axis for axis in axes if axis != "cp")
    high, low = number, -number
    if alike:
        here, there = digest(batch, is_whole=is_due(step))
        both = torch.tensor([number + here, -number - here], device=device())
        if there is not None:
            both += torch.stack((there, -there))
        # Over ranks, max(x) == -max(-x) exactly if all ranks have the same x.
        reduce_along(both, mesh, alike, dist.ReduceOp.MAX)
        high, low = both.tolist()
        del both
    if len(alike) < len(axes):
        # If the axes above found a difference, the ranks along cp must see it too. Two maxima of
        # at least 1 are never each other's negative, so [1, 1] counts as a difference.
        common = number + marks(batch) + 2
        values = [common, -common] if high == -low else [1, 1]
        both = torch.tensor(values, device=device())
        reduce_along(both, mesh, ("cp",), dist.ReduceOp.MAX)
        high, low = both.tolist()
    if high != -low:
        _explain(batch, words, axes, mesh)


def _explain(batch: Any, words: str, axes: tuple[str, ...], mesh: DeviceMesh) -> None:
    """Raise an ApplyError that names two ranks of a replica and what differs between their batches.

    Return if floating-point values differ only by rounding.
    """
    names = ("inputs", "targets")
    parts = zip(names, batch, strict=True) if isinstance(batch, tuple) and len(batch) == 2 else ()
    found = [
        (f"{name}.{path}" if path else name, zlib.crc32(bytes(data.cpu().numpy())), _few(tensor))
        for name, item in parts
        for path, tensor in tensors_in(item)
        if (data := elements(tensor, is_whole=True)) is not None
    ]
    where = f"along {' and '.join(axes)}"
    every = objects_along((dist.get_rank(), words, found, marks(batch)), mesh, axes)
    if any(each[1] != words for each in every):
        raise ApplyError(_differ([(rank, text) for rank, text, _, _ in every], where))
    if "cp" in axes:
        size = mesh["cp"].size()
        # Only ranks with the same coordinate along cp have the same part of the sequence, so only
        # their elements are compared with each other.
        place = {rank: mesh_place(mesh, rank, "cp") for rank, *_ in every}
        groups = [[each for each in every if place[each[0]] == at] for at in range(size)]
    else:
        groups = [every]
    for group in groups:
        rank, _, own, _ = group[0]
        for other, _, others, _ in group[1:]:
            for (name, number, few), (_, its, its_few) in zip(own, others, strict=True):
                if number != its and not _is_rounding(few, its_few):
                    raise ApplyError(_other_samples(name, rank, other, where))
    rank, _, _, whole = every[0]
    for other, _, _, its_whole in every:
        if whole != its_whole:
            raise ApplyError(_other_samples("the batch given to local_batch", rank, other, where))


def mesh_place(mesh: DeviceMesh, rank: int, axis: str) -> int:
    """Return the coordinate of a rank along an axis of the mesh."""
    at = (mesh.mesh == rank).nonzero()[0]
    return int(at[(mesh.mesh_dim_names or ()).index(axis)])


def _few(tensor: torch.Tensor) -> list[float] | None:
    """Return about 256 evenly spread elements of a floating-point tensor; None for another dtype.

    Ranks may have computed a floating-point tensor separately, so that its values differ by
    rounding. `_is_rounding` compares these elements to tell.
    """
    if not tensor.is_floating_point():
        return None
    flat = tensor.detach().reshape(-1)
    few: list[float] = flat[:: max(1, flat.numel() // 256)].double().tolist()
    return few


def _is_rounding(a: list[float] | None, b: list[float] | None) -> bool:
    if a is None or b is None:
        return False
    size = max(map(abs, (*a, *b)), default=0.0)
    return all(abs(x - y) <= 1e-3 * size for x, y in zip(a, b, strict=True))


def _other_samples(name: str, rank: int, other: int, where: str) -> Problem:
    return Problem(
        f"the ranks {where} need the same samples, but the values of {name} differ between rank "
        f"{rank} and rank {other}",
        fix=f"give these ranks the same batch: {SAMPLER}, seed random augmentations identically, "
        "or cut one global batch with local_batch",
    )


def mean_over_ranks(
    mean: torch.Tensor,
    batch: Any,
    plan: Plan,
    mesh: DeviceMesh,
    count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float | None]:
    """Return the mean of the loss over all ranks with different tokens, along the data axes and cp.

    Args:
        mean: This rank's mean loss, a scalar tensor.
        batch: This rank's batch. Its number of samples is compared with that of the other ranks.
        count: Number of elements that this rank's loss sums over; None if the loss function does
            not report it.

    Returns:
        The mean over ranks, and the sum of the counts over ranks (None without `count`).

    Raises:
        ApplyError: Ranks have different numbers of samples. The error is raised on all of them.
    """
    ranks = plan.mesh.size(*GRADIENT_AXES)
    if ranks == 1:
        return mean, None if count is None else float(numbers(count, 1.0))
    group = submesh(mesh, GRADIENT_AXES, flat=True).get_group()
    samples = num_samples(batch)
    values = [0, samples, samples**2] + ([] if count is None else [0])
    sums = torch.tensor(values, dtype=torch.float64, device=device())
    sums[0] = mean
    if count is not None:
        sums[3] = count
    dist.all_reduce(sums, group=group)
    _, number, squares, *counts = numbers(sums, [each * ranks for each in values])
    # n ranks have the same x exactly if n * sum(x^2) == sum(x)^2. These are integers in float64,
    # so the comparison is exact.
    if ranks * squares != number**2:
        every = gathered((dist.get_rank(), f"{samples} samples"), group)
        raise ApplyError(_differ(every, "of the data axes"))
    return sums[0] / ranks, counts[0] if counts else None


def _differ(every: Sequence[tuple[int, str]], where: str) -> Problem:
    """Return a problem that names two ranks whose batches have different shapes or sizes.

    Args:
        every: (rank, description of its batch) of each compared rank; two descriptions differ.
        where: Names the compared ranks, such as "along tp"; follows the words "the ranks".
    """
    rank, words = every[0]
    other, others = next(each for each in every if each[1] != words)
    return Problem(
        f"the ranks {where} need batches of the same size, but rank {rank} has {words} and rank "
        f"{other} has {others}",
        fix="cut the global batch with local_batch, and drop a smaller last batch",
    )


def _shapes(value: Any) -> str:
    """Describe the shapes and dtypes in a batch as text."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shapes(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_shapes, value)) + ")"
    return type(value).__name__


def num_samples(value: Any) -> int:
    """Return the number of samples in a batch: the size of dim 0 of the first tensor with dims.

    Return 0 if the batch has no such tensor.
    """
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.ndim else 0
    items = value.values() if isinstance(value, Mapping) else value
    if isinstance(items, str) or not hasattr(items, "__iter__"):
        return 0
    return next((n for n in map(num_samples, items) if n), 0)
