"""Run a pipeline schedule on this rank: compute, send, receive.

Stages exchange the shapes of the tensors between them once per form of the inputs (structure,
shapes and dtypes), with the first microbatch. After an exception, a rank stops computing but keeps
sending and receiving, so that no other rank waits for it forever; the error is raised at the end.
If only some ranks of a stage fail, the others would wait for them in collectives of the stage, so
the error is raised at once. Nothing here depends on the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from meshplan.errors import ApplyError, Problem
from meshplan.layout.schedules import Action, Schedule
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.pipeline.split_backward import (
    PendingWeightGrads,
    check_weights,
    first_half,
    second_half,
)
from meshplan.runtime.apply.pipeline.stage import Program, Replay
from meshplan.runtime.base.batch import mapped
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.mesh import device
from meshplan.runtime.base.phases import begin
from meshplan.runtime.checks.forward_writes import before_backward, begin_microbatch
from meshplan.runtime.torch_private.private import reduce_units
from meshplan.runtime.watch.guard import fails_together, is_lost_connection
from meshplan.traffic.pipeline import sent_dtype
from meshplan.traffic.sequence import SequenceCuts

Meta = tuple[tuple[int, ...], torch.dtype, bool]
"""(shape, dtype, True if a gradient is sent back) of a tensor that a stage sends to the next."""


@dataclass(frozen=True, slots=True)
class StageRuntime:
    """A stage of this rank.

    Attributes:
        module: The wrapped stage module.
        plan: The plan, restricted to this stage.
        replay: Decides what calls of units do while the stage's forward runs.
    """

    module: nn.Module
    plan: Plan
    replay: Replay


@dataclass(slots=True)
class InputForm:
    """The stages' work and messages for inputs of one form: equal structure, shapes and dtypes.

    Attributes:
        program: The work of each stage for such inputs.
        sequence: Finds which values are sharded along the sequence over tp.
        metas: The tensors that a stage sends to the next one, as in the first pass, by (index of
            the sending stage, True if gradients are enabled).
        is_new: True until a first pass with such inputs has ended.
    """

    program: Program
    sequence: SequenceCuts
    metas: dict[tuple[int, bool], list[Meta]] = field(default_factory=dict)
    is_new: bool = True


@dataclass(slots=True)
class _InFlight:
    """The tensors of one microbatch in one stage, between forward and backward.

    Attributes:
        received: Tensors from the previous stage, as autograd leaves, by value id.
        outputs: Tensors for the next stage; in the last stage, the loss.
        gradients: Gradients of the outputs, received from the next stage.
        halves: Remaining work of a split backward.
    """

    received: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    halves: PendingWeightGrads = field(default_factory=PendingWeightGrads)


class RemoteFailure(Exception):
    """Raised when another rank failed."""


class PipelineStep:
    """One pass of all microbatches through this rank's stages.

    Args:
        parts: This rank's stages, by stage index.
        schedule: The schedule, which places stages on ranks.
        group: The ranks along pp.
        peers: Global ranks that hold the same stages, including this one.
        form: The `InputForm` of the microbatches.
        microbatches: (args, kwargs) of each microbatch.
        finish: Called in the last stage with (output, index of the microbatch). Returns the loss
            that backward starts from, or None if there is no backward.
        sync: Called before each backward with (stage, True if it is the last backward of that stage
            in this pass).
        before: Number of microbatches of the same optimizer step that ran before these.
        released: For an action, the earlier sends that are known to have arrived when it starts.
            Their tensors are freed then; the tensors of all other sends are kept until the end.

    Attributes:
        last: Index of the last stage.
        has_poison: True if a stage's output contained NaN; checked for new forms only.
        failure: The first exception on this rank; None if there is none.
    """

    def __init__(
        self,
        parts: dict[int, StageRuntime],
        *,
        schedule: Schedule,
        group: ProcessGroup,
        peers: Sequence[int],
        form: InputForm,
        microbatches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        finish: Callable[[Any, int], torch.Tensor | None],
        sync: Callable[[StageRuntime, bool], None] = lambda part, is_last: None,
        before: int = 0,
        released: Mapping[Action, tuple[Action, ...]] = MappingProxyType({}),
    ) -> None:
        self.parts, self.schedule, self.group, self.form = parts, schedule, group, form
        self.microbatches, self.finish, self.sync = microbatches, finish, sync
        self.peers, self.before = peers, before
        self.last = form.program.last
        self.has_poison = False
        self.failure: Exception | None = None
        self._size = dist.get_world_size(group)
        self._flights: dict[tuple[int, int], _InFlight] = {}
        self._arriving: dict[tuple[str, int, int], list[dist.Work]] = {}
        self._leaving: dict[Action, tuple[list[dist.Work], list[torch.Tensor]]] = {}
        self._released = released
        self._backwards: dict[int, int] = dict.fromkeys(parts, 0)

    def play(self, actions: Sequence[Action]) -> None:
        """Run these actions in order, then wait for all communication."""
        steps = {
            "F": self._forward, "B": self._backward, "I": self._backward_inputs,
            "W": self._backward_weights, "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward, "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
        }  # fmt: skip
        for action in actions:
            step = steps[action.kind]
            if "_" in action.kind:
                step(action.stage, action.microbatch)
            elif self.failure is None:
                begin("forward" if action.kind == "F" else "backward")
                try:
                    step(action.stage, action.microbatch)
                except Exception as error:  # User code may raise anything.
                    self._fail(error)
        for works in (*self._arriving.values(), *(works for works, _ in self._leaving.values())):
            for work in works:
                work.wait()
        self._arriving.clear()
        self._leaving.clear()

    def _fail(self, error: Exception) -> None:
        """Record an exception, so that this rank computes nothing more, or raise it at once.

        It is raised if other ranks of the stage keep computing, since they would wait for this rank
        in a collective. It is also raised in a fake step and after a lost connection, so that an
        incomplete pass is not taken for a complete one.
        """
        if self.failure is None:
            is_alone = is_fake_execution() or is_lost_connection(error)
            if is_alone or not fails_together(error, self.peers):
                raise error
            self.failure = error

    def _flight(self, stage: int, microbatch: int) -> _InFlight:
        return self._flights.setdefault((stage, microbatch), _InFlight())

    def _forward(self, stage: int, m: int) -> None:
        part, flight, program = self.parts[stage], self._flight(stage, m), self.form.program
        if stage and self._peer(stage - 1) is None:
            values = program.sent(stage - 1)
            for value, tensor in zip(values, self._flight(stage - 1, m).outputs, strict=True):
                # The previous stage is on this rank: a detached leaf separates the two backwards.
                leaf = tensor.detach().requires_grad_(tensor.requires_grad)
                flight.received[value] = leaf
        self._wait("F", stage, m)
        self._release(Action("F", stage, m))
        replay = part.replay
        replay.program, replay.received = program, flight.received
        args, kwargs = self.microbatches[m]
        if program.writes_inputs:
            # The next stage of this rank reads it again. Microbatches are views of one tensor, of
            # which autograd saves nothing that a later microbatch may write.
            args, kwargs = mapped((args, kwargs), torch.clone)
        begin_microbatch(part.module, self.before + m)
        try:
            output = part.module(*args, **kwargs)
        finally:
            replay.program, replay.received = None, {}
            replay.forget()
        if stage == self.last:
            loss = self.finish(output, m)
            flight.outputs = [] if loss is None else [loss]
        else:
            flight.outputs = list(output)
        if self.form.is_new and not is_fake_execution():
            self.has_poison |= any(
                t.is_floating_point() and bool(t.detach().isnan().any()) for t in flight.outputs
            )

    def _backward(self, stage: int, m: int) -> None:
        flight = self._before_backward("B", stage, m)
        outputs, gradients = self._roots(stage, flight)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        flight.outputs, flight.gradients = [], []

    def _backward_inputs(self, stage: int, m: int) -> None:
        flight, weights = (
            self._before_backward("I", stage, m),
            self.parts[stage].module.parameters(),
        )
        outputs, gradients = self._roots(stage, flight)
        leaves = self._leaves(flight)
        if self.form.is_new and m == 0:
            check_weights(outputs, leaves, self.parts[stage].module.parameters())
        flight.halves = first_half(outputs, gradients, leaves, weights)
        flight.outputs, flight.gradients = [], []

    def _backward_weights(self, stage: int, m: int) -> None:
        flight = self._flight(stage, m)
        second_half(flight.halves, self.parts[stage].module.parameters())
        flight.halves = PendingWeightGrads()

    def _before_backward(self, kind: Literal["B", "I"], stage: int, m: int) -> _InFlight:
        flight = self._flight(stage, m)
        if stage < self.last and self._peer(stage + 1) is None:
            flight.gradients = self._gradients(self._flight(stage + 1, m))
        self._wait("B", stage, m)
        self._release(Action(kind, stage, m))
        self._backwards[stage] += 1
        is_last = self._backwards[stage] == len(self.microbatches)
        before_backward(self.parts[stage].module, self.before + m)
        self.sync(self.parts[stage], is_last)
        return flight

    def _roots(
        self, stage: int, flight: _InFlight
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        outputs = [tensor for tensor in flight.outputs if tensor.requires_grad]
        return outputs, None if stage == self.last else flight.gradients

    def _leaves(self, flight: _InFlight) -> list[torch.Tensor]:
        return [leaf for leaf in flight.received.values() if leaf.requires_grad]

    def _gradients(self, flight: _InFlight) -> list[torch.Tensor]:
        """Return the gradients of the received tensors, zeros for None, and free these tensors."""
        out = []
        for leaf in self._leaves(flight):
            gradient = leaf.grad
            out.append(torch.zeros_like(leaf) if gradient is None else gradient.contiguous())
        flight.received = {}
        return out

    # Communication between ranks.

    def _peer(self, stage: int) -> int | None:
        """Return the global rank that holds a stage; None if it is this rank."""
        place = self.schedule.rank_of(stage, self._size)
        if place == dist.get_rank(self.group):
            return None
        return dist.get_global_rank(self.group, place)

    def _send_forward(self, stage: int, m: int) -> None:
        peer = self._peer(stage + 1)
        assert peer is not None
        tensors = self._flight(stage, m).outputs
        found: list[Meta] = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        key = (stage, torch.is_grad_enabled())
        known = self.form.metas.get(key)
        if known is None:
            known = self.form.metas[key] = found
            header = None if self.failure else found
            if not is_fake_execution():
                dist.send_object_list([header], dst=peer, group=self.group)
        if known != found:
            changed = _changed(stage, known, found)
            self._fail(ApplyError(changed))
            tensors = [torch.zeros(meta[0], dtype=meta[1], device=device()) for meta in known]
        self._send(tensors, peer, Action("SEND_F", stage, m))

    def _receive_forward(self, stage: int, m: int) -> None:
        peer = self._peer(stage - 1)
        assert peer is not None
        key = (stage - 1, torch.is_grad_enabled())
        if key not in self.form.metas:
            box: list[Any] = [None]
            if is_fake_execution():
                box = [self._expected(stage - 1)]
            else:
                dist.recv_object_list(box, src=peer, group=self.group)
            self.form.metas[key] = box[0] or []
            if box[0] is None:
                self._fail(RemoteFailure())
        metas = self.form.metas[key]
        tensors = [torch.empty(shape, dtype=dtype, device=device()) for shape, dtype, _ in metas]
        self._arriving["F", stage, m] = self._receive(tensors, peer)
        values = self.form.program.sent(stage - 1)
        for value, tensor, meta in zip(values, tensors, metas, strict=not self.failure):
            self._flight(stage, m).received[value] = tensor.requires_grad_(meta[2])

    def _expected(self, stage: int) -> list[Meta]:
        """Return metas of what a stage sends, from the recorded forward; used in a fake step.

        Raises:
            ApplyError: The recorded forward does not show whether a value is sharded along the
                sequence.
        """
        plan = self.parts[stage + 1].plan
        out: list[Meta] = []
        for number in self.form.program.sent(stage):
            value = self.form.program.flow.values[number]
            kind: torch.dtype = getattr(torch, sent_dtype(plan, value.dtype))
            shape = self.form.sequence.shape(number, value.shape)
            if shape is None:
                what = (
                    f"the recorded forward does not show whether a tensor that stage {stage} sends "
                    "is sharded along the sequence"
                )
                raise ApplyError(Problem(what, fix="leave sequence_parallel or pp out"))
            out.append((shape, kind, kind.is_floating_point))
        return out

    def _send_backward(self, stage: int, m: int) -> None:
        peer = self._peer(stage - 1)
        assert peer is not None
        self._wait("F", stage, m)  # A rank that failed skipped the forward, which waits too.
        gradients = self._gradients(self._flight(stage, m))
        self._send(gradients, peer, Action("SEND_B", stage, m))

    def _receive_backward(self, stage: int, m: int) -> None:
        peer = self._peer(stage + 1)
        assert peer is not None
        flight = self._flight(stage, m)
        metas = self.form.metas[stage, True]
        flight.gradients = [
            torch.empty(shape, dtype=dtype, device=device())
            for shape, dtype, needs_gradient in metas
            if needs_gradient
        ]
        self._arriving["B", stage, m] = self._receive(flight.gradients, peer)

    def _send(self, tensors: list[torch.Tensor], peer: int, action: Action) -> None:
        whole = [t.detach().contiguous() for t in tensors if t.numel()]
        ops = [dist.P2POp(dist.isend, t, peer, self.group) for t in whole]
        if ops:
            self._leaving[action] = (dist.batch_isend_irecv(ops), whole)

    def _release(self, step: Action) -> None:
        """Free the sent tensors that are known to have arrived when this action starts."""
        for sent in self._released.get(step, ()):
            works, _ = self._leaving.pop(sent, ((), ()))
            for work in works:
                work.wait()

    def _receive(self, tensors: list[torch.Tensor], peer: int) -> list[dist.Work]:
        ops = [dist.P2POp(dist.irecv, t, peer, self.group) for t in tensors if t.numel()]
        with torch.no_grad() if ops else nullcontext():
            return dist.batch_isend_irecv(ops) if ops else []

    def _wait(self, kind: str, stage: int, m: int) -> None:
        for work in self._arriving.pop((kind, stage, m), []):
            work.wait()


def _changed(stage: int, known: list[Meta], found: list[Meta]) -> Problem:
    """Return the problem of a stage that sends tensors (`found`) unlike those before (`known`)."""
    if [meta[:2] for meta in known] == [meta[:2] for meta in found]:
        return Problem(
            f"parameters of stage {stage} or of an earlier stage were frozen or unfrozen, and "
            "later stages do not know yet whether to send a gradient back",
            fix="call model.train() on every rank after freezing or unfreezing",
        )
    return Problem(
        f"the tensors that stage {stage} sends changed shape or dtype from {known} to {found}, "
        "although the inputs did not",
        fix="cut where shapes depend only on the shapes of the inputs",
    )


def end_split_backward(part: StageRuntime) -> None:
    """Reduce a stage's gradients over its data ranks after the last split backward of a step."""
    reduce_units(part.module)
