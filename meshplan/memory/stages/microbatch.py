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
_NAMELESS_IN_HALVES: Final = ("waiting", "held")
"""Cached properties of `StageWork` that renaming does not change. The second tuple has those that
exist for a split backward only."""
_FORWARD: Final = (HookKind.BEFORE_FORWARD, HookKind.AFTER_FORWARD)


@dataclass(frozen=True)
class StageWork:
    """One microbatch of one stage, with the storages that cross the stage's boundaries.

    Args:
        work: Trace of forward, then backward.
        split: Index of the first event of backward.
        received: Storages of the activations received from the previous stage.
        sent: Storages of the activations sent to the next stage.
        given: Storages of the gradients of `sent`, received from the next stage.
        returned: Storages of the gradients of `received`, sent to the previous stage.
        turn: For a split backward, (number of events, number of marks) before its second half; None
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
        """Return the same work with every module, unit and parameter renamed.

        Args:
            names: New names by old name.
        """
        out = replace(self, work=_renamed(self.work, names))
        for figure in _NAMELESS if self.turn is None else (*_NAMELESS, *_NAMELESS_IN_HALVES):
            out.__dict__[figure] = getattr(self, figure)
        return out

    @cached_property
    def num_before(self) -> int:
        """Number of events that allocate storages that exist before the microbatch."""
        return sum(not phase for _, _, phase in self.work.log.changes)

    @cached_property
    def storages(self) -> tuple[Storage, ...]:
        """All storages of the log; those in `sent` and `returned` are communication buffers."""
        crossing = {*self.sent, *self.returned}
        return tuple(
            each._replace(term=Term.COMMUNICATION) if number in crossing else each
            for number, each in enumerate(self.work.log.storages)
        )

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """Bytes of each storage, by its number."""
        return {storage: delta for delta, storage, _ in self.work.log.changes if delta > 0}

    @cached_property
    def left(self) -> tuple[int, ...]:
        """Storages that forward leaves for backward, without those in `sent`."""
        live: dict[int, None] = {}
        for delta, storage, _ in self.work.log.changes[self.num_before : self.split]:
            if delta > 0:
                live[storage] = None
            else:
                live.pop(storage)
        return tuple(live.keys() - {*self.sent})

    @cached_property
    def waiting(self) -> tuple[int, ...]:
        """Storages that are made before the second half of a split backward and freed in it."""
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
        """Storages that cross a boundary and that the graph references until the second half."""
        crossing = {*self.received, *self.given, *self.returned}
        return frozenset(crossing & {*self.waiting})

    @cached_property
    def host_bytes(self) -> int:
        """Bytes that forward leaves for backward in host memory."""
        return sum(delta for _, delta in self.work.host or () if delta > 0)

    @cached_property
    def changes(self) -> Mapping[str, int]:
        """Change in live bytes by kind of action, such as "F" or "SEND_B".

        The key "arrived" is the change once the gradients sent back are known to have arrived.
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
        """For each event, the index of the first event at or after it that needs attention.

        All other events can simply be copied into a pass: there is no mark, no phase begins, no
        storage crosses a stage boundary, and no gradient is made or assigned.
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
        """Return the marks of the forward, backward or half of a backward that begins at `first`.

        Args:
            first: `num_before` for forward, `split` for backward or its first half, the event in
                `turn` for its second half.
        """
        marks = self.work.marks
        # The kind of a mark does not tell forward from backward, since backward may recompute a
        # unit. So forward's marks end where the first mark of another kind is.
        back = next(n for n, mark in enumerate(marks) if mark.moment not in _FORWARD)
        if first == self.num_before:
            return marks[:back]
        if self.turn is None:
            return marks[back:]
        return marks[self.turn[1] :] if first == self.turn[0] else marks[back : self.turn[1]]

    @cached_property
    def ready_at(self) -> Mapping[int, Sequence[int]]:
        """Storages of the parameters' gradients complete before an event, by the event's index."""
        out: dict[int, list[int]] = {}
        for fqn, event in self.work.ready.items():
            out.setdefault(event, []).append(self.work.gradients[fqn])
        return out

    @cached_property
    def names(self) -> Mapping[int, str]:
        """Fqn of the parameter, by storage of its gradient."""
        return {storage: fqn for fqn, storage in self.work.gradients.items()}


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
    """Put `BEFORE_BACKWARD` of a unit ahead of the root's, if both are at the same event.

    If the output of a stage's last unit is the output of the stage, the unit's hook runs first,
    because it was registered first. In a whole model the head is between the last unit and the
    output, so the hooks are at different events.
    """
    out = list(marks)
    for number, mark in enumerate(out[:-1]):
        after = out[number + 1]
        if mark[1:] == (HookKind.BEFORE_BACKWARD, "") and after[:2] == mark[:2]:
            out[number : number + 2] = [after, mark]
    return tuple(out)


class StagePlayer(Player):
    """Plays the tape of a stage, and records the storages that cross the stage's boundaries.

    Attributes:
        received: Storages of the activations received from the previous stage.
        sent: Storages of the activations sent to the next stage.
        given: Storages of the gradients of `sent`, received from the next stage.
        returned: Storages of the gradients of `received`, sent to the previous stage.
        turn: For a split backward, (number of events, number of marks) before its second half; else
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
            # The pipeline references these gradients too, so autograd never adds to them in place.
            for storage in self.given:
                self._hold(storage)

    def _mark(self, moment: HookKind, unit: str) -> None:
        if moment == HookKind.END_OF_BACKWARD:
            self.returned = tuple(self._grads.pop(value) for value in self._part.received)
        super()._mark(moment, unit)
