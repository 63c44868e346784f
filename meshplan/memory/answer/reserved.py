"""What is reserved for the step of a rank, workspaces included, and what its peak is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from meshplan.memory.log.allocator import Reserve, reserve
from meshplan.memory.log.driver import with_workspaces
from meshplan.memory.log.events import EventLog, Term
from meshplan.spec.spec import Spec

_STREAM = attrgetter("stream")


class PeakLocation(NamedTuple):
    """When and where the peak is, and what the storage is that makes it.

    Attributes:
        module: "" outside of all: in the loss, in the optimizer's step.
    """

    phase: str
    module: str
    term: Term


@dataclass(frozen=True, slots=True)
class RankSummary:
    """What an estimate says of a rank: of a log of tens of thousands of events, these.

    Args:
        at: Of the requested bytes.
        terms: What those are at the peak; they add up.
        host_bytes: As of the log.
    """

    reserve: Reserve
    at: PeakLocation
    terms: Mapping[Term, int]
    host_bytes: int


@dataclass(frozen=True, slots=True)
class ReservedLog:
    """The log of a rank's step, workspaces included, and what is reserved for it."""

    log: EventLog
    reserve: Reserve

    @property
    def figures(self) -> RankSummary:
        """What is of interest once the log is not."""
        log = self.log
        made = log.storages[log.changes[log.peak.event][1]]
        terms = {term: size for term, size in log.terms_at_peak.items() if size}
        at = PeakLocation(log.phase_at_peak, log.module_at_peak, made.term)
        return RankSummary(self.reserve, at, terms, log.host_bytes)


class ReplayCache:
    """What is reserved for one log after another; what has the same events is played once.

    Args:
        device: A name of `hardware`.
        spec: Of the plan, which says what allocator there is.
    """

    def __init__(self, device: str, spec: Spec) -> None:
        self._device, self._grows = device, spec.allocator == "expandable"
        self._known: list[tuple[EventLog, Reserve]] = []

    def of(self, log: EventLog) -> ReservedLog:
        """Of a log without workspaces."""
        whole = with_workspaces(log, self._device)
        found = next((held for known, held in self._known if _do_the_same(known, log)), None)
        if found is None:
            found = reserve(whole, expandable=self._grows)
            self._known.append((log, found))
        return ReservedLog(whole, found)


def _do_the_same(one: EventLog, other: EventLog) -> bool:
    """Whether an allocator sees no difference.

    Logs that differ do so soon: to compare them takes less than to hash either.
    """
    if len(one.changes) != len(other.changes) or one.changes != other.changes:
        return False
    return [*map(_STREAM, one.storages)] == [*map(_STREAM, other.storages)]
