"""Run a training step of one rank on fake tensors: without memory, values or other ranks.

The user's model runs with the real FSDP2, DDP, DTensor and pipeline, on fake tensors in a fake
process group. The trace is therefore right by construction: no rules that imitate these libraries
are involved. The process plays one rank at a time; ranks with shards of other sizes need further
runs.
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
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.data.data import params_on_host
from meshplan.runtime.apply.experts.expert_protocol import reuse_protocols
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
    """Return the log of the second training step. All later steps are equal to it.

    Args:
        model: The unsharded model of one process, on any device. It is copied, and its values are
            not read.
        plan: A plan made for this model.
        inputs: One rank's inputs of a step, as `train_step` takes them.
        targets: The same rank's targets of the step.
        loss_fn: Maps the model's output and the targets to the loss, as for `train_step`.
        make_optimizer: Makes the optimizer from the wrapped model.
        rank: The rank that this process stands for.
        device: Name of the device whose kernels are emulated: "cpu", "cuda", or a name of
            `layout.hardware`. The workspaces of cuBLAS and other libraries are not in the log;
            `memory.log.driver.with_workspaces` adds them.

    Raises:
        ApplyError: This process is in a process group already, or the behaviour of an operator on
            the device is not known.
    """
    with fake_rank(model, plan, rank, device) as (fake_model, mesh, fake, behaviour):
        batch, fake_targets = mapped(inputs, fake), mapped(targets, fake)
        wrapped = apply_plan(fake_model, plan, mesh, InitialValues())
        applied(wrapped).is_tested = True
        optimizer = make_optimizer(wrapped)
        return watch_steps(wrapped, optimizer, batch, fake_targets, loss_fn, behaviour=behaviour)[0]


@contextmanager
def fake_rank(
    model: nn.Module, plan: Plan, rank: int, device: str = CPU
) -> Iterator[tuple[nn.Module, DeviceMesh, Callable[[torch.Tensor], torch.Tensor], Behaviour]]:
    """Let this process play one rank of a job, on fake tensors, inside the `with` block.

    Args:
        model: The unsharded model of one process.
        plan: A plan made for this model.
        rank: The rank that this process stands for.
        device: The device whose kernels are emulated, as for `fake_step`.

    Yields:
        (copy of the model on fake tensors, mesh of the plan, function that returns a fake tensor
        like a given one, behaviour of the device).

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
            fake_model, fake, behaviour = found
            yield fake_model, mesh, fake, behaviour


@contextmanager
def fake_single_rank(
    model: nn.Module, device: str = CPU, plan: Plan | None = None
) -> Iterator[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor], Behaviour]]:
    """Enter a fake mode with a copy of the model; a process group is not needed.

    Args:
        model: The unsharded model of one process.
        device: The device whose kernels are emulated, as for `fake_step`.
        plan: The plan, for its expert modules and offloaded parameters; None if it has neither.

    Yields:
        (copy of the model on fake tensors, function that returns a fake tensor like a given one,
        behaviour of the device).
    """
    with no_collection():
        mode = fake_mode()
        fake_model, _, _ = copy_to_run(model, (), mode)
        if plan is not None:
            with mode:  # Cast first, as `reuse_protocols` stores its results by dtype.
                cast_parameters(fake_model, plan)
            reuse_protocols(model, fake_model, plan)
        shadows = ConstantPropagation(mode)

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            out = stand_in(tensor)
            shadows.know(out, tensor)
            return out

        with ExitStack() as stack:
            for world in (on_fake_devices(), fakes_unnoticed(), mode, shadows, fake_execution()):
                stack.enter_context(world)
            offloads = plan is not None and plan.assignment.offloads_parameters
            behaviour = stack.enter_context(behaving_as(device, offloads=offloads))
            stack.enter_context(heard_by(shadows.hear))
            yield fake_model, fake, behaviour


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
    """Train one step, then return the logs of the next `count` steps; on real or fake tensors.

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
    tracker = MemoryTracker(names_of(model), behaviour)
    tracker.note(model.parameters(), Term.PARAMETERS)
    tracker.note(model.buffers(), Term.BUFFERS)
    if behaviour.has_host:
        tracker.put_on_host(params_on_host(model, applied(model).plan))
    owners = _owners(model)
    for tensor, fqn in owners.items():
        tracker.attribute([tensor], fqn)
    tracker.note((tensor for _, tensor in tensors_in((inputs, targets))), Term.INPUTS)
    _attribute_compiled_outputs(model, tracker)
    logs = []

    def take(output: Any, target: Any) -> torch.Tensor:
        tracker.note((tensor for _, tensor in tensors_in(output)), Term.LOSS)
        return loss_fn(output, target)

    def begin(phase: str) -> None:
        if phase == "step":
            gradients = (p.grad for p in model.parameters() if p.grad is not None)
            tracker.note(gradients, Term.GRADIENTS)
        tracker.begin(phase)

    with heard_by(begin):
        for step in range(1 + count):
            tracker.forget()
            with around(step), tracker:
                train_step(model, optimizer, inputs, targets, take)
            logs.append(tracker.log())
            states = [tensor for _, tensor in tensors_in(list(optimizer.state.values()))]
            tracker.note(states, Term.OPTIMIZER)
            for param, kept in optimizer.state.items():
                tracker.attribute((tensor for _, tensor in tensors_in(kept)), owners.get(param, ""))
            if behaviour.has_host:
                tracker.stop_counting(_counters(optimizer))
            if not step:
                _note_gradients(model, tracker)
    return logs[1:]


def _note_gradients(model: nn.Module, tracker: MemoryTracker) -> None:
    """Register hooks that set the category of each gradient as soon as autograd has made it.

    Assumes: a step was done, because only then do FSDP2 units have unsharded parameters.
    """

    def note(param: torch.Tensor) -> None:
        if param.grad is not None:
            tracker.set_term([param.grad], Term.GRADIENTS)

    owned = set(model.parameters())
    gathered = (p for module in model.modules() for p in gathered_parameters(module))
    for param in (*gathered, *owned):
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(note)


def _attribute_compiled_outputs(model: nn.Module, tracker: MemoryTracker) -> None:
    """Register hooks that attribute outputs of compiled modules to the module around them.

    A compiler may eliminate tensors inside a compiled module, but not its outputs.
    """
    compiled = frozenset(applied(model).plan.assignment.compiled)
    for module, fqn in names_of(model).items():
        if fqn in compiled:
            outside = fqn.rpartition(".")[0]
            module.register_forward_hook(
                lambda _, args, out, outside=outside: tracker.attribute(
                    (tensor for _, tensor in tensors_in(out)), outside
                )
            )


def _counters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the step counts that torch keeps on the host, unless `fused` or `capturable` is set."""
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("capturable"):
            continue
        for param in group["params"]:
            count = optimizer.state.get(param, {}).get("step")
            if isinstance(count, torch.Tensor):
                yield count


def _owners(model: nn.Module) -> dict[torch.Tensor, str]:
    """Map each parameter and buffer to the fqn of its module; of the first one if it is shared."""
    owners: dict[torch.Tensor, str] = {}
    for module, fqn in names_of(model).items():
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for tensor in tensors:
            owners.setdefault(tensor, fqn)
    return owners


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the fqn in the plan of every module that this rank runs, by module."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    roots = inner.stage_modules if isinstance(inner, PipelinedModule) else [inner]
    return {module: fqn for root in roots for fqn, module in root.named_modules()}
