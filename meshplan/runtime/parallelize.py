"""`parallelize`: read the plan, resolve it, agree with the other ranks, apply it, check the result.

All checks that leave the model unchanged run first. If a later step fails, the model is restored.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from meshplan.errors import ApplyError, MeshplanError, Origin, PlanError, Problem
from meshplan.launch.environment import size_variable
from meshplan.plan.plan import Plan, make_plan
from meshplan.runtime.apply.allocator import allocator_problems, set_allocator
from meshplan.runtime.apply.experts.expert_protocol import expert_problems
from meshplan.runtime.apply.loss.chunked_loss import chunked_loss_problems
from meshplan.runtime.apply.parameters.materialize import agree_on_values
from meshplan.runtime.apply.parameters.random_apply import refuse_random_apply
from meshplan.runtime.apply.wrap import apply_plan, exchange, function_of
from meshplan.runtime.base.batch_agreement import open_groups
from meshplan.runtime.base.compile import compiles
from meshplan.runtime.base.launch import torchrun_line
from meshplan.runtime.base.mesh import device_mesh, ensure_process_group, ranks_per_node
from meshplan.runtime.base.module_state import has_own_class, own_attributes
from meshplan.runtime.base.parallel_models import register
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.checks.detours import explain_mixed_losses, refuse_copies_and_casts
from meshplan.runtime.checks.second_wrapper import refuse_second_wrappers
from meshplan.runtime.comparisons.batches import watch_batches
from meshplan.runtime.comparisons.drift import watch_drift
from meshplan.runtime.comparisons.optimizers import note_replaced, watch_optimizers
from meshplan.runtime.live.planned import closed_together
from meshplan.runtime.torch_private.clipping import refuse_norms_of_stages
from meshplan.runtime.torch_private.handlers import handle_operators_of_loops
from meshplan.runtime.torch_private.local_steps import step_on_local_tensors
from meshplan.runtime.torch_private.private import forget_units
from meshplan.runtime.trace.inputs import find_example
from meshplan.runtime.trace.ops import record
from meshplan.runtime.trace.rehearse import rehearser
from meshplan.runtime.trace.structure import graph_of
from meshplan.runtime.train.grad_hooks import watch_torch_hooks
from meshplan.runtime.train.state import refuse_whole_tensors
from meshplan.runtime.watch.guard import (
    come_together,
    guarded,
    note_forwards,
    publish,
    report_uncaught,
)
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import Spec
from meshplan.spec.strategies import WorldSizeProblem

PlanLike = str | os.PathLike[str] | Mapping[str, Any] | Spec | Plan


def parallelize(
    model: nn.Module,
    plan: PlanLike,
    *,
    example_inputs: Any = None,
    allow_code: bool = True,
) -> nn.Module:
    """Apply a plan to a model on this rank. Every rank must pass the same arguments.

    Args:
        model: Any module, on meta, on the CPU or on this rank's device. Real values are taken
            from rank 0. A model on meta is initialised with the numbers that one process would
            draw.
        plan: A path to a plan.yaml, a mapping of the same form, a Spec or a Plan.
        example_inputs: Inputs to trace the model with: a tensor, a tuple of arguments or a
            mapping of keyword arguments; only shapes and dtypes count. Plans that read the
            model's data flow (`tp_plan: auto`, `pp`) need them. If None, `input:` of the plan is
            used, or the inputs that a transformers model declares.
        allow_code: If False, a plan with `apply: "pkg.mod:function"` is rejected.

    Returns:
        The module to train: the model itself, or a DistributedDataParallel around it. With a pp
        axis it is a `PipelinedModule` of this rank's stages, and `model` is left without values.
        The attribute `meshplan` of the returned module has the plan and the mesh.

    Raises:
        SpecError: The plan cannot be read.
        PlanError: The plan does not fit this model or this job.
        ApplyError: The ranks disagree, or the live model does not match the plan.

    The default process group is used if it exists. Otherwise it is initialized, with the ranks
    that torchrun, SLURM, MPI or LSF started, or with one rank.
    On any error, the model is left unchanged.
    """
    report_uncaught()
    ensure_process_group()
    with guarded("parallelize"):
        come_together("parallelize")
        return _parallelize(model, plan, example_inputs, allow_code)


def spec_of(plan: PlanLike) -> Spec:
    """Return the Spec of a plan in any form.

    Raises:
        SpecError: The plan cannot be read.
    """
    if isinstance(plan, Plan):
        return plan.spec
    return plan if isinstance(plan, Spec) else load_spec(plan)


def _parallelize(
    model: nn.Module, plan: PlanLike, example_inputs: Any, allow_code: bool
) -> nn.Module:
    whole = closed_together(model, plan, example_inputs)
    decided = _agree(lambda: _decide(model, whole, example_inputs, allow_code))
    set_allocator(decided.spec)
    mesh = device_mesh(decided.mesh)
    # Make the process groups while no rank can have failed yet, then publish their connections. A
    # rank that fails later closes its connections, so that the collectives of the others raise.
    open_groups(decided, mesh)
    publish()
    with _untouched_on_error(model):
        values = agree_on_values(model, decided)
        before = [weakref.ref(parameter) for parameter in model.parameters()]
        is_compiled = compiles(model, decided)
        wrapped = apply_plan(model, decided, mesh, values)
        refuse_whole_tensors(wrapped)
        watch_torch_hooks(wrapped, decided)
        refuse_copies_and_casts(wrapped)
        refuse_random_apply(wrapped)
        refuse_second_wrappers(wrapped, model, is_compiled=is_compiled)
        explain_mixed_losses()
        register(wrapped, decided, mesh)
        watch_batches(wrapped)
        watch_drift(wrapped)
        note_replaced(before, wrapped)
        watch_optimizers()
        step_on_local_tensors()
        handle_operators_of_loops()
        refuse_norms_of_stages()
        note_forwards(wrapped, decided)
        if dist.get_rank() == 0:
            for warning in decided.assignment.warnings:
                warnings.warn(str(warning), stacklevel=3)
    return wrapped


def _decide(model: nn.Module, plan: PlanLike, example_inputs: Any, allow_code: bool) -> Plan:
    """Read and resolve the plan, without changing the model or communicating with other ranks."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallelize needs an nn.Module, not {type(model).__name__}")
    _check_kind(model)
    spec = spec_of(plan)
    inputs = find_example(model, spec, example_inputs) if spec.reads_flow else None
    graph = graph_of(model, record(model, inputs) if spec.reads_flow else None)
    try:
        decided = make_plan(
            spec,
            graph,
            world_size=dist.get_world_size(),
            gpus_per_node=ranks_per_node(),
            rehearse=rehearser(model, inputs) if spec.reads_flow else None,
        )
    except PlanError as error:
        if not any(isinstance(each, WorldSizeProblem) for each in error.problems):
            raise
        raise PlanError([_with_launch(each, spec) for each in error.problems]) from None
    if isinstance(plan, Plan) and plan.digest() != decided.digest():
        raise PlanError(
            Problem(
                f"this Plan was made for another model or mesh ({plan.graph.name} on {plan.mesh})",
                spec.origin(""),
                "call make_plan for this model and mesh, or pass plan.spec",
            )
        )
    problems = [
        problem
        for _, code, reason in decided.assignment.apply
        if (problem := _code_problem(code, reason.origin, allow_code))
    ]
    problems += _class_problems(model, decided)
    problems += _state_problems(model, decided)
    problems += _embedding_problems(model, decided)
    problems += _alias_problems(model, decided)
    problems += expert_problems(model, decided)
    problems += chunked_loss_problems(model, decided)
    problems += allocator_problems(decided.spec)
    if problems:
        raise PlanError(problems)
    return decided


def _with_launch(problem: Problem, spec: Spec) -> Problem:
    """Return the problem; if the job has too few or too many ranks, with the command to type.

    The variable of the launcher that states the number of ranks is named too.
    """
    if not isinstance(problem, WorldSizeProblem):
        return problem
    if "WORLD_SIZE" in os.environ:
        stated = f"{size_variable(os.environ)} is {os.environ['WORLD_SIZE']}"
        problem = replace(problem, what=f"{problem.what}: {stated}")
    line = torchrun_line(problem.needed, spec.hardware)
    return replace(problem, fix=f"{problem.fix}, or start {problem.needed} ranks: {line}")


_WRAPPERS: Final = (DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
"""Wrappers of torch that parallelize a model by themselves."""


def _check_kind(model: nn.Module) -> None:
    """Raise ApplyError for a model that no plan can be applied to."""
    what, fix = "", ""
    if hasattr(model, "meshplan"):
        what, fix = (
            "this model is parallelized already",
            "build the model again, then call parallelize",
        )
    elif wrapped := [(n, m) for n, m in model.named_modules() if isinstance(m, _WRAPPERS)]:
        name, wrapper = wrapped[0]
        what = f"{name or 'this model'} is wrapped in {type(wrapper).__name__} already"
        fix = f"pass {f'the model with {name}' if name else 'model'}.module"
        fix += f"{' in its place' if name else ''}: the plan states how it is parallelized"
    elif isinstance(model, torch.jit.ScriptModule):
        what, fix = "this model is a ScriptModule, which cannot be wrapped", "pass the nn.Module"
    else:
        lazy = [n for n, p in model.named_parameters() if is_lazy(p)]
        if lazy:
            what = f"{lazy[0]} is a lazy parameter, which has no shape yet"
            fix = "run the model once before parallelize"
    if what:
        raise ApplyError(Problem(what, fix=fix))


def _class_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Yield a problem for quantised weights, whose scales would be lost with their class."""
    own = {name: type(p).__name__ for name, p in model.named_parameters() if has_own_class(p)}
    if own and plan.assignment.wrapper == "units":
        name, kind = next(iter(own.items()))
        more = f", one of {len(own)} such weights" if len(own) > 1 else ""
        yield Problem(
            f"{name} is of the class {kind}{more}: class and attributes are lost where FSDP units "
            "shard a parameter",
            plan.spec.origin("strategy"),
            "use strategy: ddp, which keeps frozen quantised weights whole on each rank, or keep "
            "the quantised values and their scales in buffers of a module of your own",
        )


def _state_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each state of a parameter, such as a hook, that wrapping would lose."""
    by_storage: dict[int, str] = {}
    keeps_parameters = plan.assignment.wrapper == "ddp"
    for name, parameter in model.named_parameters():
        if isinstance(parameter.data, DTensor):
            yield Problem(
                f"{name} is a DTensor already",
                fix="pass the unsharded model, which the plan then shards",
            )
            continue
        if not parameter.is_contiguous() and not keeps_parameters:
            yield Problem(f"{name} is not contiguous", fix="assign param.data = param.contiguous()")
        if parameter.grad is not None:
            yield Problem(f"{name} has a gradient already", fix="call model.zero_grad() first")
        is_hooked = bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
        if is_hooked and (plan.num_parts > 1 or not keeps_parameters):
            yield Problem(
                f"{name} has a gradient hook, which would be lost, or get the gradient of only "
                "a part of the batch",
                fix=f"register it after parallelize: meshplan.register_grad_hook(model, '{name}', "
                "hook)",
            )
        if parameter.is_meta or not parameter.numel() or keeps_parameters:
            continue
        storage = parameter.untyped_storage().data_ptr()
        other = by_storage.setdefault(storage, name)
        if other != name:
            yield Problem(
                f"{name} and {other} share memory but are two parameters, which would diverge",
                fix="make them one parameter, or give each separate memory (.clone())",
            )


def _embedding_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each trained embedding with gradients that ranks cannot put together.

    Sparse gradients are neither reduced by FSDP units nor cut along tp. With `scale_grad_by_freq`,
    gradients are divided by how often a row occurs in the whole batch.
    """
    for fqn, module in model.named_modules():
        placed = plan.assignment.tensors.get(f"{fqn}.weight" if fqn else "weight")
        if placed is None or not placed.info.trainable:
            continue
        which = f"{fqn} ({type(module).__name__})"
        if getattr(module, "sparse", False):
            if plan.assignment.wrapper == "units" and placed.unit in plan.assignment.units:
                yield Problem(
                    f"{which} has sparse gradients, but FSDP units reduce only dense ones",
                    plan.spec.origin("strategy"),
                    "build it with sparse=False, or use strategy: ddp",
                )
            elif placed.computed.axes:
                axis = placed.computed.axes[0]
                yield Problem(
                    f"{which} has sparse gradients, but its weight is sharded over {axis}, which "
                    "takes only dense ones",
                    plan.spec.origin(f"mesh.{axis}"),
                    "build it with sparse=False",
                )
        is_cut = plan.num_parts > 1 and not plan.spec.batch.per_rank
        if getattr(module, "scale_grad_by_freq", False) and is_cut:
            yield Problem(
                f"{which} has scale_grad_by_freq=True: it divides gradients by how often a row "
                f"occurs in the batch, but ranks and microbatches see one of {plan.num_parts} "
                "parts",
                plan.spec.origin("batch"),
                "build it without scale_grad_by_freq; or set batch: {per_rank: true} if each part "
                "is meant to be independent",
            )


def _alias_problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """Yield a problem for each plain attribute of a module that refers to a parameter.

    Wrapping replaces the parameter objects, so such an attribute would keep a parameter that is
    never updated.
    """
    if plan.assignment.wrapper != "units" and plan.mesh.size("tp", "ep") == 1:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for fqn, module in model.named_modules():
        if type(module).__setattr__ is not nn.Module.__setattr__:
            continue  # Modules such as nn.LSTM keep their own lists of parameters up to date.
        for attribute, value in own_attributes(module).items():
            for _, tensor in tensors_in(value):
                if id(tensor) in names:
                    where = f"{fqn}.{attribute}" if fqn else attribute
                    yield Problem(
                        f"{where} keeps a reference to {names[id(tensor)]}, which parallelize "
                        "shards and replaces: the reference would keep the initial values",
                        fix="read the parameter from its module in forward",
                    )


def _code_problem(code: str, origin: Origin | None, allow_code: bool) -> Problem | None:
    """Return the problem if the function `code` of the plan is not allowed or not importable."""
    if not allow_code:
        what = f"the plan runs code ('{code}'), and allow_code is False"
        return Problem(what, origin, "remove 'apply', or pass allow_code=True")
    try:
        function_of(code)
    except (ImportError, AttributeError, ValueError) as error:
        what = f"'{code}' cannot be imported: {error}"
        return Problem(what, origin, "name an importable function as 'pkg.mod:function'")
    return None


def _agree(decide: Callable[[], Plan]) -> Plan:
    """Call `decide` on every rank; return its plan if all ranks succeeded with equal plans.

    An error on one rank is raised on every rank, so that no rank waits in a collective.
    """
    error: Exception | None = None
    decided: Plan | None = None
    outcome: tuple[str, str]
    try:
        decided = decide()
        outcome = ("plan", decided.digest())
    except MeshplanError as caught:
        error, outcome = caught, ("error", caught.render())
    except Exception as caught:  # Report it to the other ranks, then raise it unchanged.
        error, outcome = caught, ("error", f"{type(caught).__name__}: {caught}")
    outcomes = exchange(outcome, error)
    assert decided is not None
    digests = [text for _, text in outcomes]
    other = next((rank for rank, text in enumerate(digests) if text != digests[0]), None)
    if other is not None:
        raise ApplyError(
            Problem(
                f"rank {other} has a different plan than rank 0: its plan file or model differs",
                fix="give every rank the same plan file and build the same model on all of them",
            )
        )
    return decided


@contextmanager
def _untouched_on_error(model: nn.Module) -> Iterator[None]:
    """Restore the whole module tree if anything inside the `with` block raises.

    Wrapping changes each module's class, hooks and parameters in place, so all of these are saved.
    """
    modules = [
        (m, type(m), {k: dict(v) if type(v) is dict else v for k, v in vars(m).items()},
         {k: type(v)(v) for k, v in vars(m).items() if isinstance(v, dict) and type(v) is not dict})
        for m in model.modules()
    ]  # fmt: skip
    data = [(t, t.data) for t in (*model.parameters(), *model.buffers())]
    try:
        yield
    except BaseException:
        forget_units(module for module, _, _, _ in modules)
        for module, cls, plain, others in modules:
            object.__setattr__(module, "__class__", cls)  # Bypasses a user's own __setattr__.
            vars(module).clear()
            vars(module).update(plain | others)
        for tensor, value in data:
            tensor.data = value
        raise
