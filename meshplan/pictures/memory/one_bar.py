"""Draw the peak memory of ranks that are all equal: one bar, each part with its name beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshplan.pictures.base.page import (
    SMALL,
    TEXT,
    Plane,
    Sheet,
    behind,
    box,
    edge_of,
    fitted,
    height_of,
    is_narrow,
    room_of,
    width_of,
    wrapped,
    write,
)
from meshplan.pictures.base.palette import SMALLER, UNKNOWN, Ink, Theme
from meshplan.pictures.memory.bars import INKS, MemoryBars
from meshplan.pictures.memory.scale import MemoryScale, scale_of
from meshplan.units import format_bytes, format_gib

_SHARE: Final = 0.012
"""Share of the bar below which a part is too small to have a name of its own."""
_MOST: Final = 1.05
"""Width of a name above the bar in inches; longer names have several lines."""
_GAP: Final = 0.12
_THICK: Final = 0.62
"""Thickness of the lying bar in inches."""
_TALL: Final = 3.7
"""Height of the upright bar in inches."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the bar, from `begin_bytes` to `end_bytes`."""

    name: str
    begin_bytes: int
    end_bytes: int
    ink: Ink
    gid: str

    @property
    def size(self) -> str:
        return format_bytes(self.end_bytes - self.begin_bytes)


def draw_one_bar(facts: MemoryBars, theme: Theme, width: float) -> Sheet:
    """Draw the bar: lying with names above it, or upright with names beside it if it is narrow."""
    return _upright(facts, theme, width) if is_narrow(width) else _lying(facts, theme, width)


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Return centres of labels near the wanted ones, in the same order and without overlap.

    Args:
        wanted: Wanted centres, in ascending order.
        sizes: Sizes of the labels, with the gaps between them.
        low: Lowest end of a label.
        high: Highest end of a label; labels that do not fit between `low` and `high` overlap.

    >>> spread([1.0, 1.1, 5.0], [1.0, 1.0, 1.0], 0.0, 5.0)
    [0.55, 1.55, 4.5]
    """
    # Without the sizes of the labels before it, a label's place may not be less than the one
    # before: labels in the way of each other are pooled, at the mean of their wanted places.
    offsets = [sum(sizes[:place]) + size / 2 for place, size in enumerate(sizes)]
    pools: list[tuple[float, int]] = []
    for centre, offset in zip(wanted, offsets, strict=True):
        total, count = centre - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, more = pools.pop()
            total, count = total + before, count + more
        pools.append((total, count))
    free = [total / count for total, count in pools for _ in range(count)]
    highest = max(high - sum(sizes), low)
    return [round(min(max(place, low), highest) + offset, 6)
            for place, offset in zip(free, offsets, strict=True)]  # fmt: skip


def _parts(facts: MemoryBars, most: int) -> list[_Part]:
    """Return at most `most` parts of the bar; the smallest ones are one part together."""
    bar = facts.bars[0]
    least = _SHARE * max(bar.total_bytes, 1)
    by_size = sorted(bar.parts, key=lambda part: -part[1])
    small = {name for place, (name, size) in enumerate(by_size)
             if size < least or (place >= most - 1 and len(by_size) > most)}  # fmt: skip
    if len(small) < 2:
        small = set()
    seen = [(name, size, INKS[name]) for name, size in bar.parts if name not in small]
    if small:
        size = sum(size for name, size in bar.parts if name in small)
        seen.append((f"{len(small)} smaller", size, SMALLER))
    out, at = [], 0
    for name, size, ink in seen:
        out.append(_Part(name, at, at + size, ink, f"{bar.name}: {name}: {size} B"))
        at += size
    return out


@dataclass(frozen=True, slots=True)
class _Label:
    """A label above the bar: its text, and the place on the scale that it belongs to."""

    text: str
    at: float
    is_limit: bool = False

    @property
    def wide(self) -> float:
        return width_of(self.text, SMALL, bold=self.is_limit) + _GAP


def _labelled(
    facts: MemoryBars, scale: MemoryScale, per_inch: float, room: float
) -> tuple[list[_Part], list[_Part], list[_Label]]:
    """Return all parts, those with a name inside, and labels that fit side by side into `room`."""
    most = 12
    while True:
        parts = _parts(facts, most)
        inside: list[_Part] = []
        labels: list[_Label] = []
        for part in parts:
            middle = (part.begin_bytes + part.end_bytes) / 2 / scale.unit_bytes
            wide = (part.end_bytes - part.begin_bytes) / scale.unit_bytes / per_inch
            needed = max(width_of(part.name, SMALL), width_of(part.size, SMALL))
            if wide > needed + 0.14 and not scale.crosses(middle, needed * per_inch):
                inside.append(part)
            else:
                lines = [*wrapped(part.name, _MOST, SMALL, most=3), part.size]
                labels.append(_Label("\n".join(lines), middle))
        if scale.limit is not None:
            text = f"limit\n{format_bytes(round(scale.limit * scale.unit_bytes))}"
            labels.append(_Label(text, scale.limit, is_limit=True))
        if sum(label.wide for label in labels) <= room or most < 3:
            return parts, inside, sorted(labels, key=lambda label: label.at)
        most -= 1


def _lying(facts: MemoryBars, theme: Theme, width: float) -> Sheet:
    bar = facts.bars[0]
    largest = bar.high_bytes or round(bar.total_bytes * 1.25)
    scale = scale_of(largest, facts.limit_bytes)
    edge, names = edge_of(width), width_of(bar.name, SMALL)
    words = f"{format_bytes(bar.total_bytes)}: {facts.verdict(bar)}"
    left = edge + names + 0.15
    room = width - left - edge - width_of(words, TEXT, bold=True) - 0.2
    per_inch = scale.most / room
    parts, inside, labels = _labelled(facts, scale, per_inch, room_of(width))
    high = max((height_of(label.text, SMALL) for label in labels), default=0.0)
    notes = [*facts.notes, *([scale.note] if scale.note else [])]
    body = 0.6 + _THICK + 0.55 + high
    sheet = Sheet(theme, facts.title, body, notes=notes, width=width)
    axes = sheet.plot(
        left=left, bottom=0.6, units=(per_inch, 1.0), most=scale.most,
        label=f"{scale.unit} of one GPU, at the peak of a step", grid=_THICK + 0.15,
    )  # fmt: skip
    low, middle, top = 0.08, 0.08 + _THICK / 2, 0.08 + _THICK
    end = 0.0
    for part in parts:
        begin, end = part.begin_bytes / scale.unit_bytes, part.end_bytes / scale.unit_bytes
        box(axes, begin, low, end - begin, _THICK, part.ink, edge=theme.paper, line=0.4,
            gid=part.gid)  # fmt: skip
        if part in inside:
            write(axes, (begin + end) / 2, middle, f"{part.name}\n{part.size}", theme,
                  size=SMALL, colour=theme.text_on(part.ink.colour), across="center", up="center",
                  bbox=behind(part.ink), gid="inside")  # fmt: skip
    upper = largest / scale.unit_bytes
    if bar.high_bytes is not None:
        axes.plot([end, upper], [middle] * 2, color=theme.ink, lw=1.4)
        axes.plot([upper] * 2, [middle - 0.08, middle + 0.08], color=theme.ink)
    else:
        box(axes, end, low, upper - end, _THICK, UNKNOWN, edge=theme.quiet,
            gid=f"{bar.name}: unknown")  # fmt: skip
        if (upper - end) / per_inch > width_of("unknown", SMALL) + 0.1:
            write(axes, (upper + end) / 2, middle, "unknown", theme, size=SMALL,
                  colour=theme.text_on(UNKNOWN.colour), across="center", up="center",
                  bbox=behind(UNKNOWN))  # fmt: skip
    if scale.limit is not None:
        axes.plot([scale.limit] * 2, [low - 0.03, top], color=theme.ink, lw=2.0, gid="limit")
    _above(sheet, axes, labels, top, theme)
    texts, y = Plane(sheet.figure), axes.inches(0, middle)[1]
    write(texts, edge + names, y, bar.name, theme, size=SMALL, across="right", up="center")
    write(texts, left + room + 0.15, y, words, theme, colour=_colour(facts, theme), weight="bold",
          up="center", gid="verdict")  # fmt: skip
    return sheet


def _above(sheet: Sheet, axes: Plane, labels: Sequence[_Label], top: float, theme: Theme) -> None:
    """Write the labels above the bar, with lines from its upper edge, which is at `top`."""
    texts, base = Plane(sheet.figure), axes.inches(0, top + 0.28)[1]
    starts = [axes.inches(label.at, 0)[0] for label in labels]
    ends = spread(starts, [label.wide for label in labels], sheet.edge, sheet.width - sheet.edge)
    for label, start, x in zip(labels, starts, ends, strict=True):
        weight = "bold" if label.is_limit else "normal"
        write(texts, x, base, label.text, theme, size=SMALL, weight=weight, across="center",
              up="bottom", linespacing=1.2, gid="label")  # fmt: skip
        texts.plot(
            [start, start, x], [axes.inches(0, top)[1], base - 0.2, base - 0.03],
            color=theme.ink if label.is_limit else theme.quiet, lw=2.0 if label.is_limit else 0.8,
            gid="limit" if label.is_limit else "leader",
        )  # fmt: skip


def _colour(facts: MemoryBars, theme: Theme) -> str:
    bar = facts.bars[0]
    if facts.verdict(bar).startswith("OVER"):
        return theme.bad
    return theme.good if bar.fits else theme.ink


def _upright(facts: MemoryBars, theme: Theme, width: float) -> Sheet:
    from matplotlib.ticker import MaxNLocator

    bar = facts.bars[0]
    largest = bar.high_bytes or round(bar.total_bytes * 1.25)
    scale = scale_of(largest, facts.limit_bytes)
    notes = [*facts.notes, *([scale.note] if scale.note else [])]
    sheet = Sheet(theme, facts.title, _TALL + 0.6, notes=notes, width=width)
    per_inch = scale.most / _TALL
    left, wide = sheet.edge + 0.42, 0.7
    axes = Plane(sheet.figure, (left, sheet.bottom + 0.15), (1.0, per_inch))
    for tick in MaxNLocator(nbins=6).tick_values(0.0, scale.most):
        if 0 <= tick <= scale.most:
            axes.plot([-0.12, -0.06], [tick, tick], color=theme.quiet, lw=0.8)
            write(axes, -0.17, tick, f"{tick:g}", theme, size=SMALL, across="right", up="center")
    axes.plot([-0.06, -0.06], [0, scale.most], color=theme.line, lw=0.8)
    head = f"{scale.unit} of one GPU, at the peak of a step, of {bar.name}"
    write(axes, -left + sheet.edge, scale.most + 0.24 * per_inch, head, theme, size=SMALL)
    marks: list[tuple[float, str, str, str]] = []
    end = 0.0
    for part in _parts(facts, 12):
        begin, end = part.begin_bytes / scale.unit_bytes, part.end_bytes / scale.unit_bytes
        box(axes, 0, begin, wide, end - begin, part.ink, edge=theme.paper, line=0.4, gid=part.gid)
        marks.append(((begin + end) / 2, f"{part.name}, {part.size}", theme.ink, "normal"))
    if bar.high_bytes is not None:
        upper = bar.high_bytes / scale.unit_bytes
        axes.plot([wide / 2] * 2, [end, upper], color=theme.ink, lw=1.4)
        axes.plot([wide / 2 - 0.1, wide / 2 + 0.1], [upper] * 2, color=theme.ink)
        marks.append((upper, f"at most {format_bytes(bar.high_bytes)}", theme.ink, "normal"))
    else:
        upper = largest / scale.unit_bytes
        box(axes, 0, end, wide, upper - end, UNKNOWN, edge=theme.quiet, gid=f"{bar.name}: unknown")
        marks.append(((end + upper) / 2, "unknown", theme.ink, "normal"))
    marks.append((upper, facts.verdict(bar), _colour(facts, theme), "bold"))
    if scale.limit is not None:
        axes.plot([-0.06, wide + 0.08], [scale.limit] * 2, color=theme.ink, lw=2.0, gid="limit")
        text = f"limit {format_gib(round(scale.limit * scale.unit_bytes))}"
        marks.append((scale.limit, text, theme.ink, "bold"))
    marks.sort(key=lambda mark: mark[0])
    tall = [0.2 * per_inch] * len(marks)
    wanted = [at for at, *_ in marks]
    for (at, text, colour, weight), y in zip(
        marks, spread(wanted, tall, -0.1 * per_inch, scale.most + 0.1 * per_inch), strict=True
    ):
        axes.plot([wide + 0.03, wide + 0.12, wide + 0.24, wide + 0.29], [at, at, y, y],
                  color=theme.quiet, lw=0.8)  # fmt: skip
        text = fitted(text, width - left - wide - 0.33, SMALL, bold=True)
        write(axes, wide + 0.33, y, text, theme, size=SMALL, colour=colour, weight=weight,
              up="center", gid="label")  # fmt: skip
    return sheet
