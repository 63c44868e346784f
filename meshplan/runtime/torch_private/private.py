"""Private names of torch, each wrapped in a function that gives the reason for its use.

If torch changes one of them, this file needs the fix; those of DeviceMesh are in `base.mesh`.
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
    """Apply FSDP2's `replicate`, which shards nothing: DDP that works with TP and mixed precision.

    Private, because `torch.distributed._composable.replicate` of the public docs is classic
    DDP, which drops DTensor parameters from the state dict. A `fully_shard` that only keeps
    its parameters gathered would still shard the optimizer.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)


def bytes_of(tensor: torch.Tensor) -> bytes | None:
    """Return the values of a plain tensor as bytes; None if it is on meta, fake or empty.

    Under a fake mode every operation returns a fake tensor. Only private names identify a fake
    tensor and disable the modes.
    """
    if tensor.is_meta or is_fake(tensor) or not tensor.numel():
        return None
    with without_modes():
        plain = tensor.detach().cpu().contiguous().flatten()
        return bytes(plain.view(torch.uint8).numpy().tobytes())


def forget_units(modules: Iterable[nn.Module]) -> None:
    """Make modules wrappable again after wrapping has failed.

    torch keeps the state of `fully_shard` and `replicate` in a private table and rejects a module
    that is already in it.
    """
    from torch.distributed._composable_state import _module_state_mapping

    for module in modules:
        _module_state_mapping.pop(module, None)


def _param_groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers and reduces together for one unit."""
    from torch.distributed._composable_state import _get_module_state

    state: Any = _get_module_state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # Before torch 2.12 there was a single group.
        group = getattr(state, "_fsdp_param_group", None)
        groups = [group] if group else []
    return list(groups)


def on_reduction(
    module: nn.Module,
    fill: Callable[[nn.Parameter, bool], bool],
    begin: Callable[[], None],
    finish: Callable[[], None],
) -> bool:
    """Call back with a unit's gradients right before the unit reduces them.

    Args:
        fill: Called with each sharded parameter of the unit, and True if it has a gradient waiting
            to be reduced. If it returns True, the gradient is set to zeros.
        begin: Called after that, before the unit reduces.
        finish: Called once after each backward (when accumulating, after the last) in which this
            unit, or another one with the same `finish`, took part. All gradients exist by then.

    Returns:
        True if the unit has parameters of its own.

    Private, because no public hook runs between the backward of a unit and its reduction.
    torch's own `set_reduce_scatter_unused_params` (2.13) does not report which were unused.
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

    # Whichever unit's backward begins first queues its callback, and only that one is run.
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
                continue  # Never gathered, hence never used.
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
    """Yield the gathered parameters that a unit computes with in place of its sharded ones.

    Private, because FSDP2 exposes its gathered copies only while a forward runs.
    """
    for group in _param_groups(module):
        for param in group.fsdp_params:
            if hasattr(param, "_unsharded_param"):
                yield param._unsharded_param


def renew_reducer(model: DistributedDataParallel) -> None:
    """Rebuild the buckets of DistributedDataParallel for the parameters that are trainable now.

    Private, because torch builds them once and documents that a model must not change afterwards
    (pytorch/pytorch#42850 asks for more). The hooks of the old reducer are removed with it.
    """
    params, are_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(params)
    model._ddp_init_helper(params, are_sparse, names, model.static_graph)
    model._has_rebuilt_buckets = False


def renew_reduction_dtypes(module: nn.Module) -> None:
    """Make a unit of FSDP2 determine anew in which dtypes it reduces its trainable parameters.

    Private, because FSDP2 determines them once, before the first forward, and finds none if all
    parameters are frozen.
    """
    for group in _param_groups(module):
        group._init_mp_dtypes()


def store_gathered(module: nn.Module, parameter: nn.Parameter) -> None:
    """Copy a gathered parameter of a unit into this rank's shard of it.

    Private, because FSDP2 frees its gathered copies after a forward and drops what was written.
    """
    for param in (param for group in _param_groups(module) for param in group.fsdp_params):
        if getattr(param, "_unsharded_param", None) is parameter:
            whole: Any = getattr(parameter, "_local_tensor", parameter)
            dim, ranks = param.fsdp_placement.dim, param.mesh_info
            part = param.sharded_param._local_tensor
            if part.numel():  # With an uneven sharding, the last ranks have no elements.
                start = getattr(ranks, "shard_mesh_rank", 0) * param.padded_sharded_param_size[dim]
                part.copy_(whole.detach().narrow(dim, start, part.shape[dim]))


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set a tensor's version counter, so that autograd takes it for unchanged since that version.

    The caller must have restored the values of that version. Private, because torch means it for
    tensors that are freed and filled again, as gathered parameters are.
    """
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def group_store() -> dist.Store:
    """Return the store through which the ranks met, with the connection that torch itself uses.

    `ProcessGroup.get_group_store` is public but undocumented.
    """
    world = dist.group.WORLD
    assert world is not None
    return world.get_group_store()


def store_port(store: dist.Store) -> int | None:
    """Return the port at which a store is served, or None if it is not a TCP store.

    The names are public but undocumented. Stores of process groups are wrapped in prefixes.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None


def num_groups() -> int:
    """Return the number of this rank's process groups, which are in a private table of torch."""
    return len(dist.distributed_c10d._world.pg_map)


def group_sequences() -> dict[str, int] | None:
    """Return the collectives begun so far, by group name; None if a backend does not count them.

    Private, because torch means the numbers for its own reports of desynchronised ranks.
    """
    out = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            out[group.group_name] = group._get_sequence_number_for_group()
        except RuntimeError:  # This backend does not count.
            return None
    return out


def group_facts() -> list[tuple[tuple[int, ...], int, str]]:
    """Return (ranks, collectives begun, backend) of each process group of this rank.

    The table of groups and the counts are private, as in `num_groups` and `group_sequences`.
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
    """Return True if the program made a process group besides the default one and those of meshes.

    The table of groups is private, as in `num_groups`; a group's description is public.
    """
    made_by_torch = ("default_pg", "mesh_")
    return any(
        not (group.group_desc or "").startswith(made_by_torch)
        for group in list(dist.distributed_c10d._world.pg_map)
    )


def abort_groups() -> None:
    """Abort every collective of this rank, on backends that support it (NCCL).

    `ProcessGroup.abort` is public; the table of all groups is not.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()


def group_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the process group among the arguments of a collective op: boxed, or by its name.

    Private, because torch has no public function from an op's arguments to the group.
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
    """Make every call of this module run `around(call, *args, **kwargs)`, outside its hooks.

    Private, because `__call__` looks for `_compiled_call_impl` first, which `nn.Module.compile`
    sets. A wrapped `forward` would run too late, inside all hooks of the wrappers.
    """
    # No closure over the module's own previous value: copies of the module must not share it.
    call = module._compiled_call_impl or module._call_impl
    module._compiled_call_impl = partial(around, call)


def backward_of_inputs(
    outputs: list[torch.Tensor],
    gradients: list[torch.Tensor] | None,
    inputs: list[torch.Tensor],
    weights: Iterable[nn.Parameter],
) -> list[dict[str, Any]]:
    """Compute the gradients of `inputs` only; return what `backward_of_weights` needs for the rest.

    Private until torch has a public name: one half of the backward in its zero-bubble schedules.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(outputs, gradients, inputs, iter(list(weights)))[1]


def backward_of_weights(weights: Iterable[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Compute the gradients of the weights, after `backward_of_inputs` computed those of inputs."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(list(weights)), groups)


def reduce_units(module: nn.Module) -> None:
    """Reduce the gradients that have accumulated in FSDP2's units, outside any backward.

    Private: torch's own pipeline schedules do the same (`PipelineStage.perform_reduce_grad`),
    because a backward that is split in two triggers no hook at its end.
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
        # Before torch 2.12 there was a single group.
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for group in groups:
            group.post_backward()
    root._root_post_backward_final_callback()


@contextmanager
def on_resize(report: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Report every storage that is resized in place, as FSDP2 does to free gathered parameters.

    Private only in that a method of a torch class is replaced: resizing dispatches no operator.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        report(storage)
        return out

    torch.UntypedStorage.resize_ = resize_and_tell
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def without_modes() -> AbstractContextManager[Any]:
    """Run operators as if no dispatch mode were active, including fake modes and trackers."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def autograd_sequence() -> int:
    """Return the sequence number of the next autograd node, which no public name exposes."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def running_node() -> int | None:
    """Return the sequence number of the node whose backward is running; None in forward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Run a callback when the running backward has finished everything else.

    Private: FSDP2 ends its own backward in the same manner, and no public hook runs as late.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)
