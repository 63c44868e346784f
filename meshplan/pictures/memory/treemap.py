"""Parameters as rectangles: area by bytes, colour by part of the model; replicated ones stand out.

Equal parameters of all blocks share one rectangle, however many blocks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from meshplan.assign import Placed
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.model.graph import pattern_of
from meshplan.pictures.base.page import (
    TEXT,
    WIDTH,
    Plane,
    Sheet,
    behind,
    box,
    fitted_name,
    room_of,
    width_of,
    write,
)
from meshplan.pictures.base.palette import PLACEMENTS, WHOLE, Ink, Theme
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import counted
from meshplan.plan.plan import Plan
from meshplan.spec.match import fold
from meshplan.units import format_bytes

Of = Literal["local", "global"]

_TALL: Final = 4.6
_LEAST: Final = 1 / 400
"""Share of all bytes below which a rectangle is merged with others of its layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """The rectangle of parameters that are equal but for the numbers in their fqns.

    Args:
        name: Fqns of the parameters, folded: "layers.{0..31}.w".
        part: Part of the model that the parameters belong to, as `part_of` names it.
        placement: Layout of the parameters at rest, as placements in words.
        is_whole: If True, every rank that has the parameters has all of them, although there are
            several ranks to shard them over.
        num_bytes: Bytes of all these parameters.
        count: Number of parameters.
    """

    name: str
    part: str
    placement: str
    is_whole: bool
    num_bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Treemap:
    """The facts that `draw_treemap` draws.

    Args:
        model: Name of the model.
        of: "local" if areas are the bytes on `rank`, "global" if they are the bytes of the model.
        rank: The rank.
        areas: The rectangles, largest first.
        is_alone: If True, every stage has one rank, so that parameters cannot be sharded.
    """

    model: str
    of: Of
    rank: int
    areas: tuple[Area, ...]
    is_alone: bool = False

    @property
    def total_bytes(self) -> int:
        return sum(area.num_bytes for area in self.areas)

    @property
    def whole_bytes(self) -> int:
        return sum(area.num_bytes for area in self.areas if area.is_whole)

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of the model that have sharded parameters, the part with most bytes first."""
        sizes: dict[str, int] = {}
        for area in self.areas:
            if not area.is_whole:
                sizes[area.part] = sizes.get(area.part, 0) + area.num_bytes
        return tuple(sorted(sizes, key=lambda each: -sizes[each]))

    @property
    def title(self) -> str:
        """The picture's title: the answer in one sentence."""
        total = format_bytes(self.total_bytes)
        whose = f"on rank {self.rank}" if self.of == "local" else "in all"
        if not self.total_bytes:
            return f"{self.model} has no parameters {whose}"
        if self.is_alone:
            return f"{total} of parameters {whose}, with no other ranks to shard them over"
        if not self.whole_bytes:
            return f"{total} of parameters {whose}, none of them replicated on every rank"
        share = self.whole_bytes / self.total_bytes
        whole = format_bytes(self.whole_bytes)
        return f"{total} of parameters {whose}: {whole} ({share:.1%}) are replicated on every rank"

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        if not self.areas:
            return f"Nothing is drawn: {self.model} has no parameters here."
        most = max(self.areas, key=lambda area: area.num_bytes)
        return (
            f"Rectangles whose areas are the bytes of the parameters of {self.model}, coloured by "
            f"part of the model; the largest is {most.name}, {format_bytes(most.num_bytes)}, "
            f"{most.placement}."
        )


def treemap(plan: Plan, of: Of = "local", rank: int = 0) -> Treemap:
    """Return the rectangles of a plan's parameters.

    Args:
        plan: The plan.
        of: "local" for the bytes on `rank`, "global" for the bytes of the model.
        rank: The rank.
    """
    groups: dict[tuple[str, str, bool], list[Placed]] = {}
    stages = plan.assignment.stages
    place = plan.mesh.index(rank, ("pp",))
    for fqn, placed in plan.assignment.tensors.items():
        if placed.info.is_buffer:
            continue
        if of == "local" and stages is not None and not stages.holds(fqn, place):
            continue
        layout = placed.stored
        is_whole = layout.num_shards(plan.mesh) == 1 and _could_be_cut(plan)
        spelled = layout.spell(plan.mesh).replace("R", "whole")
        groups.setdefault((pattern_of(fqn), spelled, is_whole), []).append(placed)
    areas = [
        Area(
            name=", ".join(fold(placed.info.fqn for placed in alike)),
            part=part_of(alike[0].info.fqn),
            placement=spelled,
            is_whole=is_whole,
            num_bytes=sum(_bytes(plan, placed, of, rank) for placed in alike),
            count=len(alike),
        )
        for (_, spelled, is_whole), alike in groups.items()
    ]
    areas.sort(key=lambda area: (-area.num_bytes, area.name))
    return Treemap(model=plan.graph.name, of=of, rank=rank, areas=tuple(areas),
                   is_alone=not _could_be_cut(plan))  # fmt: skip


def part_of(fqn: str) -> str:
    """Return the part of the model that a parameter belongs to.

    It is the module of a block, or outside of blocks the module that has the parameter. Experts are
    a part of their own: their layout mostly differs from that of their surroundings.

    >>> part_of("model.layers.3.mlp.up_proj.weight"), part_of("model.norm.weight"), part_of("scale")
    ('mlp', 'norm', 'scale')
    """
    names = fqn.split(".")
    numbers = [place for place, name in enumerate(names) if name.isdigit()]
    after = names[numbers[0] + 1 :] if numbers else names[-2:]
    if "experts" in after:
        return "experts"
    return next((name for name in after if not name.isdigit()), names[0])


def _could_be_cut(plan: Plan) -> bool:
    """Return True if pipeline stages have more than one rank, so that parameters can be sharded."""
    return plan.mesh.world_size > plan.mesh.size("pp")


def _bytes(plan: Plan, placed: Placed, of: Of, rank: int) -> int:
    size = DTYPE_BYTES[placed.dtype]
    if of == "global":
        return placed.info.numel * size
    return placed.stored.local_numel(placed.info.shape, plan.mesh, rank) * size


def squarified(
    sizes: Sequence[float], x: float, y: float, wide: float, tall: float
) -> list[tuple[float, float, float, float]]:
    """Divide a rectangle into nearly square rectangles whose areas are proportional to `sizes`.

    Args:
        sizes: Positive numbers, largest first.
        x: Left edge of the rectangle to divide.
        y: Lower edge of this rectangle.
        wide: Width of this rectangle.
        tall: Height of this rectangle.

    Returns:
        (x, y, width, height) for each size, in order.

    Source: Bruls, Huizing, van Wijk 2000 (squarified treemaps), section 3.

    >>> squarified([3.0, 1.0], 0, 0, 4, 1)
    [(0, 0.0, 3.0, 1.0), (3.0, 0.0, 1.0, 1.0)]
    """
    out: list[tuple[float, float, float, float]] = []
    left = list(sizes)
    while left:
        side, total = min(wide, tall), sum(left)
        area = wide * tall
        row = 1
        while row < len(left) and _worst(left[: row + 1], side, area / total) <= _worst(
            left[:row], side, area / total
        ):
            row += 1
        share = sum(left[:row]) / total
        at = 0.0
        for size in left[:row]:
            part = size / sum(left[:row])
            if wide >= tall:
                out.append((x, y + at, wide * share, tall * part))
                at += tall * part
            else:
                out.append((x + at, y, wide * part, tall * share))
                at += wide * part
        if wide >= tall:
            x, wide = x + wide * share, wide * (1 - share)
        else:
            y, tall = y + tall * share, tall * (1 - share)
        left = left[row:]
    return out


def _worst(sizes: Sequence[float], side: float, scale: float) -> float:
    """Return the largest aspect ratio of rectangles that are placed in one row along `side`."""
    thick = sum(sizes) * scale / side
    return max(
        max(thick / (size * scale / thick), (size * scale / thick) / thick) for size in sizes
    )


def draw_treemap(facts: Treemap, theme: Theme, width: float = WIDTH) -> Picture:
    """Draw the areas, those of one part of the model side by side."""
    from matplotlib.patches import Rectangle

    shown = _joined(facts)
    seen = {area.part for area in shown if area.num_bytes >= _LEAST * facts.total_bytes}
    named = [part for part in facts.parts if part in seen][: len(PLACEMENTS) - 1]
    inks = dict(zip(named, PLACEMENTS, strict=False))
    layouts = {part: list(dict.fromkeys(a.placement for a in facts.areas
                                        if a.part == part and not a.is_whole))
               for part in facts.parts}  # fmt: skip
    is_same = len({each for many in layouts.values() for each in many}) == 1
    legend: list[tuple[str, Ink]] = []
    if facts.whole_bytes:
        legend.append(("replicated on every rank that has it", WHOLE))
    for part, ink in inks.items():
        layout = "" if is_same or len(layouts[part]) != 1 else f": {layouts[part][0]}"
        legend.append((f"{part}{layout}", ink))
    if any(not area.is_whole and area.part not in inks for area in shown):
        legend.append(("other parts", PLACEMENTS[-1]))
    whose = f"of rank {facts.rank}" if facts.of == "local" else "of the whole model"
    notes = [f"Area: bytes {whose}. {{0..31}} stands for the same parameter of that many blocks."]
    if is_same:
        notes.insert(0, f"Layout of all{' others' * bool(facts.whole_bytes)}: "
                        f"{next(iter(layouts.values()))[0]}.")  # fmt: skip
    sheet = Sheet(theme, facts.title, _TALL, legend=legend, notes=notes, width=width)
    plane = sheet.plane()
    edge, wide, tall = sheet.edge, room_of(width), _TALL - 0.1
    if not shown:
        box(plane, edge, 0, wide, tall, Ink(theme.panel), edge=theme.line)
        write(plane, width / 2, tall / 2, "no parameters", theme, across="center")
    groups: dict[str, list[Area]] = {}
    for area in shown:
        groups.setdefault("" if area.is_whole else area.part, []).append(area)
    order = sorted(groups.values(), key=lambda areas: -sum(area.num_bytes for area in areas))
    sizes = [sum(area.num_bytes for area in areas) for areas in order]
    for areas, (x, y, w, h) in zip(order, squarified(sizes, edge, 0, wide, tall), strict=True):
        inside = squarified([area.num_bytes for area in areas], x, y, w, h)
        for area, at in zip(areas, inside, strict=True):
            ink = WHOLE if area.is_whole else inks.get(area.part, PLACEMENTS[-1])
            name = f"area {area.name}, {area.placement}: {area.num_bytes} B"
            box(plane, *at, ink, edge=theme.paper, line=0.8, gid=name)
            _words(plane, area, "" if is_same else area.placement, ink, at, theme)
        around = Rectangle((x, y), w, h, fill=False, edgecolor=theme.paper, linewidth=3.0)
        plane.add_patch(around)
    return Picture("treemap", facts.title, facts.alt, sheet.figure)


def _joined(facts: Treemap) -> list[Area]:
    """Return the rectangles to draw; small rectangles of one part and layout are merged."""
    least = facts.total_bytes * _LEAST
    out = [area for area in facts.areas if area.num_bytes >= max(least, 1)]
    small: dict[tuple[str, str, bool], list[Area]] = {}
    for area in facts.areas:
        if 0 < area.num_bytes < least:
            small.setdefault((area.part, area.placement, area.is_whole), []).append(area)
    for (part, placement, is_whole), areas in small.items():
        count = sum(area.count for area in areas)
        size = sum(area.num_bytes for area in areas)
        name = counted(count, "small one") if len(areas) > 1 else areas[0].name
        out.append(
            Area(name=name, part=part, placement=placement, is_whole=is_whole, num_bytes=size,
                 count=count)
        )  # fmt: skip
    return sorted(out, key=lambda area: -area.num_bytes)


def _words(
    plane: Plane,
    area: Area,
    layout: str,
    ink: Ink,
    at: tuple[float, float, float, float],
    theme: Theme,
) -> None:
    """Write name, bytes and layout into a rectangle, in as many lines as fit."""
    x, y, wide, tall = at
    size = TEXT if wide > 1.6 and tall > 0.7 else 8.0
    room = int((tall - 0.08) / (size * 1.35 / 72))
    if room < 1 or wide < 0.4:
        return
    name = fitted_name(area.name, wide - 0.14, size)
    lines = [name, format_bytes(area.num_bytes), layout][: room if room < 3 else 3]
    text = "\n".join(line for line in lines if line and width_of(line, size) <= wide - 0.1)
    write(
        plane, x + wide / 2, y + tall / 2, text, theme, size=size, colour=theme.text_on(ink.colour),
        across="center", up="center", linespacing=1.25, bbox=behind(ink),
    )  # fmt: skip
