"""Play the log of one rank, with cuBLAS's workspaces, on the allocator to find reserved memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshplan.layout.optimizers import STATES_FROM_START
from meshplan.memory.log.allocator import Reserve, reserve
from meshplan.memory.log.driver import with_workspaces
from meshplan.memory.log.events import EventLog, Term
from meshplan.spec.spec import Spec


class PeakLocation(NamedTuple):
    """When and where the peak is reached: the phase, the module and the category of bytes.

    Attributes:
        phase: Name of the phase of the step.
        module: Fqn of the module; "" outside of all modules, as in the loss and the optimizer step.
        term: Category of the storage whose allocation reaches the peak.
    """

    phase: str
    module: str
    term: Term


@dataclass(frozen=True, slots=True)
class RankSummary:
    """The figures of one rank that an estimate needs; much smaller than the rank's log.

    Args:
        reserve: Peaks of requested, allocated and reserved bytes.
        at: When and where the requested bytes peak.
        terms: Requested bytes at the peak by category; they add up to the peak.
        host_bytes: Peak bytes of the step's tensors in host memory.
    """

    reserve: Reserve
    at: PeakLocation
    terms: Mapping[Term, int]
    host_bytes: int


@dataclass(frozen=True, slots=True)
class ReservedLog:
    """The log of a rank's step, cuBLAS's workspaces included, and the allocator's peaks for it."""

    log: EventLog
    reserve: Reserve

    @property
    def figures(self) -> RankSummary:
        """The rank's summary, which is kept when the log is dropped."""
        log = self.log
        made = log.storages[log.changes[log.peak.event][1]]
        terms = {term: size for term, size in log.terms_at_peak.items() if size}
        at = PeakLocation(log.phase_at_peak, log.module_at_peak, made.term)
        return RankSummary(self.reserve, at, terms, log.host_bytes)


class ReplayCache:
    """Plays logs on the allocator, and logs with equal events only once.

    Args:
        device: A device name of `hardware`, which determines the workspaces; "" if unknown.
        spec: The spec of the plan, for its optimizer and its allocator.
    """

    def __init__(self, device: str, spec: Spec) -> None:
        self._device, self._spec = device, spec
        self._known: list[tuple[EventLog, Reserve]] = []

    def of(self, log: EventLog) -> ReservedLog:
        """Add workspaces to a log, play it, and return the result."""
        whole = with_workspaces(log, self._device)
        found = next(
            (replayed for known, replayed in self._known if _do_the_same(known, log)), None
        )
        if found is None:
            found = reserve_from_start(whole, self._spec)
            self._known.append((log, found))
        return ReservedLog(whole, found)


def reserve_from_start(log: EventLog, spec: Spec, *, expandable: bool | None = None) -> Reserve:
    """Return the allocator's peaks for a step after the first one, the first one included.

    Args:
        log: The step, with cuBLAS's workspaces.
        spec: The spec of the plan, for its optimizer and its allocator.
        expandable: Whether to simulate expandable segments; None means as the spec says.
    """
    grows = spec.allocator == "expandable" if expandable is None else expandable
    return reserve(log, expandable=grows, from_first=spec.optimizer not in STATES_FROM_START)


def _do_the_same(one: EventLog, other: EventLog) -> bool:
    """Return True if the allocator would do the same for both logs."""
    if len(one.storages) != len(other.storages) or one.columns.shape != other.columns.shape:
        return False
    is_alike = (one.columns == other.columns).all() and (one.streams == other.streams).all()
    return bool(is_alike) and all(
        (a.term is Term.OPTIMIZER) is (b.term is Term.OPTIMIZER)
        for a, b in zip(one.storages, other.storages, strict=True)
    )
