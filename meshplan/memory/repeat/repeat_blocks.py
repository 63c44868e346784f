"""Repeat the middle one of five traced blocks, to obtain the trace of a model with many of them.

A run of equal blocks is traced with five of them. The three middle blocks must make and free the
same storages in the same order, and may use only their own storages and those of their neighbours.
Then one more block in the middle adds exactly the events of the middle block. If this cannot be
shown for the blocks of a run, `BlocksDifferError` is raised.
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
"""Number of periods of a run that are traced: the first and the last, which may differ from the
others, their two neighbours, which use their storages, and the middle one, which is repeated."""
_SOURCE: Final = 2
"""Index of the traced period that is repeated."""


class BlocksDifferError(Exception):
    """The blocks of a run do not make and free the same storages."""


@dataclass(frozen=True)
class RepeatedBlocks:
    """A run of equal blocks in one `ModuleList`, divided into periods of one or more blocks.

    Args:
        container: Fqn of the list.
        first: Index in the list of the run's first block.
        period: Number of blocks in a period; block `i + period` equals block `i`.
        count: Number of periods in the whole model.
        forward: Index of the event at which the forward of each traced period begins, in order, and
            of the event after the last forward.
        backward: Index of the event at which the backward of each traced period begins, in order of
            execution (the last period first), and of the event after the last backward.
    """

    container: str
    first: int
    period: int
    count: int
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()

    @property
    def num_added(self) -> int:
        """Number of periods that are not traced."""
        return self.count - KEPT

    def kept(self, place: int) -> int | None:
        """Return the index in the traced list of a block of the whole list.

        The result is None for blocks that are left out of the traced model.
        """
        if place < self.first + (_SOURCE + 1) * self.period:
            return place
        place -= self.num_added * self.period
        return place if place >= self.first + (_SOURCE + 1) * self.period else None

    def period_of(self, fqn: str) -> int | None:
        """Return the index of the traced period that contains a module or parameter, or None.

        `fqn` is a name in the traced model.
        """
        place = self.place_of(fqn)
        period = None if place is None else (place - self.first) // self.period
        return period if period is not None and 0 <= period < KEPT else None

    def place_of(self, fqn: str) -> int | None:
        """Return the index in the list of the block that a module or parameter is in, or None."""
        inside = fqn if not self.container else fqn.removeprefix(self.container + ".")
        if not is_inside(fqn, self.container) or inside == fqn == self.container:
            return None
        head = inside.partition(".")[0]
        return int(head) if head.isdigit() else None

    def shown(self, place: int) -> int:
        """Return the index of the traced block that represents a block of the whole list."""
        kept = self.kept(place)
        if kept is not None:
            return kept
        return self.first + _SOURCE * self.period + (place - self.first) % self.period

    def moved(self, fqn: str, by: int) -> str:
        """Return the fqn with the index in the list moved by `by` periods."""
        place = self.place_of(fqn)
        assert place is not None
        return self.at(fqn, place + by * self.period)

    def at(self, fqn: str, place: int) -> str:
        """Return the fqn with the index in the list replaced by `place`."""
        prefix = f"{self.container}." if self.container else ""
        rest = fqn[len(prefix) :].partition(".")[2]
        return f"{prefix}{place}" + (f".{rest}" if rest else "")

    def named(self, fqn: str) -> str:
        """Return the whole model's fqn of a module or parameter of the traced model.

        For copies of the repeated period use `moved`.
        """
        place = self.place_of(fqn)
        is_after = place is not None and place >= self.first + (_SOURCE + 1) * self.period
        return self.moved(fqn, self.num_added) if is_after else fqn


class _Birth(NamedTuple):
    """The origin of a storage.

    Attributes:
        part: Index of the segment that makes the storage.
        order: Number of storages that the segment makes before this one.
    """

    part: int
    order: int


@dataclass(slots=True)
class _LogSegment:
    """A segment of the log: the forward or backward of one period, or events between two periods.

    Attributes:
        start: Index in the log of the segment's first event.
        events: The events, in order.
        run: The run that the segment belongs to; None between periods.
        is_forward: True for a forward, False for a backward.
        period: Index of the period that the segment belongs to; -1 between periods.
        made: Storages that are made in the segment, in order.
    """

    start: int
    events: Sequence[Event]
    run: RepeatedBlocks | None = None
    is_forward: bool = True
    period: int = -1
    made: list[int] = field(default_factory=list)


def repeat_blocks(trace: MicrobatchTrace, runs: Sequence[RepeatedBlocks]) -> MicrobatchTrace:
    """Return the trace of the whole model, from a trace with `KEPT` periods of each run.

    Args:
        trace: The trace of the shortened model.
        runs: The runs of repeated blocks.

    Raises:
        BlocksDifferError: The blocks of a run differ, or use storages of distant modules.
    """
    return _BlockRepeater(trace, runs).whole() if runs else trace


class _BlockRepeater:
    def __init__(self, trace: MicrobatchTrace, runs: Sequence[RepeatedBlocks]) -> None:
        self._trace, self._runs = trace, runs = trace, [_with_ends(run, trace.log) for run in runs]
        self._parts = list(_parts(trace.log, runs))
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
        self._storages = list(trace.log.storages)
        self._events: list[Event] = []
        self._hook_points: list[HookPoint] = []
        self._copies: dict[tuple[int, int], int] = {}
        """Number of the first storage that the copy of a segment makes, by (segment, copy)."""
        self._starts_of_copies: dict[tuple[int, int], int] = {}
        """Index in the written log of the copy's first event, by (segment, copy)."""

    def whole(self) -> MicrobatchTrace:
        for run in self._runs:
            self._check(run)
            self._reserve(run)
        hook_points = self._hook_points_by_segment()
        for number, part in enumerate(self._parts):
            if part.run is None or part.period != _SOURCE:
                self._add(number, part, 0, hook_points[number])
            elif part.is_forward:
                for copy in range(part.run.num_added + 1):
                    self._add(number, part, copy, hook_points[number])
            else:
                for copy in reversed(range(part.run.num_added + 1)):
                    self._add(number, part, copy, hook_points[number])
        log = EventLog(tuple(self._storages), tuple(self._events), self._trace.log.phases)
        return replace(
            self._trace,
            log=log,
            hook_points=tuple(self._hook_points),
            gradients=dict(self._renamed(self._trace.gradients, self._storage_of)),
            ready=dict(self._renamed(self._trace.ready, self._event_of)),
            grad_relayout=dict(
                self._renamed(self._trace.grad_relayout, lambda value, fqn, copy: value)
            ),
            taken=dict(self._renamed(self._trace.taken, self._taken_of)),
        )

    def _part_of(self, run: RepeatedBlocks, is_forward: bool, period: int) -> int:
        return self._by_place[run.container, is_forward, period]

    def _check(self, run: RepeatedBlocks) -> None:
        """Check that the middle periods are equal and only neighbours use their storages."""
        for is_forward in (True, False):
            near = [self._parts[self._part_of(run, is_forward, p)] for p in (1, 2, 3)]
            sizes = [[e.delta for e in part.events if e.delta > 0] for part in near]
            other = near[2] if is_forward else near[0]
            if sizes[0] != sizes[1] or sizes[1] != sizes[2]:
                raise BlocksDifferError(f"{run.container}: its blocks allocate different sizes")
            if self._spelled(run, near[1]) != self._spelled(run, other):
                raise BlocksDifferError(f"{run.container}: its blocks allocate in different orders")
        middle = {self._part_of(run, f, p) for f in (True, False) for p in (1, 2, 3)}
        for part in self._parts:
            for event in part.events:
                if self._births[event.storage].part in middle and (
                    part.run is not run
                    or abs(part.period - self._parts[self._births[event.storage].part].period) > 1
                ):
                    raise BlocksDifferError(
                        f"{run.container}: a storage of a block is freed in a distant module"
                    )

    def _spelled(
        self, run: RepeatedBlocks, part: _LogSegment
    ) -> list[tuple[int, int, bool, int, int]]:
        """Return the events of a segment in a form that is equal for segments that do the same.

        Each event is (bytes, phase, True if a forward made the storage, period that made the
        storage minus this period, number of storages made before it in that segment).
        """
        out = []
        for delta, storage, phase in part.events:
            birth = self._births[storage]
            home = self._parts[birth.part]
            if home.run is not run or abs(home.period - part.period) > 1:
                raise BlocksDifferError(f"{run.container}: a block frees a distant storage")
            out.append((delta, phase, home.is_forward, home.period - part.period, birth.order))
        return out

    def _reserve(self, run: RepeatedBlocks) -> None:
        """Assign numbers to the storages of the added periods: copies 1, 2, ... of the source."""
        for is_forward in (True, False):
            number = self._part_of(run, is_forward, _SOURCE)
            made = [self._trace.log.storages[s] for s in self._parts[number].made]
            for copy in range(1, run.num_added + 1):
                self._copies[number, copy] = len(self._storages)
                self._storages += [_moved(storage, run, copy) for storage in made]
        for place, storage in enumerate(self._trace.log.storages):
            if run.place_of(storage.module) is not None:
                self._storages[place] = storage._replace(module=run.named(storage.module))

    def _add(
        self, number: int, part: _LogSegment, copy: int, hook_points: Sequence[HookPoint]
    ) -> None:
        start = len(self._events)
        self._starts_of_copies[number, copy] = start
        if part.run is None or not part.run.num_added:
            self._events.extend(part.events)
        else:
            self._events.extend(
                Event(delta, self._number(part, copy, storage), phase)
                for delta, storage, phase in part.events
            )
        for point in hook_points:
            unit = self._full_name(point.unit, copy)
            self._hook_points.append(HookPoint(start + point.event - part.start, point.kind, unit))

    def _number(self, part: _LogSegment, copy: int, storage: int) -> int:
        """Return the new number of a storage of the trace, as used in a copy of a segment."""
        birth = self._births[storage]
        home, run = self._parts[birth.part], part.run
        if run is None or home.run is not run or home.period == -1:
            return storage
        # In the whole model the traced periods up to the source come first, then the copies of
        # the source, then the other traced periods.
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

    def _hook_points_by_segment(self) -> list[list[HookPoint]]:
        """Return a list of hook points for each segment, in order.

        A hook point at the edge of two segments belongs to the segment whose block it names.
        """
        out: list[list[HookPoint]] = [[] for _ in self._parts]
        for point in self._trace.hook_points:
            number = max(bisect_right(self._starts, point.event) - 1, 0)
            own = self._own_part(point, number)
            if own is None:
                edge = self._parts[number].start == point.event
                if edge and number and self._is_seam(number):
                    raise BlocksDifferError(f"the unit '{point.unit}' acts between two blocks")
                own = number
            out[own].append(point)
        return out

    def _own_part(self, point: HookPoint, number: int) -> int | None:
        for run in self._runs:
            period = run.period_of(point.unit)
            if period is None:
                continue
            for near in range(number, -1, -1):
                part = self._parts[near]
                if part.start + len(part.events) < point.event:
                    break
                if part.run is run and part.period == period:
                    return near
            if 0 < period < KEPT - 1:
                raise BlocksDifferError(f"the unit '{point.unit}' acts while another block runs")
        return None

    def _is_seam(self, number: int) -> bool:
        """Return True if copies are inserted between the previous segment and this one."""
        both = self._parts[number - 1], self._parts[number]
        return any(part.run is not None and part.period == _SOURCE for part in both)

    def _renamed(self, items: Mapping[str, Any], value: Callable[..., Any]) -> Iterator[Any]:
        """Yield (whole model's name, value) for each name of the traced model and for its copies.

        Args:
            items: Items by the traced model's name.
            value: Maps (item, traced model's name, number of the copy) to the value.
        """
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
        """Return the index of the event before which a copy of a gradient is complete.

        The event is in the backward of the gradient's own period, or in the segment that follows.
        """
        run = next((r for r in self._runs if r.period_of(fqn) is not None), None)
        number = max(bisect_right(self._starts, event) - 1, 0)
        if run is not None:
            own = self._part_of(run, False, run.period_of(fqn) or 0)
            part = self._parts[own]
            if part.start <= event <= part.start + len(part.events):
                number = own
            elif 0 < part.period < KEPT - 1:
                raise BlocksDifferError(f"the gradient of {fqn} completes while another block runs")
        return self._starts_of_copies[number, copy] + event - self._parts[number].start


def _with_ends(run: RepeatedBlocks, log: EventLog) -> RepeatedBlocks:
    """Return the run with its last forward extended by the frees that directly follow.

    These free tensors that the caller of the blocks still referenced. After any other period, such
    frees are part of its segment already, which extends to the beginning of the next period.
    """
    end, forward = run.forward[-1], log.events[run.forward[-1] - 1].phase
    while log.events[end].delta < 0 and log.events[end].phase == forward:
        end += 1
    return replace(run, forward=(*run.forward[:-1], end))


def _parts(log: EventLog, runs: Sequence[RepeatedBlocks]) -> Iterator[_LogSegment]:
    """Yield the segments of the log, in order."""
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
