"""Devices, process group and DeviceMesh; layouts as DTensor placements.

The only room that speaks placements and the only one with private torch names: each stands
here behind a function, with the reason.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshplan.layout import Layout
from meshplan.mesh import Mesh

JOIN_TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for each other in a group that meshplan makes: far above any step, far
below torch's half hour."""

_JOINT = "+"
"""Joins the names of axes that torch sees as one dim."""

_meshes: dict[tuple[str, Mesh], tuple[object, DeviceMesh, DeviceMesh]] = {}


def device_type() -> str:
    """The kind of device to run on: the accelerator that torch finds, else the CPU.

    The one place that asks. A caller whose group runs gloo wants the CPU.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return "cpu"
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return accelerator.type
    return "cpu"


def device() -> torch.device:
    """This rank's device."""
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def ensure_process_group() -> None:
    """Join torchrun's group, or make a group of one; a caller's group stays as it is."""
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
    """End the group that `ensure_process_group` made, before the interpreter goes.

    gloo's threads would otherwise meet the destructors of static objects, and some runs would
    end in "terminate called without an active exception".
    """
    _meshes.clear()
    gc.collect()  # Wrapped models are cycles, and hold groups.
    if dist.is_initialized():
        dist.destroy_process_group()


def ranks_per_node() -> int | None:
    """Ranks on this machine as torchrun counts them; None without torchrun."""
    value = os.environ.get("LOCAL_WORLD_SIZE")
    return int(value) if value else None


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The DeviceMesh of a mesh, the same object for the same group, mesh and device.

    DTensor caches by mesh equality, so an equal second mesh could be handed back with the
    process groups of an older one (huggingface/transformers#48383 tells the story): one object
    each.
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
    """The same ranks with borrowed axes in place of those that lend.

    Private until `DeviceMesh.unflatten` is public. FSDP2 joins the mesh it shards over with the
    one that ep cut before, so both must be parts of one mesh.
    """
    for loan in mesh.loans:
        sizes = mesh.size(loan.rest), loan.size
        made = made._unflatten(loan.within, sizes, (loan.rest, loan.name))
    return made


def submesh(whole: DeviceMesh, axes: Sequence[str], *, flat: bool = False) -> DeviceMesh:
    """The part of the mesh along `axes`, in mesh order; `flat` joins them to one dim."""
    split = next((split for _, made, split in _meshes.values() if made is whole), whole)
    borrowed = set(split.mesh_dim_names or ()) - set(whole.mesh_dim_names or ())
    whole = split if borrowed & set(axes) else whole
    names = tuple(name for name in whole.mesh_dim_names or () if name in axes)
    part = whole[names] if len(names) < whole.ndim else whole
    if flat and part.ndim > 1:
        # Private until `DeviceMesh.flatten` is public; makes no new group a second time.
        return part._flatten(_JOINT.join(names))
    return part


def unit_mesh(whole: DeviceMesh, replicate: Sequence[str], shard: Sequence[str]) -> DeviceMesh:
    """The mesh of a sharded unit: an axis of its replicas, if any, and its shards as one dim."""
    if len(submesh(whole, shard).shape) == 1:
        return submesh(whole, (*replicate, *shard))
    shards = submesh(whole, shard, flat=True)
    if not replicate:
        return shards
    # Private, because the public way, slicing by the joint name, is deprecated without another.
    return DeviceMesh._concatenate([submesh(whole, replicate), shards])


def gather_into(every: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `every`, stacked along dim 0, with the `part` of each rank.

    torch 2.13 renamed this collective and the next.
    """
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(every.flatten(0, 1), part.contiguous(), group=group)


def scatter_sum(part: torch.Tensor, every: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `part` with the sum over ranks of the piece that is this rank's in `every`."""
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collective(part, every.contiguous().flatten(0, 1), group=group)


def placement(layout: Layout, axis: str) -> Placement:
    """How a layout lies along one axis."""
    if axis in layout.partial:
        return Partial()
    dim = layout.dim_of(axis)
    if dim is None:
        return Replicate()
    return _packed(dim, layout.pieces(dim)) if layout.pieces(dim) > 1 else Shard(dim)


def _packed(dim: int, pieces: int) -> Placement:
    """Each of the equal pieces of a dim cut by itself.

    Private: no public placement says so. Its `full_tensor` is right as long as no other axis cuts
    the same dim, which `Layout` asserts.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=pieces)


def activation_placement(word: str) -> Placement:
    """A placement word of `styles` ("R", "P", "S(-1)") as torch's placement."""
    if word == "R":
        return Replicate()
    if word == "P":
        return Partial()
    return Shard(int(word[2:-1]))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def cut_dims(tensor: torch.Tensor) -> dict[str, int]:
    """The mesh axes that cut a live tensor, each with the dim it cuts."""
    if not isinstance(tensor, DTensor):
        return {}
    names = tensor.device_mesh.mesh_dim_names or ()
    # A dim of several axes cuts along each of them.
    # FSDP2 marks a dim that tp cut before with _StridedShard, which is not always a Shard.
    return {
        axis: p.dim
        for name, p in zip(names, tensor.placements, strict=True)
        if not isinstance(p, Replicate | Partial)
        for axis in name.split(_JOINT)
    }


def shard_axes(tensor: torch.Tensor) -> tuple[str, ...]:
    """The mesh axes that cut a live tensor."""
    return tuple(cut_dims(tensor))


def without_partial(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with every pending sum done."""
    if isinstance(tensor, DTensor) and any(isinstance(p, Partial) for p in tensor.placements):
        done = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
        return tensor.redistribute(placements=done)
    return tensor


def replicate_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    ignored: set[nn.Parameter],
) -> None:
    """FSDP2's machinery with nothing sharded: DDP that mixes with TP and mixed precision.

    Private, because `torch.distributed._composable.replicate` of the public docs is classic
    DDP, which drops DTensor parameters from the state dict. A `fully_shard` that only keeps
    its parameters gathered would still shard the optimizer.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole value of a tensor; every rank of its mesh must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    # A _StridedShard is the later cut of a dim that is cut twice, so it is undone first; in one
    # go torch does the same and logs a warning about the order.
    order = sorted(range(len(placements)), key=lambda i: isinstance(placements[i], Shard))
    for i in order:
        if not isinstance(placements[i], Replicate):
            placements[i] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def fake_mode() -> AbstractContextManager[object]:
    """Tensors made inside have shapes and dtypes, but neither numbers nor memory.

    Private, yet what `torch.export` and `torch.compile` rest on; there is no public name.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Fake tensors log a traceback before they raise; what is expected to raise is not news."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def bytes_of(tensor: torch.Tensor) -> bytes | None:
    """The numbers of a plain tensor; None where it has none, on meta or fake.

    Under a fake mode every operation gives a fake tensor, and only private names tell which
    tensor is one and turn the modes off.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes

    if tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel():
        return None
    with _disable_current_modes():
        plain = tensor.detach().cpu().contiguous().flatten()
        return bytes(plain.view(torch.uint8).numpy().tobytes())


def forget_units(modules: Iterable[nn.Module]) -> None:
    """Let modules be wrapped again after a wrapping that failed.

    torch keeps the state of `fully_shard` and `replicate` in a private table of its own, and
    refuses a module that is in it already.
    """
    from torch.distributed._composable_state import _module_state_mapping

    for module in modules:
        _module_state_mapping.pop(module, None)


def on_reduction(
    module: nn.Module, fill: Callable[[nn.Parameter, bool], bool], finish: Callable[[], None]
) -> bool:
    """Look at a unit's gradients just before it reduces them.

    Args:
        fill: Gets each parameter of the unit, and whether it has a gradient that waits to be
            reduced; returns whether to make it zeros.
        finish: Called once after each backward (when accumulating, after the last) in which the
            unit or another one with the same `finish` took part, when all gradients are there.

    Returns:
        Whether the unit has parameters of its own.

    Private, because no public hook lies between the backward of a unit and its reduction.
    torch's own `set_reduce_scatter_unused_params` (2.13) does not tell which were unused.
    """
    from torch.distributed._composable_state import _get_module_state

    state: Any = _get_module_state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # Before torch 2.13 there was one.
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    for group in groups:
        _look_before_reduction(group, fill)
    end = state._root_post_backward_final_callback

    def end_and_finish() -> None:
        end()
        if state._state_ctx.is_last_backward:
            finish()

    # Whichever unit's backward begins first queues its own, and only that one is run.
    state._root_post_backward_final_callback = end_and_finish
    return bool(groups)


def _look_before_reduction(group: Any, fill: Callable[[nn.Parameter, bool], bool]) -> None:
    reduce = group.post_backward

    def look_and_reduce(*unused: Any) -> None:
        for param in group.fsdp_params if group.reduce_grads else ():
            if not hasattr(param, "_unsharded_param"):
                continue  # Never gathered, so never used.
            whole = param.unsharded_param
            waits = whole.grad is not None or param.unsharded_accumulated_grad is not None
            if fill(param.sharded_param, waits):
                whole.grad = torch.zeros_like(whole)
        reduce(*unused)

    group.post_backward = look_and_reduce


def group_store() -> dist.Store:
    """The store in which the ranks met, with a connection of its own where the store can.

    `ProcessGroup.get_group_store` is public but undocumented. A clone, because a thread may be
    waiting on the first connection.
    """
    world = dist.group.WORLD
    assert world is not None
    store = world.get_group_store()
    return store.clone()


def num_groups() -> int:
    """How many process groups this rank knows. torch counts them in a private table only."""
    return len(dist.distributed_c10d._world.pg_map)


def group_sequences() -> dict[str, int] | None:
    """How many collectives each group of this rank has begun; None where torch does not count.

    Private, because torch means them for its own desynchronisation reports.
    """
    out = {}
    for group in dist.distributed_c10d._world.pg_map:
        try:
            out[group.group_name] = group._get_sequence_number_for_group()
        except RuntimeError:  # This backend does not count.
            return None
    return out


def abort_groups() -> None:
    """Give up every collective of this rank, on backends that can (NCCL).

    `ProcessGroup.abort` is public; the table of all groups is not.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()


def after_backward(callback: Callable[[], None]) -> None:
    """Call once when the backward that is running now has come to its end.

    Private, because torch has no public hook there; FSDP2 and DistributedDataParallel use the
    same one.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """The number of the backward that is running now, -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def group_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    """The process group among the arguments of a collective op: a boxed one, or its name.

    Private, because torch has no public way from an op's arguments to the group.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except (TypeError, RuntimeError):
                continue  # A reduce op.
        if isinstance(value, str) and value in dist.distributed_c10d._world.pg_names.values():
            return dist.distributed_c10d._resolve_process_group(value)
    raise AssertionError("a collective without a group")


def intercept_calls(module: nn.Module, around: Callable[..., Any]) -> None:
    """Let `around(call, *args, **kwargs)` decide what a call of this module does, hooks and all.

    Private: `_compiled_call_impl` is what `nn.Module.compile` sets and `__call__` looks at first.
    A wrapped `forward` would come too late, inside of every hook of the wrappers.
    """
    # Not a closure over the module's own old value: copies of the module must not share it.
    call = module._compiled_call_impl or module._call_impl
    module._compiled_call_impl = partial(around, call)


def backward_of_inputs(
    outputs: list[torch.Tensor],
    gradients: list[torch.Tensor] | None,
    inputs: list[torch.Tensor],
    weights: Iterable[nn.Parameter],
) -> list[dict[str, Any]]:
    """Gradients of `inputs` alone; returns what `backward_of_weights` needs for the rest.

    Private until torch has a public name: the halves of the backward of its zero-bubble schedules.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(outputs, gradients, inputs, iter(list(weights)))[1]


def backward_of_weights(weights: Iterable[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """The rest of a backward that `backward_of_inputs` began."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(list(weights)), groups)


def reduce_units(module: nn.Module) -> None:
    """Reduce the gradients that FSDP2's units have gathered, outside of any backward.

    Private: torch's own pipeline schedules do the same (`PipelineStage.perform_reduce_grad`),
    since a backward that is split in two ends in no hook.
    """
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not isinstance(module, FSDPModule):
        return
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(True)
    module.set_requires_gradient_sync(True)
    kind = replicate if isinstance(module, ReplicateModule) else fully_shard
    root = kind.state(module)
    for state in root._state_ctx.all_states:
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # Before torch 2.12 there was one.
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for group in groups:
            group.post_backward()
    root._root_post_backward_final_callback()
