"""Work of many alike blocks from work of a few: what one block adds is repeated.

A run of blocks is traced with five of them. Those in the middle must make and free the same in the
same order, each touching nothing but its own, its neighbours' and what both sides hand over; then
a further block between them adds just that. Whoever cannot show it is not stretched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from meshplan.memory.log.events import Event, EventLog, Storage
from meshplan.memory.log.microbatch import HookPoint, MicrobatchTrace
from meshplan.model.graph import is_inside

KEPT: Final = 5
"""Periods of a run that are traced: the first and the last are special, those beside them touch
them, and the one in the middle is repeated."""
_SOURCE: Final = 2


class BlocksDifferError(Exception):
    """The blocks of a run do not do the same."""


@dataclass(frozen=True)
class RepeatedBlocks:
    """Blocks of one list that are alike, period by period.

    Args:
        container: The fqn of the list.
        first: The first block's place in it.
        period: After how many blocks they are alike again.
        count: How many periods there are.
        forward: The event at which forward of each kept period begins, and that of the end.
        backward: The event at which backward of each kept period begins, and that of the end.
    """

    container: str
    first: int
    period: int
    count: int
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()

    @property
    def num_added(self) -> int:
        """Periods that are not traced."""
        return self.count - KEPT

    def kept(self, place: int) -> int | None:
        """The place among the kept blocks of a block of the whole list; None if it is left out."""
        if place < self.first + (_SOURCE + 1) * self.period:
            return place
        place -= self.num_added * self.period
        return place if place >= self.first + (_SOURCE + 1) * self.period else None

    def period_of(self, fqn: str) -> int | None:
        """The kept period that something of the short model lies in."""
        place = self.place_of(fqn)
        period = None if place is None else (place - self.first) // self.period
        return period if period is not None and 0 <= period < KEPT else None

    def place_of(self, fqn: str) -> int | None:
        """The place in the list of what something lies in."""
        inside = fqn if not self.container else fqn.removeprefix(self.container + ".")
        if not is_inside(fqn, self.container) or inside == fqn == self.container:
            return None
        head = inside.partition(".")[0]
        return int(head) if head.isdigit() else None

    def shown(self, place: int) -> int:
        """The place among the kept blocks of one that does the same as a block of the whole."""
        kept = self.kept(place)
        if kept is not None:
            return kept
        return self.first + _SOURCE * self.period + (place - self.first) % self.period

    def moved(self, fqn: str, by: int) -> str:
        """A name with the place in the list so many periods further on."""
        place = self.place_of(fqn)
        assert place is not None
        return self.at(fqn, place + by * self.period)

    def at(self, fqn: str, place: int) -> str:
        """A name with another place in the list."""
        prefix = f"{self.container}." if self.container else ""
        rest = fqn[len(prefix) :].partition(".")[2]
        return f"{prefix}{place}" + (f".{rest}" if rest else "")

    def named(self, fqn: str) -> str:
        """The name in the whole model of something of the short one, but for what is repeated."""
        place = self.place_of(fqn)
        is_after = place is not None and place >= self.first + (_SOURCE + 1) * self.period
        return self.moved(fqn, self.num_added) if is_after else fqn


class _Birth(NamedTuple):
    """Where a storage is made: the part of the log, and its place among those made there."""

    part: int
    order: int


@dataclass(slots=True)
class _LogSegment:
    """A piece of the log: one period's forward or backward, or what lies between such.

    Attributes:
        start: Its first event.
        events: They.
        made: Storages made in it.
        run: The run it belongs to; None between.
    """

    start: int
    events: Sequence[Event]
    run: RepeatedBlocks | None = None
    is_forward: bool = True
    period: int = -1
    made: list[int] = field(default_factory=list)


def repeat_blocks(work: MicrobatchTrace, runs: Sequence[RepeatedBlocks]) -> MicrobatchTrace:
    """The work of the whole model.

    Args:
        work: Of the model with `KEPT` periods of each run.

    Raises:
        NotAlikeError: The blocks of a run differ.
    """
    return _BlockRepeater(work, runs).whole() if runs else work


class _BlockRepeater:
    def __init__(self, work: MicrobatchTrace, runs: Sequence[RepeatedBlocks]) -> None:
        self._work, self._runs = work, runs = work, [_with_ends(run, work.log) for run in runs]
        self._parts = list(_parts(work.log, runs))
        self._starts = [part.start for part in self._parts]
        self._births: dict[int, _Birth] = {}
        for number, part in enumerate(self._parts):
            for event in part.events:
                if event.storage not in self._births:
                    self._births[event.storage] = _Birth(number, len(part.made))
                    part.made.append(event.storage)
        self._by_place = {
            (part.run.container, part.is_forward, part.period): number
            for number, part in enumerate(self._parts)
            if part.run is not None
        }
        self._storages = list(work.log.storages)
        self._events: list[Event] = []
        self._marks: list[HookPoint] = []
        self._shifts: list[tuple[int, int]] = []
        """(the event at which a part began, how many more are before it now)."""
        self._copies: dict[tuple[int, int], int] = {}
        """By part and copy: the number of the first storage that is made in it."""
        self._starts_of_copies: dict[tuple[int, int], int] = {}

    def whole(self) -> MicrobatchTrace:
        for run in self._runs:
            self._check(run)
            self._reserve(run)
        marks = self._marks_by_part()
        for number, part in enumerate(self._parts):
            if part.run is None or part.period != _SOURCE:
                self._add(number, part, 0, marks[number])
            elif part.is_forward:
                for copy in range(part.run.num_added + 1):
                    self._add(number, part, copy, marks[number])
            else:
                for copy in reversed(range(part.run.num_added + 1)):
                    self._add(number, part, copy, marks[number])
        log = EventLog(tuple(self._storages), tuple(self._events), self._work.log.phases)
        return replace(
            self._work,
            log=log,
            marks=tuple(self._marks),
            gradients=dict(self._renamed(self._work.gradients, self._storage_of)),
            ready=dict(self._renamed(self._work.ready, self._event_of)),
            settling=dict(self._renamed(self._work.settling, lambda value, fqn, copy: value)),
            taken=dict(self._renamed(self._work.taken, self._taken_of)),
        )

    def _part_of(self, run: RepeatedBlocks, is_forward: bool, period: int) -> int:
        return self._by_place[run.container, is_forward, period]

    def _check(self, run: RepeatedBlocks) -> None:
        """The middle periods are alike, and their storages stay among neighbours."""
        for is_forward in (True, False):
            near = [self._parts[self._part_of(run, is_forward, p)] for p in (1, 2, 3)]
            sizes = [[e.delta for e in part.events if e.delta > 0] for part in near]
            other = near[2] if is_forward else near[0]
            if sizes[0] != sizes[1] or sizes[1] != sizes[2]:
                raise BlocksDifferError(f"{run.container}: other sizes")
            if self._spelled(run, near[1]) != self._spelled(run, other):
                raise BlocksDifferError(f"{run.container}: another order")
        middle = {self._part_of(run, f, p) for f in (True, False) for p in (1, 2, 3)}
        for part in self._parts:
            for event in part.events:
                if self._births[event.storage].part in middle and (
                    part.run is not run
                    or abs(part.period - self._parts[self._births[event.storage].part].period) > 1
                ):
                    raise BlocksDifferError(
                        f"{run.container}: what a block makes is freed elsewhere"
                    )

    def _spelled(
        self, run: RepeatedBlocks, part: _LogSegment
    ) -> list[tuple[int, int, bool, int, int]]:
        """The events with storages named from here."""
        out = []
        for delta, storage, phase in part.events:
            birth = self._births[storage]
            home = self._parts[birth.part]
            if home.run is not run or abs(home.period - part.period) > 1:
                raise BlocksDifferError(f"{run.container}: a block frees what it does not own")
            out.append((delta, phase, home.is_forward, home.period - part.period, birth.order))
        return out

    def _reserve(self, run: RepeatedBlocks) -> None:
        """Numbers for what the added periods make; copy 0 is the one that was traced."""
        for is_forward in (True, False):
            number = self._part_of(run, is_forward, _SOURCE)
            made = [self._work.log.storages[s] for s in self._parts[number].made]
            for copy in range(1, run.num_added + 1):
                self._copies[number, copy] = len(self._storages)
                self._storages += [_moved(storage, run, copy) for storage in made]
        for place, storage in enumerate(self._work.log.storages):
            if run.place_of(storage.module) is not None:
                self._storages[place] = storage._replace(module=run.named(storage.module))

    def _add(self, number: int, part: _LogSegment, copy: int, marks: Sequence[HookPoint]) -> None:
        start = len(self._events)
        self._starts_of_copies[number, copy] = start
        if part.run is None or not part.run.num_added:
            self._events.extend(part.events)
        else:
            self._events.extend(
                Event(delta, self._number(part, copy, storage), phase)
                for delta, storage, phase in part.events
            )
        for mark in marks:
            unit = self._full_name(mark.unit, copy)
            self._marks.append(HookPoint(start + mark.event - part.start, mark.moment, unit))

    def _number(self, part: _LogSegment, copy: int, storage: int) -> int:
        """What a storage that a copy of a part touches is called."""
        birth = self._births[storage]
        home, run = self._parts[birth.part], part.run
        if run is None or home.run is not run or home.period == -1:
            return storage
        # Places in a row: up to the source the kept ones, then its copies, then the kept ones.
        at = part.period + copy if part.period <= _SOURCE else part.period + run.num_added
        place = at + home.period - part.period
        if place < _SOURCE:
            home_of, its_copy = place, 0
        elif place <= _SOURCE + run.num_added:
            home_of, its_copy = _SOURCE, place - _SOURCE
        else:
            home_of, its_copy = place - run.num_added, 0
        number = self._part_of(run, home.is_forward, home_of)
        if its_copy:
            return self._copies[number, its_copy] + birth.order
        return self._parts[number].made[birth.order]

    def _marks_by_part(self) -> list[list[HookPoint]]:
        """Of each part, in order; at its edge a mark is the part's whose block it is of."""
        out: list[list[HookPoint]] = [[] for _ in self._parts]
        for mark in self._work.marks:
            number = max(bisect_right(self._starts, mark.event) - 1, 0)
            own = self._own_part(mark, number)
            if own is None:
                edge = self._parts[number].start == mark.event
                if edge and number and self._is_seam(number):
                    raise BlocksDifferError(f"'{mark.unit}' acts between two blocks")
                own = number
            out[own].append(mark)
        return out

    def _own_part(self, mark: HookPoint, number: int) -> int | None:
        for run in self._runs:
            period = run.period_of(mark.unit)
            if period is None:
                continue
            for near in range(number, -1, -1):
                part = self._parts[near]
                if part.start + len(part.events) < mark.event:
                    break
                if part.run is run and part.period == period:
                    return near
            if 0 < period < KEPT - 1:
                raise BlocksDifferError(f"'{mark.unit}' acts while another block runs")
        return None

    def _is_seam(self, number: int) -> bool:
        """Whether periods are put in right before this part, or right after the one before."""
        both = self._parts[number - 1], self._parts[number]
        return any(part.run is not None and part.period == _SOURCE for part in both)

    def _renamed(self, items: Mapping[str, Any], value: Callable[..., Any]) -> Iterator[Any]:
        """(full name, value) of what the short model names, and of its copies."""
        for fqn, item in items.items():
            run = next((r for r in self._runs if r.period_of(fqn) == _SOURCE), None)
            for copy in range(run.num_added + 1 if run else 1):
                yield self._full_name(fqn, copy), value(item, fqn, copy)

    def _full_name(self, fqn: str, copy: int) -> str:
        for run in self._runs:
            if run.place_of(fqn) is not None:
                return run.moved(fqn, copy) if copy else run.named(fqn)
        return fqn

    def _storage_of(self, storage: int, fqn: str, copy: int) -> int:
        birth = self._births[storage]
        if not copy:
            return storage
        if (birth.part, copy) not in self._copies:
            raise BlocksDifferError(f"the gradient of {fqn} is made outside of its block")
        return self._copies[birth.part, copy] + birth.order

    def _taken_of(self, storages: tuple[int, ...], fqn: str, copy: int) -> tuple[int, ...]:
        run = next((r for r in self._runs if r.period_of(fqn) is not None), None)
        if run is None:
            return storages
        part = self._parts[self._part_of(run, True, run.period_of(fqn) or 0)]
        return tuple(self._number(part, copy, storage) for storage in storages)

    def _event_of(self, event: int, fqn: str, copy: int) -> int:
        """Of a gradient that is there: events of its own period's backward, or of what follows."""
        run = next((r for r in self._runs if r.period_of(fqn) is not None), None)
        number = max(bisect_right(self._starts, event) - 1, 0)
        if run is not None:
            own = self._part_of(run, False, run.period_of(fqn) or 0)
            part = self._parts[own]
            if part.start <= event <= part.start + len(part.events):
                number = own
            elif 0 < part.period < KEPT - 1:
                raise BlocksDifferError(f"the gradient of {fqn} is there while another block runs")
        return self._starts_of_copies[number, copy] + event - self._parts[number].start


def _with_ends(run: RepeatedBlocks, log: EventLog) -> RepeatedBlocks:
    """With what ends as soon as the last block has run: whoever called it held on to that.

    What ends after any other block is of the next one's period, which begins later.
    """
    end, forward = run.forward[-1], log.events[run.forward[-1] - 1].phase
    while log.events[end].delta < 0 and log.events[end].phase == forward:
        end += 1
    return replace(run, forward=(*run.forward[:-1], end))


def _parts(log: EventLog, runs: Sequence[RepeatedBlocks]) -> Iterator[_LogSegment]:
    """The log in pieces, in order."""
    cuts: list[tuple[int, int, RepeatedBlocks, bool, int]] = []
    for run in runs:
        for period in range(KEPT):
            start, end = run.forward[period : period + 2]
            cuts.append((start, end, run, True, period))
            start, end = run.backward[period : period + 2]
            cuts.append((start, end, run, False, KEPT - 1 - period))
    at = 0
    for start, end, run, is_forward, period in sorted(cuts, key=lambda cut: cut[:2]):
        if start < at or end < start:
            raise BlocksDifferError(f"{run.container}: its blocks do not run one after the other")
        if at < start:
            yield _LogSegment(at, log.events[at:start])
        yield _LogSegment(start, log.events[start:end], run, is_forward, period)
        at = end
    yield _LogSegment(at, log.events[at:])


def _moved(storage: Storage, run: RepeatedBlocks, copy: int) -> Storage:
    if run.place_of(storage.module) is None:
        return storage
    return storage._replace(module=run.moved(storage.module, copy))
