"""Draw the candidates of a search: memory to the right, step time upward, and a list of plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from meshplan.pictures.base.page import (
    SMALL,
    WIDTH,
    Plane,
    Sheet,
    is_narrow,
    room_of,
    width_of,
    wrapped,
    write,
)
from meshplan.pictures.base.palette import BLUE, YELLOW, Ink, Theme
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import counted, time_scale
from meshplan.pictures.plans.pareto import Dot, Pareto
from meshplan.units import GIB, format_gib, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOG: Final = 12.0
"""An axis is logarithmic if its largest value divided by its smallest one exceeds this."""
_BINS: Final = 60
_SLOW: Final = 2.5
"""Bounds that take more than this many times the fastest plan are counted, but not drawn."""
_LARGE: Final = 3.0
"""Bounds of more than this many times the limit are counted, but not drawn."""
_LINE: Final = 0.19
_LETTERS: Final = "ABCDE"
_LETTER: Final = 15.0
"""Distance between two letters in points."""


def draw_pareto(facts: Pareto, theme: Theme, width: float = WIDTH) -> Picture:
    """Draw the dots; what is beyond the limit, and what no plan can reach, is shaded."""
    narrow = is_narrow(width)
    bounds, num_hidden = _near(facts)
    over = [dot for dot in facts.simulated if dot.num_bytes > facts.limit_bytes]
    fits = [dot for dot in facts.simulated if dot.num_bytes <= facts.limit_bytes]
    legend = [("lower bounds of a configuration", Ink(theme.line))]
    if fits:
        legend.insert(0, ("simulated, fits", Ink(BLUE)))
    if over:
        legend.insert(1, ("simulated, does not fit", Ink(theme.bad)))
    lines = _listed(facts, room_of(width) - 0.3)
    listed = sum(0.07 + _LINE * len(words) for _, words in lines) + (0.25 if lines else 0.0)
    tall = 3.6 if narrow else 4.3
    sheet = Sheet(theme, facts.title, tall + 1.0 + listed, legend=legend,
                  notes=_notes(facts, num_hidden), width=width)  # fmt: skip
    left, right = sheet.edge + 0.45, sheet.edge + 0.1
    axes = sheet.axes(left=left, right=right, top=0.45, bottom=listed + 0.55)
    room = width - left - right
    every = [*bounds, *facts.simulated] or [Dot(facts.limit_bytes, 1.0)]
    limit = facts.limit_bytes / GIB
    axes.set_xlim(_scale(axes.xaxis, [limit, *(d.num_bytes / GIB for d in every)]))
    unit, shown = time_scale(max(d.seconds for d in every))
    axes.set_ylim(_scale(axes.yaxis, [d.seconds for d in every], shown))
    _regions(axes, facts, limit, room, theme)
    dots = list(_thinned(bounds))
    axes.plot([d.num_bytes / GIB for d in dots], [d.seconds for d in dots], ls="", ms=3.2,
              marker="o", color=theme.quiet, alpha=0.4, mew=0, gid="bounds")  # fmt: skip
    axes.plot([d.num_bytes / GIB for d in facts.frontier], [d.seconds for d in facts.frontier],
              color=BLUE, lw=1.2, drawstyle="steps-post", gid="frontier")  # fmt: skip
    for some, marker, colour, name in (
        (fits, "o", BLUE, "simulated"),
        (over, "X", theme.bad, "over"),
    ):
        axes.plot([d.num_bytes / GIB for d in some], [d.seconds for d in some], ls="", ms=7,
                  marker=marker, color=colour, mec=theme.paper, gid=name, zorder=4)  # fmt: skip
    if facts.chosen is not None:
        at = (facts.chosen.num_bytes / GIB, facts.chosen.seconds)
        axes.plot([at[0]], [at[1]], marker="*", ms=17, color=YELLOW, mec="#000000", mew=1.0,
                  zorder=6, ls="", gid="chosen")  # fmt: skip
    _letters(axes, facts, theme)
    axes.set_xlabel("GiB of the rank that needs most", fontsize=SMALL)
    write(axes, 0, 1.02, f"{unit} of a step", theme, size=SMALL, transform=axes.transAxes)
    axes.grid(True, color=theme.line, lw=0.5)
    _limit(axes, facts, room, f"{unit} of a step", theme)
    _list(sheet, lines, listed, theme)
    return Picture("pareto", facts.title, facts.alt, sheet.figure)


def _letters(axes: Axes, facts: Pareto, theme: Theme) -> None:
    """Write a letter beside each named plan, each at a place of its own."""
    taken: list[tuple[float, float]] = []
    per_point = axes.figure.dpi / 72
    for letter, dot in zip(_LETTERS, facts.named, strict=False):
        x, y = axes.transData.transform((dot.num_bytes / GIB, dot.seconds)) / per_point

        def is_free(offset: tuple[float, float], x: float = x, y: float = y) -> bool:
            at = (x + offset[0], y + offset[1])
            return all(max(abs(at[0] - a), abs(at[1] - b)) >= _LETTER for a, b in taken)

        # Above the plan and to its left, the more so the more letters are there already.
        places = [(-14.0 - _LETTER * left, 26.0 + _LETTER * up)
                  for up in range(3) for left in range(4)]  # fmt: skip
        offset = next(filter(is_free, places), places[-1])
        taken.append((x + offset[0], y + offset[1]))
        point = (dot.num_bytes / GIB, dot.seconds)
        axes.annotate("", point, offset, textcoords="offset points", zorder=6.5,
                      arrowprops={"arrowstyle": "-", "color": theme.ink, "lw": 0.8})  # fmt: skip
        axes.annotate(
            letter, point, offset, textcoords="offset points", fontsize=SMALL, fontweight="bold",
            color=theme.ink, ha="center", va="center", zorder=7,
            bbox={"facecolor": theme.paper, "edgecolor": theme.line, "pad": 1.5},
        )  # fmt: skip


def _near(facts: Pareto) -> tuple[list[Dot], int]:
    """Return the bounds near the plans and the limit, and the number of all others."""
    times = [dot.seconds for dot in (*facts.simulated, *facts.bounds)]
    slow = _SLOW * min([dot.seconds for dot in facts.simulated] or times or [1.0])
    large = _LARGE * facts.limit_bytes
    near = [dot for dot in facts.bounds if dot.seconds <= slow and dot.num_bytes <= large]
    if not near or facts.chosen is None:
        near = list(facts.bounds)
    return near, len(facts.bounds) - len(near)


def _notes(facts: Pareto, num_hidden: int) -> list[str]:
    notes = [
        "A small dot is a configuration's least memory at any step time, and its least step time "
        "at any memory. Simulated plans have simulated memory, and times of the cost model."
    ]
    if num_hidden:
        many = counted(num_hidden, "configuration")
        notes.append(
            f"Not drawn: {many} of more than {_SLOW:g} times the fastest step, or more than "
            f"{_LARGE:g} times the limit."
        )
    return notes


def _regions(axes: Axes, facts: Pareto, limit: float, room: float, theme: Theme) -> None:
    """Shade what is beyond the limit, and what is below all lower bounds, and name both."""
    (low, right), bottom = axes.get_xlim(), axes.get_ylim()[0]
    axes.axvspan(limit, right, color=theme.forbidden, lw=0, gid="forbidden", zorder=0)
    axes.axvline(limit, color=theme.ink, lw=1.8, gid="limit")
    share = 1 - _across(axes, limit)
    text = "beyond the limit"
    if width_of(text, SMALL) + 0.2 < share * room:
        write(axes, 0.985, 0.97, text, theme, size=SMALL, across="right", up="top",
              transform=axes.transAxes, colour=theme.bad,
              bbox={"facecolor": theme.forbidden, "edgecolor": "none", "pad": 1.5})  # fmt: skip
    bound = facts.bound
    if not bound:
        return
    top = axes.get_ylim()[1]
    xs = [low, *(dot.num_bytes / GIB for dot in bound), right]
    ys = [top, *(dot.seconds for dot in bound), bound[-1].seconds]
    axes.fill_between(xs, bottom, ys, step="post", color=theme.panel, lw=0, zorder=0.1,
                      gid="impossible")  # fmt: skip
    axes.plot(xs, ys, drawstyle="steps-post", color=theme.quiet, lw=1.4, gid="bound", zorder=2)
    # The words stand on one side of the limit's line, which would run through them.
    share = _across(axes, limit)
    for text in ("no plan is below the line: the least of all lower bounds",
                 "no plan is below the line"):  # fmt: skip
        wide = width_of(text, SMALL) + 0.2
        if max(share, 1 - share) * room < wide:
            continue
        at = 0.99 if (1 - share) * room >= wide else share - 0.1 / room
        write(axes, at, 0.025, text, theme, size=SMALL, across="right", transform=axes.transAxes,
              colour=theme.quiet, gid="impossible",
              bbox={"facecolor": theme.panel, "edgecolor": "none", "pad": 1.0})  # fmt: skip
        return


def _listed(facts: Pareto, room: float) -> list[tuple[str, list[str]]]:
    """Return the mark and the lines of text of each plan that the picture names."""
    out = []
    if facts.chosen is not None:
        words = f"chosen: {_figures(facts.chosen)}: {facts.chosen.words}"
        out.append(("*", wrapped(words, room, SMALL, most=5)))
    as_chosen = "as chosen, but " if facts.chosen is not None else ""
    for letter, dot in zip(_LETTERS, facts.named, strict=False):
        over = "" if dot.num_bytes <= facts.limit_bytes else " (does not fit)"
        words = f"{_figures(dot)}{over}: {as_chosen}{dot.words}"
        out.append((letter, wrapped(words, room, SMALL, most=5)))
    return out


def _figures(dot: Dot) -> str:
    return f"{format_seconds(dot.seconds)}, {format_gib(dot.num_bytes)}"


def _list(
    sheet: Sheet, lines: Sequence[tuple[str, list[str]]], listed: float, theme: Theme
) -> None:
    """Write the list of plans below the axes."""
    plane: Plane = sheet.plane()
    y = listed - 0.12
    for mark, texts in lines:
        if mark == "*":
            plane.plot([sheet.edge + 0.1], [y - 0.08], marker="*", ms=12, color=YELLOW,
                       mec="#000000", mew=0.8, ls="")  # fmt: skip
        else:
            write(plane, sheet.edge + 0.1, y - 0.13, mark, theme, size=SMALL, weight="bold",
                  across="center")  # fmt: skip
        for text in texts:
            write(plane, sheet.edge + 0.28, y - 0.13, text, theme, size=SMALL, gid="named")
            y -= _LINE
        y -= 0.07


def _scale(axis: Any, values: Sequence[float], shown: float = 1.0) -> tuple[float, float]:
    """Return (lowest, highest) value of an axis; make it logarithmic if these are far apart.

    Args:
        axis: The axis.
        values: All values.
        shown: Number that the axis shows for the value 1.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values), max(values)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * shown:,g}"))
    if low <= 0 or high / low <= _LOG:
        return max(0.0, low - 0.12 * (high - low) - 0.02 * high), high * 1.12 or 1.0
    low, high = low / 1.25, high * 1.35
    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    firsts = (1, 2, 5) if len(decades) < 5 else (1,)
    ticks = [first * 10.0**decade for decade in decades for first in firsts]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * shown:,g}"))
    return low, high


def _limit(axes: Axes, facts: Pareto, room: float, before: str, theme: Theme) -> None:
    """Write the memory limit above the line that marks it, to the right of `before`."""
    text = f"limit {format_gib(facts.limit_bytes)}"
    half = width_of(text, SMALL, bold=True) / 2 / room
    least = (width_of(before, SMALL) + 0.2) / room + half
    at = min(max(_across(axes, facts.limit_bytes / GIB), least), 1 - half)
    write(axes, at, 1.02, text, theme, size=SMALL, weight="bold", across="center",
          transform=axes.transAxes)  # fmt: skip


def _across(axes: Axes, value: float) -> float:
    """Return the position of a value on the horizontal axis, from 0 (left) to 1 (right)."""
    point = axes.transData.transform((value, axes.get_ylim()[0]))
    return float(axes.transAxes.inverted().transform(point)[0])


def _thinned(dots: Sequence[Dot]) -> Iterator[Dot]:
    """Yield dots, but only the first of those that would be drawn at nearly the same position."""
    seen = set()
    for dot in dots:
        key = (round(_BINS * math.log(max(dot.num_bytes, 1))),
               round(_BINS * math.log(max(dot.seconds, 1e-12))))  # fmt: skip
        if key not in seen:
            seen.add(key)
            yield dot
