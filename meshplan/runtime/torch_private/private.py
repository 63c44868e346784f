"""Private torch names, each behind a function with the reason.

Where torch changes one of them, this is the file to mend; those of DeviceMesh stand in `mesh`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from meshplan.runtime.torch_private.fakes import is_fake


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


def bytes_of(tensor: torch.Tensor) -> bytes | None:
    """The numbers of a plain tensor; None where it has none, on meta or fake.

    Under a fake mode every operation gives a fake tensor, and only private names tell which
    tensor is one and turn the modes off.
    """
    if tensor.is_meta or is_fake(tensor) or not tensor.numel():
        return None
    with without_modes():
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


def _param_groups(module: nn.Module) -> list[Any]:
    """The groups of parameters that FSDP2 gathers and reduces together for one unit."""
    from torch.distributed._composable_state import _get_module_state

    state: Any = _get_module_state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # Before torch 2.12 there was one.
        group = getattr(state, "_fsdp_param_group", None)
        groups = [group] if group else []
    return list(groups)


def on_reduction(
    module: nn.Module,
    fill: Callable[[nn.Parameter, bool], bool],
    begin: Callable[[], None],
    finish: Callable[[], None],
) -> bool:
    """Look at a unit's gradients just before it reduces them.

    Args:
        fill: Gets each parameter of the unit, and whether it has a gradient that waits to be
            reduced; returns whether to make it zeros.
        begin: Called after that, before the unit reduces.
        finish: Called once after each backward (when accumulating, after the last) in which the
            unit or another one with the same `finish` took part, when all gradients are there.

    Returns:
        Whether the unit has parameters of its own.

    Private, because no public hook lies between the backward of a unit and its reduction.
    torch's own `set_reduce_scatter_unused_params` (2.13) does not tell which were unused.
    """
    from torch.distributed._composable_state import _get_module_state

    state: Any = _get_module_state(module)
    groups = _param_groups(module)
    for group in groups:
        _look_before_reduction(group, fill, begin)
    end = state._root_post_backward_final_callback

    def end_and_finish() -> None:
        end()
        if state._state_ctx.is_last_backward:
            finish()

    # Whichever unit's backward begins first queues its own, and only that one is run.
    state._root_post_backward_final_callback = end_and_finish
    return bool(groups)


def _look_before_reduction(
    group: Any, fill: Callable[[nn.Parameter, bool], bool], begin: Callable[[], None]
) -> None:
    reduce = group.post_backward

    def look_and_reduce(*unused: Any) -> None:
        is_used = False
        for param in group.fsdp_params if group.reduce_grads else ():
            if not hasattr(param, "_unsharded_param"):
                continue  # Never gathered, so never used.
            is_used = True
            whole = param.unsharded_param
            waits = whole.grad is not None or param.unsharded_accumulated_grad is not None
            if fill(param.sharded_param, waits):
                whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)
        if is_used:
            begin()
        reduce(*unused)

    group.post_backward = look_and_reduce


def gathered_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """What a unit computes with in place of its parameters, once it was gathered.

    Private, since FSDP2 shows its gathered copies while a forward runs only.
    """
    for group in _param_groups(module):
        for param in group.fsdp_params:
            if hasattr(param, "_unsharded_param"):
                yield param._unsharded_param


def renew_reducer(model: DistributedDataParallel) -> None:
    """Give DistributedDataParallel buckets for the parameters that are trainable now.

    Private: torch makes them once, and says that a model must not change afterwards
    (pytorch/pytorch#42850 asks for more). The hooks of the old reducer go with it.
    """
    params, are_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(params)
    model._ddp_init_helper(params, are_sparse, names, model.static_graph)
    model._has_rebuilt_buckets = False


def renew_reduction_dtypes(module: nn.Module) -> None:
    """Let a unit of FSDP2 see in which dtypes it reduces the parameters that are trainable now.

    Private: it looks once, before its first forward, and finds none where all are frozen.
    """
    for group in _param_groups(module):
        group._init_mp_dtypes()


def store_gathered(module: nn.Module, parameter: nn.Parameter) -> None:
    """Copy a gathered parameter of a unit into the part of it that this rank holds.

    Private: FSDP2 frees its gathered copies after a forward, whatever was written into them.
    """
    for param in (param for group in _param_groups(module) for param in group.fsdp_params):
        if getattr(param, "_unsharded_param", None) is parameter:
            whole: Any = getattr(parameter, "_local_tensor", parameter)
            dim, ranks = param.fsdp_placement.dim, param.mesh_info
            part = param.sharded_param._local_tensor
            if part.numel():  # An uneven cut leaves nothing to the last ranks.
                start = getattr(ranks, "shard_mesh_rank", 0) * param.padded_sharded_param_size[dim]
                part.copy_(whole.detach().narrow(dim, start, part.shape[dim]))


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let autograd take a tensor for unchanged that holds again what it held at this version.

    Private: torch means it for tensors that are freed and filled again, as gathered ones are.
    """
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def group_store() -> dist.Store:
    """The store in which the ranks met, with the connection that torch uses itself.

    `ProcessGroup.get_group_store` is public but undocumented.
    """
    world = dist.group.WORLD
    assert world is not None
    return world.get_group_store()


def store_port(store: dist.Store) -> int | None:
    """The port at which a store is served, None where it is not a TCP store.

    Public names, but undocumented: stores of process groups are wrapped in prefixes.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None


def num_groups() -> int:
    """How many process groups this rank knows. torch counts them in a private table only."""
    return len(dist.distributed_c10d._world.pg_map)


def group_sequences() -> dict[str, int] | None:
    """How many collectives each group of this rank has begun; None where torch does not count.

    Private, because torch means them for its own desynchronisation reports.
    """
    out = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            out[group.group_name] = group._get_sequence_number_for_group()
        except RuntimeError:  # This backend does not count.
            return None
    return out


def group_facts() -> list[tuple[tuple[int, ...], int, str]]:
    """(ranks, collectives begun, backend) of each process group of this rank.

    Private for the reasons above.
    """
    counts = group_sequences() or {}
    return [
        (
            tuple(dist.get_process_group_ranks(group)),
            counts.get(group.group_name, 0),
            dist.get_backend(group),
        )
        for group in list(dist.distributed_c10d._world.pg_map)
    ]


def has_groups_of_program() -> bool:
    """Whether the program made a process group itself, beside the default one and those of meshes.

    Private for the reasons above; a group's description is public.
    """
    made_by_torch = ("default_pg", "mesh_")
    return any(
        not (group.group_desc or "").startswith(made_by_torch)
        for group in list(dist.distributed_c10d._world.pg_map)
    )


def abort_groups() -> None:
    """Give up every collective of this rank, on backends that can (NCCL).

    `ProcessGroup.abort` is public; the table of all groups is not.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()


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


@contextmanager
def on_resize(told: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Tell of every storage that changes its size in place, as FSDP2 frees gathered parameters.

    Private only in that a method of a torch class is replaced: resizing runs no operator.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        told(storage)
        return out

    torch.UntypedStorage.resize_ = resize_and_tell
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def without_modes() -> AbstractContextManager[Any]:
    """Run operators as if no mode were open, fake tensors and observers among them."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def autograd_sequence() -> int:
    """The number that autograd gives the next node; no public name tells."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def running_node() -> int | None:
    """The number of the node whose backward runs; None in forward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call something once the running backward has run all it had to run.

    Private: FSDP2 ends its own backward by the same way, and no public hook comes as late.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)
