"""One training step of one rank on fake tensors, without memory, numbers or other ranks.

The user's model and the real wrappers run on fake tensors in a fake process group. Whatever the
plan says is traced as it is, and no second description of FSDP2, DTensor or the pipeline has to
agree with the first. A process stands for one rank; ranks with shards of other sizes are run one by
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshplan.errors import ApplyError, Problem
from meshplan.garbage import no_collection
from meshplan.memory.log.events import EventLog, Term
from meshplan.memory.replay.shards import offloads_params
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.data.data import params_on_host
from meshplan.runtime.apply.experts.expert_protocol import find_for_twin
from meshplan.runtime.apply.parameters.materialize import InitialValues
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import applied, apply_plan, cast_parameters
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.base.batch_agreement import open_groups
from meshplan.runtime.base.fake_mode import fake_execution
from meshplan.runtime.base.mesh import device_mesh, on_fake_devices
from meshplan.runtime.base.phases import heard_by
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.fake_step.cuda_mode import AS_IT_IS, CPU, Behaviour, behaving_as
from meshplan.runtime.fake_step.memory_tracker import MemoryTracker
from meshplan.runtime.torch_private.fakes import (
    fake_mode,
    fakes_unnoticed,
    group_of_fakes,
    meshes_outside_fakes,
)
from meshplan.runtime.torch_private.private import gathered_parameters
from meshplan.runtime.trace.constants import ConstantPropagation
from meshplan.runtime.trace.ops import copy_to_run, stand_in
from meshplan.runtime.train.step import train_step

LossFn = Callable[[Any, Any], torch.Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def fake_step(
    model: nn.Module,
    plan: Plan,
    inputs: Any,
    targets: Any,
    loss_fn: LossFn,
    make_optimizer: MakeOptimizer,
    rank: int = 0,
    device: str = CPU,
) -> EventLog:
    """Return the events of the second training step, from which on all steps are equal.

    Args:
        model: The unsharded model of one process, on any device; it is copied, and only shapes
            count.
        plan: A plan made for this model.
        inputs: One rank's inputs of a step, as `train_step` takes them.
        targets: The same rank's targets.
        loss_fn: Maps the model's output and the targets to the loss, as for `train_step`.
        make_optimizer: Makes the optimizer from the wrapped model.
        rank: The rank that this process stands for.
        device: The device whose kernels are emulated: "cpu", "cuda", or a name of `hardware`.
            Workspaces of libraries are not in the log (`memory.log.driver.with_workspaces`).

    Raises:
        ApplyError: This process is in a process group already, or the behaviour of an operator on
            the device is not known.
    """
    with fake_rank(model, plan, rank, device) as (twin, mesh, fake, behaviour):
        batch, goals = mapped(inputs, fake), mapped(targets, fake)
        wrapped = apply_plan(twin, plan, mesh, InitialValues())
        applied(wrapped).is_tested = True
        optimizer = make_optimizer(wrapped)
        return watch_steps(wrapped, optimizer, batch, goals, loss_fn, behaviour=behaviour)[0]


@contextmanager
def fake_rank(
    model: nn.Module, plan: Plan, rank: int, device: str = CPU
) -> Iterator[tuple[nn.Module, DeviceMesh, Callable[[torch.Tensor], torch.Tensor], Behaviour]]:
    """Let this process stand for one rank of a job, on fake tensors.

    Args:
        model: The unsharded model of one process.
        plan: A plan made for this model.
        rank: The rank that this process stands for.
        device: The device whose kernels are emulated, as for `fake_step`.

    Returns:
        A copy of the model on fake tensors, the mesh of the plan, a function that makes a tensor
        fake, and the behaviour of the device.

    Raises:
        ApplyError: This process is in a process group already.
    """
    if dist.is_initialized():
        raise ApplyError(
            Problem(
                "this process is already in a process group, and cannot simulate a rank of another",
                fix="estimate before init_process_group, or in a separate process",
            )
        )
    with group_of_fakes(rank, plan.mesh.world_size), on_fake_devices():
        mesh = device_mesh(plan.mesh)
        open_groups(plan, mesh)
        with meshes_outside_fakes(), fake_single_rank(model, device, plan) as found:
            twin, fake, behaviour = found
            yield twin, mesh, fake, behaviour


@contextmanager
def fake_single_rank(
    model: nn.Module, device: str = CPU, plan: Plan | None = None
) -> Iterator[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor], Behaviour]]:
    """Run on fake tensors without any other rank, with or without a process group.

    Args:
        model: The unsharded model of one process.
        device: The device whose kernels are emulated, as for `fake_step`.
        plan: The plan, whose expert modules are looked for and whose offloaded parameters change
            the behaviour; None for neither.

    Returns:
        A copy of the model on fake tensors, a function that makes a tensor fake, and the behaviour
        of the device.
    """
    with no_collection():
        mode = fake_mode()
        twin, _, _ = copy_to_run(model, (), mode)
        if plan is not None:
            with mode:  # Results for experts are looked up by dtype, so cast first.
                cast_parameters(twin, plan)
            find_for_twin(model, twin, plan)
        shadows = ConstantPropagation(mode)

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            out = stand_in(tensor)
            shadows.know(out, tensor)
            return out

        with ExitStack() as stack:
            for world in (on_fake_devices(), fakes_unnoticed(), mode, shadows, fake_execution()):
                stack.enter_context(world)
            offloads = plan is not None and offloads_params(plan.assignment)
            behaviour = stack.enter_context(behaving_as(device, offloads=offloads))
            stack.enter_context(heard_by(shadows.hear))
            yield twin, fake, behaviour


def watch_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Any,
    targets: Any,
    loss_fn: LossFn,
    count: int = 1,
    around: Callable[[int], AbstractContextManager[Any]] = lambda step: nullcontext(),
    behaviour: Behaviour = AS_IT_IS,
) -> list[EventLog]:
    """Train one step, then log each of the next ones; on real tensors or on fake ones.

    Args:
        model: The wrapped model.
        optimizer: An optimizer of its parameters.
        inputs: This rank's inputs of every step.
        targets: This rank's targets of every step.
        loss_fn: Maps the model's output and the targets to the loss.
        count: The number of steps that are logged.
        around: Called with the number of each step, from 0; returns a context to run the step in.
        behaviour: The behaviour of the device that the tensors stand for.
    """
    ledger = MemoryTracker(names_of(model), behaviour)
    ledger.note(model.parameters(), Term.PARAMETERS)
    ledger.note(model.buffers(), Term.BUFFERS)
    if behaviour.has_host:
        ledger.put_on_host(params_on_host(model, applied(model).plan))
    owners = _owners(model)
    for held, fqn in owners.items():
        ledger.hand_on([held], fqn)
    ledger.note((tensor for _, tensor in tensors_in((inputs, targets))), Term.INPUTS)
    _tell_handed_on(model, ledger)
    logs = []

    def take(output: Any, target: Any) -> torch.Tensor:
        ledger.note((tensor for _, tensor in tensors_in(output)), Term.LOSS)
        return loss_fn(output, target)

    def begin(phase: str) -> None:
        if phase == "step":
            gradients = (p.grad for p in model.parameters() if p.grad is not None)
            ledger.note(gradients, Term.GRADIENTS)
        ledger.begin(phase)

    with heard_by(begin):
        for step in range(1 + count):
            ledger.forget()
            with around(step), ledger:
                train_step(model, optimizer, inputs, targets, take)
            logs.append(ledger.log())
            states = [tensor for _, tensor in tensors_in(list(optimizer.state.values()))]
            ledger.note(states, Term.OPTIMIZER)
            for param, kept in optimizer.state.items():
                ledger.hand_on((tensor for _, tensor in tensors_in(kept)), owners.get(param, ""))
            if behaviour.has_host:
                ledger.overlook(_counters(optimizer))
            if not step:
                _note_gradients(model, ledger)
    return logs[1:]


def _note_gradients(model: nn.Module, ledger: MemoryTracker) -> None:
    """Categorise each gradient as soon as autograd has made it.

    Assumes: a step was done, so that units have gathered what they compute with.
    """

    def note(param: torch.Tensor) -> None:
        if param.grad is not None:
            ledger.tell([param.grad], Term.GRADIENTS)

    owned = set(model.parameters())
    gathered = (p for module in model.modules() for p in gathered_parameters(module))
    for param in (*gathered, *owned):
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(note)


def _tell_handed_on(model: nn.Module, ledger: MemoryTracker) -> None:
    """Assign outputs of compiled modules to the parent: no compiler can eliminate them."""
    compiled = frozenset(applied(model).plan.assignment.compiled)
    for module, fqn in names_of(model).items():
        if fqn in compiled:
            outside = fqn.rpartition(".")[0]
            module.register_forward_hook(
                lambda _, args, out, outside=outside: ledger.hand_on(
                    (tensor for _, tensor in tensors_in(out)), outside
                )
            )


def _counters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Iterate over the step counts that torch keeps on the host because no kernel reads them."""
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("capturable"):
            continue
        for param in group["params"]:
            count = optimizer.state.get(param, {}).get("step")
            if isinstance(count, torch.Tensor):
                yield count


def _owners(model: nn.Module) -> dict[torch.Tensor, str]:
    """Map each parameter and buffer to the fqn of its module, the first of several if shared."""
    owners: dict[torch.Tensor, str] = {}
    for module, fqn in names_of(model).items():
        held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for tensor in held:
            owners.setdefault(tensor, fqn)
    return owners


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Map every module that runs on this rank to its fqn in the plan."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    roots = inner.stage_modules if isinstance(inner, PipelinedModule) else [inner]
    return {module: fqn for root in roots for fqn, module in root.named_modules()}
