"""Draw the graph of a model's modules: boxes in rows, arrows, and frames around repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from meshplan.pictures.base.page import (
    SMALL,
    TEXT,
    WIDTH,
    Item,
    Plane,
    Sheet,
    behind,
    box,
    fitted,
    fitted_name,
    is_narrow,
    room_of,
    width_of,
    write,
)
from meshplan.pictures.base.palette import GREY, PLACEMENTS, STAGES, WHOLE, Ink, Theme
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import counted
from meshplan.pictures.graphs.arrows import ENTRY, EXIT, Box
from meshplan.pictures.graphs.layered import Key, LayeredPositions, Link, Point, lay_out
from meshplan.pictures.graphs.modules import SEVERAL, Graph
from meshplan.pictures.graphs.tree import NOTHING
from meshplan.units import format_count

_TALL: Final = 0.5
_MEETING: Final = 0.24
_MOST: Final = 3.6
_BETWEEN: Final = 0.3
_IN_ROW: Final = 5
_HEAD: Final = 0.34
"""Height of the title of a frame in inches."""
_EDGE: Final = 0.16


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoxSizes:
    """Sizes of boxes, in inches.

    Args:
        least: Least width of a box.
        gap: Distance of two boxes in a row.
        size: Font size of names in points.
        is_strict: If True, boxes are drawn without arrows if there is no room for these.
    """

    least: float
    gap: float
    size: float
    is_strict: bool


_WIDE: Final = _BoxSizes(least=1.15, gap=0.2, size=TEXT, is_strict=False)
_NARROW: Final = _BoxSizes(least=0.92, gap=0.12, size=SMALL, is_strict=True)


@dataclass(frozen=True, slots=True)
class _Level:
    """The positions of the boxes inside one frame, or outside of all frames.

    Args:
        positions: Positions of the boxes, in inches.
        inside: Positions inside those boxes that are frames, by the number of the box.
    """

    positions: LayeredPositions
    inside: Mapping[int, _Level]

    @property
    def width(self) -> float:
        return self.positions.width

    @property
    def height(self) -> float:
        return self.positions.height


def draw_graph(facts: Graph, theme: Theme, width: float = WIDTH) -> Picture:
    """Draw the graph, with the first boxes that run at the top."""
    inks = _inks(facts)
    sizing = _NARROW if is_narrow(width) else _WIDE
    level = _level(facts, -1, room_of(width), sizing)
    legend: list[Item] = list(inks.items())
    if any(not each.group and not each.is_meeting and not each.is_frame for each in facts.boxes):
        legend.append((NOTHING, Ink(theme.panel)))
    notes = _notes(facts)
    if facts.links.get(-1) and not level.positions.paths:
        notes.append("The outer boxes are in the order in which they run: this drawing is too "
                     "narrow for their arrows.")  # fmt: skip
    sheet = Sheet(theme, facts.title, level.height + 0.15, legend=legend, notes=notes,
                  width=width)  # fmt: skip
    plane = sheet.plane()
    left = sheet.edge + (room_of(width) - level.width) / 2
    _draw(plane, facts, level, (left, 0.05), inks, sizing, theme)
    return Picture("graph", facts.title, facts.alt, sheet.figure)


def _notes(facts: Graph) -> list[str]:
    notes = [
        f"Colour: the {facts.by} of a box's parameters. {{0..31}} stands for that many identical "
        "modules, one of which a frame shows; numbers count the parameters of all of them."
    ]
    if facts.source == "recorded":
        notes.append("Arrows: the data flow of a recorded forward; a sign marks code between "
                     "modules that combines values.")  # fmt: skip
    elif facts.source == "config":
        notes.append("Arrows: the data flow as transformers computes this family; a sign marks "
                     "code between modules that combines values.")  # fmt: skip
    elif facts.source:
        notes.append("Arrows: the data flow. A frame without arrows shows its modules in the "
                     "order of definition: the config does not give their data flow.")  # fmt: skip
    else:
        notes.append("Modules are in the order of definition: no forward was recorded, so the data "
                     "flow is unknown.")  # fmt: skip
    if facts.num_idle:
        boxes = counted(facts.num_idle, "box", "boxes")
        notes.append(f"Left out: {boxes} of modules that do not run and hold no parameters.")
    return notes


def _level(facts: Graph, frame: int, room: float, sizing: _BoxSizes) -> _Level:
    """Lay out the boxes of one frame within a width of `room` inches."""
    own = {n: each for n, each in enumerate(facts.boxes) if each.frame == frame}
    links: list[Link] = list(facts.links.get(frame, ()))
    inside = {n: _level(facts, n, room - 2 * _EDGE - 0.3 * (not sizing.is_strict), sizing)
              for n, each in own.items() if each.is_frame}  # fmt: skip
    if not links:
        return _Level(_in_order(own, inside, room, sizing), inside)
    most, in_row = _MOST, _IN_ROW
    while True:
        widest = dict.fromkeys(own, min(most, room))
        positions = _lay_out(own, inside, links, widest, in_row, sizing)
        if positions.width <= room:
            break
        if most <= sizing.least and in_row == 1:
            if sizing.is_strict:
                positions = _in_order(own, inside, room, sizing)
            return _Level(positions, inside)
        if most > sizing.least:
            most = max(most - 0.3, sizing.least)
        else:
            in_row -= 1
    if sizing.is_strict and most < _MOST:
        # Only boxes that share a row need to be that narrow.
        heights = [y for n, (_, y) in positions.at.items() if n in own]
        alone = {n: room * 0.6 for n in own if heights.count(positions.at[n][1]) == 1}
        wider = _lay_out(own, inside, links, widest | alone, in_row, sizing)
        positions = wider if wider.width <= room else positions
    return _Level(positions, inside)


def _lay_out(
    own: Mapping[int, Box],
    inside: Mapping[int, _Level],
    links: Sequence[Link],
    widest: Mapping[int, float],
    in_row: int,
    sizing: _BoxSizes,
) -> LayeredPositions:
    """Lay out boxes and arrows.

    Args:
        own: The boxes, by number.
        inside: Positions inside those boxes that are frames.
        links: The arrows.
        widest: Largest width of each box.
        in_row: Maximum number of boxes in a row.
        sizing: Sizes of boxes.
    """
    sizes: dict[Key, tuple[float, float]] = {}
    if any(a == ENTRY for a, _ in links):
        sizes[ENTRY] = (0.02, 0.0)
    sizes |= {n: _size(each, inside.get(n), widest[n], sizing) for n, each in own.items()}
    if any(b == EXIT for _, b in links):
        sizes[EXIT] = (0.02, 0.0)
    return lay_out(sizes, links, most_in_row=in_row, gap=sizing.gap, between=_BETWEEN)


def _in_order(
    own: Mapping[int, Box], inside: Mapping[int, _Level], room: float, sizing: _BoxSizes
) -> LayeredPositions:
    """Lay out boxes without arrows in rows from left to right, like the words of a text."""
    rows: list[list[int]] = [[]]
    wide: dict[Key, tuple[float, float]] = {
        n: _size(each, inside.get(n), min(_MOST, room), sizing) for n, each in own.items()
    }
    for n in own:
        taken = sum(wide[k][0] + sizing.gap for k in rows[-1])
        if rows[-1] and (taken + wide[n][0] > room or inside.get(n) or inside.get(rows[-1][-1])):
            rows.append([])
        rows[-1].append(n)
    height = sum(max((wide[n][1] for n in row), default=0.0) + 0.16 for row in rows) - 0.16
    at: dict[Key, Point] = {}
    y, most = height, 0.0
    for row in rows:
        x = 0.0
        tall = max((wide[n][1] for n in row), default=0.0)
        for n in row:
            at[n] = (x, y - tall)
            x += wide[n][0] + sizing.gap
        most = max(most, x - sizing.gap)
        y -= tall + 0.16
    return LayeredPositions(max(most, 0.0), max(height, 0.0), at, wide, {})


def _size(each: Box, inside: _Level | None, most: float, sizing: _BoxSizes) -> tuple[float, float]:
    if each.is_meeting:
        return max(width_of(each.name, SMALL) + 0.16, 0.3), _MEETING
    if inside is not None:
        head = min(width_of(_head(each), SMALL, bold=True) + 0.3, most * 1.5)
        if sizing.is_strict:
            head = 0.0  # The frame is as wide as what is inside; its title is shortened.
        return max(inside.width + 2 * _EDGE, head), inside.height + _HEAD + _EDGE
    wanted = max(width_of(each.name, sizing.size, bold=True), width_of(_words(each), SMALL)) + 0.2
    return min(max(wanted, sizing.least), most), _TALL


def _words(each: Box, room: float = 99.0) -> str:
    """Return the class of a box and its numbers; the class is shortened to fit `room` inches."""
    size = f" · {format_count(each.num_params)}" if each.num_params else ""
    times = f" · {each.num_modules:,} times" if each.num_modules > 1 and each.frame < 0 else ""
    below = f" · {each.num_below:,} inside" if each.num_below else ""
    for more in (f"{size}{times}{below}", f"{size}{times}", size):
        kind = fitted(each.type, room - width_of(more, SMALL), SMALL)
        if kind:
            return f"{kind}{more}"
    return fitted(each.type, room, SMALL)


def _head(each: Box) -> str:
    return f"{each.name} · {each.type} · {each.num_modules:,} times · " + format_count(
        each.num_params
    )


def _draw(
    plane: Plane,
    facts: Graph,
    level: _Level,
    corner: Point,
    inks: Mapping[str, Ink],
    sizing: _BoxSizes,
    theme: Theme,
) -> None:
    x0, y0 = corner
    for (begin, end), points in level.positions.paths.items():
        xs, ys = [x0 + x for x, _ in points], [y0 + y for _, y in points]
        plane.plot(xs, ys, color=theme.quiet, lw=1.1, zorder=0.9, gid=f"link {begin} {end}")
        if end != EXIT:
            plane.plot(
                [xs[-1]], [ys[-1] + 0.045], marker="v", markersize=5, color=theme.quiet, zorder=1.5
            )
    for number, at in level.positions.at.items():
        if not isinstance(number, int) or number < 0:
            continue
        each = facts.boxes[number]
        x, y = x0 + at[0], y0 + at[1]
        wide, tall = level.positions.sizes[number]
        if each.is_frame:
            box(plane, x, y, wide, tall, Ink(theme.panel), edge=theme.quiet, zorder=0.5,
                gid=f"frame {number}")  # fmt: skip
            head = fitted(_head(each), wide - 0.2, SMALL, bold=True)
            write(plane, x + 0.1, y + tall - 0.2, head, theme, size=SMALL, weight="bold")
            inner = level.inside[number]
            left = x + (wide - inner.width) / 2
            _draw(plane, facts, inner, (left, y + _EDGE), inks, sizing, theme)
        elif each.is_meeting:
            box(plane, x, y, wide, tall, Ink(theme.paper), edge=theme.quiet,
                gid=f"meeting {number}")  # fmt: skip
            write(plane, x + wide / 2, y + tall / 2, each.name, theme, size=SMALL,
                  across="center", up="center")  # fmt: skip
        else:
            _module(plane, number, each, (x, y, wide), inks, sizing, theme)


def _module(
    plane: Plane,
    number: int,
    each: Box,
    at: tuple[float, float, float],
    inks: Mapping[str, Ink],
    sizing: _BoxSizes,
    theme: Theme,
) -> None:
    x, y, wide = at
    ink = inks.get(each.group, Ink(theme.panel))
    # The gid becomes a tooltip of the svg: it has the full text, which the box may shorten.
    gid = f"module {number}: {each.group or NOTHING}: {each.name}, {_words(each)}"
    box(plane, x, y, wide, _TALL, ink, edge=theme.quiet, gid=gid)
    colour = theme.text_on(ink.colour)
    name = fitted_name(each.name, wide - 0.14, sizing.size)
    if width_of(name, sizing.size, bold=True) > wide - 0.12:
        name = fitted(name, wide - 0.14, sizing.size, bold=True)
    for text, up, size, weight in (
        (name, 0.27, sizing.size, "bold"),
        (_words(each, wide - 0.12), 0.09, SMALL, "normal"),
    ):
        write(plane, x + wide / 2, y + up, text, theme, size=size, weight=weight, colour=colour,
              across="center", bbox=behind(ink))  # fmt: skip


def _inks(facts: Graph) -> dict[str, Ink]:
    table: Sequence[Ink] = STAGES if facts.by == "stage" else PLACEMENTS
    shown = {each.group for each in facts.boxes if not each.is_frame}
    out: dict[str, Ink] = {}
    number = 0
    for name in facts.groups:
        if name == "whole":
            out[name] = WHOLE
            continue
        out[name] = table[min(number, len(table) - 1)]
        number += 1
    out[SEVERAL] = Ink(GREY, "++")
    return {name: ink for name, ink in out.items() if name in shown}
