"""One microbatch of one stage, played by itself: what it takes, what it leaves, what crosses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshplan.memory.log import Storage, Term
from meshplan.memory.stage_tape import StageTape
from meshplan.memory.tape import Player
from meshplan.memory.work import Mark, Moment, Work


@dataclass(frozen=True)
class StageWork:
    """One microbatch of one stage.

    Args:
        work: Forward, then backward.
        split: The first event of backward.
        received: Storages that came from the stage before.
        sent: Storages that go to the next.
        given: Storages of the gradients that come back for these.
        returned: Storages of the gradients of what was received.
    """

    work: Work
    split: int
    received: tuple[int, ...]
    sent: tuple[int, ...]
    given: tuple[int, ...]
    returned: tuple[int, ...]

    @cached_property
    def num_before(self) -> int:
        """Events of what is there before."""
        return sum(event.phase == 0 for event in self.work.log.events)

    @cached_property
    def storages(self) -> tuple[Storage, ...]:
        """Those of the work, with what is sent for what it is."""
        crossing = {*self.sent, *self.returned}
        return tuple(
            each._replace(term=Term.COMMUNICATION) if number in crossing else each
            for number, each in enumerate(self.work.log.storages)
        )

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """Bytes of each storage."""
        return {storage: delta for delta, storage, _ in self.work.log.events if delta > 0}

    @cached_property
    def left(self) -> tuple[int, ...]:
        """Storages that forward leaves for backward, those apart that cross an edge."""
        live: dict[int, None] = {}
        for delta, storage, _ in self.work.log.events[self.num_before : self.split]:
            if delta > 0:
                live[storage] = None
            else:
                live.pop(storage)
        return tuple(live.keys() - {*self.sent})

    @cached_property
    def host_bytes(self) -> int:
        """What forward leaves for backward in the host's memory."""
        return sum(delta for _, delta in self.work.host or () if delta > 0)

    @cached_property
    def changes(self) -> Mapping[str, int]:
        """By the kind of an action, how many bytes more there are after it.

        And once what was sent back is known to have arrived.
        """

        def total(storages: Iterable[int]) -> int:
            return sum(self.sizes[storage] for storage in storages)

        return {
            "F": total((*self.left, *self.sent)),
            "B": total(self.returned) - total((*self.left, *self.sent, *self.given)),
            "RECV_F": total(self.received),
            "RECV_B": total(self.given),
            "SEND_B": -total(self.received),
            "arrived": -total(self.returned),
        }

    @cached_property
    def is_plain(self) -> Sequence[bool]:
        """Of each event, whether nothing has to be looked at when it is written again.

        No mark stands there and no phase begins, nothing crosses an edge, no gradient is there,
        and none was there before that ends with its operation.
        """
        events, storages = self.work.log.events, self.work.log.storages
        marked = {mark.event for mark in self.work.marks}
        marked |= {event for event, _ in self.work.host or ()}
        looked_at = {*self.sent, *self.given, *self.names}
        out, phase, made_by = [], 0, None
        for number, (delta, storage, now) in enumerate(events):
            plain = number not in marked and now == phase and storage not in looked_at
            phase = now
            if delta > 0:
                own = storages[storage].op, storages[storage].module
                if made_by is not None and own != made_by:
                    plain, made_by = False, None
                if storage in self.names:
                    made_by = own
            out.append(plain)
        return out

    @cached_property
    def names(self) -> Mapping[int, str]:
        """By its storage, whose gradient it is."""
        return {storage: fqn for fqn, storage in self.work.gradients.items()}


def play_stage(part: StageTape, *, sums_in_place: bool) -> StageWork:
    """One microbatch of a stage, by itself."""
    player = _StagePlayer(part, sums_in_place)
    work = player.work()
    events, phases = work.log.events, work.log.phases
    backward = phases.index("backward")
    split = next(n for n, e in enumerate(events) if e.phase == backward and e.delta > 0)
    if part.sent:
        work = replace(work, marks=_inner_first(work.marks))
    return StageWork(
        work=work,
        split=split,
        received=player.received,
        sent=player.sent,
        given=player.given,
        returned=player.returned,
    )


def _inner_first(marks: tuple[Mark, ...]) -> tuple[Mark, ...]:
    """What a stage's last unit gives is what the stage gives: its hook came first, and runs first.

    Of a whole model, the head stands between.
    """
    out = list(marks)
    for number, mark in enumerate(out[:-1]):
        after = out[number + 1]
        if mark[1:] == (Moment.BEFORE_BACKWARD, "") and after[:2] == mark[:2]:
            out[number : number + 2] = [after, mark]
    return tuple(out)


class _StagePlayer(Player):
    """Plays the tape of a stage, and notes what crosses its edges."""

    def __init__(self, part: StageTape, sums_in_place: bool) -> None:
        super().__init__(part.tape, sums_in_place)
        self._part = part
        self.received: tuple[int, ...] = ()
        self.sent: tuple[int, ...] = ()
        self.given: tuple[int, ...] = ()
        self.returned: tuple[int, ...] = ()

    def _begin_backward(self) -> None:
        self.received = tuple(self._env[value] for value in self._part.received)
        self.sent = tuple(self._env[value] for value in self._part.sent)
        super()._begin_backward()

    def _back(self, number: int) -> None:
        super()._back(number)
        if self._part.sent and number == len(self._part.tape.rows) - 1:
            self.given = tuple(self._grads[value] for value in self._part.sent)
            for storage in self.given:  # As the pipeline does, so nothing is added to them.
                self._hold(storage)

    def _mark(self, moment: Moment, unit: str) -> None:
        if moment == Moment.END_OF_BACKWARD:
            self.returned = tuple(self._grads.pop(value) for value in self._part.received)
        super()._mark(moment, unit)
