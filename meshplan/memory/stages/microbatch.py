"""One microbatch of one stage, played alone: its events, what it leaves and what it sends."""

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
_NAMELESS_IN_HALVES: Final = ("waiting", "held")
"""Cached properties that renaming does not change; the second list is for a split backward only."""
_FORWARD: Final = (HookKind.BEFORE_FORWARD, HookKind.AFTER_FORWARD)


@dataclass(frozen=True)
class StageWork:
    """One microbatch of one stage.

    Args:
        work: Trace of forward, then backward.
        split: Number of the first event of backward.
        received: Storages of the activations received from the stage before.
        sent: Storages of the activations sent to the next stage.
        given: Storages of the gradients received for what was sent.
        returned: Storages of the gradients of what was received.
        turn: For a split backward, the numbers of events and of marks before the second half; None
            if the backward is not split.
    """

    work: MicrobatchTrace
    split: int
    received: tuple[int, ...]
    sent: tuple[int, ...]
    given: tuple[int, ...]
    returned: tuple[int, ...]
    turn: tuple[int, int] | None = None

    def renamed(self, names: Mapping[str, str]) -> StageWork:
        """Return the same work with every module renamed as in `names`."""
        out = replace(self, work=_renamed(self.work, names))
        for figure in _NAMELESS if self.turn is None else (*_NAMELESS, *_NAMELESS_IN_HALVES):
            out.__dict__[figure] = getattr(self, figure)
        return out

    @cached_property
    def num_before(self) -> int:
        """Number of events of storages that exist before the microbatch."""
        return sum(not phase for _, _, phase in self.work.log.changes)

    @cached_property
    def storages(self) -> tuple[Storage, ...]:
        """All storages, where those that are sent on or back are communication buffers."""
        crossing = {*self.sent, *self.returned}
        return tuple(
            each._replace(term=Term.COMMUNICATION) if number in crossing else each
            for number, each in enumerate(self.work.log.storages)
        )

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """Bytes of each storage."""
        return {storage: delta for delta, storage, _ in self.work.log.changes if delta > 0}

    @cached_property
    def left(self) -> tuple[int, ...]:
        """Storages that forward leaves for backward, without those that are sent."""
        live: dict[int, None] = {}
        for delta, storage, _ in self.work.log.changes[self.num_before : self.split]:
            if delta > 0:
                live[storage] = None
            else:
                live.pop(storage)
        return tuple(live.keys() - {*self.sent})

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """Storages made before the second half of a split backward that are freed in it."""
        assert self.turn is not None
        live: dict[int, None] = {}
        for delta, storage, _ in self.work.log.changes[self.num_before : self.turn[0]]:
            if delta > 0:
                live[storage] = None
            else:
                live.pop(storage, None)
        later = {
            storage for delta, storage, _ in self.work.log.changes[self.turn[0] :] if delta < 0
        }
        return tuple(storage for storage in (*live, *self.received) if storage in later)

    @cached_property
    def held(self) -> frozenset[int]:
        """Storages that cross an edge and that the graph references until the second half."""
        crossing = {*self.received, *self.given, *self.returned}
        return frozenset(crossing & {*self.waiting})

    @cached_property
    def host_bytes(self) -> int:
        """Bytes that forward leaves for backward in host memory."""
        return sum(delta for _, delta in self.work.host or () if delta > 0)

    @cached_property
    def changes(self) -> Mapping[str, int]:
        """Change in live bytes from each kind of action.

        The key "arrived" is for what was sent back and is known to have arrived.
        """

        def total(storages: Iterable[int]) -> int:
            return sum(self.sizes[storage] for storage in storages)

        if self.turn is not None:
            kept, back = total(self.waiting), total({*self.returned} - self.held)
            return {
                "F": total((*self.left, *self.sent)),
                "I": back + kept - total((*self.left, *self.sent, *self.given)),
                "W": -kept,
                "RECV_F": total(self.received),
                "RECV_B": total(self.given),
                "SEND_B": -total({*self.received} - self.held),
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
        """For each event, the next event from there on that cannot simply be copied into a pass.

        At all other events there is no mark, no phase begins, nothing crosses an edge, and no
        gradient is made or assigned.
        """
        events = self.work.log.changes
        marked = {mark.event for mark in self.work.marks}
        marked |= {event for event, _ in self.work.host or ()}
        looked_at = {*self.sent, *self.given, *self.names}
        marked |= {*self.work.ready.values()}
        if self.turn is not None:
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

    def marks_between(self, first: int) -> Sequence[HookPoint]:
        """Return the marks of forward, backward or a half of it, by its first event."""
        marks = self.work.marks
        # Backward may recompute a unit, so forward's marks end at the first mark of another kind.
        back = next(n for n, mark in enumerate(marks) if mark.moment not in _FORWARD)
        if first == self.num_before:
            return marks[:back]
        if self.turn is None:
            return marks[back:]
        return marks[self.turn[1] :] if first == self.turn[0] else marks[back : self.turn[1]]

    @cached_property
    def ready_at(self) -> Mapping[int, Sequence[int]]:
        """Gradients of weights that are complete before each event."""
        out: dict[int, list[int]] = {}
        for fqn, event in self.work.ready.items():
            out.setdefault(event, []).append(self.work.gradients[fqn])
        return out

    @cached_property
    def names(self) -> Mapping[int, str]:
        """The parameter whose gradient each storage is."""
        return {storage: fqn for fqn, storage in self.work.gradients.items()}


def play_stage(part: StageTape, *, sums_in_place: bool) -> StageWork:
    """Play one microbatch of a stage alone."""
    return played(part, StagePlayer(part, sums_in_place))


def played(part: StageTape, player: StagePlayer) -> StageWork:
    """Return the `StageWork` that a player plays."""
    work = player.work()
    backward = work.log.phases.index("backward")
    split = next(
        number
        for number, (delta, _, phase) in enumerate(work.log.changes)
        if phase == backward and delta > 0
    )
    if part.sent:
        work = replace(work, marks=_inner_first(work.marks))
    return StageWork(
        work=work,
        split=split,
        received=player.received,
        sent=player.sent,
        given=player.given,
        returned=player.returned,
        turn=player.turn,
    )


def _renamed(work: MicrobatchTrace, names: Mapping[str, str]) -> MicrobatchTrace:
    """Return the trace with modules, units and parameters renamed."""
    return replace(
        work,
        log=replace(
            work.log,
            storages=tuple(
                [
                    Storage(term, op, names[module], phase, stream)
                    for term, op, module, phase, stream in work.log.storages
                ]
            ),
        ),
        marks=tuple([HookPoint(event, moment, names[unit]) for event, moment, unit in work.marks]),
        gradients={names[fqn]: storage for fqn, storage in work.gradients.items()},
        ready={names[fqn]: event for fqn, event in work.ready.items()},
        settling={names[fqn]: each for fqn, each in work.settling.items()},
    )


def _inner_first(marks: tuple[HookPoint, ...]) -> tuple[HookPoint, ...]:
    """Put the mark of a unit's backward ahead of the root's, if both begin at the same event.

    The output of a stage's last unit is the output of the stage, so the unit's hook was registered
    first and runs first. In a whole model the head lies in between.
    """
    out = list(marks)
    for number, mark in enumerate(out[:-1]):
        after = out[number + 1]
        if mark[1:] == (HookKind.BEFORE_BACKWARD, "") and after[:2] == mark[:2]:
            out[number : number + 2] = [after, mark]
    return tuple(out)


class StagePlayer(Player):
    """Plays the tape of a stage, and records what crosses its edges.

    Attributes:
        received: Storages of the activations received from the stage before.
        sent: Storages of the activations sent to the next stage.
        given: Storages of the gradients received for what was sent.
        returned: Storages of the gradients of what was received.
        turn: For a split backward, the numbers of events and of marks before the second half; else
            None.
    """

    def __init__(self, part: StageTape, sums_in_place: bool) -> None:
        super().__init__(part.tape, sums_in_place)
        self._part = part
        self.received: tuple[int, ...] = ()
        self.sent: tuple[int, ...] = ()
        self.given: tuple[int, ...] = ()
        self.returned: tuple[int, ...] = ()
        self.turn: tuple[int, int] | None = None

    def _begin_backward(self) -> None:
        self.received = tuple(self._env[value] for value in self._part.received)
        self.sent = tuple(self._env[value] for value in self._part.sent)
        super()._begin_backward()

    def _back(self, number: int) -> None:
        super()._back(number)
        self._note_given(number)

    def _note_given(self, number: int) -> None:
        if self._part.sent and number == len(self._part.tape.rows) - 1:
            self.given = tuple(self._grads[value] for value in self._part.sent)
            for storage in self.given:  # So does the pipeline: nothing is added to them in place.
                self._hold(storage)

    def _mark(self, moment: HookKind, unit: str) -> None:
        if moment == HookKind.END_OF_BACKWARD:
            self.returned = tuple(self._grads.pop(value) for value in self._part.received)
        super()._mark(moment, unit)
