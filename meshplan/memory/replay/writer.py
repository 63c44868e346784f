"""Write an event log: events of a recorded microbatch, with those of wrappers in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshplan.memory.log.events import Change, EventLog, Storage, Term


class LogWriter:
    """Builds an event log from allocations and frees.

    Storages are reference-counted: a storage is freed when its last holder is removed.

    Args:
        has_host: If True, host memory is separate from the device's; otherwise storages on the host
            count as storages on the device.
    """

    def __init__(self, *, has_host: bool = False) -> None:
        self.has_host = has_host
        self._host_storages: set[int] = set()
        self._host_live = self._host_most = 0
        self._storages: list[Storage] = []
        self._events: list[Change] = []
        self._phases: list[str] = ["before"]
        self._sizes: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._passing: dict[int, tuple[int, Term]] = {}
        """For storages with `passing`: (number of phases begun at their birth, `passing`)."""

    def begin(self, phase: str) -> None:
        """Begin a phase, unless it is the current one already."""
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
        """Allocate a storage with one holder.

        Args:
            size: Bytes of the storage.
            term: Category of its bytes.
            module: Fqn of the module that the storage belongs to; "" for none.
            op: Name of the operator that makes the storage; "" for none.
            stream: Number of the CUDA stream on which it is made; 0 is the compute stream.
            on_host: If True, the storage is in host memory, provided that is separate.
            passing: Category that replaces `term` if the storage turns out to be short-lived, as
                in a trace, where only lifetimes are known. `COMMUNICATION` replaces it if the
                storage is freed before the optimizer step, any other category if the storage is
                freed in the phase in which it was made.

        Returns:
            The number of the storage.
        """
        number = len(self._storages)
        if passing is not None:
            self._passing[number] = len(self._phases), passing
        self._storages.append(Storage(term, op, module, self._phases[-1], stream))
        self._sizes[number], self._holders[number] = size, 1
        if on_host and self.has_host:
            self._host_storages.add(number)
            self._host_live += size
            self._host_most = max(self._host_most, self._host_live)
        elif size:
            self._events.append((size, number, len(self._phases) - 1))
        return number

    def change_host(self, delta: int) -> None:
        """Add `delta` to the bytes that the microbatch keeps in host memory."""
        assert self.has_host, "the host has no memory apart from the device's"
        self._host_live += delta
        self._host_most = max(self._host_most, self._host_live)

    def adopt(self, number: int, size: int) -> None:
        """Add a holder to a storage of `size` bytes that events of the microbatch made."""
        self._sizes[number] = size
        self._holders[number] = self._holders.get(number, 0) + 1

    def size(self, number: int) -> int:
        """Return the bytes of a live storage."""
        return self._sizes[number]

    def hold(self, number: int) -> None:
        """Add a holder to a storage."""
        self._holders[number] += 1

    def free(self, number: int | None) -> None:
        """Remove a holder of a storage, and free the storage if no other holder is left.

        None stands for no storage and is ignored.
        """
        if number is None:
            return
        self._holders[number] = left = self._holders.get(number, 0) - 1
        if not left:
            size = self._sizes.pop(number)
            if number in self._passing:
                self._set_final_term(number)
            if number in self._host_storages:
                self._host_live -= size
            elif size:
                self._events.append((-size, number, len(self._phases) - 1))

    def _set_final_term(self, number: int) -> None:
        born, term = self._passing.pop(number)
        # Short-lived are communication buffers that are freed before the optimizer step, and other
        # storages that are freed in the phase in which they were made.
        is_sent = term == Term.COMMUNICATION
        if self._phases[-1] != "step" if is_sent else len(self._phases) == born:
            self._storages[number] = self._storages[number]._replace(term=term)

    def free_all(self, numbers: Iterable[int]) -> None:
        """Remove one holder of each storage."""
        for number in numbers:
            self.free(number)

    def log(self) -> EventLog:
        """Return the event log as written so far."""
        storages, events = tuple(self._storages), tuple(self._events)
        return EventLog(storages, events, tuple(self._phases), self._host_most)

    def add_storages(self, storages: Sequence[Storage]) -> int:
        """Add the storages of a microbatch, and return the new number of its storage 0."""
        first = len(self._storages)
        self._storages.extend(storages)
        return first

    def add_events(self, events: Sequence[Change], first: int, known: Mapping[int, int]) -> None:
        """Add events of a microbatch to the current phase.

        Args:
            events: The events, all of one phase, with the storage numbers of the microbatch.
            first: Number in this log of the microbatch's storage 0.
            known: Numbers in this log of storages that exist already, by their number in the
                microbatch.
        """
        if not events:
            return
        now = len(self._phases) - 1
        if not first and not known and events[0][2] == now:
            self._events.extend(events)
        else:
            self._events += [(d, known.get(s, first + s), now) for d, s, _ in events]


class Copy:
    """One execution of a recorded microbatch, whose events are written with new storage numbers.

    Args:
        writer: The log to write to.
        log: The log of the microbatch.
        first_event: Index of the first event to execute; the events before it allocate what exists
            before the microbatch.
        known: Maps storage numbers of the microbatch to storage numbers of the written log, for
            storages that are already in that log, such as inputs and buffers.

    Attributes:
        host: Changes of host memory, as in `MicrobatchTrace`.
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
        """Return the number in the written log of a storage of the microbatch."""
        return self._known.get(storage, self._first + storage)

    def allocate_resident(self, before: Sequence[Change], times: Mapping[Term, int]) -> None:
        """Allocate the storages that exist before the microbatch.

        Args:
            before: The events that allocate them.
            times: Factors by category; bytes of categories that are not listed stay as they are.
        """
        for delta, storage, phase in before:
            many = times.get(self._log.storages[storage].term, 1)
            self._writer.add_events([(delta * many, storage, phase)], self._first, self._known)

    def until(self, event: int, *, enters: bool = False) -> None:
        """Execute the microbatch up to an event, from where the previous call stopped.

        Args:
            event: Index of the event to stop before.
            enters: If True, also enter the phase of that event.
        """
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
        if phase:  # Events of the phase "before" are added to the current phase.
            self._writer.begin(self._log.phases[phase])

    def _end_of_phase(self, at: int, event: int) -> int:
        events = self._log.changes
        if events[event - 1][2] == events[at][2]:
            return event
        return next(n for n in range(at, event) if events[n][2] != events[at][2])
