"""The memory of one rank during one step: live bytes by category after each event."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.memory.log.driver import with_workspaces
from meshplan.memory.log.events import EventLog, Term
from meshplan.pictures.base.page import (
    SMALL,
    TEXT,
    WIDTH,
    Sheet,
    box,
    hatch_colour,
    is_narrow,
    width_of,
    write,
)
from meshplan.pictures.base.palette import TERMS, Ink, Theme
from meshplan.pictures.base.types import Picture
from meshplan.plan.plan import Plan
from meshplan.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_POINTS: Final = 500
_MOST_NARROW: Final = 250
_LEAST_NEAR: Final = 40
"""Number of events before and after the peak that are drawn at the least."""
_WIDE_PEAK: Final = 0.15
"""Share of a step above which its peak is wide enough to be seen without drawing it again."""
_LEAST: Final = 0.005
"""Share of the peak below which a category is too small to see."""
_HEAD: Final = 1.16
"""Height of the axes divided by the peak, which leaves space for the words at the peak."""
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
        near: All points around the peak, to be drawn in full; () if `points` show it well enough.
        note: A sentence on forwards that are left out; "" if none are left out.
    """

    rank: int
    points: tuple[Point, ...]
    phases: tuple[Phase, ...]
    peak_bytes: int
    peak_event: int
    where: str
    num_events: int
    near: tuple[Point, ...] = ()
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
    points = tuple(_points(log))
    return Timeline(
        rank=rank,
        points=points,
        phases=tuple(_phases(log)),
        peak_bytes=log.peak.live_bytes,
        peak_event=log.peak.event,
        where=f"in {log.phase_at_peak}{maker}",
        num_events=len(log.events),
        near=_near(log, points),
        note=f"Drawn are {shown:,} of the {num_forwards:,} forwards of the step; the others equal "
        "the last but one." if is_summarised else "",
    )  # fmt: skip


def _points(log: EventLog) -> Iterator[Point]:
    """Yield the points to draw, as `Timeline.points` describes them."""
    size = -(-len(log.events) // _MOST_POINTS) or 1
    most, best = -1, Point(0, (0,) * len(Term))
    states: list[int] = [0] * len(Term)
    for number, live, states in _after_each(log):
        if live > most:
            most, best = live, Point(number, tuple(states))
        if (number + 1) % size == 0:
            yield best
            most = -1
    if most >= 0:
        yield best
    yield Point(len(log.events), tuple(states))


def _after_each(log: EventLog) -> Iterator[tuple[int, int, list[int]]]:
    """Yield after each event its number, the live bytes, and those of each category.

    The list is the same each time, and changes with the next event.
    """
    places = {term: number for number, term in enumerate(Term)}
    of_storage = [places[storage.term] for storage in log.storages]
    states, live = [0] * len(places), 0
    for number, (delta, storage, _) in enumerate(log.events):
        live += delta
        states[of_storage[storage]] += delta
        yield number, live, states


def _near(log: EventLog, points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Return the points around the peak, from where the memory is half way up to it and back.

    A peak of a few events among tens of thousands is thinner than a pixel where the whole step is
    drawn. The answer is () if the step is short enough to be drawn in full.
    """
    if len(log.events) <= _MOST_POINTS:
        return ()
    usual = sorted(point.live_bytes for point in points)[len(points) // 2]
    half, peak = (log.peak.live_bytes + usual) / 2, log.peak.event
    live = list(itertools.accumulate(event.delta for event in log.events))
    low = next((n + 1 for n in range(peak, -1, -1) if live[n] < half), 0)
    high = next((n - 1 for n in range(peak, len(live)) if live[n] < half), len(live) - 1)
    reach = max(high - low + 1, _LEAST_NEAR)
    low, high = max(low - reach, 0), min(high + reach, len(live) - 1)
    if high - low > len(live) * _WIDE_PEAK:
        return ()
    return tuple(Point(n, tuple(states)) for n, _, states in _after_each(log) if low <= n <= high)


def _phases(log: EventLog) -> Iterator[Phase]:
    first, running = 0, log.events[0].phase if log.events else 0
    for number, event in enumerate(log.events):
        if event.phase != running:
            yield Phase(log.phases[running], first, number)
            first, running = number, event.phase
    yield Phase(log.phases[running], first, len(log.events))


def draw_timeline(facts: Timeline, theme: Theme, width: float = WIDTH) -> Picture:
    """Draw stacked areas by category for the whole step, and again for the events at its peak."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    narrow, has_near = is_narrow(width), bool(facts.near)
    seen = [place for place, _ in enumerate(Term) if any(p.terms[place] for p in facts.points)]
    most = [max(p.terms[place] for p in (*facts.points, *facts.near)) for place in range(len(Term))]
    terms = list(Term)
    large = [place for place in seen if most[place] >= _LEAST * facts.peak_bytes]
    notes = [
        "An event allocates or frees one tensor. Overheads of the allocator and the driver are in "
        "the picture of memory." + (" F is a forward, B a backward." if _has_letters(facts) else "")
    ]
    if small := [str(terms[place]) for place in seen if place not in large]:
        notes.append(f"Too small to see: {', '.join(small)}.")
    if facts.note:
        notes.append(facts.note)
    tall = 2.9 if narrow else 4.1
    whole = tall + 0.85
    sheet = Sheet(
        theme, facts.title, whole + (tall + 0.45 if narrow and has_near else 0.0),
        legend=[(str(terms[place]), TERMS[terms[place]]) for place in large], notes=notes,
        width=width,
    )  # fmt: skip
    unit, word = (GIB, "GiB") if facts.peak_bytes >= GIB / 2 else (MIB, "MiB")
    left = sheet.edge + 0.45
    beside = 0.34 * (width - left) if has_near and not narrow else 0.0
    right = sheet.edge + 0.05 + (beside + 0.35 if beside else 0.0)
    low = sheet.height - whole
    axes = sheet.axes(left=left, right=right, top=0.5, bottom=low + 0.55)
    points = _thinned(facts.points, _MOST_NARROW) if narrow else facts.points
    _areas(axes, points, seen, unit)
    peak = facts.peak_bytes / unit
    axes.set_xlim(0, max(facts.num_events, 1))
    axes.set_xlabel("events of a step, in order", fontsize=SMALL)
    room = width - left - right
    _phases_above(axes, facts, max(facts.num_events, 1) / room, theme)
    shown = [axes]
    if has_near:
        first, last = facts.near[0].event, facts.near[-1].event
        zoom = sheet.axes(
            left=left if narrow else width - sheet.edge - beside, right=sheet.edge + 0.05,
            top=whole + 0.2 if narrow else 0.5, bottom=0.55,
        )  # fmt: skip
        _areas(zoom, facts.near, seen, unit)
        zoom.set_xlim(first, last)
        zoom.set_xlabel(f"{last - first + 1:,} events around the peak", fontsize=SMALL)
        # The part of the step that is drawn again: a bar on the scale, wide enough to be seen.
        wide = max(last - first, 0.06 * facts.num_events / room)
        at = (first + last - wide) / 2
        box(axes, at, -0.022 * peak * _HEAD, wide, 0.022 * peak * _HEAD, Ink(theme.ink),
            clip_on=False, gid="near")  # fmt: skip
        shown.append(zoom)
    for each in shown:
        each.set_ylim(0, (peak or 1.0) * _HEAD)
        each.yaxis.grid(True, color=theme.line, lw=0.6)
        each.xaxis.set_major_locator(MaxNLocator(nbins=3 if narrow or each is not axes else 6,
                                                 integer=True))  # fmt: skip
        each.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        each.plot([facts.peak_event], [peak * 1.03], marker="v", color=theme.ink, markersize=8,
                  gid="peak", zorder=5, clip_on=False)  # fmt: skip
    last_axes, across = shown[-1], room if len(shown) == 1 or narrow else beside
    _name_peak(last_axes, facts, across, peak, theme)
    write(axes, 0, 1.015, f"{word} of live tensors", theme, size=SMALL, transform=axes.transAxes)
    return Picture("timeline", facts.title, facts.alt, sheet.figure)


def _thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return about `most` of the points: of each run of them the one with most live bytes."""
    size = -(-len(points) // most) or 1
    runs = [points[first : first + size] for first in range(0, len(points) - 1, size)]
    return [*(max(run, key=lambda point: point.live_bytes) for run in runs), *points[-1:]]


def _name_peak(axes: Axes, facts: Timeline, room: float, peak: float, theme: Theme) -> None:
    """Write the bytes of the peak above its mark."""
    first, last = axes.get_xlim()
    text = f"peak {format_bytes(facts.peak_bytes)}"
    half = (width_of(text, TEXT, bold=True) / 2 + 0.05) * (last - first) / room
    at = min(max(facts.peak_event, first + half), last - half)
    write(axes, at, peak * 1.07, text, theme, weight="bold", across="center", up="bottom",
          bbox={"facecolor": theme.paper, "edgecolor": "none", "pad": 1.0})  # fmt: skip


def _areas(axes: Axes, points: Sequence[Point], places: Sequence[int], unit: int) -> None:
    """Draw the categories on top of each other."""
    from matplotlib.collections import PolyCollection

    terms = list(Term)
    events = [point.event for point in points]
    tops, top = [], [0.0] * len(events)
    for place in places:
        top = [t + p.terms[place] / unit for t, p in zip(top, points, strict=True)]
        tops.append((terms[place], top))
    # Each area begins at zero, and those drawn later cover it. An area between two outlines would
    # have both in the file, which would be twice as large.
    for term, top in reversed(tops):
        ink, outline = TERMS[term], list(zip(events, top, strict=True))
        area = [(events[0], 0.0), *outline, (events[-1], 0.0)] if events else []
        stroke = hatch_colour(ink) if ink.hatch else ink.colour
        axes.add_collection(
            PolyCollection([area], facecolor=ink.colour, hatch=ink.hatch or None, edgecolor=stroke,
                           linewidth=0.0, gid=str(term))
        )  # fmt: skip


def _has_letters(facts: Timeline) -> bool:
    return any(phase.name in _LETTERS for phase in facts.phases)


def _phases_above(axes: Axes, facts: Timeline, scale: float, theme: Theme) -> None:
    """Draw the phases as a strip above the areas, so that no line hides a peak."""
    below, tall = 1.075, 0.05
    across = axes.get_xaxis_transform()
    for number, phase in enumerate(facts.phases):
        ink = Ink({"forward": theme.panel, "backward": theme.line}.get(phase.name, theme.paper))
        box(axes, phase.first, below, phase.last - phase.first, tall, ink, transform=across,
            clip_on=False, gid=f"phase {number}: {phase.name}")  # fmt: skip
        room = (phase.last - phase.first) / scale
        name = phase.name
        if width_of(name, SMALL) > room - 0.06:
            name = _LETTERS.get(name, "") if room > 0.12 else ""
        middle = (phase.first + phase.last) / 2
        write(axes, middle, below + tall / 2, name, theme, size=SMALL, across="center",
              up="center", clip_on=False, transform=across)  # fmt: skip
