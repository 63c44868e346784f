"""Draw a step on a time axis: passes of each rank, waiting, and forwards in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from meshplan.pictures.base.page import (
    SMALL,
    WIDTH,
    Item,
    Plane,
    Sheet,
    box,
    edge_of,
    fitted,
    is_narrow,
    width_of,
    write,
)
from meshplan.pictures.base.palette import GREEN, PASSES, PINK, SKY, STAGES, Ink, Theme
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import time_scale
from meshplan.pictures.plans.gantt import ENDS, OPTIMIZER, Gantt, GanttBar

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES: Final = {
    "F": "forward",
    "B": "backward",
    "I": "backward, gradients of inputs",
    "W": "backward, gradients of weights",
}
_MOST_RANKS: Final = 16
_MOST_SINGLE: Final = 500
_MOST_LINES: Final = 8


def draw_gantt(facts: Gantt, theme: Theme, width: float = WIDTH) -> Picture:
    """Draw a row per rank, and below these the number of kept forwards, on one time axis."""
    from matplotlib.ticker import FuncFormatter

    if not facts.schedule:
        sheet = draw_no_pipeline(facts, theme, width)
        return Picture("gantt", facts.title, facts.alt, sheet.figure)
    narrow = is_narrow(width)
    shown = _some(facts.ranks)
    kinds = [kind for kind in PASSES if any(block.kind == kind for block in facts.blocks)]
    legend: list[Item] = [(_NAMES[kind], PASSES[kind]) for kind in kinds]
    legend.append(("waiting (the bubble)", Ink(theme.forbidden)))
    row = 0.42 if len(shown) <= 8 else 0.3
    tall, low = row * len(shown) + 0.1, 1.5
    sheet = Sheet(theme, facts.title, tall + low + 0.9, legend=legend,
                  notes=_notes(facts), width=width)  # fmt: skip
    labels = [_label(facts, rank, is_narrow=narrow) for rank in shown]
    left = max(width_of(label, SMALL) for label in labels) + 0.15 + sheet.edge
    right = 0.95 + sheet.edge
    above = sheet.axes(left=left, right=right, top=0.05, bottom=low + 0.9)
    above.set_xlim(0, facts.step)
    above.set_ylim(len(shown), 0)
    above.set_facecolor(theme.forbidden)
    above.tick_params(bottom=False, labelbottom=False)
    above.set_yticks([place + 0.5 for place in range(len(shown))])
    above.set_yticklabels(labels)
    per_inch = facts.step / (sheet.width - left - right)
    place_of = {rank: place for place, rank in enumerate(shown) if rank is not None}
    drawn = [block for block in facts.blocks if block.rank in place_of]
    if len(drawn) <= _MOST_SINGLE:
        for block in drawn:
            room = (block.end - block.begin) / per_inch
            _draw_block(above, facts, block, place_of[block.rank], room, theme)
    else:
        _draw_many(above, drawn, place_of, theme)
    for place, rank in enumerate(shown):
        if rank is None:
            box(above, 0, place, facts.step, 1, Ink(theme.panel))
            more = f"… {facts.ranks - len(shown) + 1} more ranks"
            write(above, facts.step / 2, place + 0.5, more, theme, size=SMALL, across="center",
                  up="center")  # fmt: skip
    below = sheet.axes(left=left, right=right, top=tall + 0.35, bottom=0.55)
    _draw_kept(below, facts, theme, right - sheet.edge, num_ticks=4 if narrow else 8)
    unit, times = "1 = the forward of one rank's stages", 1.0
    if facts.is_seconds:
        unit, times = time_scale(facts.step)
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * times:,g}"))
    below.set_xlabel(f"time in a step ({unit})", fontsize=SMALL)
    return Picture("gantt", facts.title, facts.alt, sheet.figure)


def _draw_block(
    above: Axes, facts: Gantt, block: GanttBar, y: int, room: float, theme: Theme
) -> None:
    ink = PASSES[block.kind]
    name = f"{block.kind} stage {block.stage} microbatch {block.microbatch}"
    box(above, block.begin, y + 0.08, block.end - block.begin, 0.84, ink, edge=theme.paper,
        line=0.5, gid=name)  # fmt: skip
    if text := _inside(facts, block, room):
        write(
            above, (block.begin + block.end) / 2, y + 0.5, text, theme, size=8.0,
            colour=theme.text_on(ink.colour), across="center", up="center",
        )  # fmt: skip


def _draw_many(
    above: Axes, blocks: Sequence[GanttBar], place_of: Mapping[int, int], theme: Theme
) -> None:
    """Draw blocks that are too small for text; one matplotlib collection per rank and kind."""
    rows: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for block in blocks:
        span = (block.begin, block.end - block.begin)
        rows.setdefault((block.rank, block.kind), []).append(span)
    for (rank, kind), spans in rows.items():
        above.broken_barh(
            spans, (place_of[rank] + 0.08, 0.84), facecolor=PASSES[kind].colour,
            edgecolor=theme.paper, linewidth=0.2, gid=f"{kind} on pp {rank}: {len(spans)}",
        )  # fmt: skip


def _draw_kept(below: Axes, facts: Gantt, theme: Theme, right: float, *, num_ticks: int) -> None:
    """Draw the number of forwards kept for backward, one line per rank."""
    from matplotlib.ticker import MaxNLocator

    most = max(facts.most_kept, default=1)
    below.set_xlim(0, facts.step)
    below.set_ylim(0, most * 1.12 + 0.2)
    below.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    words = "forwards whose activations a rank keeps for backward"
    write(below, 0, 1.05, words, theme, size=SMALL, transform=below.transAxes)
    below.xaxis.set_major_locator(MaxNLocator(nbins=num_ticks))
    ranks = _spread(facts.ranks, _MOST_LINES)
    for number, rank in enumerate(ranks):
        times = [when for when, _ in facts.kept[rank]] + [facts.step]
        counts = [count for _, count in facts.kept[rank]]
        ink = STAGES[number % len(STAGES)]
        style = ("-", "--", "-.", ":")[number % 4]
        below.plot(
            times, [*counts, counts[-1]], drawstyle="steps-post", color=ink.colour, lw=1.7,
            ls=style, gid=f"kept on pp {rank}",
        )  # fmt: skip
        at = 1 - (number + 0.5) / len(ranks)
        # The key is a plane in inches: shares of the axes would be shorter in a narrow picture.
        below.annotate(
            "", (1, at), (34, 0), xycoords="axes fraction", textcoords="offset points",
            arrowprops={"arrowstyle": "-", "color": ink.colour, "lw": 2.0, "ls": style,
                        "shrinkA": 0, "shrinkB": 7},
        )  # fmt: skip
        name = fitted(f"pp {rank}: {facts.most_kept[rank]:,}", right - 0.4, 8.0)
        below.annotate(
            name, (1, at), (37, 0), xycoords="axes fraction", textcoords="offset points",
            fontsize=8.0, color=theme.ink, va="center",
        )  # fmt: skip


def _label(facts: Gantt, rank: int | None, *, is_narrow: bool) -> str:
    if rank is None:
        return ""
    if is_narrow:
        return f"pp {rank}"
    stages = sorted({block.stage for block in facts.blocks if block.rank == rank})
    words = ", ".join(map(str, stages[:3])) + (", …" if len(stages) > 3 else "")
    return f"pp {rank}: stage{'s' if len(stages) > 1 else ''} {words}"


def _inside(facts: Gantt, block: GanttBar, room: float) -> str:
    """Return the text in a block, such as "F3", or "F3/5" if ranks have several stages."""
    long = f"{block.kind}{block.microbatch}"
    if facts.virtual > 1 and width_of(f"{long}/{block.stage}", 8.0) < room - 0.04:
        return f"{long}/{block.stage}"
    if width_of(long, 8.0) < room - 0.04:
        return long
    short = str(block.microbatch)
    return short if width_of(short, 8.0) < room - 0.03 else ""


def _notes(facts: Gantt) -> list[str]:
    notes = [facts.assumed]
    if facts.virtual > 1:
        notes.insert(
            0, "F3/5 is the forward of microbatch 3 in stage 5; 3 alone is its microbatch."
        )
    else:
        notes.insert(0, "F3 is the forward of microbatch 3; a number alone is a microbatch.")
    if facts.ranks > _MOST_LINES:
        notes.append("Kept forwards are drawn for some ranks only.")
    return notes


def _some(ranks: int) -> list[int | None]:
    if ranks <= _MOST_RANKS:
        return list(range(ranks))
    return [*range(_MOST_RANKS - 3), None, ranks - 1]


def _spread(ranks: int, most: int) -> list[int]:
    """Return at most `most` ranks at equal distances, including the first and the last."""
    if ranks <= most:
        return list(range(ranks))
    return [round(place * (ranks - 1) / (most - 1)) for place in range(most)]


_INKS: Final = {
    "computation": Ink("#8A8A8A"), "recomputation": Ink("#8A8A8A", "//"),
    "communication of tp, ep and cp": Ink(PINK, "\\\\"), ENDS: Ink(SKY, "//"),
    OPTIMIZER: Ink(GREEN),
}  # fmt: skip
_ROW: Final = 0.36
_NARROW_ROW: Final = 0.48
_PASSES: Final = 0.5
"""Height of the row of passes in inches."""


def draw_no_pipeline(facts: Gantt, theme: Theme, width: float) -> Sheet:
    """Draw a row of passes, and below it a bar for each use of the time if it is known."""
    narrow, edge = is_narrow(width), edge_of(width)
    parts, whole = facts.parts, facts.whole_step
    legend: list[Item] = [("forward", PASSES["F"]), ("backward", PASSES["B"])]
    names = dict(parts)
    legend += [(name, _INKS[name]) for name in (ENDS, OPTIMIZER) if name in names]
    notes = ["All ranks do the same. F3 is the forward of microbatch 3.", facts.assumed]
    row = _NARROW_ROW if narrow else _ROW
    words = [f"{facts.time(part)}, {part / whole:.1%}" for _, part in parts]
    labels = ["" if narrow else "a step", *(name for name, _ in parts)]
    column = max(width_of(label, SMALL) for label in labels) + 0.15
    left = edge + (0.06 if narrow else column)
    beside = max((width_of(text, SMALL) for text in words), default=0.0) + 0.15
    room = width - left - edge - (0.1 if narrow else beside)
    body = _PASSES + 0.2 + row * len(parts) + 0.75
    sheet = Sheet(theme, facts.title, body, legend=legend, notes=notes, width=width)
    unit, shown = "1 = the forward of a microbatch", 1.0
    if facts.is_seconds:
        unit, shown = time_scale(whole)
    axes = sheet.plot(left=left, bottom=0.6, units=(whole / room, 1.0), most=whole,
                      label=f"time in a step ({unit})", shown=shown)  # fmt: skip
    texts = Plane(sheet.figure)
    base = row * len(parts) + 0.2
    _passes(axes, facts, base, whole / room, theme)
    if not narrow:
        write(texts, left - 0.1, axes.inches(0, base + _PASSES / 2)[1], labels[0], theme,
              size=SMALL, across="right", up="center")  # fmt: skip
    at = 0.0
    for place, ((name, part), text) in enumerate(zip(parts, words, strict=True)):
        y = row * (len(parts) - place - 1) + 0.05
        ink = _INKS.get(name, Ink(theme.forbidden))
        # Each bar begins where the one above ends: together they are the step.
        box(axes, at, y, part, 0.24, ink, edge=theme.quiet, line=0.5, gid=f"part {name}: {part} s")
        at += part
        height = axes.inches(0, y + (0.34 if narrow else 0.12))[1]
        text_x = width - edge - 0.06 if narrow else width - edge
        write(texts, text_x, height, text, theme, size=SMALL, across="right", up="center")
        name = fitted(name, width - 2 * edge - beside if narrow else column, SMALL)
        write(texts, left if narrow else left - 0.1, height, name, theme, size=SMALL,
              across="left" if narrow else "right", up="center")  # fmt: skip
    return sheet


def _passes(axes: Plane, facts: Gantt, base: float, per_inch: float, theme: Theme) -> None:
    """Draw forwards and backwards in order, and what follows the last of them."""
    for block in facts.blocks:
        ink, text = PASSES[block.kind], f"{block.kind}{block.microbatch}"
        wide = block.end - block.begin
        name = f"{block.kind} stage {block.stage} microbatch {block.microbatch}"
        box(axes, block.begin, base, wide, _PASSES, ink, edge=theme.paper, line=0.5, gid=name)
        if width_of(text, SMALL) < wide / per_inch - 0.06:
            write(axes, block.begin + wide / 2, base + _PASSES / 2, text, theme, size=SMALL,
                  colour=theme.text_on(ink.colour), across="center", up="center")  # fmt: skip
    at = facts.step
    for name, part in facts.parts:
        if name in (ENDS, OPTIMIZER):
            box(axes, at, base, part, _PASSES, _INKS[name], edge=theme.paper, line=0.5,
                gid=f"end {name}")  # fmt: skip
            at += part
