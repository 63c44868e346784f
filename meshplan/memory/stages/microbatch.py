"""One microbatch of one stage, played alone: its events, and the storages that it passes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from meshplan.memory.log.events import Storage, Term
from meshplan.memory.log.microbatch import HookKind, HookPoint, MicrobatchTrace
from meshplan.memory.stages.tape import StageTape
from meshplan.memory.tape.tape import Player

_NAMELESS: Final = ("num_before", "sizes", "left", "host_bytes", "changes", "plain_until")
_NAMELESS_IN_HALVES: Final = ("waiting", "returned_inputs")
"""Cached properties of `StageWork` that renaming does not change. The second tuple has those that
exist for a split backward only."""
_FORWARD: Final = (HookKind.BEFORE_FORWARD, HookKind.AFTER_FORWARD)


@dataclass(frozen=True)
class StageWork:
    """One microbatch of one stage, with the storages that cross the stage's boundaries.

    Args:
        trace: Trace of forward, then backward.
        split: Index of the first event of backward.
        received: Storages of the activations received from the previous stage.
        sent: Storages of the activations sent to the next stage.
        given: Storages of the gradients of `sent`, received from the next stage.
        returned: Storages of the gradients of `received`, sent to the previous stage.
        second_half: For a split backward, (number of events, number of hook points) before its
            second half; None if the backward is not split.
    """

    trace: MicrobatchTrace
    split: int
    received: tuple[int, ...]
    sent: tuple[int, ...]
    given: tuple[int, ...]
    returned: tuple[int, ...]
    second_half: tuple[int, int] | None = None

    def renamed(self, names: Mapping[str, str]) -> StageWork:
        """Return the same work with every module, unit and parameter renamed.

        Args:
            names: New names by old name.
        """
        out = replace(self, trace=_renamed(self.trace, names))
        for figure in _NAMELESS if self.second_half is None else (*_NAMELESS, *_NAMELESS_IN_HALVES):
            out.__dict__[figure] = getattr(self, figure)
        return out

    @cached_property
    def num_before(self) -> int:
        """Number of events that allocate storages that exist before the microbatch."""
        return sum(not phase for _, _, phase in self.trace.log.changes)

    @cached_property
    def storages(self) -> tuple[Storage, ...]:
        """All storages of the log; those in `sent` and `returned` are communication buffers."""
        crossing = {*self.sent, *self.returned}
        return tuple(
            each._replace(term=Term.COMMUNICATION) if number in crossing else each
            for number, each in enumerate(self.trace.log.storages)
        )

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """Bytes of each storage, by its number."""
        return {storage: delta for delta, storage, _ in self.trace.log.changes if delta > 0}

    @cached_property
    def left(self) -> tuple[int, ...]:
        """Storages that forward leaves for backward, without those in `sent`."""
        live: dict[int, None] = {}
        for delta, storage, _ in self.trace.log.changes[self.num_before : self.split]:
            if delta > 0:
                live[storage] = None
            else:
                live.pop(storage)
        return tuple(live.keys() - {*self.sent})

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """Storages that are made before the second half of a split backward and freed in it."""
        assert self.second_half is not None
        live: dict[int, None] = {}
        for delta, storage, _ in self.trace.log.changes[self.num_before : self.second_half[0]]:
            if delta > 0:
                live[storage] = None
            else:
                live.pop(storage, None)
        later = {
            storage
            for delta, storage, _ in self.trace.log.changes[self.second_half[0] :]
            if delta < 0
        }
        return tuple(storage for storage in (*live, *self.received) if storage in later)

    @cached_property
    def returned_inputs(self) -> frozenset[int]:
        """Storages that cross a boundary and that the graph references until the second half."""
        crossing = {*self.received, *self.given, *self.returned}
        return frozenset(crossing & {*self.waiting})

    @cached_property
    def host_bytes(self) -> int:
        """Bytes that forward leaves for backward in host memory."""
        return sum(delta for _, delta in self.trace.host or () if delta > 0)

    @cached_property
    def changes(self) -> Mapping[str, int]:
        """Change in live bytes by kind of action, such as "F" or "SEND_B".

        The key "arrived" is the change once the gradients sent back are known to have arrived.
        """

        def total(storages: Iterable[int]) -> int:
            return sum(self.sizes[storage] for storage in storages)

        if self.second_half is not None:
            kept, back = total(self.waiting), total({*self.returned} - self.returned_inputs)
            return {
                "F": total((*self.left, *self.sent)),
                "I": back + kept - total((*self.left, *self.sent, *self.given)),
                "W": -kept,
                "RECV_F": total(self.received),
                "RECV_B": total(self.given),
                "SEND_B": -total({*self.received} - self.returned_inputs),
                "arrived": -back,
            }
        return {
            "F": total((*self.left, *self.sent)),
            "B": total(self.returned) - total((*self.left, *self.sent, *self.given)),
            "RECV_F": total(self.received),
            "RECV_B": total(self.given),
            "SEND_B": -total(self.received),
            "arrived": -total(self.returned),
        }

    @cached_property
    def plain_until(self) -> Sequence[int]:
        """For each event, the index of the first event at or after it that needs attention.

        All other events can simply be copied into a pass: there is no mark, no phase begins, no
        storage crosses a stage boundary, and no gradient is made or assigned.
        """
        events = self.trace.log.changes
        marked = {point.event for point in self.trace.hook_points}
        marked |= {event for event, _ in self.trace.host or ()}
        looked_at = {*self.sent, *self.given, *self.names}
        marked |= {*self.trace.ready.values()}
        if self.second_half is not None:
            looked_at |= {*self.received, *self.returned}
        phase = 0
        for number, (_, storage, now) in enumerate(events):
            if now != phase or storage in looked_at:
                phase = now
                marked.add(number)
        out: list[int] = []
        for number in sorted(each for each in {*marked, len(events)} if each <= len(events)):
            out += [number] * (number - len(out)) + [number]
        return out

    def hook_points_from(self, first: int) -> Sequence[HookPoint]:
        """Return the hook points of the forward, backward or half backward that begins at `first`.

        Args:
            first: `num_before` for forward, `split` for backward or its first half, the event in
                `second_half` for its second half.
        """
        hook_points = self.trace.hook_points
        # The kind of a hook point does not separate forward from backward, since backward may
        # recompute a unit's forward. The first kind that only backward has is where it begins.
        back = next(n for n, point in enumerate(hook_points) if point.kind not in _FORWARD)
        if first == self.num_before:
            return hook_points[:back]
        if self.second_half is None:
            return hook_points[back:]
        return (
            hook_points[self.second_half[1] :]
            if first == self.second_half[0]
            else hook_points[back : self.second_half[1]]
        )

    @cached_property
    def ready_at(self) -> Mapping[int, Sequence[int]]:
        """Storages of the parameters' gradients complete before an event, by the event's index."""
        out: dict[int, list[int]] = {}
        for fqn, event in self.trace.ready.items():
            out.setdefault(event, []).append(self.trace.gradients[fqn])
        return out

    @cached_property
    def names(self) -> Mapping[int, str]:
        """Fqn of the parameter, by storage of its gradient."""
        return {storage: fqn for fqn, storage in self.trace.gradients.items()}


def play_stage(part: StageTape, *, sums_in_place: bool) -> StageWork:
    """Play one microbatch of a stage whose backward is not split.

    Args:
        part: The tape of the stage.
        sums_in_place: If True, several gradients of one value are added up in place; see
            `tape.play`.
    """
    return played(part, StagePlayer(part, sums_in_place))


def played(part: StageTape, player: StagePlayer) -> StageWork:
    """Let a player play the tape of a stage, and return the result."""
    trace = player.trace()
    backward = trace.log.phases.index("backward")
    split = next(
        number
        for number, (delta, _, phase) in enumerate(trace.log.changes)
        if phase == backward and delta > 0
    )
    if part.sent:
        trace = replace(trace, hook_points=_inner_first(trace.hook_points))
    return StageWork(
        trace=trace,
        split=split,
        received=player.received,
        sent=player.sent,
        given=player.given,
        returned=player.returned,
        second_half=player.second_half,
    )


def _renamed(trace: MicrobatchTrace, names: Mapping[str, str]) -> MicrobatchTrace:
    """Return the trace with modules, units and parameters renamed."""
    return replace(
        trace,
        log=replace(
            trace.log,
            storages=tuple(
                [
                    Storage(term, op, names[module], phase, stream)
                    for term, op, module, phase, stream in trace.log.storages
                ]
            ),
        ),
        hook_points=tuple(
            [HookPoint(event, kind, names[unit]) for event, kind, unit in trace.hook_points]
        ),
        gradients={names[fqn]: storage for fqn, storage in trace.gradients.items()},
        ready={names[fqn]: event for fqn, event in trace.ready.items()},
        grad_relayout={names[fqn]: each for fqn, each in trace.grad_relayout.items()},
    )


def _inner_first(hook_points: tuple[HookPoint, ...]) -> tuple[HookPoint, ...]:
    """Put `BEFORE_BACKWARD` of a unit ahead of the root's, if both are at the same event.

    If the output of a stage's last unit is the output of the stage, the unit's hook runs first,
    because it was registered first. In a whole model the head is between the last unit and the
    output, so the hooks are at different events.
    """
    out = list(hook_points)
    for number, point in enumerate(out[:-1]):
        after = out[number + 1]
        if point[1:] == (HookKind.BEFORE_BACKWARD, "") and after[:2] == point[:2]:
            out[number : number + 2] = [after, point]
    return tuple(out)


class StagePlayer(Player):
    """Plays the tape of a stage, and records the storages that cross the stage's boundaries.

    Attributes:
        received: Storages of the activations received from the previous stage.
        sent: Storages of the activations sent to the next stage.
        given: Storages of the gradients of `sent`, received from the next stage.
        returned: Storages of the gradients of `received`, sent to the previous stage.
        second_half: For a split backward, (number of events, number of hook points) before its
            second half; else None.
    """

    def __init__(self, part: StageTape, sums_in_place: bool) -> None:
        super().__init__(part.tape, sums_in_place)
        self._part = part
        self.received: tuple[int, ...] = ()
        self.sent: tuple[int, ...] = ()
        self.given: tuple[int, ...] = ()
        self.returned: tuple[int, ...] = ()
        self.second_half: tuple[int, int] | None = None

    def _begin_backward(self) -> None:
        self.received = tuple(self._env[value] for value in self._part.received)
        self.sent = tuple(self._env[value] for value in self._part.sent)
        super()._begin_backward()

    def _backward_of_op(self, number: int) -> None:
        super()._backward_of_op(number)
        self._note_given(number)

    def _note_given(self, number: int) -> None:
        if self._part.sent and number == len(self._part.tape.rows) - 1:
            self.given = tuple(self._grads[value] for value in self._part.sent)
            # The pipeline references these gradients too, so autograd never adds to them in place.
            for storage in self.given:
                self._reference(storage)

    def _add_hook_point(self, kind: HookKind, unit: str) -> None:
        if kind == HookKind.END_OF_BACKWARD:
            self.returned = tuple(self._grads.pop(value) for value in self._part.received)
        super()._add_hook_point(kind, unit)
