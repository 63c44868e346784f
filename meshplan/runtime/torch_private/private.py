"""Private names of torch, each wrapped in a function that gives the reason for its use.

If torch changes one of them, only this file needs a fix. Private names of DeviceMesh are in
`base.mesh`.
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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from meshplan.runtime.torch_private.fakes import is_fake


def replicate_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    ignored: set[nn.Parameter],
) -> None:
    """Apply FSDP2's `replicate`: data parallelism without sharding, for TP and mixed precision.

    Private, because the `torch.distributed._composable.replicate` of the public docs is classic
    DDP, which drops DTensor parameters from the state dict. `fully_shard` with
    `reshard_after_forward=False` is no alternative: it would still shard the optimizer state.

    Args:
        module: The module that becomes a unit.
        mesh: The mesh of the axis that replicates.
        policy: Dtypes of the unit's parameters, gradients and outputs.
        ignored: Parameters that the unit leaves alone.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)


def bytes_of(tensor: torch.Tensor) -> bytes | None:
    """Return the values of a tensor as bytes; None if the tensor is on meta, fake or empty.

    Private, because the values must be readable under a fake mode too, where every operation
    returns a fake tensor, and torch has no public name to recognise a fake tensor or to disable
    modes.
    """
    if tensor.is_meta or is_fake(tensor) or not tensor.numel():
        return None
    with without_modes():
        plain = tensor.detach().cpu().contiguous().flatten()
        return bytes(plain.view(torch.uint8).numpy().tobytes())


def forget_units(modules: Iterable[nn.Module]) -> None:
    """Make modules wrappable again after `fully_shard` or `replicate` has failed on them.

    Private, because torch keeps the state of both in a private table, and rejects a module that is
    already in the table.
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


def reshard(module: FSDPModule) -> None:
    """Free the gathered parameters of an FSDP2 unit, even if its last forward raised.

    Assumes: no forward of the unit is running.

    Private, because FSDP2 takes a forward that raised for one that still runs. `reshard` then frees
    no parameters that stay gathered after a forward, and later forwards use their old values after
    the optimizer has updated the shards. The public `FSDPModule.reset_iter_state` of torch 2.13
    also drops gradients that wait for another microbatch.
    """
    from torch.distributed._composable_state import _get_module_state
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state: Any = _get_module_state(module)
    for each in (state, *_param_groups(module)):
        if each._training_state == TrainingState.FORWARD:
            each._training_state = TrainingState.IDLE
    if state._state_ctx.iter_forward_root is state:
        state._state_ctx.iter_forward_root = None
    module.reshard()


def on_reduction(
    module: nn.Module,
    fill: Callable[[nn.Parameter, bool], bool],
    begin: Callable[[], None],
    finish: Callable[[], None],
) -> bool:
    """Register callbacks that run right before an FSDP2 unit reduces its gradients.

    Args:
        module: The unit.
        fill: Called with each sharded parameter of the unit that was gathered, and True if a
            gradient of it waits for the reduction. If `fill` returns True, the gradient is set to
            zeros.
        begin: Called after `fill` has been called for all parameters, before the reduction.
        finish: Called at the end of a backward in which the unit took part, when all gradients
            exist. With gradient accumulation only the last backward counts. If several units
            register the same `finish`, it is called once for all of them.

    Returns:
        True if the unit has parameters of its own.

    Private, because no public hook runs between the backward of a unit and its reduction.
    torch's own `set_reduce_scatter_unused_params` (2.13) does not report which parameters were
    unused.
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

    # FSDP2 runs the final callback of one unit only: of the unit whose backward begins first.
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
    """Yield the unsharded parameters of an FSDP2 unit, which replace its shards in forward.

    Private, because FSDP2 exposes these tensors only while a forward runs.
    """
    for group in _param_groups(module):
        for param in group.fsdp_params:
            if hasattr(param, "_unsharded_param"):
                yield param._unsharded_param


def renew_reducer(model: DistributedDataParallel) -> None:
    """Rebuild the buckets of DistributedDataParallel for the parameters that are trainable now.

    Private, because torch builds the buckets once, and documents that `requires_grad` must not
    change afterwards (pytorch/pytorch#42850 asks for a way). The new reducer replaces the old one,
    and the old one's hooks go with it.
    """
    params, are_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(params)
    model._ddp_init_helper(params, are_sparse, names, model.static_graph)
    model._has_rebuilt_buckets = False


def renew_reduction_dtypes(module: nn.Module) -> None:
    """Make an FSDP2 unit determine its reduction dtypes from the parameters that are trainable now.

    Private, because FSDP2 determines the dtypes once, before the first forward, and finds none if
    all parameters are frozen at that time.
    """
    for group in _param_groups(module):
        group._init_mp_dtypes()


def store_gathered(module: nn.Module, parameter: nn.Parameter) -> None:
    """Copy the values of an unsharded parameter of an FSDP2 unit into this rank's shard.

    Private, because FSDP2 frees the unsharded parameter after a forward, and has no public function
    that keeps values written to it.

    Args:
        module: The unit.
        parameter: The unsharded parameter, one of `gathered_parameters`.
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
    """Set a tensor's version counter (`Tensor._version`).

    Autograd then takes the tensor for unchanged since that version, so the caller must have
    restored the values it had. Private, because torch means the function for tensors that are
    freed and filled again, such as FSDP2's unsharded parameters.
    """
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def group_store() -> dist.Store:
    """Return the store of the default process group, which shares the connection torch uses.

    `ProcessGroup.get_group_store` is public but undocumented.
    """
    world = dist.group.WORLD
    assert world is not None
    return world.get_group_store()


def store_port(store: dist.Store) -> int | None:
    """Return the TCP port of a store's server, or None if the store is no TCPStore.

    Stores of process groups are wrapped in `PrefixStore`, whose `underlying_store` is public but
    undocumented, as is `TCPStore.port`.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None


def num_groups() -> int:
    """Return the number of this rank's process groups, from a private table of torch."""
    return len(dist.distributed_c10d._world.pg_map)


def group_sequences() -> dict[str, int] | None:
    """Return how many collectives this rank has begun in each group, by group name.

    Return None if the backend of a group does not count. Private, because torch means the counts
    for its own reports of desynchronised ranks.
    """
    out = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            out[group.group_name] = group._get_sequence_number_for_group()
        except RuntimeError:  # This backend does not count.
            return None
    return out


def group_facts() -> list[tuple[tuple[int, ...], int, str]]:
    """Return (ranks, number of collectives begun, name of the backend) of each group of this rank.

    The number is 0 if `group_sequences` returns None. Private for the same reasons as `num_groups`
    and `group_sequences`.
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
    """Return True if the user's program made a process group itself.

    The default group and the groups of a DeviceMesh do not count; their descriptions tell. Private,
    because the table of groups is.
    """
    made_by_torch = ("default_pg", "mesh_")
    return any(
        not (group.group_desc or "").startswith(made_by_torch)
        for group in list(dist.distributed_c10d._world.pg_map)
    )


def abort_groups() -> None:
    """Abort the collectives of all groups of this rank, on backends that support it (NCCL).

    `ProcessGroup.abort` is public, but the table of all groups is private.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()


def group_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the process group that a collective op was called with.

    Ops of `c10d` take the group as a ScriptObject, functional ones take its name. Private, because
    torch has no public function that returns the group of either.

    Args:
        args: Positional arguments of the op.
        kwargs: Keyword arguments of the op.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except (TypeError, RuntimeError):
                continue  # A `ReduceOp`, which is a ScriptObject too.
        if isinstance(value, str) and value in dist.distributed_c10d._world.pg_names.values():
            return dist.distributed_c10d._resolve_process_group(value)
    raise AssertionError("a collective without a group")


def intercept_calls(module: nn.Module, around: Callable[..., Any]) -> None:
    """Make every call of this module run `around(call, *args, **kwargs)`.

    `call` runs the module with its hooks, so `around` encloses the hooks of FSDP2 and DDP as well;
    a wrapped `forward` would run inside of them. Private, because the only attribute that
    `__call__` looks up before the hooks is `_compiled_call_impl`, which `nn.Module.compile` sets.
    """
    # A partial, because deepcopy rebinds its `call` to the copied module; it would not copy a
    # closure, and the copy would call the original module.
    call = module._compiled_call_impl or module._call_impl
    module._compiled_call_impl = partial(around, call)


@contextmanager
def intercepted_calls(module: nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """Make calls of this module run `around(call, *args, **kwargs)` inside.

    Private for the same reason as `intercept_calls`.
    """
    before = module._compiled_call_impl
    intercept_calls(module, around)
    try:
        yield
    finally:
        module._compiled_call_impl = before


def backward_of_inputs(
    outputs: list[torch.Tensor],
    gradients: list[torch.Tensor] | None,
    inputs: list[torch.Tensor],
    weights: Iterable[nn.Parameter],
) -> list[dict[str, Any]]:
    """Compute the gradients of a stage's inputs, and leave those of its weights for later.

    This is the first half (I) of a backward that zero-bubble schedules split in two. Private,
    because torch has no public name for either half.

    Args:
        outputs: Outputs of the stage.
        gradients: Gradients of the outputs; None for a loss.
        inputs: Inputs of the stage; their `grad` is set.
        weights: Parameters of the stage.

    Returns:
        The parameter groups that `backward_of_weights` takes.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(outputs, gradients, inputs, iter(list(weights)))[1]


def backward_of_weights(weights: Iterable[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Compute the gradients of a stage's weights: the second half (W) of a split backward.

    Args:
        weights: Parameters of the stage.
        groups: The return value of `backward_of_inputs`.
    """
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(list(weights)), groups)


def reduce_units(module: nn.Module) -> None:
    """Reduce the gradients that have accumulated in the FSDP2 units of a module.

    Called outside any backward: a backward that is split in two does not trigger the hooks by which
    FSDP2 reduces. Private, because torch's own pipeline schedules call the same private names
    (`perform_reduce_grad` of a stage).
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
    """Call `report` with every storage that is resized in place inside the `with` block.

    FSDP2 resizes storages to free gathered parameters. A resize dispatches no operator, so no mode
    sees it. `UntypedStorage.resize_` is public, but replacing a method of a torch class is not.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_report(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        report(storage)
        return out

    torch.UntypedStorage.resize_ = resize_and_report
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode is active, neither fake modes nor trackers."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def autograd_sequence() -> int:
    """Return the sequence number of the next autograd node. No public name exposes it."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def running_node() -> int | None:
    """Return the sequence number of the autograd node that is running; None outside a backward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Queue a callback that runs at the end of the running backward, when all else has finished.

    Private, because no public hook runs as late. FSDP2 ends its own backward in the same manner.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)
