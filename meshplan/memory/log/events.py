"""The event log of one training step: when every storage is born, resized and freed, in order.

Peak, breakdown, timeline and reserved memory are all computed from an `EventLog`. Its events may
come from a trace of the real wrappers on fake tensors, from a replay of blocks, or from a real run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from meshplan.memory.log.columns import Columns, Ints


class Term(StrEnum):
    """Categories of a storage's bytes, in the order of tables and pictures."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    GATHERED = "gathered parameters"
    COMMUNICATION = "communication buffers"
    ACTIVATIONS = "activations"
    LOSS = "logits and loss"
    WORKSPACES = "library workspaces"
    TEMPORARIES = "temporaries"


COMPILED_OUTPUT: Final = "compiled_output"
"""Name of the operator that makes the output of a compiled block, in a computed log."""


class Storage(NamedTuple):
    """One allocation, from its birth to its death.

    Attributes:
        term: Category of its bytes.
        op: Name of the aten operator that made it; "" if no operator did, as for storages that
            exist before the step.
        module: Fqn of the innermost module whose forward or backward was running at its birth.
        phase: Name of the phase in which it was made.
        stream: Number of the CUDA stream on which it was made; 0 is the compute stream.
    """

    term: Term
    op: str = ""
    module: str = ""
    phase: str = ""
    stream: int = 0


class Event(NamedTuple):
    """A change of a storage's size: its first event is its birth; at 0 bytes it is freed.

    Attributes:
        delta: Bytes by which the storage grows; negative if it shrinks.
        storage: Index of the storage in the log's `storages`.
        phase: Index of the phase in the log's `phases`.
    """

    delta: int
    storage: int
    phase: int


Change = tuple[int, int, int]
"""The fields of an `Event`, as a plain tuple: a step has tens of thousands of events, and a planner
replays thousands of steps."""


class Peak(NamedTuple):
    """The most bytes that are live at once.

    Attributes:
        live_bytes: Live bytes at the peak.
        event: Index of the first event after which that many bytes are live; -1 if the log has no
            live bytes.
    """

    live_bytes: int
    event: int


@dataclass(frozen=True)
class EventLog:
    """One rank's events, phase by phase.

    Args:
        storages: All storages; an event refers to one by its index.
        changes: All events in order, as plain tuples (see `Event`). Storages that exist before the
            step are born in the first phase.
        phases: Names of the phases in order: "before", then "forward", "loss" and "backward" as
            often as they occur, and "step".
        host_bytes: Peak bytes of the step's tensors in host memory, which have no events.

    All sizes are bytes as requested; `memory.log.allocator` rounds them to blocks.
    """

    storages: tuple[Storage, ...]
    changes: tuple[Change, ...]
    phases: tuple[str, ...]
    host_bytes: int = 0

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """`changes` with named fields."""
        return tuple(map(Event._make, self.changes))

    @cached_property
    def columns(self) -> Columns:
        """`changes` as an array, for arithmetic on all events at once."""
        from meshplan.memory.log.columns import columns_of

        return columns_of(self.changes)

    def preceded(self, storages: Sequence[Storage], sizes: Sequence[int]) -> EventLog:
        """Return the log with more storages that exist before the step and outlive it.

        Args:
            storages: The storages.
            sizes: Their bytes.
        """
        from meshplan.memory.log import columns

        first = len(self.storages)
        born = tuple((size, first + number, 0) for number, size in enumerate(sizes))
        log = replace(self, storages=(*self.storages, *storages), changes=(*born, *self.changes))
        # Reading the events of this log from tuples again would take longer than playing them.
        log.__dict__["columns"] = columns.preceded(born, self.columns)
        return log

    @cached_property
    def streams(self) -> Ints:
        """[storages] number of the CUDA stream of each storage."""
        from meshplan.memory.log.columns import ints

        return ints([storage.stream for storage in self.storages])

    @cached_property
    def peak(self) -> Peak:
        """The peak of the live bytes over all phases."""
        from meshplan.memory.log.columns import peak_of

        return Peak(*peak_of(self.columns))

    @cached_property
    def pooled_bytes(self) -> int:
        """A lower bound on reserved bytes: the peak of live bytes on each stream, summed.

        The allocator keeps a separate pool for each stream and never shrinks it while memory lasts.
        """
        from meshplan.memory.log.columns import pooled_bytes

        return pooled_bytes(self.columns, self.streams)

    @cached_property
    def by_phase(self) -> Mapping[str, tuple[int, int]]:
        """For each phase name, (peak live bytes, live bytes when the phase last ended)."""
        out: dict[str, tuple[int, int]] = {}
        live = most = running = 0
        for delta, _, phase in (*self.changes, (0, 0, len(self.phases))):
            while running < phase:
                name = self.phases[running]
                out[name] = (max(most, out.get(name, (0, 0))[0]), live)
                most, running = live, running + 1
            live += delta
            most = max(most, live)
        return out

    def live_after(self, event: int) -> dict[int, int]:
        """Return the bytes of every storage that is live right after an event, by its index."""
        live: dict[int, int] = {}
        for delta, storage, _ in self.changes[: event + 1]:
            size = live.get(storage, 0) + delta
            if size:
                live[storage] = size
            else:
                live.pop(storage, None)
        return live

    @cached_property
    def live_at_peak(self) -> Mapping[int, int]:
        """Bytes of every storage that is live at the peak, by its index."""
        return self.live_after(self.peak.event)

    @cached_property
    def terms_at_peak(self) -> Mapping[Term, int]:
        """Bytes of each term at the peak; they add up to `peak.live_bytes`."""
        from meshplan.memory.log.columns import live_sizes

        out = dict.fromkeys(Term, 0)
        for storage, size in live_sizes(self.columns[:, : self.peak.event + 1]).items():
            out[self.storages[storage].term] += size
        return out

    @property
    def phase_at_peak(self) -> str:
        """Name of the phase in which the peak is reached."""
        return self.phases[self.changes[self.peak.event][2]]

    @property
    def module_at_peak(self) -> str:
        """Fqn of the module that made the storage whose birth reaches the peak; "" if none did."""
        return self.storages[self.changes[self.peak.event][1]].module
