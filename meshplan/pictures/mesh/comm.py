"""Bytes sent in a step: from each rank to each other, as a matrix, and by collective, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.pictures.base.page import (
    SMALL,
    TEXT,
    WIDTH,
    Sheet,
    box,
    fitted,
    is_narrow,
    width_of,
    write,
)
from meshplan.pictures.base.palette import COLLECTIVES, GREY, HEAT, Ink, Theme, rgb
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import counted, in_short, speed
from meshplan.pictures.mesh.links import Lane, links_of, machine_of, strides
from meshplan.plan.plan import Plan
from meshplan.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_CELLS: Final = 32
_MOST_NUMBERS: Final = 16
_MOST_NARROW: Final = 8
"""Most rows of a matrix with numbers in a narrow picture."""
_MOST_BARS: Final = 7
_SIDE: Final = 4.2
"""Side of the matrix in inches."""
_LEAST: Final = 1e-4
"""Share of the largest value below which a cell is left blank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm:
    """The facts that `draw_comm` draws.

    Args:
        num_ranks: Number of ranks in the mesh.
        per_cell: Number of ranks that one row or column of the matrix stands for.
        per_node: Ranks per node; None if it is not stated.
        matrix: Bytes sent in a step, as [sender, receiver], each a group of `per_cell` ranks.
        rank: The rank whose collectives are listed.
        lanes: The collectives of `rank`.
        crossing_bytes: Bytes that all ranks send to other nodes; None if nodes are not stated.
        unknown: Further communication whose bytes are not known.
        is_computed: If True, bytes of activations are computed from the model's sizes, as in
            `Links`.
    """

    num_ranks: int
    per_cell: int
    per_node: int | None
    matrix: NDArray[np.float64]
    rank: int
    lanes: tuple[Lane, ...]
    crossing_bytes: float | None
    unknown: tuple[str, ...]
    is_computed: bool = False

    @property
    def sent_bytes(self) -> float:
        """Bytes that `rank` sends in a step."""
        return sum(lane.sent_bytes for lane in self.lanes)

    @property
    def title(self) -> str:
        """The picture's title: the answer in one sentence."""
        if self.num_ranks == 1:
            return "1 rank: nothing is sent"
        least = "at least " if self.unknown else ""
        sent = f"Rank {self.rank} sends {least}{format_bytes(self.sent_bytes)} a step"
        total = float(self.matrix.sum())
        if self.crossing_bytes is None or not total or self.num_ranks <= (self.per_node or 0):
            return sent
        share = self.crossing_bytes / total
        return f"{sent}; of what all ranks send, {share:.1%} crosses nodes"

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        cell = "rank" if self.per_cell == 1 else f"group of {self.per_cell:,} ranks"
        most = ", ".join(
            f"{lane.kind} along {' × '.join(lane.axes)} {format_bytes(lane.sent_bytes)}"
            for lane in self.lanes[:3]
        )
        return (
            f"A matrix of bytes a step from each {cell} to every other, and a bar for each "
            f"collective of rank {self.rank}: {most or 'none'}."
        )


def comm(plan: Plan, rank: int = 0) -> Comm:
    """Return the bytes that ranks send to each other in a step; collectives are those of `rank`."""
    mesh, machine = plan.mesh, machine_of(plan)
    world = mesh.world_size
    per_node = machine.per_node
    per_cell = 1
    if world > _MOST_CELLS:
        per_cell = per_node or 1
        while -(-world // per_cell) > _MOST_CELLS:
            per_cell *= 2
    cells = -(-world // per_cell)
    ranks = np.arange(world)
    pp = strides(mesh, ("pp",))
    places = ranks // pp[0][1] % pp[0][0] if pp else np.zeros(world, dtype=int)
    matrix = np.zeros((cells, cells))
    crossing = 0.0
    links = links_of(plan, rank)
    for place in range(int(places.max()) + 1):
        own = ranks[places == place]
        for lane in links_of(plan, int(own[0])).lanes:
            if lane.to:
                to = [(own + (at - place) * pp[0][1], size) for at, size in lane.to]
                sent, out = _placed(to, own, world, per_cell, per_node)
            else:
                sent, out = _sent(lane, own, strides(mesh, lane.axes), world, per_cell, per_node)
            matrix += sent
            crossing += out
    return Comm(
        num_ranks=world,
        per_cell=per_cell,
        per_node=per_node,
        matrix=matrix,
        rank=rank,
        lanes=links.lanes,
        crossing_bytes=crossing if per_node is not None else None,
        unknown=links.unknown,
        is_computed=links.is_computed,
    )


def _sent(
    lane: Lane,
    own: NDArray[Any],
    spans: tuple[tuple[int, int], ...],
    world: int,
    per_cell: int,
    per_node: int | None,
) -> tuple[NDArray[np.float64], float]:
    """Return the bytes that some ranks send in the collectives of a lane.

    Args:
        lane: The collectives.
        own: The sending ranks.
        spans: (size, stride) of each axis of the lane.
        world: Number of ranks in the mesh.
        per_cell: Number of ranks per row and column of the matrix.
        per_node: Ranks per node; None if it is not stated.

    Returns:
        (bytes as in `Comm.matrix`, bytes that cross nodes); the latter are 0 if nodes are not
        stated.
    """
    cells = -(-world // per_cell)
    crossing = 0
    if lane.num_ranks == world:
        # Every rank sends to every other: count ranks per cell instead of looping over all pairs.
        sizes = np.bincount(np.arange(world) // per_cell, minlength=cells)
        mine = np.bincount(own // per_cell, minlength=cells)
        pairs = np.outer(mine, sizes) - np.diag(mine)
        if per_node is not None:
            nodes = np.bincount(np.arange(world) // per_node)
            crossing = int((world - nodes[own // per_node]).sum())
        return np.asarray(pairs * lane.pair_bytes, dtype=np.float64), crossing * lane.pair_bytes
    base = own.copy()
    for size, stride in spans:
        base -= own // stride % size * stride
    offsets = np.zeros(1, dtype=int)
    for size, stride in spans:
        offsets = (offsets[:, None] + np.arange(size)[None] * stride).ravel()
    to = [(base + offset, lane.pair_bytes) for offset in offsets]
    return _placed(to, own, world, per_cell, per_node)


def _placed(
    to: Sequence[tuple[NDArray[Any], float]],
    own: NDArray[Any],
    world: int,
    per_cell: int,
    per_node: int | None,
) -> tuple[NDArray[np.float64], float]:
    """Return the bytes that the ranks `own` send, with arguments and results as in `_sent`.

    Args:
        to: Pairs (a receiving rank for each rank of `own`, bytes sent to it).
        own: The sending ranks. A rank that receives from itself does not count.
        world: Number of ranks in the mesh.
        per_cell: Number of ranks per row and column of the matrix.
        per_node: Ranks per node; None if it is not stated.
    """
    cells = -(-world // per_cell)
    out = np.zeros(cells * cells)
    crossing = 0.0
    for ranks, size in to:
        is_other = ranks != own
        places = own[is_other] // per_cell * cells + ranks[is_other] // per_cell
        out += np.bincount(places, minlength=cells * cells) * size
        if per_node is not None:
            crossing += size * int((own // per_node != ranks // per_node).sum())
    return out.reshape(cells, cells), crossing


def draw_comm(facts: Comm, theme: Theme, width: float = WIDTH) -> Picture:
    """Draw the matrix on the left and the bars on the right, or below it in a narrow picture."""
    notes = [
        "Bytes that one rank needs from another, counted as if sent directly. A ring moves as many "
        "bytes in total, and libraries may pass them on through other ranks."
    ]
    if facts.is_computed:
        notes.append("Bytes of activations are computed from the model's sizes.")
    if facts.unknown:
        notes.append(f"Unknown, and not counted: {in_short(facts.unknown)}.")
    narrow = is_narrow(width)
    rows = min(len(facts.lanes), _MOST_BARS)
    beside = 0.45 + 0.58 * rows + (0.3 if len(facts.lanes) > _MOST_BARS else 0.1)
    side = 3.4 if narrow else _SIDE
    whole = side + (0.3 if narrow else 0.35) + 0.65
    sheet = Sheet(theme, facts.title, whole + (beside if narrow else max(0.0, beside - whole)),
                  notes=notes, width=width)  # fmt: skip
    left = sheet.edge + (0.42 if narrow else 0.65)
    axes = sheet.axes(left=left, right=sheet.width - left - side, top=whole - side - 0.65,
                      bottom=sheet.height - whole + 0.65)  # fmt: skip
    _cells(axes, facts, side, theme)
    unit = "rank" if facts.per_cell == 1 else f"ranks, {facts.per_cell:,} together"
    axes.set_xlabel(f"to {unit}", fontsize=SMALL)
    cells = len(facts.matrix)
    step = max(1, -(-cells // 8))
    axes.set_xticks(range(0, cells, step))
    axes.set_yticks(range(0, cells, step))
    names = [f"{place * facts.per_cell}" for place in range(0, cells, step)]
    axes.set_xticklabels(names)
    axes.set_yticklabels(names)
    most = float(facts.matrix.max())
    head = f"from {unit}; {_unit(most)[0]} a step, at most {format_bytes(most)}"
    if not facts.matrix.any():
        head = f"from {unit}; nothing is sent"
    above = sheet.plane()
    write(above, sheet.edge, sheet.height - 0.2, fitted(head, width - 2 * sheet.edge, SMALL), theme,
          size=SMALL, colour=theme.quiet)  # fmt: skip
    corner = (sheet.edge, sheet.height - whole) if narrow else (left + side + 0.5, sheet.height)
    _bars(sheet, corner, facts, theme)
    if any(line.get_gid() == "node" for line in axes.lines):
        text = "lines: node boundaries"
        x = left + side - width_of(text, SMALL)
        y = sheet.height - whole + 0.1
        write(above, x, y, text, theme, size=SMALL, colour=theme.bad)
    return Picture("comm", facts.title, facts.alt, sheet.figure)


def _cells(axes: Axes, facts: Comm, side: float, theme: Theme) -> None:
    """Draw the matrix, with numbers in its cells if all of them fit."""
    cells = len(facts.matrix)
    most = float(facts.matrix.max()) or 1.0
    texts = [_short(float(size), most) for size in facts.matrix.flat if size > most * _LEAST]
    has_room = max((width_of(text, 8.0) for text in texts), default=0.0) < side / cells - 0.02
    # On a phone, hundreds of small numbers hide the pattern that the colours show.
    has_room = has_room and (side >= _SIDE or cells <= _MOST_NARROW)
    pixels = np.zeros((cells, cells, 4), dtype=np.uint8)
    pixels[:, :, :3] = rgb(HEAT)
    for row in range(cells):
        for column in range(cells):
            size = float(facts.matrix[row, column])
            is_seen = size > most * _LEAST
            opaque = 0.12 + 0.88 * size / most if is_seen else 0.0
            if cells > _MOST_NUMBERS:
                pixels[row, column, 3] = round(255 * opaque)
                continue
            gid = f"cell {row} {column}: {size:.0f} B"
            box(axes, column - 0.5, row - 0.5, 1, 1, Ink(HEAT), alpha=opaque, gid=gid)
            if is_seen and has_room:
                write(axes, column, row, _short(size, most), theme, size=8.0,
                      across="center", up="center")  # fmt: skip
    if cells > _MOST_NUMBERS:
        axes.imshow(pixels, interpolation="nearest", aspect="auto", gid="cells")
    axes.set_xlim(-0.5, cells - 0.5)
    axes.set_ylim(cells - 0.5, -0.5)
    for spine in axes.spines.values():
        spine.set_visible(True)
    _edges(axes, facts, cells, theme)


def _unit(most: float) -> tuple[str, int]:
    """Return the unit of the numbers in the matrix whose largest value is `most`, and its bytes."""
    return ("GiB", GIB) if most >= GIB / 10 else ("MiB", MIB)


def _short(size: float, most: float) -> str:
    """Return bytes as text without a unit, in the unit that suits `most`, in few characters."""
    value = size / _unit(most)[1]
    if value < 0.05:
        return "~0"
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def _edges(axes: Axes, facts: Comm, cells: int, theme: Theme) -> None:
    """Draw the boundaries of nodes as lines in the matrix."""
    if facts.per_node is None or facts.per_node >= facts.num_ranks:
        return
    step = facts.per_node / facts.per_cell
    if step < 1 or (step == 1 and cells > _MOST_NUMBERS):
        return
    place = step - 0.5
    while place < cells - 0.5:
        axes.axhline(place, color=theme.bad, lw=1.8, gid="node")
        axes.axvline(place, color=theme.bad, lw=1.8, gid="node")
        place += step


def _bars(sheet: Sheet, corner: tuple[float, float], facts: Comm, theme: Theme) -> None:
    """Draw the bytes that the rank sends by each collective, with a line of text below each bar.

    Args:
        sheet: The sheet.
        corner: Upper left corner of the bars in the body.
        facts: The facts.
        theme: Colours of the picture.
    """
    plane = sheet.plane()
    x, top = corner
    wide = sheet.width - x - sheet.edge - 0.05
    head = fitted(f"what rank {facts.rank} sends in a step", wide, TEXT, bold=True)
    write(plane, x, top - 0.2, head, theme, weight="bold")
    if not facts.lanes:
        write(plane, x, top - 0.6, "nothing", theme)
        return
    most = facts.lanes[0].sent_bytes or 1.0
    y = top - 0.35
    for lane in facts.lanes[:_MOST_BARS]:
        y -= 0.58
        ink = Ink(COLLECTIVES.get(lane.kind, GREY))
        gid = f"lane {lane.kind}: {lane.sent_bytes:.0f} B"
        size = format_bytes(lane.sent_bytes)
        room = wide - width_of(size, SMALL) - 0.1
        long = max(room * lane.sent_bytes / most, 0.02)
        box(plane, x, y + 0.22, long, 0.2, ink, edge=theme.quiet, line=0.5, gid=gid)
        write(plane, x + long + 0.07, y + 0.26, size, theme, size=SMALL)
        where = {True: "ACROSS NODES", False: "inside nodes", None: "nodes not stated"}
        text = (
            f"{lane.kind} along {' × '.join(lane.axes)}, {where[lane.crosses]}, "
            f"{speed(lane.bytes_per_s)}"
        )
        colour = theme.bad if lane.crosses else theme.ink
        write(plane, x, y + 0.04, fitted(text, wide, SMALL), theme, size=SMALL, colour=colour)
    if len(facts.lanes) > _MOST_BARS:
        more = counted(len(facts.lanes) - _MOST_BARS, "smaller collective")
        write(plane, x, y - 0.2, f"and {more}", theme, size=SMALL, colour=theme.quiet)
