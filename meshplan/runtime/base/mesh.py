"""This rank's device, process group and DeviceMesh, and the DTensor placements of layouts.

Only this module translates layouts to placements. It also wraps the private names of DeviceMesh and
DTensor placements in functions, each with its reason; all other private names of torch are in
`runtime/torch_private`.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshplan.errors import ApplyError, Problem
from meshplan.launch.environment import read_rank
from meshplan.layout.layout import Layout
from meshplan.layout.mesh import Mesh
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.join import device_index, join

JOIN_TIMEOUT = timedelta(minutes=5)
"""Timeout of a process group that meshplan makes: far longer than any step, and shorter than
torch's defaults, 10 minutes for NCCL and 30 for gloo."""

_T = TypeVar("_T")
_JOINT = "+"
"""Separates axis names in the name of a DeviceMesh dim that flattens several axes."""

_meshes: dict[tuple[str, Mesh], tuple[object, DeviceMesh, DeviceMesh]] = {}
"""The cache of `device_mesh`: (device type, mesh) -> (the world process group it was made in, the
DeviceMesh, the same ranks with borrowed axes as made by `_split`)."""

_IMAGINED: Final[ContextVar[bool]] = ContextVar("imagined", default=False)


@contextmanager
def on_fake_devices() -> Iterator[None]:
    """Make `device_type` return "cpu" inside the `with` block: fake steps run on CPU tensors."""
    token = _IMAGINED.set(True)
    try:
        yield
    finally:
        _IMAGINED.reset(token)


def device_type() -> str:
    """Return the type of device to run on: torch's accelerator if there is one, else "cpu".

    The type is "cpu" too if the default process group uses gloo, and inside `on_fake_devices`. All
    of meshplan asks this function, so that no two parts decide differently.
    """
    if _IMAGINED.get() or (dist.is_initialized() and dist.get_backend() == "gloo"):
        return "cpu"
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return accelerator.type
    return "cpu"


def device() -> torch.device:
    """Return this rank's device."""
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def ensure_process_group() -> None:
    """Initialise torch.distributed, unless the caller has done so.

    The process group has the ranks that a launcher has started, else this one process. torchrun's
    variables are set if another launcher has started them.

    Raises:
        ApplyError: The launcher's variables contradict each other, or a rank is missing.
    """
    if dist.is_initialized():
        return
    launched = read_rank(os.environ)
    kind = device_type()
    backend = dist.get_default_backend_for_device(kind)
    place = ""
    if kind != "cpu":
        index = device_index(launched, torch.accelerator.device_count())
        torch.accelerator.set_device_index(index)
        place = f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}/{index}"
    if launched is None or launched.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        for name, value in launched.torch_variables.items():
            os.environ.setdefault(name, value)
        store = join(launched, place, JOIN_TIMEOUT)
        dist.init_process_group(
            backend, store=store, rank=launched.rank, world_size=launched.world_size,
            timeout=JOIN_TIMEOUT,
        )  # fmt: skip
    atexit.register(_leave)


def _leave() -> None:
    """Destroy the group that `ensure_process_group` made, before the interpreter exits.

    Otherwise gloo's threads are still running while static C++ objects are destroyed, and some runs
    end in "terminate called without an active exception".
    """
    _meshes.clear()
    gc.collect()  # Wrapped models are reference cycles that keep their process groups alive.
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks_per_node() -> int | None:
    """Return the number of ranks on this machine according to the launcher; None without one."""
    value = os.environ.get("LOCAL_WORLD_SIZE")
    return int(value) if value else None


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the DeviceMesh for a mesh; equal meshes share one DeviceMesh.

    A new DeviceMesh is made only for another mesh, device type or world process group. DTensor's
    caches compare DeviceMeshes by equality, so an operation on a second, equal DeviceMesh could use
    the process groups of an older one (see huggingface/transformers#48383).
    """
    kind = device_type()
    key = (kind, mesh)
    world = dist.group.WORLD
    found = _meshes.get(key)
    if found is None or found[0] is not world:
        made = init_device_mesh(kind, tuple(mesh.sizes.values()), mesh_dim_names=mesh.names)
        found = _meshes[key] = (world, made, _split(made, mesh))
    return found[1]


def _split(made: DeviceMesh, mesh: Mesh) -> DeviceMesh:
    """Return a DeviceMesh of the same ranks in which each lending axis is split in two.

    The two are the borrowed axis and the rest of the lender: `ep` and `loan.rest` in place of
    `dp_shard`, for example. This uses a private method until `DeviceMesh.unflatten` is public. The
    result must be derived from `made`, because FSDP2 joins the mesh that it shards over with the
    mesh over which ep has sharded the parameter, and torch can only join slices of one mesh.
    """
    for loan in mesh.loans:
        sizes = mesh.size(loan.rest), loan.size
        names = made.mesh_dim_names or ()
        # The dim is given by index: the check of a dim's name in torch 2.11 is inverted.
        made = made._unflatten(names.index(loan.within), sizes, (loan.rest, loan.name))
    return made


def submesh(whole: DeviceMesh, axes: Sequence[str], *, flat: bool = False) -> DeviceMesh:
    """Return the slice of `whole` along `axes`, which may include borrowed axes.

    The dims are in mesh order, whatever the order of `axes`. `flat` flattens them into one dim.
    """
    split = next((split for _, made, split in _meshes.values() if made is whole), whole)
    borrowed = set(split.mesh_dim_names or ()) - set(whole.mesh_dim_names or ())
    whole = split if borrowed & set(axes) else whole
    names = tuple(name for name in whole.mesh_dim_names or () if name in axes)
    part = whole[names] if len(names) < whole.ndim else whole
    if flat and part.ndim > 1:
        # Private until `DeviceMesh.flatten` is public. torch caches the result, so that a second
        # call makes no new process group.
        return part._flatten(_JOINT.join(names))
    return part


def unit_mesh(whole: DeviceMesh, replicate: Sequence[str], shard: Sequence[str]) -> DeviceMesh:
    """Return the DeviceMesh over which FSDP2 shards a unit.

    Its dims are the `replicate` axes, then one dim that flattens the `shard` axes.
    """
    if len(submesh(whole, shard).shape) == 1:
        return submesh(whole, (*replicate, *shard))
    shards = submesh(whole, shard, flat=True)
    if not replicate:
        return shards
    # `_concatenate` is private, but the public alternative, slicing by the name of the flattened
    # dim, is deprecated.
    return DeviceMesh._concatenate([submesh(whole, replicate), shards])


def reduce_along(
    value: torch.Tensor, mesh: DeviceMesh, axes: Iterable[str], op: dist.ReduceOp.RedOpType
) -> None:
    """All-reduce a tensor in place over the ranks that differ from this one only along `axes`.

    There is one all-reduce per axis, in process groups that exist anyway: a group of all these
    ranks would cost each rank the buffers of another communicator.
    """
    for axis in axes:
        if mesh[axis].size() > 1:
            dist.all_reduce(value, op=op, group=submesh(mesh, (axis,)).get_group())


def extremes(
    values: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest of each value over the ranks of a group, or over all."""
    both = torch.stack((-values, values))  # One all-reduce gives both: min(x) == -max(-x).
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return -both[0], both[1]


def raise_first(problem: Problem | None) -> None:
    """Raise, on all ranks, the problem of the lowest rank that has one; all ranks must call it."""
    for each in [problem] if is_fake_execution() else gathered(problem):
        if each is not None:
            raise ApplyError(each)


def gathered(own: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """Return `own` of each rank of a group, in their order; of all ranks if there is no group."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    return every


def objects_along(own: Any, mesh: DeviceMesh, axes: Iterable[str]) -> list[Any]:
    """Return `own` of this rank and of all ranks that differ from it only along `axes`.

    The order is the same on each of these ranks.
    """
    every = [own]
    for axis in axes:
        rows = gathered(every, submesh(mesh, (axis,)).get_group())
        every = [each for row in rows for each in row]
    return every


def gather_into(every: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `every` with the `part` of each rank, stacked along dim 0.

    torch 2.13 renamed the collectives used here and in `scatter_sum`, so both names are tried.

    Shape: every (ranks, *part.shape).
    """
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(every.flatten(0, 1), part.contiguous(), group=group)


def scatter_sum(part: torch.Tensor, every: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum `every` over ranks and fill `part` with this rank's slice of the sum along dim 0.

    Shape: every (ranks, *part.shape).
    """
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collective(part, every.contiguous().flatten(0, 1), group=group)


def sums_over_ranks() -> frozenset[Any]:
    """Return the operators with which DTensor sums over ranks: all-reduce and reduce-scatter.

    They are in no public namespace, and torch 2.13 renamed one. A policy for selective activation
    checkpointing is called with each operator and compares it with these.
    """
    ops: Any = torch.ops._c10d_functional
    names = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
    return frozenset(getattr(ops, name).default for name in names if hasattr(ops, name))


def placement(layout: Layout, axis: str) -> Placement:
    """Return the DTensor placement of a layout along one mesh axis."""
    if axis in layout.partial:
        return Partial()
    dim = layout.dim_of(axis)
    if dim is None:
        return Replicate()
    return _packed(dim, layout.pieces(dim)) if layout.pieces(dim) > 1 else Shard(dim)


def _packed(dim: int, pieces: int) -> Placement:
    """Return the placement that shards each of `pieces` equal pieces of a dim separately.

    A fused projection of q, k and v has three pieces, for example. `_StridedShard` is private, but
    no public placement expresses this. `full_tensor` of such a DTensor is correct as long as no
    other axis shards the same dim, which `Layout` asserts.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=pieces)


def activation_placement(word: str) -> Placement:
    """Return the DTensor placement for a placement word of `layout/styles.py`, such as "S(-1)".

    "R" is Replicate, "P" is Partial, and "S(dim)" is Shard.
    """
    if word == "R":
        return Replicate()
    if word == "P":
        return Partial()
    return Shard(int(word[2:-1]))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself if it is no DTensor."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def cut_dims(tensor: torch.Tensor) -> dict[str, int]:
    """Return {mesh axis: the tensor dim that it shards}; empty if the tensor is no DTensor."""
    if not isinstance(tensor, DTensor):
        return {}
    names = tensor.device_mesh.mesh_dim_names or ()
    # A mesh dim that flattens several axes shards along each of them. Test for the placements that
    # do not shard: besides Shard there is _StridedShard, which FSDP2 uses for a dim that tp shards
    # too, and which in some releases of torch is not a subclass of Shard.
    return {
        axis: p.dim
        for name, p in zip(names, tensor.placements, strict=True)
        if not isinstance(p, Replicate | Partial)
        for axis in name.split(_JOINT)
    }


def shard_axes(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the mesh axes that shard a live tensor."""
    return tuple(cut_dims(tensor))


def without_partial(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with every pending sum (`Partial`) reduced."""
    if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        done = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
        return tensor.redistribute(placements=done)
    return tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full value of a tensor as a plain tensor; all ranks of its mesh must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != device_type():
        tensor = tensor.to(device())  # An offloaded shard: NCCL needs it in device memory.
    placements = list(tensor.placements)
    # If a dim is sharded twice, the _StridedShard is the second sharding, so it is undone first.
    # A single `redistribute` would use the same order, but log a warning about it.
    order = sorted(range(len(placements)), key=lambda i: isinstance(placements[i], Shard))
    for i in order:
        if not isinstance(placements[i], Replicate):
            placements[i] = Replicate()
            tensor = replicated(tensor, i)
    return tensor.to_local()


def replicated(tensor: DTensor, axis: int) -> DTensor:
    """Return the DTensor replicated along the mesh dim with index `axis`.

    For the placement of `_packed`, `redistribute` raises in torch 2.11: it takes every
    _StridedShard for the second of two shardings of one dim. The shards are then gathered here.
    """
    placements = list(tensor.placements)
    cut: Any = placements[axis]
    placements[axis] = Replicate()
    try:
        return tensor.redistribute(placements=placements)
    except ValueError:
        pieces, ranks = getattr(cut, "split_factor", 0), tensor.device_mesh.size(axis)
        if not pieces or tensor.shape[cut.dim] % (pieces * ranks):
            raise
    mesh, local = tensor.device_mesh, tensor.to_local().contiguous()
    parts = [torch.empty_like(local) for _ in range(ranks)]
    dist.all_gather(parts, local, group=mesh.get_group(axis))
    cuts = zip(*(part.chunk(pieces, cut.dim) for part in parts), strict=True)
    whole = torch.cat([part for piece in cuts for part in piece], cut.dim)
    # Each rank has a chunk of every piece. Order the chunks by piece, then by rank.
    return DTensor.from_local(
        whole, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
