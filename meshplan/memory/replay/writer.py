"""Writes an event log: what wrappers make and free, between pieces of traced or told work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshplan.memory.log.events import Change, EventLog, Storage, Term


class LogWriter:
    """An event log in the making.

    Args:
        has_host: The host's memory is another; otherwise what is there is here too.
    """

    def __init__(self, *, has_host: bool = False) -> None:
        self.has_host = has_host
        self._hosted: set[int] = set()
        self._host_live = self._host_most = 0
        self._storages: list[Storage] = []
        self._events: list[Change] = []
        self._phases: list[str] = ["before"]
        self._sizes: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._passing: dict[int, tuple[int, Term]] = {}
        """By storage, where it was made, and its term if it does not last."""

    def begin(self, phase: str) -> None:
        """Say which phase begins."""
        if self._phases[-1] != phase:
            self._phases.append(phase)

    def make(
        self,
        size: int,
        term: Term,
        module: str = "",
        op: str = "",
        *,
        stream: int = 0,
        on_host: bool = False,
        passing: Term | None = None,
    ) -> int:
        """A storage of this many bytes, held once; on the host, if that is another memory.

        Args:
            passing: What it is for if it does not last: `COMMUNICATION` up to the step, anything
                else beyond the phase in which it is made. A trace has no other way to tell.
        """
        number = len(self._storages)
        if passing is not None:
            self._passing[number] = len(self._phases), passing
        self._storages.append(Storage(term, op, module, self._phases[-1], stream))
        self._sizes[number], self._holders[number] = size, 1
        if on_host and self.has_host:
            self._hosted.add(number)
            self._host_live += size
            self._host_most = max(self._host_most, self._host_live)
        elif size:
            self._events.append((size, number, len(self._phases) - 1))
        return number

    def change_host(self, delta: int) -> None:
        """Work holds so much more or less on the host."""
        assert self.has_host, "what is there is here too, in no order that anybody noted"
        self._host_live += delta
        self._host_most = max(self._host_most, self._host_live)

    def adopt(self, number: int, size: int, holders: int = 1) -> None:
        """From now on the wrappers hold a storage that the work made."""
        self._sizes[number] = size
        self._holders[number] = self._holders.get(number, 0) + holders

    def size(self, number: int) -> int:
        """Bytes of a storage that is there."""
        return self._sizes[number]

    def hold(self, number: int) -> None:
        """One more holds it."""
        self._holders[number] += 1

    def free(self, number: int | None) -> None:
        """One holder lets go; the last one frees it."""
        if number is None:
            return
        self._holders[number] = left = self._holders.get(number, 0) - 1
        if not left:
            size = self._sizes.pop(number)
            if number in self._passing:
                self._settle(number)
            if number in self._hosted:
                self._host_live -= size
            elif size:
                self._events.append((-size, number, len(self._phases) - 1))

    def _settle(self, number: int) -> None:
        born, term = self._passing.pop(number)
        is_sent = term == Term.COMMUNICATION
        if self._phases[-1] != "step" if is_sent else len(self._phases) == born:
            self._storages[number] = self._storages[number]._replace(term=term)

    def free_all(self, numbers: Iterable[int]) -> None:
        """Of each, one holder lets go."""
        for number in numbers:
            self.free(number)

    def log(self) -> EventLog:
        """All of it."""
        storages, events = tuple(self._storages), tuple(self._events)
        return EventLog(storages, events, tuple(self._phases), self._host_most)

    def add_storages(self, storages: Sequence[Storage]) -> int:
        """Room for storages of work; returns the number of the first."""
        first = len(self._storages)
        self._storages.extend(storages)
        return first

    def add_events(self, events: Sequence[Change], first: int, known: Mapping[int, int]) -> None:
        """Events of work, all of one phase, whose storages begin at `first`."""
        if not events:
            return
        now = len(self._phases) - 1
        if not first and not known and events[0][2] == now:
            self._events.extend(events)
        else:
            self._events += [(d, known.get(s, first + s), now) for d, s, _ in events]


class Copy:
    """One time that work is done: its events, with numbers of their own.

    Args:
        first_event: What comes before it is there already.
        known: What is there already, by the number that the work gives it: inputs, buffers.

    Attributes:
        host: As in `Work`.
    """

    def __init__(
        self,
        writer: LogWriter,
        log: EventLog,
        first_event: int,
        known: Mapping[int, int] | None = None,
    ) -> None:
        self._writer, self._log = writer, log
        self._first = writer.add_storages(log.storages)
        self._known = known or {}
        self._at = first_event
        self.host: tuple[tuple[int, int], ...] = ()
        self._of_host = 0

    def number(self, storage: int) -> int:
        """What the written log calls a storage of the work."""
        return self._known.get(storage, self._first + storage)

    def be_there(self, before: Sequence[Change], times: Mapping[Term, int]) -> None:
        """What is there before the work; of some terms, so many times as much."""
        for delta, storage, phase in before:
            many = times.get(self._log.storages[storage].term, 1)
            self._writer.add_events([(delta * many, storage, phase)], self._first, self._known)

    def until(self, event: int, *, enters: bool = False) -> None:
        """Do the work up to this event, and enter the phase of the next one or not."""
        events = self._log.changes
        at, self._at = self._at, max(self._at, event)
        while at < event:
            end = self._end_of_phase(at, event)
            self._begin(at)
            self._writer.add_events(events[at:end], self._first, self._known)
            at = end
        while self._of_host < len(self.host) and self.host[self._of_host][0] <= event:
            self._writer.change_host(self.host[self._of_host][1])
            self._of_host += 1
        if enters:
            self._begin(min(event, len(events) - 1))

    def _begin(self, event: int) -> None:
        phase = self._log.changes[event][2]
        if phase:  # Work that begins before its first phase does so in the phase that runs.
            self._writer.begin(self._log.phases[phase])

    def _end_of_phase(self, at: int, event: int) -> int:
        events = self._log.changes
        if events[event - 1][2] == events[at][2]:
            return event
        return next(n for n in range(at, event) if events[n][2] != events[at][2])
