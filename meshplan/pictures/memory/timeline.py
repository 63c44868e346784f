"""The memory of one rank during one step: live bytes by category after each event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.memory.log.driver import with_workspaces
from meshplan.memory.log.events import EventLog, Term
from meshplan.pictures.base.page import SMALL, TEXT, Sheet, fitted, hatch_colour, width_of, write
from meshplan.pictures.base.palette import TERMS, Theme
from meshplan.pictures.base.types import Picture
from meshplan.plan.plan import Plan
from meshplan.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS: Final = 700
_LETTERS: Final = {"forward": "F", "backward": "B"}


@dataclass(frozen=True, slots=True)
class Point:
    """Live bytes after an event.

    Args:
        event: Number of the event.
        terms: Bytes of each category, in the order of `Term`.
    """

    event: int
    terms: tuple[int, ...]

    @property
    def live_bytes(self) -> int:
        return sum(self.terms)


@dataclass(frozen=True, slots=True)
class Phase:
    """A forward, backward, loss or optimizer step within a training step.

    Args:
        name: Name of the phase.
        first: Number of its first event.
        last: Number of its last event plus one.
    """

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The facts that `draw_timeline` draws.

    Args:
        rank: The rank.
        points: Points to draw. The events are divided into runs of equal length; of each run this
            is the point with most live bytes. The last point is after the last event.
        phases: Phases in order.
        peak_bytes: Live bytes at the peak.
        peak_event: Number of the event after which the peak is reached.
        where: Phase of the peak, and the module or category that causes it, as text.
        num_events: Number of events in the step.
        note: A sentence on forwards that are left out; "" if none are left out.
    """

    rank: int
    points: tuple[Point, ...]
    phases: tuple[Phase, ...]
    peak_bytes: int
    peak_event: int
    where: str
    num_events: int
    note: str = ""

    @property
    def title(self) -> str:
        """The picture's title: the answer in one sentence."""
        peak = format_bytes(self.peak_bytes)
        return f"Tensors of rank {self.rank} peak at {peak}, {self.where}"

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        names = ", ".join(dict.fromkeys(phase.name for phase in self.phases))
        last = self.points[-1] if self.points else Point(0, (0,))
        return (
            f"Bytes of the tensors of rank {self.rank} through {self.num_events:,} events of a "
            f"step ({names}), stacked by category; the peak, "
            f"{format_bytes(self.peak_bytes)}, is {self.where}; "
            f"{format_bytes(last.live_bytes)} are left at the end."
        )


def log_of(plan: Plan, rank: int, device: str) -> EventLog:
    """Return the log of one rank's step, computed from the model's config alone.

    Args:
        plan: The plan.
        rank: The rank.
        device: Name of the device, whose library workspaces the log includes.

    Raises:
        PlanError: The model's family, or something in the plan, needs a trace with torch.
    """
    return with_workspaces(
        analytic_log_of_rank(plan, rank, device=device, summarised=False), device
    )


def timeline(log: EventLog, rank: int = 0, num_forwards: int | None = None) -> Timeline:
    """Return the facts of the picture for the log of a rank's step.

    Args:
        log: The log.
        rank: The rank.
        num_forwards: Number of forwards in the step; None for as many as in the log. A log may
            leave out forwards that equal others.
    """
    shown = log.phases.count("forward")
    is_summarised = num_forwards is not None and shown < num_forwards
    module, term = log.module_at_peak, log.storages[log.events[log.peak.event].storage].term
    maker = f" of {module}" if module else f", for {term}"
    return Timeline(
        rank=rank,
        points=tuple(_points(log)),
        phases=tuple(_phases(log)),
        peak_bytes=log.peak.live_bytes,
        peak_event=log.peak.event,
        where=f"in {log.phase_at_peak}{maker}",
        num_events=len(log.events),
        note=f"Drawn are {shown:,} of the {num_forwards:,} forwards of the step; the others equal "
        "the last but one." if is_summarised else "",
    )  # fmt: skip


def _points(log: EventLog) -> Iterator[Point]:
    """Yield the points to draw, as `Timeline.points` describes them."""
    places = {term: number for number, term in enumerate(Term)}
    of_storage = [places[storage.term] for storage in log.storages]
    held = [0] * len(places)
    size = -(-len(log.events) // _MOST_POINTS) or 1
    live, most, best = 0, -1, Point(0, tuple(held))
    for number, (delta, storage, _) in enumerate(log.events):
        live += delta
        held[of_storage[storage]] += delta
        if live > most:
            most, best = live, Point(number, tuple(held))
        if (number + 1) % size == 0:
            yield best
            most = -1
    if most >= 0:
        yield best
    yield Point(len(log.events), tuple(held))


def _phases(log: EventLog) -> Iterator[Phase]:
    first, running = 0, log.events[0].phase if log.events else 0
    for number, event in enumerate(log.events):
        if event.phase != running:
            yield Phase(log.phases[running], first, number)
            first, running = number, event.phase
    yield Phase(log.phases[running], first, len(log.events))


def draw_timeline(facts: Timeline, theme: Theme) -> Picture:
    """Draw stacked areas by category, with the phases above and the peak marked."""
    shown = [
        (place, term)
        for place, term in enumerate(Term)
        if any(point.terms[place] for point in facts.points)
    ]
    sheet = Sheet(
        theme,
        facts.title,
        4.5,
        legend=[(str(term), TERMS[term]) for _, term in shown],
        notes=[
            "An event allocates or frees one tensor. Overheads of the allocator and the driver are "
            "in the picture of memory. F is a forward, B a backward.",
            *([facts.note] if facts.note else []),
        ],
    )
    unit, word = (GIB, "GiB") if facts.peak_bytes >= GIB / 2 else (MIB, "MiB")
    axes = sheet.axes(left=0.95, right=0.35, top=0.55, bottom=0.6)
    room = sheet.width - 0.95 - 0.35
    scale = max(facts.num_events, 1) / room
    events = [point.event for point in facts.points]
    below = [0.0] * len(events)
    for place, term in shown:
        ink = TERMS[term]
        above = [b + p.terms[place] / unit for b, p in zip(below, facts.points, strict=True)]
        axes.fill_between(
            events, below, above, facecolor=ink.colour, hatch=ink.hatch or None,
            edgecolor=hatch_colour(ink) if ink.hatch else ink.colour, linewidth=0.0, gid=str(term),
        )  # fmt: skip
        below = above
    peak = facts.peak_bytes / unit
    axes.set_xlim(0, max(facts.num_events, 1))
    axes.set_ylim(0, (peak or 1.0) * 1.22)
    axes.set_ylabel(f"{word} of live tensors")
    axes.set_xlabel("events of a step, in order")
    axes.yaxis.grid(True, color=theme.line, lw=0.6)
    _draw_phases(axes, facts, scale, theme)
    axes.plot([facts.peak_event], [peak], marker="v", color=theme.ink, markersize=9, gid="peak",
              zorder=5)  # fmt: skip
    text = fitted(
        f"peak {format_bytes(facts.peak_bytes)} {facts.where}", room * 0.9, TEXT, bold=True
    )
    half = width_of(text, TEXT, bold=True) / 2 * scale
    at = min(max(facts.peak_event, half + 0.05 * scale), facts.num_events - half - 0.05 * scale)
    write(axes, at, peak * 1.08, text, theme, weight="bold", across="center", up="bottom")
    return Picture("timeline", facts.title, facts.alt, sheet.figure)


def _draw_phases(axes: Axes, facts: Timeline, scale: float, theme: Theme) -> None:
    """Draw a vertical line at the end of each phase, and the names of phases that have space."""
    top = axes.get_ylim()[1]
    for number, phase in enumerate(facts.phases):
        if number:
            axes.axvline(phase.first, color=theme.quiet, lw=0.8, ls=":", gid=f"phase {number}")
        room = (phase.last - phase.first) / scale
        name = phase.name
        if width_of(name, SMALL) > room - 0.06:
            name = _LETTERS.get(name, "") if room > 0.12 else ""
        middle = (phase.first + phase.last) / 2
        write(axes, middle, top * 1.015, name, theme, size=SMALL, colour=theme.quiet,
              across="center", clip_on=False)  # fmt: skip
