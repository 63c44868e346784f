"""Draw the peak memory of groups of ranks: a bar for each group, or the one bar of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshplan.pictures.base.page import (
    SMALL,
    TEXT,
    WIDTH,
    Plane,
    Sheet,
    behind,
    box,
    edge_of,
    fitted,
    is_narrow,
    width_of,
    write,
)
from meshplan.pictures.base.palette import SMALLER, UNKNOWN, Ink, Theme
from meshplan.pictures.base.types import Picture
from meshplan.pictures.memory.bars import INKS, MemoryBars
from meshplan.pictures.memory.one_bar import draw_one_bar
from meshplan.pictures.memory.scale import MemoryScale, draw_limit, scale_of
from meshplan.units import format_bytes

_LEAST: Final = 0.05
"""Width in inches below which a category is too small to be seen in any bar."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The parts, names and legend that `draw_memory` draws.

    Args:
        parts: For each bar, pairs (name, bytes); categories too small to see are one part.
        inside: For each name that fits into its fill, the number of the bar in which it is written.
        legend: Pairs (label, fill) of the other names.
    """

    parts: tuple[tuple[tuple[str, int], ...], ...]
    inside: dict[str, int]
    legend: tuple[tuple[str, Ink], ...]


def _drawn(facts: MemoryBars, scale: MemoryScale, per_inch: float) -> _Drawn:
    """Decide which categories are one part, and which names are written into their fills.

    Args:
        facts: The facts.
        scale: The scale.
        per_inch: Bytes of an inch.
    """
    most = dict.fromkeys(INKS, 0)
    for bar in facts.bars:
        for name, size in bar.parts:
            most[name] = max(most[name], size)
    small = [name for name, size in most.items() if 0 < size < _LEAST * per_inch]
    if len(small) < 2:
        small = []
    together = f"{len(small)} smaller categories"
    parts = []
    for bar in facts.bars:
        seen = [(name, size) for name, size in bar.parts if name not in small]
        if rest := sum(size for name, size in bar.parts if name in small):
            seen.append((together, rest))
        parts.append(tuple(seen))
    names = [name for name in INKS if most[name] and name not in small]
    inside: dict[str, int] = {}
    for name in names:
        wide = width_of(name, SMALL)
        spans = [_span(each, name) for each in parts]
        room = [
            0.0 if scale.crosses((begin + end) / 2 / scale.unit_bytes, wide * per_inch
                                 / scale.unit_bytes) else (end - begin) / per_inch
            for begin, end in spans
        ]  # fmt: skip
        if max(room) >= wide + 0.14:
            inside[name] = room.index(max(room))
    legend = [(name, _ink(name)) for name in names if name not in inside]
    if small:
        legend.append((together, _ink(together)))
    if facts.unknown:
        legend.append(("unknown", UNKNOWN))
    return _Drawn(tuple(parts), inside, tuple(legend))


def _span(parts: Sequence[tuple[str, int]], name: str) -> tuple[int, int]:
    """Return where a part of a bar begins and ends, in bytes; (0, 0) if the bar lacks it."""
    at = 0
    for each, size in parts:
        if each == name:
            return at, at + size
        at += size
    return 0, 0


def _ink(name: str) -> Ink:
    return INKS.get(name, SMALLER)


def draw_memory(facts: MemoryBars, theme: Theme, width: float = WIDTH) -> Picture:
    """Draw a bar for each group, with the names of its parts inside it where these fit."""
    if len(facts.bars) == 1:
        return Picture("memory", facts.title, facts.alt, draw_one_bar(facts, theme, width).figure)
    narrow, rows = is_narrow(width), len(facts.bars)
    largest = max(bar.high_bytes or round(bar.total_bytes * 1.25) for bar in facts.bars)
    scale = scale_of(largest, facts.limit_bytes)
    words = [f"{format_bytes(bar.total_bytes)}: {facts.verdict(bar)}" for bar in facts.bars]
    beside = max(width_of(text, TEXT, bold=True) for text in words)
    edge = edge_of(width)
    names = min(max(width_of(bar.name, SMALL) for bar in facts.bars), 2.6)
    left = edge + (0.06 if narrow else names + 0.15)
    # Leave space for the texts of the bars, to the right of the longest bar and of the limit.
    room = width - left - edge - (0.05 if narrow else beside + 0.2)
    per_inch = scale.most / room
    drawn = _drawn(facts, scale, per_inch * scale.unit_bytes)
    tall, low, high = 0.62, 0.16, 0.84
    # A narrow picture has the texts above the bar, in two lines where they are too long for one.
    lines = 1 + any(
        width_of(bar.name, SMALL) + width_of(text, TEXT, bold=True) > width - 2 * left - 0.1
        for bar, text in zip(facts.bars, words, strict=True)
    )
    if narrow:
        tall = 0.44 + 0.2 * lines
        low, high = 0.04 / tall, 0.4 / tall
    notes = [*facts.notes, *([scale.note] if scale.note else [])]
    sheet = Sheet(theme, facts.title, tall * rows + 0.95, legend=drawn.legend, notes=notes,
                  width=width)  # fmt: skip
    axes = sheet.plot(
        left=left, bottom=0.6, units=(per_inch, 1 / tall), most=scale.most,
        label=f"{scale.unit} of one GPU, at the peak of a step",
    )  # fmt: skip
    texts = sheet.plane()
    for number, bar in enumerate(facts.bars):
        y = rows - number - 1
        middle = y + (low + high) / 2
        at = 0.6 + middle * tall
        above = 0.6 + (y + high) * tall + 0.11
        end = _draw_parts(axes, facts, drawn, number, (y + low, y + high), scale, theme)
        if bar.high_bytes is not None:
            upper = bar.high_bytes / scale.unit_bytes
            axes.plot([end, upper], [middle] * 2, color=theme.ink, lw=1.4)
            axes.plot([upper] * 2, [middle - 0.1, middle + 0.1], color=theme.ink)
        else:
            box(axes, end, y + low, largest / scale.unit_bytes - end, high - low, UNKNOWN,
                edge=theme.quiet, gid=f"{bar.name}: unknown")  # fmt: skip
        is_over = facts.verdict(bar).startswith("OVER")
        colour = theme.bad if is_over else theme.good if bar.fits else theme.ink
        name = fitted(bar.name, width - 2 * left if narrow else names, SMALL)
        if narrow:
            write(texts, left, above + 0.2 * (lines - 1), name, theme, size=SMALL, up="center")
            x, across = (left, "left") if lines > 1 else (width - left, "right")
            verdict_at = (x, above)
        else:
            write(texts, edge + names, at, name, theme, size=SMALL, across="right", up="center")
            verdict_at, across = (left + room + 0.15, at), "left"
        write(texts, *verdict_at, words[number], theme, colour=colour, weight="bold",
              across=across, up="center", gid="verdict")  # fmt: skip
    draw_limit(axes, sheet, scale, [(y + low, y + high) for y in range(rows)], float(rows))
    return Picture("memory", facts.title, facts.alt, sheet.figure)


def _draw_parts(
    axes: Plane,
    facts: MemoryBars,
    drawn: _Drawn,
    number: int,
    span: tuple[float, float],
    scale: MemoryScale,
    theme: Theme,
) -> float:
    """Draw the parts of one bar, with names inside, and return its right end."""
    low, high = span
    at, bar = 0, facts.bars[number]
    for name, size in drawn.parts[number]:
        ink, begin, wide = _ink(name), at / scale.unit_bytes, size / scale.unit_bytes
        gid = f"{bar.name}: {name}: {size} B"
        box(axes, begin, low, wide, high - low, ink, edge=theme.paper, line=0.4, gid=gid)
        if drawn.inside.get(name) == number:
            write(
                axes, begin + wide / 2, (low + high) / 2, name, theme, size=SMALL,
                colour=theme.text_on(ink.colour), across="center", up="center",
                bbox=behind(ink), gid="inside",
            )  # fmt: skip
        at += size
    return at / scale.unit_bytes
