"""Devices, process group and DeviceMesh; layouts as DTensor placements.

The only room that speaks placements and the only one with private torch names: each stands
here behind a function, with the reason.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
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

_meshes: dict[tuple[str, tuple[Any, ...]], tuple[object, DeviceMesh]] = {}


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
    key = (kind, mesh.axes)
    world = dist.group.WORLD
    found = _meshes.get(key)
    if found is None or found[0] is not world:
        made = init_device_mesh(kind, tuple(mesh.sizes.values()), mesh_dim_names=mesh.names)
        found = _meshes[key] = (world, made)
    return found[1]


def submesh(whole: DeviceMesh, axes: Sequence[str], *, flat: bool = False) -> DeviceMesh:
    """The part of the mesh along `axes`, in mesh order; `flat` joins them to one dim."""
    names = tuple(name for name in whole.mesh_dim_names or () if name in axes)
    part = whole[names] if len(names) < whole.ndim else whole
    if flat and part.ndim > 1:
        # Private until `DeviceMesh.flatten` is public; makes no new group a second time.
        return part._flatten("_".join(names))
    return part


def placement(layout: Layout, axis: str) -> Placement:
    """How a layout lies along one axis."""
    if axis in layout.partial:
        return Partial()
    dim = layout.dim_of(axis)
    return Replicate() if dim is None else Shard(dim)


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
    # FSDP2 marks a dim that tp cut before with _StridedShard, which is not always a Shard.
    return {
        name: p.dim
        for name, p in zip(names, tensor.placements, strict=True)
        if not isinstance(p, Replicate | Partial)
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


def forget_units(modules: Iterable[nn.Module]) -> None:
    """Let modules be wrapped again after a wrapping that failed.

    torch keeps the state of `fully_shard` and `replicate` in a private table of its own, and
    refuses a module that is in it already.
    """
    from torch.distributed._composable_state import _module_state_mapping

    for module in modules:
        _module_state_mapping.pop(module, None)


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
