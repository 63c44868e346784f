"""Draw a step without a pipeline: its passes in order, and what its time is spent on."""

from __future__ import annotations

from typing import Final

from meshplan.pictures.base.page import (
    SMALL,
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
from meshplan.pictures.base.palette import GREEN, PASSES, PINK, SKY, Ink, Theme
from meshplan.pictures.base.words import time_scale
from meshplan.pictures.plans.gantt import ENDS, OPTIMIZER, Gantt

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
