"""The data axes: DistributedDataParallel around the model, or FSDP2 on each unit.

Applied last, after tensor parallelism and activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from meshplan.assign import Placed, Unit
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.data.fake_ddp import FakeDDP
from meshplan.runtime.base.fake_mode import INSTEAD_OF_WRAPPING, is_fake_execution
from meshplan.runtime.base.mesh import device, submesh, unit_mesh
from meshplan.runtime.torch_private.private import intercept_calls, replicate_unit, reshard
from meshplan.spec.spec import Precision

_DDP_WORDS = {"bucket_mb": "bucket_cap_mb"}
"""Options of `ddp:` in a plan that have another name in torch."""


class Replicated(DistributedDataParallel):
    """DistributedDataParallel whose errors say where the model's attributes and items are.

    Attributes:
        shows_model: If True, those of the model are read through it instead, for code that knows
            no wrapper. Gradients of a part that is called alone are not averaged; the first step
            finds this.
    """

    shows_model = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = vars(self).get("_modules", {}).get("module")
            if inner is None or not hasattr(inner, name):
                raise
            if self.shows_model:
                return getattr(inner, name)
        raise AttributeError(
            f"'{name}' is an attribute of the model inside DistributedDataParallel: read it as "
            f"model.module.{name}; to train, call the model itself, so that gradients are averaged"
        )

    def __getitem__(self, key: Any) -> Any:
        if self.shows_model:
            return self.module[key]
        raise TypeError(
            f"item {key!r} is one of the model inside DistributedDataParallel: read it as "
            f"model.module[{key!r}]"
        )


def apply_data_parallel(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> nn.Module:
    """Wrap a model for the data axes.

    Returns:
        The model itself, or DistributedDataParallel around it.
    """
    assignment = plan.assignment
    mark = INSTEAD_OF_WRAPPING.get()
    if mark is not None:
        mark(model)
        return model
    if assignment.wrapper == "ddp":
        group = submesh(mesh, GRADIENT_AXES, flat=True).get_group()
        options = {_DDP_WORDS.get(key, key): value for key, value in plan.spec.ddp.items()}
        # Gradients that are views of the buckets need no copy of them; the textbook's formula 20a
        # assumes that there is no copy.
        options.setdefault("gradient_as_bucket_view", True)
        kind = FakeDDP if is_fake_execution() else Replicated
        return kind(model, process_group=group, **options)
    if assignment.wrapper == "none":
        return model
    alone = {model.get_parameter(fqn) for fqn, p in assignment.tensors.items() if p.reduced_alone}
    for unit in assignment.units.values():
        _wrap_unit(model.get_submodule(unit.fqn), unit, model, plan, mesh, alone)
    for param in alone:
        if not param.is_meta:
            param.data = param.data.to(device())  # FSDP2 does not move ignored_params.
    return model


def _wrap_unit(
    module: nn.Module,
    unit: Unit,
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    alone: set[nn.Parameter],
) -> None:
    policy = replace(mixed_precision(unit.precision), cast_forward_inputs=unit.casts_inputs)
    if not unit.is_sharded:
        axes = unit.replicate_axes
        replicate_unit(module, submesh(mesh, axes, flat=True), policy, alone)
        return
    spread = tuple(a for a in unit.replicate_axes if plan.mesh.size(a) > 1)
    dims = _shard_dims(model, plan, unit)
    fully_shard(
        module,
        mesh=unit_mesh(mesh, spread, unit.shard_axes),
        reshard_after_forward=unit.reshard_after_forward,
        shard_placement_fn=(lambda p: Shard(dims[p])) if any(dims.values()) else None,
        mp_policy=policy,
        offload_policy=offload_policy(unit),
        ignored_params=alone or None,
    )


def _shard_dims(model: nn.Module, plan: Plan, unit: Unit) -> dict[nn.Parameter, int]:
    """Return the dim that the unit's axes shard, for each of its parameters."""

    def dim(placed: Placed) -> int:
        return placed.stored.dim_of(unit.shard_axes[0]) or 0

    return {
        model.get_parameter(fqn): dim(placed)
        for fqn, placed in plan.assignment.tensors.items()
        if placed.unit == unit.fqn
    }


def offload_policy(unit: Unit) -> OffloadPolicy:
    """Return FSDP2's offload policy for a unit; pinned memory needs an accelerator."""
    return CPUOffloadPolicy(pin_memory=device().type != "cpu") if unit.on_host else OffloadPolicy()


def params_on_host(model: nn.Module, plan: Plan) -> Iterator[nn.Parameter]:
    """Yield the live parameters of this rank that the plan offloads to the host."""
    live = dict(model.named_parameters())
    for fqn, placed in plan.assignment.tensors.items():
        if plan.assignment.is_on_host(placed) and fqn in live:
            yield live[fqn]


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for a unit's dtypes; None in a role keeps the model's dtype.

    Gradients are reduced in the compute dtype unless the plan sets another. torch 2.15 would
    default to the stored dtype.
    """

    def dtype(word: str | None) -> torch.dtype | None:
        return getattr(torch, word) if word else None

    return MixedPrecisionPolicy(
        param_dtype=dtype(precision.param),
        reduce_dtype=dtype(precision.reduce or precision.param),
        output_dtype=dtype(precision.output),
    )


def reshard_units(model: nn.Module, plan: Plan) -> None:
    """Free the gathered parameters of every unit; a later backward gathers them again.

    Assumes: no forward is running.
    """
    if plan.assignment.wrapper != "units":
        return
    for unit in plan.assignment.units.values():
        module = model.get_submodule(unit.fqn)
        assert isinstance(module, FSDPModule)
        reshard(module)


def keep_evaluation_apart(model: nn.Module, plan: Plan) -> None:
    """Make forwards without gradients leave no FSDP2 state behind that disturbs training, in place.

    Otherwise the outermost unit, and with ZeRO-2 every unit, would stay gathered until the next
    backward. Its memory would not be freed, and an optimizer constructed meanwhile would get the
    gathered parameters, which are never trained.

    FSDP2 reuses its all-gather buffers in later forwards, and training could not write to buffers
    that were created in inference mode. A forward in inference mode therefore runs under `no_grad`
    instead.
    """
    if plan.assignment.wrapper != "units":
        return

    def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return call(*args, **kwargs)
        try:
            with torch.inference_mode(False), torch.no_grad():
                return call(*args, **kwargs)
        finally:
            reshard_units(model, plan)

    intercept_calls(model, around)


def set_gradient_sync(model: nn.Module, plan: Plan, is_last: bool) -> AbstractContextManager[None]:
    """Tell FSDP2 or DDP whether the coming backward is the last one of the optimizer step.

    Unsharded gradients (DDP, ZeRO-1) are reduced in the last backward only. Sharded gradients
    (ZeRO-2 and 3) are reduce-scattered in every backward; with HSDP they are all-reduced over the
    replicas of a shard in the last one only. Units whose parameters stay gathered after forward
    also stay gathered for the next microbatch, since the peak includes all of them anyway.

    Args:
        model: The wrapped model, or the wrapped module of a pipeline stage.
        plan: The plan that was applied to it.
        is_last: If True, gradients are complete after this backward.

    Returns:
        A context manager to run the forward and the backward in.
    """
    if plan.accumulate == 1:
        return nullcontext()  # Every backward is the last, as torch assumes by default.
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if is_last else model.no_sync()
    keeps_whole = "gradient" not in plan.assignment.strategy.cuts
    for unit in plan.assignment.units.values():
        module = model.get_submodule(unit.fqn)
        assert isinstance(module, FSDPModule)
        module.set_is_last_backward(is_last)
        resharding = is_last or bool(unit.reshard_after_forward)
        module.set_reshard_after_backward(resharding, recurse=False)
        if keeps_whole or not unit.is_sharded:
            module.set_requires_gradient_sync(is_last, recurse=False)
        elif unit.replicate_axes:
            module.set_requires_all_reduce(is_last, recurse=False)
    return nullcontext()
