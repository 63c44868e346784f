"""The event log of one training step: every storage's birth and death, in order.

The one record that peak, breakdown, timeline and allocator are read from. It does not know where
it came from: a trace of the real wrappers on tensors without numbers, a replay of blocks, or a
real run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple


class Term(StrEnum):
    """What the bytes of a storage are for, in the order of tables and pictures."""

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


class Storage(NamedTuple):
    """One piece of memory, from its first to its last byte.

    Attributes:
        term: What it is for.
        op: The operator that made it, as aten names it; "" for what was there before.
        module: The fqn of the innermost module that ran, or whose backward ran.
        phase: When it was made.
        stream: The stream it was made on; 0 computes.
    """

    term: Term
    op: str = ""
    module: str = ""
    phase: str = ""
    stream: int = 0


class Event(NamedTuple):
    """A storage grows or shrinks by `delta` bytes; made is grown from 0, freed is shrunk to 0."""

    delta: int
    storage: int
    phase: int


_DELTA = itemgetter(0)
Change = tuple[int, int, int]
"""An event without names for what it is made of: a step has tens of thousands, and whoever plans
plays thousands of steps."""


class Peak(NamedTuple):
    """The most bytes at once.

    Attributes:
        live_bytes: How many.
        event: The event after which there were as many, for the first time; -1 before all.
    """

    live_bytes: int
    event: int


@dataclass(frozen=True)
class EventLog:
    """One rank's events, phase by phase.

    Args:
        storages: What each storage is, by its number.
        changes: In order. What was there before is born in the first phase.
        phases: Names of the phases, in order: "before", then "forward", "loss", "backward" as
            often as they come, and "step".
        host_bytes: The most that tensors of the step hold in the host's memory at once; those are
            in no event.

    Units: bytes as asked for; what an allocator rounds to is `memory.log.allocator`'s.
    """

    storages: tuple[Storage, ...]
    changes: tuple[Change, ...]
    phases: tuple[str, ...]
    host_bytes: int = 0

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The changes, by name."""
        return tuple(map(Event._make, self.changes))

    @cached_property
    def peak(self) -> Peak:
        """Of all phases."""
        live = [*accumulate(map(_DELTA, self.changes))]
        most = max(live, default=0)
        return Peak(most, live.index(most)) if most > 0 else Peak(0, -1)

    @cached_property
    def pooled_bytes(self) -> int:
        """What is reserved at the least: each stream has a pool of its own, which never shrinks."""
        stream_of = [storage.stream for storage in self.storages]
        deltas: dict[int, list[int]] = {stream: [] for stream in set(stream_of)}
        for delta, storage, _ in self.changes:
            deltas[stream_of[storage]].append(delta)
        return sum(max(accumulate(each, initial=0)) for each in deltas.values())

    @cached_property
    def by_phase(self) -> Mapping[str, tuple[int, int]]:
        """(most bytes at once, bytes at its last end) of the phases of each name."""
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
        """Bytes of every storage that lives right after an event."""
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
        """Bytes of every storage that lives at the peak."""
        return self.live_after(self.peak.event)

    @cached_property
    def terms_at_peak(self) -> Mapping[Term, int]:
        """What the peak is made of; the terms add up to it."""
        out = dict.fromkeys(Term, 0)
        for storage, size in self.live_at_peak.items():
            out[self.storages[storage].term] += size
        return out

    @property
    def phase_at_peak(self) -> str:
        """When the peak is."""
        return self.phases[self.changes[self.peak.event][2]]

    @property
    def module_at_peak(self) -> str:
        """The module whose storage made the peak."""
        return self.storages[self.changes[self.peak.event][1]].module


def on_streams(log: EventLog, streams: Mapping[tuple[Term, int], int]) -> EventLog:
    """The log with what no operator made on the streams that its term and bytes at birth tell."""
    sizes: dict[int, int] = {}
    for delta, storage, _ in log.changes:
        sizes.setdefault(storage, delta)
    storages = tuple(
        each
        if each.op or each.stream
        else each._replace(stream=streams.get((each.term, sizes.get(n, 0)), 0))
        for n, each in enumerate(log.storages)
    )
    return replace(log, storages=storages)
