"""The storages that a rank of a pipeline allocates and frees over all microbatches of a step.

Each stage is played once (`StageWork`). The events of its forward and backward are copied in the
order of the schedule. Between them are the buffers that `runtime.apply.pipeline.run` receives and
sends; a sent tensor stays until it is known to have arrived.

In a long step most microbatches have the same events as others that run with more memory in use, so
they cannot contain the peak. They can be summarised: only the storages that they leave behind are
written. If a backward is split in two halves, the autograd graph may reference a tensor that
crosses a stage boundary for longer than its sender or receiver does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from meshplan.assign.base.types import Stages
from meshplan.layout.schedules import Action
from meshplan.memory.log.events import Change, EventLog, Storage, Term
from meshplan.memory.log.microbatch import AT_STAGE, HookKind, HookPoint, MicrobatchTrace
from meshplan.memory.stages.microbatch import StageWork

_NUMBER: Final = 8
"""Bytes of the sum of losses, a float64 number."""


@dataclass(frozen=True, slots=True)
class _PlayedMicrobatch:
    """One microbatch in one stage: maps its storages in the `StageWork` to those in the pass.

    Args:
        stage: Number of the stage.
        first: Number in the pass of storage 0 of the trace.
        known: Number in the pass of each storage that is not numbered from `first`, by its number
            in the trace.
        left: Numbers in the pass of the storages that forward left for backward and that nothing
            else references.
    """

    stage: int
    first: int
    known: dict[int, int]
    left: list[int]

    def __getitem__(self, storage: int) -> int:
        return self.known.get(storage, self.first + storage)


class Pass:
    """The pass of a rank through its schedule; each method appends the events of one action.

    Args:
        parts: Work of one microbatch in each of the rank's stages.
        part_of: Maps (stage, microbatch) to the microbatch's work, which may have a split backward.
        stages: Stages of the whole pipeline.
        whole: (stage, microbatch) pairs that are expanded; all others are summarised.
        takes_gradients: If True, wrappers take the gradients of every microbatch; otherwise
            gradients are added to those of the first microbatch.
    """

    def __init__(
        self,
        parts: Mapping[int, StageWork],
        part_of: Callable[[int, int], StageWork],
        stages: Stages,
        whole: set[tuple[int, int]],
        *,
        takes_gradients: bool,
    ) -> None:
        self._parts, self._part_of = parts, part_of
        self._stages, self._takes = stages, takes_gradients
        self._whole = whole
        self._storages: list[Storage] = []
        self._events: list[Change] = []
        self._phases = ["before"]
        self._sizes: dict[int, int] = {}
        self._hook_points: list[HookPoint] = []
        self._gradients: dict[str, int] = {}
        self._ready: dict[str, int] = {}
        self._later_gradients: list[tuple[int, str, int]] = []
        self._known: dict[int, dict[int, int]] = {}
        """For each stage, storages that exist before the step: number in the pass by number in the
        trace."""
        self._flights: dict[tuple[int, int], _PlayedMicrobatch] = {}
        self._arrived: dict[tuple[int, int], list[int]] = {}
        self._came_back: dict[tuple[int, int], list[int]] = {}
        self._leaving: dict[Action, list[int]] = {}
        self._holders: Counter[int] = Counter()
        self._host: list[tuple[int, int]] = []
        self._allocate_initial()
        self._num_before = len(self._events)
        self._total = self._make(_NUMBER, Storage(Term.COMMUNICATION, "zeros"))

    def _allocate_initial(self) -> None:
        """Allocate the inputs and targets of all microbatches, and the buffers of every stage."""
        inputs: list[int] | None = None
        for stage, part in self._parts.items():
            known = self._known[stage] = {}
            given: list[int] = []
            log = part.trace.log
            for delta, storage, phase in log.changes:
                if phase:
                    break
                made = log.storages[storage]
                if storage in part.received:
                    continue
                if made.term != Term.INPUTS:
                    known[storage] = self._make(delta, made)
                    continue
                if inputs is None:
                    given.append(self._make(delta * self._stages.microbatches, made))
                else:
                    given.append(inputs[len(given)])
                known[storage] = given[-1]
            inputs = given if inputs is None else inputs

    # Actions of a rank

    def begin(self, action: Action, arrived: Iterable[Action]) -> None:
        """Begin a forward or backward: free the tensors of sends that are known to have arrived."""
        self._begin("forward" if action.kind == "F" else "backward")
        for sent in arrived:
            self._drop_all(self._leaving.pop(sent, ()))

    def forward(self, stage: int, m: int) -> None:
        """Append the forward of microbatch `m`, up to the tensors that are sent, or to the loss."""
        part = self._part_of(stage, m)
        arrived = self._arrived.pop((stage, m), [])
        if stage - 1 in self._parts:  # A stage on the same rank passes its tensors directly.
            before = self._flights[stage - 1, m]
            arrived = [before[s] for s in self._part_of(stage - 1, m).sent]
            self._holders.update(arrived)
        known = self._known[stage] | dict(zip(part.received, arrived, strict=True))
        flight = _PlayedMicrobatch(stage, len(self._storages), known, [])
        self._flights[stage, m] = flight
        if part.second_half is not None:  # The graph references the received tensors too.
            self._holders.update(arrived)
        if (stage, m) not in self._whole:
            flight.left.extend(self._make(part.sizes[n], part.storages[n]) for n in part.left)
            self._make_known(part, flight, part.sent)
            self._change_host(part.host_bytes)
            return
        self._storages.extend(part.storages)
        flight.left.extend(flight[storage] for storage in part.left)
        for storage in (*part.left, *part.sent, *part.returned):
            self._sizes[flight[storage]] = part.sizes[storage]
        self._play(part, flight, part.num_before, part.split)
        if stage == self._stages.num - 1:
            self._begin("backward")
            self._drop(self._make(_NUMBER, Storage(Term.LOSS, "_to_copy")))

    def backward(self, stage: int, m: int) -> None:
        """Append a backward that is not split, up to the gradients of the received tensors."""
        self._take_from_next_stage(stage, m)
        self._whole_backward(stage, m)

    def _whole_backward(self, stage: int, m: int) -> None:
        part, flight = self._part_of(stage, m), self._flights[stage, m]
        came = self._came_back.pop((stage, m), [])
        if (stage, m) not in self._whole:
            self._make_known(part, flight, part.returned)
            for storage in (*flight.left, *came):
                self._drop_all([storage])
            self._drop_all(flight[storage] for storage in part.sent)
            self._change_host(-part.host_bytes)
            return
        flight.known.update(zip(part.given, came, strict=True))
        self._play(part, flight, part.split, len(part.trace.log.changes))
        self._drop_all(came)
        self._end_outputs(part, flight)

    def first_half(self, stage: int, m: int) -> None:
        """Append the first half of a split backward, which computes no gradients of weights."""
        self._take_from_next_stage(stage, m)
        part, flight = self._part_of(stage, m), self._flights[stage, m]
        if part.second_half is None:
            return  # No received tensor needs a gradient: the second half runs all of backward.
        flight.known.update(zip(part.given, self._came_back.pop((stage, m), []), strict=True))
        if (stage, m) in self._whole:
            self._play(part, flight, part.split, part.second_half[0])
            self._end_outputs(part, flight)
            return
        waiting = {*part.waiting}
        # Second halves that ran earlier left gradients of weights. Wrappers take those gradients at
        # the hook points of this first half.
        for point in part.hook_points_from(part.split):
            self._add_hook_point(point, f"{AT_STAGE}{stage}")
        self._make_known(part, flight, part.returned)
        self._holders.update(flight[s] for s in part.returned)
        new = [s for s in part.waiting if s not in flight.known and s not in part.left]
        left = dict(zip(part.left, flight.left, strict=True))
        flight.known.update(left)
        self._make_known(part, flight, new)
        self._drop_all(flight[s] for s in part.left if s not in waiting)
        self._drop_all(
            flight[s] for s in (*part.received, *part.given, *part.returned) if s not in waiting
        )
        self._drop_all(flight[storage] for storage in part.sent)

    def second_half(self, stage: int, m: int) -> None:
        """Append the second half of a split backward, which computes the gradients of weights."""
        part, flight = self._part_of(stage, m), self._flights[stage, m]
        if part.second_half is None:
            self._whole_backward(stage, m)
        elif (stage, m) in self._whole:
            self._play(part, flight, part.second_half[0], len(part.trace.log.changes))
        else:
            self._drop_all(flight[storage] for storage in part.waiting)
            for storage in part.names if self._takes else ():
                # The gradients wait for the next first half, in which the wrapper takes them.
                self._make_known(part, flight, [storage])
                self._take(part, storage, flight[storage], f"{AT_STAGE}{stage}")

    def _end_outputs(self, part: StageWork, flight: _PlayedMicrobatch) -> None:
        """Free the outputs from which backward began: the sent tensors, or the loss."""
        self._drop_all(flight[storage] for storage in part.sent)
        if flight.stage == self._stages.num - 1:
            for storage in part.trace.losses:
                self._drop(flight[storage])

    def _take_from_next_stage(self, stage: int, m: int) -> None:
        """Take the gradients directly from the next stage, if that is on the same rank.

        The activations to which the gradients belong are freed.
        """
        if stage + 1 in self._parts:
            part, flight = self._part_of(stage + 1, m), self._flights[stage + 1, m]
            self._drop_all(flight[storage] for storage in part.received)
            self._came_back[stage, m] = [flight[storage] for storage in part.returned]

    def send_forward(self, stage: int, m: int) -> None:
        """Keep the sent activations until they have arrived; the graph keeps them even longer."""
        storages = [self._flights[stage, m][s] for s in self._part_of(stage, m).sent]
        self._leaving[Action("SEND_F", stage, m)] = storages
        self._holders.update(storages)

    def receive_forward(self, stage: int, m: int) -> None:
        """Allocate buffers for the activations that arrive."""
        self._arrived[stage, m] = self._receive(stage, m, received=True)

    def send_backward(self, stage: int, m: int) -> None:
        """Keep the sent gradients until they have arrived.

        The activations to which the gradients belong are freed.
        """
        part, flight = self._part_of(stage, m), self._flights[stage, m]
        self._leaving[Action("SEND_B", stage, m)] = [flight[s] for s in part.returned]
        self._drop_all(flight[storage] for storage in part.received)

    def receive_backward(self, stage: int, m: int) -> None:
        """Allocate buffers for the gradients that arrive, which stay until backward is done."""
        self._came_back[stage, m] = self._receive(stage, m, received=False)

    def end(self, split_of: Collection[int]) -> MicrobatchTrace:
        """Finish the pass after the last action: free the sent tensors, and return the trace.

        Args:
            split_of: Stages with split backwards, whose gradients are reduced now.
        """
        self._begin("backward")
        for storages in self._leaving.values():
            self._drop_all(storages)
        self._drop(self._make(_NUMBER, Storage(Term.COMMUNICATION, "_to_copy")))
        for stage in self._parts:
            if stage in split_of:
                self._hook_points.append(
                    HookPoint(len(self._events), HookKind.REDUCING, f"{AT_STAGE}{stage}")
                )
        self._hook_points.append(HookPoint(len(self._events), HookKind.SHARING, ""))
        loss = self._make(_NUMBER, Storage(Term.LOSS, "div"))
        self._drop(self._total)
        return MicrobatchTrace(
            log=EventLog(tuple(self._storages), tuple(self._events), tuple(self._phases)),
            hook_points=tuple(self._hook_points),
            gradients=self._gradients,
            ready=self._ready,
            losses=(loss,),
            later_gradients=tuple(self._later_gradients),
            grad_relayout={
                f"{fqn}{AT_STAGE}{stage}": each
                for stage, part in self._parts.items()
                for fqn, each in part.trace.grad_relayout.items()
            },
            num_before=self._num_before,
            host=tuple(self._host),
        )

    # Memory

    def _change_host(self, delta: int) -> None:
        if delta:
            self._host.append((len(self._events), delta))

    def _make_known(
        self, part: StageWork, flight: _PlayedMicrobatch, storages: Iterable[int]
    ) -> None:
        for storage in storages:
            flight.known[storage] = self._make(part.sizes[storage], part.storages[storage])

    def _begin(self, phase: str) -> None:
        if self._phases[-1] != phase:
            self._phases.append(phase)

    def _make(self, size: int, storage: Storage) -> int:
        number = len(self._storages)
        if storage.phase != self._phases[-1]:
            storage = Storage(*storage[:3], self._phases[-1], storage.stream)
        self._storages.append(storage)
        self._sizes[number] = size
        self._events.append((size, number, len(self._phases) - 1))
        return number

    def _drop(self, number: int) -> None:
        self._events.append((-self._sizes[number], number, len(self._phases) - 1))

    def _receive(self, stage: int, m: int, *, received: bool) -> list[int]:
        part = self._part_of(stage, m)
        storages, sizes = part.received if received else part.given, part.sizes
        made = Storage(Term.COMMUNICATION, "empty")
        return [self._make(sizes[storage], made) for storage in storages]

    def _drop_all(self, storages: Iterable[int]) -> None:
        """Drop one reference to each storage, and free storages without further references."""
        for storage in storages:
            if self._holders.get(storage):
                self._holders[storage] -= 1
            else:
                self._drop(storage)

    def _play(self, part: StageWork, flight: _PlayedMicrobatch, first: int, end: int) -> None:
        """Append the events from `first` to before `end` of a stage's work."""
        log, at = part.trace.log, f"{AT_STAGE}{flight.stage}"
        hook_points = part.hook_points_from(first)
        is_split = part.second_half is not None
        crossing = {*part.received, *part.given, *part.returned} if is_split else set[int]()
        sent, given, returned = {*part.sent}, {*part.given}, {*part.returned}
        ready = part.ready_at
        is_forward = first < part.split
        # Forward copies to the host, and backward frees the copies.
        host = deque(each for each in part.trace.host or () if (each[1] > 0) is is_forward)
        done = 0
        plain_until, numbers, events = part.plain_until, flight.known, log.changes
        number = first
        while number < end:
            # Copy all events up to the next one that cannot simply be copied.
            if plain_until[number] > number:
                begun, number = number, min(plain_until[number], end)
                now, offset = len(self._phases) - 1, flight.first
                self._events += [
                    (delta, numbers.get(storage, offset + storage), now)
                    for delta, storage, _ in events[begun:number]
                ]
                continue
            while host and host[0][0] <= number:
                self._change_host(host.popleft()[1])
            while done < len(hook_points) and hook_points[done].event <= number:
                self._add_hook_point(hook_points[done], at)
                done += 1
            for storage in ready.get(number, ()):
                self._take(part, storage, flight[storage], at)
            delta, storage, phase = events[number]
            number += 1
            if storage in (sent if delta < 0 else given):
                continue  # The methods of the pass write this event.
            self._begin(log.phases[phase])
            if delta < 0 and storage in crossing:
                self._drop_all([flight[storage]])
                continue
            own = flight[storage]
            self._events.append((delta, own, len(self._phases) - 1))
            if delta > 0 and storage in crossing & returned:
                self._holders[own] += 1
            if delta > 0 and storage in part.names:
                self._sizes[own] = delta
        for storage in ready.get(end, ()) if end == len(events) else ():
            self._take(part, storage, flight[storage], at)
        for _, delta in host:
            self._change_host(delta)
        for point in hook_points[done:]:
            self._add_hook_point(point, at)

    def _take(self, part: StageWork, storage: int, own: int, at: str) -> None:
        """Assign a gradient, which autograd has completed, to its parameter."""
        name = part.names[storage] + at
        if name not in self._gradients:
            self._gradients[name], self._ready[name] = own, len(self._events)
        elif self._takes:
            self._later_gradients.append((len(self._events), name, own))
        else:  # The gradient is added to the existing one in place.
            self._drop(own)

    def _add_hook_point(self, point: HookPoint, at: str) -> None:
        self._hook_points.append(HookPoint(len(self._events), point.kind, point.unit + at))
