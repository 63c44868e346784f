"""Trace the memory of one microbatch on one rank, without FSDP2 or DDP.

The trace includes tensor and context parallelism, compute dtypes and recomputation. It does not
include the gathering of parameters, the reduction and accumulation of gradients, or the optimizer;
`memory.replay` adds these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from meshplan.assign import Assignment
from meshplan.layout.mesh import UNIT_AXES
from meshplan.memory.log.events import Term
from meshplan.memory.log.microbatch import AT_STAGE, HookKind, HookPoint, MicrobatchTrace
from meshplan.memory.repeat.repeat_blocks import RepeatedBlocks, repeat_blocks
from meshplan.memory.replay.buckets import DdpOptions
from meshplan.plan.plan import Plan
from meshplan.plan.restrict import restrict
from meshplan.runtime.apply.loss.loss_mode import loss_mode
from meshplan.runtime.apply.loss.vocab_parallel_loss import take_loss
from meshplan.runtime.apply.parameters.materialize import InitialValues
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import applied, apply_plan, cast_parameters
from meshplan.runtime.base.batch import as_arguments, mapped
from meshplan.runtime.base.fake_mode import INSTEAD_OF_WRAPPING
from meshplan.runtime.base.module_state import contents, hooks_of
from meshplan.runtime.base.phases import begin, heard_by
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.fake_step.cuda_mode import CPU, Behaviour
from meshplan.runtime.fake_step.equal_blocks import Edges, runs_of, short_plan, shortened
from meshplan.runtime.fake_step.few_microbatches import (
    first_microbatches,
    of_few,
    with_all_inputs,
)
from meshplan.runtime.fake_step.hook_points import BlockRecorder, HookPointRecorder
from meshplan.runtime.fake_step.memory_tracker import MemoryTracker
from meshplan.runtime.fake_step.step import LossFn, fake_rank, names_of

MakeTracker = Callable[[Mapping[nn.Module, str], Behaviour], MemoryTracker]


def trace_microbatch(
    model: nn.Module,
    plan: Plan,
    inputs: Any,
    targets: Any,
    loss_fn: LossFn,
    rank: int = 0,
    device: str = CPU,
    observer: Observer | None = None,
) -> MicrobatchTrace:
    """Return the memory trace of one microbatch on one rank, as it runs from the second one on.

    Of many equal blocks in a row only a few run, and the trace is extended to all of them. A
    pipeline runs the microbatches of a step interleaved, so its trace covers a step of this rank's
    stages, with as many microbatches as its peak depends on (`few_microbatches`).

    Args:
        model: The unsharded model of one process, on any device. It is copied, and its values are
            not read.
        plan: A plan made for this model.
        inputs: One rank's inputs of one microbatch; with a pipeline, of a step.
        targets: Targets of the same samples.
        loss_fn: Maps the model's output and the targets to the loss, as for `train_step`.
        rank: The rank that this process stands for.
        device: The device whose kernels are emulated, as for `fake_step`.
        observer: What records the microbatch; None to record its memory only. A pipeline ignores
            it.
    """
    if (stages := plan.assignment.stages) is not None:
        inputs, targets = first_microbatches((inputs, targets), stages)
        trace = _traced_pass(model, of_few(plan), inputs, targets, loss_fn, rank, device)
        return with_all_inputs(trace, stages)
    runs = [] if plan.assignment.apply else runs_of(model, plan)
    observer = observer or Observer()
    if runs:
        try:
            with shortened(model, runs) as used:
                short = short_plan(plan, runs)
                trace = _traced(
                    model, short, inputs, targets, loss_fn, rank, device, runs, observer
                )
            if not used:
                return trace
        except Exception:  # The model may need all of its blocks, and raise anything.
            if dist.is_initialized():
                raise
    return _traced(model, plan, inputs, targets, loss_fn, rank, device, (), observer)


class Observer:
    """Records a microbatch: makes the memory tracker and the hooks of a model with a plan applied.

    Args:
        make_tracker: Makes the memory tracker from the fqn of every module that runs and the
            behaviour of the device.
        blocks: Fqns of blocks whose hook points and inputs (`MicrobatchTrace.taken`) are recorded,
            whether they are units or not.

    Attributes:
        tracker: The memory tracker of the last model.
        recorder: The recorder of that model's hook points.
        block_recorder: The recorder of that model's blocks.
    """

    tracker: MemoryTracker
    recorder: HookPointRecorder
    block_recorder: BlockRecorder

    def __init__(
        self, make_tracker: MakeTracker = MemoryTracker, blocks: Collection[str] = ()
    ) -> None:
        self._make_tracker, self._blocks = make_tracker, blocks

    def watch(self, model: nn.Module, plan: Plan, behaviour: Behaviour) -> None:
        """Register hooks on a model without wrappers, and make its tracker and recorders."""
        names = names_of(model)
        self.tracker = self._make_tracker(names, behaviour)
        self.recorder = hook_points_of(model, plan, self.tracker)
        there = set(names.values())  # A shortened model lacks some blocks.
        blocks = [fqn for fqn in self._blocks if fqn in there]
        self.block_recorder = BlockRecorder(model, plan, blocks, self.tracker, self.recorder)


def _traced(
    model: nn.Module,
    plan: Plan,
    inputs: Any,
    targets: Any,
    loss_fn: LossFn,
    rank: int,
    device: str,
    runs: Sequence[RepeatedBlocks],
    observer: Observer,
) -> MicrobatchTrace:
    """Return the trace of the whole model, of which the blocks of `runs` were shortened."""
    bare = without_data(plan)
    with fake_rank(model, bare, rank, device) as (fake_model, mesh, fake, behaviour):
        batch, fake_targets = mapped(inputs, fake), mapped(targets, fake)

        def mark(module: nn.Module) -> None:
            observer.watch(module, plan, behaviour)

        wrapped = applied_without_data(fake_model, bare, mesh, mark)
        applied(wrapped).is_tested = True
        return _watched(
            wrapped, batch, fake_targets, plan, loss_fn, observer, runs,
            is_plain=_is_plain(model, plan),
        )  # fmt: skip


def _traced_pass(
    model: nn.Module,
    plan: Plan,
    inputs: Any,
    targets: Any,
    loss_fn: LossFn,
    rank: int,
    device: str,
) -> MicrobatchTrace:
    """Trace a later step of a pipeline: all microbatches through the stages of this rank.

    As in `_watched`, the second step is skipped if it would equal the first.
    """
    bare, stages = without_data(plan), plan.assignment.stages
    assert stages is not None
    names: dict[nn.Module, str] = {}
    hook_points: list[HookPoint] = []
    recorders: list[HookPointRecorder] = []
    coming = iter(stages.of_rank(plan.mesh.index(rank, ("pp",))))

    def mark(module: nn.Module) -> None:
        stage = next(coming)
        at = f"{AT_STAGE}{stage}"
        recorders.append(hook_points_of(module, restrict(plan, stage), tracker, at, hook_points))

    with fake_rank(model, bare, rank, device) as (fake_model, mesh, fake, behaviour):
        tracker = MemoryTracker(names, behaviour)
        batch, fake_targets = mapped(inputs, fake), mapped(targets, fake)
        wrapped = applied_without_data(fake_model, bare, mesh, mark)
        assert isinstance(wrapped, PipelinedModule)

        def share() -> None:
            hook_points.append(HookPoint(tracker.num_events, HookKind.SHARING, ""))

        # The gradients of units are not reduced here: `memory.replay` adds up what stages share.
        wrapped.shared.add_gradients = share  # type: ignore[method-assign]
        # Record forwards with parameters in the dtypes in which they are stored: those of other
        # stages still have the dtypes that they had at that time.
        cast_parameters(wrapped.skeleton, plan)
        names.update(names_of(wrapped))
        of_params = note_state(tracker, wrapped, (batch, fake_targets))

        def left() -> Any:
            return tracker.alive, [*map(_known_by, wrapped.stage_modules)]

        is_plain, trace = _is_plain(model, plan), None
        wrapped.record(batch)
        with heard_by(tracker.begin):
            for _ in range(2):
                for recorder in recorders:
                    recorder.clear()
                tracker.forget()
                num_before = tracker.num_events
                before = left()
                with tracker:
                    with loss_mode(plan):
                        take = partial(_noted_loss, tracker, loss_fn)
                        loss = wrapped.step(batch, fake_targets, take)
                    for recorder in recorders:
                        recorder.finish()
                found = trace_of(tracker, recorders, of_params, loss)
                num_of_params = sum(event.storage in of_params for event in tracker.log().events)
                trace = replace(found, num_before=num_before - num_of_params)
                del loss
                for recorder in recorders:
                    recorder.clear()
                if is_plain and left() == before:
                    break
        assert trace is not None
        return trace


def applied_without_data(
    model: nn.Module, bare: Plan, mesh: DeviceMesh, mark: Callable[[nn.Module], None]
) -> nn.Module:
    """Apply a plan, and call `mark` with each model or stage where it would be wrapped for data.

    Hooks that `mark` registers are called in the order of a wrapper's own: after those of tensor
    parallelism, before those of context parallelism.
    """
    token = INSTEAD_OF_WRAPPING.set(mark)
    try:
        return apply_plan(model, bare, mesh, InitialValues())
    finally:
        INSTEAD_OF_WRAPPING.reset(token)


def without_data(plan: Plan) -> Plan:
    """Return the plan without FSDP2 and DDP.

    Parameters are not sharded over data axes, and are stored in their compute dtypes. Each keeps
    its unit, which will redistribute its gradient when it reduces it.
    """
    whole = plan.assignment
    tensors = {
        fqn: replace(
            placed,
            stored=placed.stored.without(*UNIT_AXES),
            dtype=placed.compute_dtype,
            reduced_alone=False,
        )
        for fqn, placed in whole.tensors.items()
    }
    bare: Assignment = replace(
        whole, wrapper="none", tensors=MappingProxyType(tensors), units=MappingProxyType({})
    )
    return replace(plan, assignment=bare, accumulate=1)


class MicrobatchRecorder:
    """Runs microbatches of a wrapped model, and returns the trace of each.

    Args:
        model: The wrapped model, on fake tensors.
        plan: The plan that was applied.
        loss_fn: Maps the model's output and the targets to the loss.
        observer: What watches the model.
        runs: The runs of equal blocks that were shortened.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss_fn: LossFn,
        observer: Observer,
        runs: Sequence[RepeatedBlocks],
    ) -> None:
        self._model, self._plan, self._loss_fn, self._observer = model, plan, loss_fn, observer
        self._tracker = observer.tracker
        self._of_params = note_state(self._tracker, model, ())
        self._edges = [Edges(model, run, self._tracker) for run in runs]

    def run(self, inputs: Any, targets: Any) -> MicrobatchTrace:
        """Run a microbatch.

        Returns:
            The trace of the model as it is: of a short one, not yet extended to all blocks.
        """
        tracker, recorder = self._tracker, self._observer.recorder
        recorder.clear()
        self._observer.block_recorder.clear()
        for edge in self._edges:
            edge.clear()
        tracker.forget()  # Its phases, too: the inputs exist before any phase.
        tracker.note((tensor for _, tensor in tensors_in((inputs, targets))), Term.INPUTS)
        tracker.forget()
        with heard_by(tracker.begin), tracker:
            loss = self._loss(inputs, targets)
            recorder.finish()
        found = trace_of(tracker, [recorder], self._of_params, loss)
        recorder.clear()
        return replace(found, taken=dict(self._observer.block_recorder.taken))

    def repeated(self, trace: MicrobatchTrace) -> MicrobatchTrace:
        """Extend the trace that `run` returned last to all blocks of the whole model."""
        num_left_out = sum(event.storage in self._of_params for event in self._tracker.log().events)
        return repeat_blocks(trace, [edge.found(num_left_out) for edge in self._edges])

    def left(self) -> tuple[int, ...]:
        """Return the sizes of what earlier microbatches had left when the last one began.

        Parameters, buffers and inputs do not count.
        """
        log = self._tracker.log()
        return tuple(
            event.delta for event in log.events
            if not event.phase and event.storage not in self._of_params
            and log.storages[event.storage].term not in (Term.INPUTS, Term.BUFFERS)
        )  # fmt: skip

    def _loss(self, inputs: Any, targets: Any) -> torch.Tensor:
        # The same local variables as in `train_step`, because they keep tensors alive. The product
        # with 1.0 allocates what scaling the loss does.
        args, kwargs = as_arguments(inputs)
        begin("forward")
        with loss_mode(self._plan):
            loss = _noted_loss(self._tracker, self._loss_fn, self._model(*args, **kwargs), targets)
            (loss * 1.0).backward()
        return loss


def _watched(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    plan: Plan,
    loss_fn: LossFn,
    observer: Observer,
    runs: Sequence[RepeatedBlocks],
    *,
    is_plain: bool,
) -> MicrobatchTrace:
    """Trace the second of two microbatches, when all that a model keeps between them exists.

    The second microbatch is skipped if it would equal the first: only the model's modules could
    make it differ (`is_plain`), and the first microbatch left nothing behind, neither in the
    modules nor in memory.
    """
    microbatches = MicrobatchRecorder(model, plan, loss_fn, observer, runs)
    tracker, trace = observer.tracker, None
    tracker.note((tensor for _, tensor in tensors_in((inputs, targets))), Term.INPUTS)
    for _ in range(2):
        there, known = tracker.alive, _known_by(model)
        trace = microbatches.run(inputs, targets)
        if is_plain and tracker.alive == there and _known_by(model) == known:
            break
    assert trace is not None
    return microbatches.repeated(trace)


def _is_plain(model: nn.Module, plan: Plan) -> bool:
    """Return True if the state of the model's modules alone can make a second microbatch differ.

    Otherwise other state may change in the first one: sharded layers find out the placements of
    their inputs, recomputed blocks find out which buffers they write, and the state of hooks and of
    the plan's `apply` functions is out of sight.
    """
    a = plan.assignment
    if plan.mesh.size("tp", "cp", "ep") > 1 or a.apply or a.compiled:
        return False
    if any(hooks for module in model.modules() for hooks in hooks_of(module)):
        return False
    again = (model.get_submodule(fqn) for fqn in a.recompute)
    return not any(True for module in again for _ in module.buffers())


def _known_by(model: nn.Module) -> Any:
    """Return the state of a model's modules, in a form that can be compared for equality."""
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    return buffers, contents(model)


def _noted_loss(tracker: MemoryTracker, loss_fn: LossFn, output: Any, targets: Any) -> torch.Tensor:
    """Return the loss between forward and backward, and note what the output holds."""
    tracker.note((tensor for _, tensor in tensors_in(output)), Term.LOSS)
    begin("loss")
    loss = take_loss(loss_fn, output, targets)
    begin("backward")
    return loss


def note_state(tracker: MemoryTracker, model: nn.Module, batch: Any) -> set[int]:
    """Record parameters, buffers and the batch; return the parameters' storage numbers."""
    tracker.note(model.parameters(), Term.PARAMETERS)
    tracker.note(model.buffers(), Term.BUFFERS)
    for fqn, module in model.named_modules():
        tracker.attribute(module.buffers(recurse=False), fqn)
    tracker.note((tensor for _, tensor in tensors_in(batch)), Term.INPUTS)
    return {number for param in model.parameters() for number in tracker.numbers_of(param)}


def hook_points_of(
    model: nn.Module,
    plan: Plan,
    tracker: MemoryTracker,
    at: str = "",
    hook_points: list[HookPoint] | None = None,
) -> HookPointRecorder:
    """Register hooks that record the hook points of the plan's units.

    Args:
        model: The model without wrappers; with a pipeline, one stage of it.
        plan: The plan; with a pipeline, restricted to that stage.
        tracker: The memory tracker that numbers the events.
        at: Suffix of every recorded name, which names the stage; "" without a pipeline.
        hook_points: List that hook points are appended to; None for a new list.
    """
    params = {fqn: param for fqn, param in model.named_parameters() if param.requires_grad}
    recorder = HookPointRecorder(tracker, params, at, hook_points)
    owned: dict[str | None, list[str]] = {}
    for fqn, placed in plan.assignment.tensors.items():
        owned.setdefault(placed.unit, []).append(fqn)
    for fqn, unit in plan.assignment.units.items():
        recorder.watch(model.get_submodule(fqn), unit, owned.get(fqn, ()))
    if plan.assignment.wrapper == "ddp" and DdpOptions.of(plan.spec.ddp).clones_output:
        model.register_forward_hook(lambda *call: tree_map_only(torch.Tensor, torch.clone, call[2]))
    return recorder


def trace_of(
    tracker: MemoryTracker,
    recorders: Sequence[HookPointRecorder],
    of_params: set[int],
    loss: torch.Tensor,
) -> MicrobatchTrace:
    """Return the trace of the last microbatch, without the storages of parameters.

    `memory.replay` adds their memory, which FSDP2 or DDP manages.

    Args:
        tracker: The memory tracker.
        recorders: The recorders of hook points; with a pipeline, one for each stage.
        of_params: Numbers of the storages of the parameters.
        loss: The loss of the microbatch.
    """
    log = tracker.log()
    num_left_out = sum(event.storage in of_params for event in log.events)
    assert not any(event.storage in of_params for event in log.events if event.phase)
    return MicrobatchTrace(
        log=replace(log, changes=tuple(e for e in log.events if e.storage not in of_params)),
        hook_points=tuple(
            m._replace(event=m.event - num_left_out) for m in recorders[0].hook_points
        ),
        gradients={name: n for m in recorders for name, n in m.gradients.items()},
        ready={name: event - num_left_out for m in recorders for name, event in m.ready.items()},
        losses=tracker.numbers_of(loss),
        later_gradients=tuple(
            (event - num_left_out, name, n)
            for m in recorders
            for event, name, n in m.later_gradients
        ),
        grad_relayout={name: each for m in recorders for name, each in m.grad_relayout.items()},
    )
