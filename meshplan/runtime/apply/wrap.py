"""Apply a plan without open fields to a live model: all wrappers, in the order that they require.

`parallelize` runs this after all ranks have agreed on the plan. Memory estimates run the same code
on fake tensors in a single process, where nothing is exchanged between ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshplan.errors import ApplyError, Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.context.apply import ContextParallelism
from meshplan.runtime.apply.data.batchnorm import apply_sync_batchnorm
from meshplan.runtime.apply.data.data import apply_data_parallel, keep_evaluation_apart
from meshplan.runtime.apply.data.gradients import agree_on_gradients
from meshplan.runtime.apply.data.trainability import follow_trainability
from meshplan.runtime.apply.experts.experts import apply_expert_parallel
from meshplan.runtime.apply.generation import align_generate
from meshplan.runtime.apply.loss.chunked_loss import apply_chunked_loss
from meshplan.runtime.apply.loss.loss_weights import History
from meshplan.runtime.apply.offload import apply_host_activations
from meshplan.runtime.apply.parameters.materialize import InitialValues
from meshplan.runtime.apply.parameters.max_norm import share_looked_up_rows
from meshplan.runtime.apply.parameters.randomness import give_own_stream
from meshplan.runtime.apply.pipeline.apply import apply_pipeline
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.recompute import apply_recompute
from meshplan.runtime.apply.tensor_parallel.tensor_parallel import (
    align_gradients,
    apply_tensor_parallel,
)
from meshplan.runtime.base.compile import apply_compile, compiles
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.forward_calls import routable_units, route_direct_calls
from meshplan.runtime.base.mesh import device, gathered
from meshplan.runtime.base.optimizer_steps import take_mixed_one_by_one
from meshplan.runtime.base.parallel_models import find_model
from meshplan.runtime.checks.detours import refuse_calls_of_parts
from meshplan.runtime.checks.dp_replicas import watch_replicas
from meshplan.runtime.checks.forward_writes import set_microbatches, watch_forward_writes
from meshplan.runtime.checks.layouts import check_live
from meshplan.runtime.checks.local_forward import prove_first_forward
from meshplan.runtime.checks.outside import refuse_second_derivatives, watch_first_forward
from meshplan.runtime.checks.tp_replicas import watch_first_step
from meshplan.shown import shown
from meshplan.spec.trust import check_code


@shown
@dataclass(slots=True)
class Applied:
    """The state behind `model.meshplan`: the applied plan and what training has seen so far.

    Attributes:
        plan: The plan that was applied, with the microbatches of the present epoch if a loader
            changes them.
        mesh: The live DeviceMesh, with the plan's axis names.
        loss_scale: Current scale of the loss under fp16, 1.0 otherwise.
        steps_without_overflow: Steps since the scale last changed.
        is_tested: True once `train_step` has run the checks of its first call: of the optimizer,
            and, with tp, that all ranks along tp compute the same loss.
        history: What `train_step` has observed about the loss function and the batches so far.
        is_averaged: True while `EMA.averaged` has put averages in place of the weights.
        given: The plan as it was applied.
    """

    plan: Plan
    mesh: DeviceMesh
    loss_scale: float = field(default=1.0)
    steps_without_overflow: int = 0
    is_tested: bool = False
    history: History = field(default_factory=History)
    is_averaged: bool = False
    given: Plan = field(init=False)

    def __post_init__(self) -> None:
        self.given = self.plan


def applied(model: nn.Module) -> Applied:
    """Return the `Applied` of a parallelized model.

    Raises:
        ApplyError: The model was not parallelized by meshplan.
    """
    found = getattr(model, "meshplan", None)
    if not isinstance(model, nn.Module):
        what = f"a model is needed as the first argument, not a {type(model).__name__}"
        raise ApplyError(Problem(what, fix="pass the module that meshplan.parallelize returned"))
    if not isinstance(found, Applied):
        raise ApplyError(
            Problem(
                f"this {type(model).__name__} was not parallelized by meshplan",
                fix="use the module that meshplan.parallelize returned",
            )
        )
    return found


def set_accumulate(model: nn.Module, count: int) -> None:
    """Accumulate gradients over so many microbatches in each step from the next one on.

    Args:
        model: The module that `parallelize` returned. The plan in its `Applied` changes.
        count: Number of parts that `train_step` cuts a rank's samples into.
    """
    state = applied(model)
    if state.plan.accumulate == count:
        return
    state.plan = find_model(model, "accumulate").plan = replace(state.plan, accumulate=count)
    stages = model.stage_modules if isinstance(model, PipelinedModule) else [own_module(model)]
    for module in stages:
        set_microbatches(module, count)


def own_module(model: nn.Module) -> nn.Module:
    """Return the user's module, without the DistributedDataParallel around it, if any."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def apply_plan(model: nn.Module, plan: Plan, mesh: DeviceMesh, values: InitialValues) -> nn.Module:
    """Apply a plan to a model, in place; all ranks must have agreed on the plan before.

    Args:
        model: The user's module, with the same values on every rank, or with tensors on meta.
        plan: The plan, already checked against this model.
        mesh: The live DeviceMesh, with the plan's axis names.
        values: Initial values of all tensors that this rank stores, if the model has tensors on
            meta on any rank; empty otherwise.

    Returns:
        The module to train, whose attribute `meshplan` is its `Applied`.
    """
    cast_parameters(model, plan)
    _apply_code(model, plan)
    if plan.assignment.stages is None:
        is_compiled = compiles(model, plan)
        wrapped = _wrap(model, plan, mesh, values)
        if not is_compiled:  # torch.compile would trace the mode that this uses.
            watch_first_forward(wrapped, plan)
        refuse_second_derivatives(wrapped, plan)
    else:
        wrapped = apply_pipeline(model, plan, mesh, values, _wrap)
    needs_scale = plan.spec.precision.scales_loss
    wrapped.meshplan = Applied(plan, mesh, 2.0**16 if needs_scale else 1.0)
    return wrapped


def _wrap(model: nn.Module, plan: Plan, mesh: DeviceMesh, values: InitialValues) -> nn.Module:
    """Apply everything in a plan except its pipeline, in place, and return the module to call."""
    routable, is_compiled = routable_units(model, plan), compiles(model, plan)
    apply_tensor_parallel(model, plan, mesh)
    apply_expert_parallel(model, plan, mesh)
    apply_sync_batchnorm(model, plan, mesh)
    # Before recomputation, so that the torch function mode of cp is active in recomputed blocks.
    context = ContextParallelism(model, plan, mesh)
    # Before offload, so that only the inputs of a recomputed block are moved to the host.
    apply_recompute(model, plan)
    apply_host_activations(model, plan)
    apply_compile(model, plan)
    defer_head = apply_chunked_loss(model, plan)
    is_elsewhere = not values.local and not is_fake_execution()
    if plan.assignment.wrapper != "units" and is_elsewhere:
        model.to(device())
    if plan.assignment.wrapper == "ddp":
        values.fill(model, plan)  # DistributedDataParallel refuses to wrap meta tensors.
    if not is_fake_execution():
        share_looked_up_rows(model, plan, mesh)
        watch_forward_writes(model, plan, mesh)
    wrapped = apply_data_parallel(model, plan, mesh)
    route_direct_calls(routable)
    # After FSDP2 has added its hooks to the head, so that the head's deferred call runs them.
    defer_head()
    values.fill(wrapped, plan)
    check_live(wrapped, plan)
    align_gradients(wrapped, plan)
    renew = agree_on_gradients(wrapped, plan, mesh)
    if not is_fake_execution():
        follow_trainability(wrapped, plan, renew)
        if not is_compiled:
            refuse_calls_of_parts(model, wrapped, plan)
    keep_evaluation_apart(model, plan)
    take_mixed_one_by_one()
    if not is_fake_execution():  # These checks compare values, which fake tensors lack.
        align_generate(model, plan, mesh)
        watch_first_step(wrapped, plan, mesh)
        watch_replicas(model, plan, mesh)
        prove_first_forward(wrapped, plan, mesh)
    give_own_stream(model, plan)
    context.watch(wrapped)
    return wrapped


def cast_parameters(model: nn.Module, plan: Plan) -> None:
    """Cast every parameter, in place, to the dtype in which it is stored and updated."""
    for fqn, placed in plan.assignment.tensors.items():
        dtype = getattr(torch, placed.dtype)
        if not placed.info.is_buffer:
            parameter = model.get_parameter(fqn)
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)


def _apply_code(model: nn.Module, plan: Plan) -> None:
    """Run the functions listed under `apply:` in the plan; a failure on one rank raises on all."""
    if not plan.assignment.apply:
        return
    if is_fake_execution():  # An estimate runs only code that the caller has allowed.
        for _, code, reason in plan.assignment.apply:
            check_code(code, reason.origin)
    failure: ApplyError | None = None
    for fqn, code, reason in plan.assignment.apply:
        try:
            function_of(code)(model.get_submodule(fqn))
        except Exception as error:  # User code may raise anything.
            what = f"'{code}' failed on '{fqn}': {type(error).__name__}: {error}"
            failure = ApplyError(Problem(what, reason.origin, "correct the function"))
            failure.__cause__ = error
            break
    exchange(("error", str(failure.problems[0])) if failure is not None else ("", ""), failure)


def function_of(code: str) -> Callable[[nn.Module], object]:
    """Import and return the function that "pkg.mod:name" refers to.

    Raises:
        ImportError: The module does not exist.
        AttributeError: The module has no attribute of that name.
        ValueError: The attribute is not callable.
    """
    module, _, name = code.partition(":")
    found = getattr(importlib.import_module(module), name)
    if not callable(found):
        raise ValueError(f"{name} is not a function")
    return found


def exchange(outcome: tuple[str, str], error: Exception | None) -> list[tuple[str, str]]:
    """Return the outcomes of all ranks, each as (kind, text), in rank order.

    In a fake step, return a copy of this rank's outcome for every rank.

    Args:
        outcome: This rank's (kind, text); kind "error" means that the rank failed.
        error: Why this rank failed, which is raised here; None if it did not.

    Raises:
        ApplyError: Another rank failed; the message names the lowest such rank.
    """
    is_fake = is_fake_execution()
    outcomes = [outcome] * dist.get_world_size() if is_fake else gathered(outcome)
    if error is not None:
        raise error
    failed = [rank for rank, (kind, _) in enumerate(outcomes) if kind == "error"]
    if failed:
        text = outcomes[failed[0]][1].replace("\n", "\n    ")
        raise ApplyError(Problem(f"rank {failed[0]} cannot apply its plan: {text}"))
    return outcomes
