"""Devices, process group and DeviceMesh; layouts as DTensor placements.

Layouts are translated to placements in this module only. Private names of DeviceMesh are wrapped in
functions here, each with its reason; all other private names of torch are in `torch_private`.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshplan.layout.layout import Layout
from meshplan.layout.mesh import Mesh

JOIN_TIMEOUT = timedelta(minutes=5)
"""Timeout of a process group that meshplan makes: far above any step, far below torch's half
hour."""

_JOINT = "+"
"""Joins the names of axes that are flattened into one dim of a DeviceMesh."""

_meshes: dict[tuple[str, Mesh], tuple[object, DeviceMesh, DeviceMesh]] = {}


_IMAGINED: Final[ContextVar[bool]] = ContextVar("imagined", default=False)


@contextmanager
def on_fake_devices() -> Iterator[None]:
    """Make the device the CPU inside the `with` block, on any machine, as fake tensors need it."""
    token = _IMAGINED.set(True)
    try:
        yield
    finally:
        _IMAGINED.reset(token)


def device_type() -> str:
    """Return the type of device to run on: torch's accelerator if there is one, else "cpu".

    The only place that decides this. If the caller's process group uses gloo, it is the CPU.
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
    """Join torchrun's group, or make a group of one rank; a caller's group is left as it is."""
    if dist.is_initialized():
        return
    kind = device_type()
    backend = dist.get_default_backend_for_device(kind)
    if kind != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=JOIN_TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_leave)


def _leave() -> None:
    """Destroy the group that `ensure_process_group` made, before the interpreter exits.

    Otherwise gloo's threads run into the destructors of static objects, and some runs end in
    "terminate called without an active exception".
    """
    _meshes.clear()
    gc.unfreeze()  # `leave_at_once` may have frozen the objects.
    gc.collect()  # Wrapped models are reference cycles, and they reference process groups.
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks_per_node() -> int | None:
    """Return the number of ranks on this machine according to torchrun; None without torchrun."""
    value = os.environ.get("LOCAL_WORLD_SIZE")
    return int(value) if value else None


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the DeviceMesh of a mesh: one object per process group, mesh and type of device.

    DTensor caches by mesh equality, so a second, equal mesh could be served the process groups of
    an older one (see huggingface/transformers#48383).
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
    """Return a mesh of the same ranks with the borrowed axes in place of those that lend.

    Uses a private method until `DeviceMesh.unflatten` is public. FSDP2 joins the mesh it shards
    over with the one that ep sharded before, so both must be slices of one mesh.
    """
    for loan in mesh.loans:
        sizes = mesh.size(loan.rest), loan.size
        names = made.mesh_dim_names or ()
        # By index, because torch 2.11 has its check of the name inverted.
        made = made._unflatten(names.index(loan.within), sizes, (loan.rest, loan.name))
    return made


def submesh(whole: DeviceMesh, axes: Sequence[str], *, flat: bool = False) -> DeviceMesh:
    """Return the slice of the mesh along `axes`, in mesh order; `flat` joins them into one dim."""
    split = next((split for _, made, split in _meshes.values() if made is whole), whole)
    borrowed = set(split.mesh_dim_names or ()) - set(whole.mesh_dim_names or ())
    whole = split if borrowed & set(axes) else whole
    names = tuple(name for name in whole.mesh_dim_names or () if name in axes)
    part = whole[names] if len(names) < whole.ndim else whole
    if flat and part.ndim > 1:
        # Private until `DeviceMesh.flatten` is public. A second call makes no new process group.
        return part._flatten(_JOINT.join(names))
    return part


def unit_mesh(whole: DeviceMesh, replicate: Sequence[str], shard: Sequence[str]) -> DeviceMesh:
    """Return the mesh of a sharded unit: the `replicate` axes, then `shard` as one dim."""
    if len(submesh(whole, shard).shape) == 1:
        return submesh(whole, (*replicate, *shard))
    shards = submesh(whole, shard, flat=True)
    if not replicate:
        return shards
    # Private, because the public alternative, slicing by the joint name, is deprecated.
    return DeviceMesh._concatenate([submesh(whole, replicate), shards])


def reduce_along(
    value: torch.Tensor, mesh: DeviceMesh, axes: Iterable[str], op: dist.ReduceOp.RedOpType
) -> None:
    """All-reduce a tensor in place over the ranks that differ along `axes` only.

    It runs axis by axis, in process groups that exist anyway: a group of all these ranks would cost
    each rank the buffers of another communicator.
    """
    for axis in axes:
        if mesh[axis].size() > 1:
            dist.all_reduce(value, op=op, group=submesh(mesh, (axis,)).get_group())


def objects_along(own: Any, mesh: DeviceMesh, axes: Iterable[str]) -> list[Any]:
    """Return the objects of all ranks that differ along `axes` only, in equal order on each."""
    every = [own]
    for axis in axes:
        group = submesh(mesh, (axis,)).get_group()
        told: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, every, group=group)
        every = [each for row in told for each in row]
    return every


def gather_into(every: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `every`, stacked along dim 0, with the `part` of each rank.

    torch 2.13 renamed this collective and the one in `scatter_sum`.

    Shape: every (ranks, *part.shape).
    """
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(every.flatten(0, 1), part.contiguous(), group=group)


def scatter_sum(part: torch.Tensor, every: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `part` with the sum over ranks of this rank's slice of `every` along dim 0."""
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collective(part, every.contiguous().flatten(0, 1), group=group)


def sums_over_ranks() -> frozenset[Any]:
    """Return the operators with which DTensor sums over ranks.

    They are in no public namespace, and torch 2.13 renamed one. A selective checkpointing policy
    needs the operators themselves.
    """
    ops: Any = torch.ops._c10d_functional
    names = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
    return frozenset(getattr(ops, name).default for name in names if hasattr(ops, name))


def placement(layout: Layout, axis: str) -> Placement:
    """Return the placement of a layout along one mesh axis."""
    if axis in layout.partial:
        return Partial()
    dim = layout.dim_of(axis)
    if dim is None:
        return Replicate()
    return _packed(dim, layout.pieces(dim)) if layout.pieces(dim) > 1 else Shard(dim)


def _packed(dim: int, pieces: int) -> Placement:
    """Return the placement that shards each of the equal pieces of a dim separately.

    Private, because no public placement expresses this. Its `full_tensor` is correct as long as no
    other axis shards the same dim, which `Layout` asserts.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=pieces)


def activation_placement(word: str) -> Placement:
    """Return torch's placement for a placement word of `styles` ("R", "P", "S(-1)")."""
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
    """Return the mesh axes that shard a live tensor, each with the dim it shards."""
    if not isinstance(tensor, DTensor):
        return {}
    names = tensor.device_mesh.mesh_dim_names or ()
    # A mesh dim that joins several axes shards along each of them. FSDP2 marks a dim that tp
    # sharded before with _StridedShard, which is not always a subclass of Shard.
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
    """Return the full value of a tensor; every rank of its mesh must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device.type != device_type():
        tensor = tensor.to(device())  # An offloaded shard: the device's collectives need it here.
    placements = list(tensor.placements)
    # A _StridedShard is the later sharding of a dim that is sharded twice, so it is undone first.
    # In a single redistribute torch does the same and logs a warning about the order.
    order = sorted(range(len(placements)), key=lambda i: isinstance(placements[i], Shard))
    for i in order:
        if not isinstance(placements[i], Replicate):
            placements[i] = Replicate()
            tensor = replicated(tensor, i)
    return tensor.to_local()


def replicated(tensor: DTensor, axis: int) -> DTensor:
    """Return the DTensor replicated along one dim of its mesh.

    torch 2.11 raises if each piece of a packed dim is sharded separately: it takes that placement
    for the later of two shardings of one dim. No public name distinguishes the two.
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
    # Each rank has a chunk of every piece; put the chunks of a piece next to each other again.
    return DTensor.from_local(
        whole, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
