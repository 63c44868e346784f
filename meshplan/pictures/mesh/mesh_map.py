"""The mesh as a map: ranks coloured by shard, node boundaries, and communication by axis."""

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
    fitted,
    is_narrow,
    room_of,
    width_of,
    wrapped,
    write,
)
from meshplan.pictures.base.palette import Ink, Theme, shard_ink
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import at_in_words, counted, in_short, speed
from meshplan.pictures.mesh.links import Lane, Links, links_of, machine_of, strides
from meshplan.plan.plan import Plan
from meshplan.units import format_bytes

_MOST_LARGE: Final = 4
_MOST_NODES: Final = 12
_MOST_TILES: Final = 16
_PER_ROW: Final = 8
_MOST_LANES: Final = 8
_LEAST: Final = 1e-4
"""Lanes with less than this share of the largest lane's bytes are not drawn."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one rank.

    Args:
        rank: The rank.
        shard: Number of the shard of the model that the rank has.
        at: Texts such as "tp 1": coordinates of the rank on all axes larger than 1.
    """

    rank: int
    shard: int
    at: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeBox:
    """The box of one node, or of one row of ranks if nodes are not stated.

    Args:
        number: Number of the node; if `tiles` is empty, the number of nodes left out.
        tiles: Tiles of the ranks; None stands for the ranks that are left out.
        missing: Number of ranks that this None stands for.
    """

    number: int
    tiles: tuple[Tile | None, ...]
    missing: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshMap:
    """The facts that `draw_mesh` draws.

    Args:
        mesh: The mesh as text.
        noun: "node", or "row" if nodes are not stated.
        nodes: The nodes that are shown; one without tiles stands for those left out.
        num_nodes: Number of all nodes.
        num_ranks: Number of all ranks.
        per_node: Ranks per node or row.
        num_shards: Number of different shards of the model.
        copies: Number of ranks that have each shard.
        cut_axes: Axes along which ranks have different shards.
        links: Communication of rank 0.
    """

    mesh: str
    noun: str
    nodes: tuple[NodeBox, ...]
    num_nodes: int
    num_ranks: int
    per_node: int
    num_shards: int
    copies: int
    cut_axes: tuple[str, ...]
    links: Links

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes to draw, largest first; a note counts the others."""
        lanes = self.links.lanes
        least = lanes[0].sent_bytes * _LEAST if lanes else 0.0
        return tuple(lane for lane in lanes if lane.sent_bytes >= least)[:_MOST_LANES]

    @property
    def title(self) -> str:
        """The picture's title: the answer in one sentence."""
        where = counted(self.num_nodes, "node") if self.noun == "node" else "nodes not stated"
        held = (
            "each holds the whole model"
            if self.num_shards == 1
            else f"{self.num_shards:,} different shards, each held "
            + {1: "once", 2: "twice"}.get(self.copies, f"{self.copies:,} times")
        )
        if self.num_ranks == 1:
            return "1 rank holds the whole model, and sends nothing"
        return f"{counted(self.num_ranks, 'rank')} on {where}: {held}{self._crossing()}".replace(
            "on nodes not stated", "(nodes not stated)"
        )

    def _crossing(self) -> str:
        if self.noun != "node" or self.num_nodes == 1:
            return ""
        sent = self.links.crossing_bytes
        if not sent and not self.links.unknown:
            return "; no traffic across nodes"
        if not sent:
            return "; traffic across nodes is unknown"
        least = "at least " if self.links.unknown else ""
        return f"; each rank sends {least}{format_bytes(sent)} a step along axes that cross nodes"

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        same = (
            "all tiles have one colour, since all ranks hold the same parameters"
            if self.num_shards == 1
            else "tiles of one colour hold the same shard; it is cut along "
            + " × ".join(self.cut_axes)
        )
        sent = "; ".join(lane_in_words(lane) for lane in self.lanes[:3])
        sends = f" A step sends: {sent}." if sent else ""
        return (
            f"A map of the mesh {self.mesh}: each tile is a rank, each frame a {self.noun}; "
            f"{same}.{sends}"
        )


def lane_in_words(lane: Lane) -> str:
    """Return a sentence on the axes, the bytes and the link of a lane."""
    where = {True: "ACROSS NODES", False: "inside nodes", None: "nodes not stated"}[lane.crosses]
    along = " × ".join(lane.axes)
    to = "the next stage" if lane.kind == "send" else counted(lane.num_ranks - 1, "other")
    sent = format_bytes(lane.sent_bytes)
    link = f"{where}, {speed(lane.bytes_per_s)}"
    return f"{lane.kind} along {along}: each rank sends {sent} a step to {to}, {link}"


def mesh_map(plan: Plan, *, most_nodes: int = _MOST_NODES) -> MeshMap:
    """Return the facts of the map; at most `most_nodes` nodes are shown."""
    mesh, machine = plan.mesh, machine_of(plan)
    world = mesh.world_size
    per_node = machine.per_node
    if per_node is None:
        per_node = world // mesh.axes[0].size if len(mesh.axes) > 1 else world
    cutting = {
        axis
        for placed in plan.assignment.tensors.values()
        if not placed.info.is_buffer
        for axis in placed.stored.axes
    } | ({"pp"} if plan.assignment.stages is not None else set())
    names = [*mesh.names, *(name for loan in mesh.loans for name in (loan.rest, loan.name))]
    cut_axes = mesh.spread(name for name in names if name in cutting)
    places = strides(mesh, cut_axes)
    shown = tuple(axis.name for axis in mesh if axis.size > 1) + tuple(
        loan.name for loan in mesh.loans
    )

    def tile(rank: int) -> Tile:
        shard = 0
        for size, stride in places:
            shard = shard * size + rank // stride % size
        return Tile(rank, shard, tuple(at_in_words(mesh.coordinates(rank), shown)))

    num_nodes = -(-world // per_node)
    columns = _some(per_node, _MOST_TILES)

    def node(number: int | None) -> NodeBox:
        if number is None:
            return NodeBox(num_nodes - most_nodes + 1, ())
        tiles = tuple(
            None if col is None else tile(number * per_node + col)
            for col in columns
            if col is None or number * per_node + col < world
        )
        return NodeBox(number, tiles, max(0, per_node - _MOST_TILES + 1) if None in columns else 0)

    shards = mesh.size(*cut_axes)
    return MeshMap(
        mesh=str(mesh),
        noun="node" if machine.per_node is not None else "row",
        nodes=tuple(node(number) for number in _some(num_nodes, most_nodes)),
        num_nodes=num_nodes,
        num_ranks=world,
        per_node=per_node,
        num_shards=shards,
        copies=world // shards,
        cut_axes=cut_axes,
        links=links_of(plan),
    )


def _some(count: int, most: int) -> Sequence[int | None]:
    """Return 0 to count - 1; if these are more than `most`, the first ones, None and the last."""
    if count <= most:
        return range(count)
    return [*range(most - 2), None, count - 1]


def draw_mesh(
    facts: MeshMap, theme: Theme, width: float = WIDTH, *, is_small: bool = False
) -> Picture:
    """Draw the map.

    Args:
        facts: The facts.
        theme: Colours of the picture.
        width: Width of the picture in inches.
        is_small: If True, tiles show only their ranks, even on a small mesh.
    """
    is_small = is_small or is_narrow(width)
    is_large = not is_small and len(facts.nodes) <= _MOST_LARGE and facts.per_node <= _PER_ROW
    lines = max((len(t.at) for n in facts.nodes for t in n.tiles if t), default=0)
    tall = 0.42 + 0.19 * lines if is_large else 0.34
    rows_in = -(-min(facts.per_node, _MOST_TILES) // _PER_ROW)
    beside = 1 if is_large or is_narrow(width) else 2
    num_rows = -(-len(facts.nodes) // beside)
    lanes = facts.lanes
    has_inside = is_large and facts.per_node > 1 and any(not lane.crosses for lane in lanes)
    frame = 0.44 + rows_in * (tall + 0.1)
    # Only the first node has an arrow below its tiles.
    frames = [frame + (0.28 if has_inside and not row else 0.0) for row in range(num_rows)]
    indent = 0.36 if is_large else 0.0  # For the letters of the arrows.
    table = _lane_table(lanes, room_of(width) - indent)
    body = sum(frames) + 0.14 * num_rows + 0.1 + table.height
    sheet = Sheet(theme, facts.title, body, notes=_notes(facts), width=width)
    plane = sheet.plane()
    gutter = 0.75 if is_large and any(lane.crosses for lane in lanes) else 0.0
    wide = (room_of(width) - gutter - 0.16 * (beside - 1)) / beside
    corners: dict[int, tuple[float, float]] = {}
    y = sheet.height
    for row, height in enumerate(frames):
        y -= height + 0.14
        for place, node in enumerate(facts.nodes[row * beside : (row + 1) * beside]):
            x = sheet.edge + place * (wide + 0.16)
            _node(plane, facts, node, (x, y, wide, height), tall, theme, is_large)
            corners[node.number] = (x, y + height / 2)
    _lanes(plane, (sheet.edge, y - 0.3), indent, lanes, table, theme)
    if is_large:
        _arrows(plane, facts, lanes, corners, wide, y_low=sheet.height - frames[0] - 0.14,
                theme=theme)  # fmt: skip
    return Picture("mesh", facts.title, facts.alt, sheet.figure)


def _notes(facts: MeshMap) -> list[str]:
    notes = ["Tiles of one colour (and hatch) hold the same parameters."]
    if facts.num_shards > 32:
        notes = ["Brighter tiles hold later shards; tiles of one colour hold the same shard."]
    more = facts.links.lanes[len(facts.lanes) :]
    if more:
        sent = format_bytes(sum(lane.sent_bytes for lane in more))
        notes.append(
            f"Not drawn: each rank sends {sent} a step by "
            f"{counted(len(more), 'smaller collective')}."
        )
    if facts.links.is_computed:
        notes.append("Bytes of activations are computed from the model's sizes.")
    if facts.links.unknown:
        notes.append(f"Unknown, and not counted: {in_short(facts.links.unknown)}.")
    if any(lane.axes for lane in facts.links.lanes) and facts.noun == "row":
        notes.append("Node boundaries are unknown: add hardware to the plan.")
    return notes


def _node(
    plane: Plane,
    facts: MeshMap,
    node: NodeBox,
    at: tuple[float, float, float, float],
    tall: float,
    theme: Theme,
    is_large: bool,
) -> None:
    """Draw the frame of a node at (x, y, width, height), with its tiles."""
    x, y, wide, frame = at
    box(plane, x, y, wide, frame, Ink(theme.panel), edge=theme.line, gid="node")
    if not node.tiles:
        first = (len(facts.nodes) - 2) * facts.per_node
        last = (facts.num_nodes - 1) * facts.per_node - 1
        text = f"… {node.number:,} more {facts.noun}s, ranks {first:,}–{last:,}"
        text = fitted(text, wide - 0.2, TEXT)
        write(plane, x + wide / 2, y + frame / 2, text, theme, across="center", up="center")
        return
    shared = _shared(node) if not is_large else ()
    title = ", ".join([f"{facts.noun} {node.number:,}", *shared])
    write(plane, x + 0.1, y + frame - 0.24, fitted(title, wide - 0.2), theme, colour=theme.quiet)
    step = _step(facts, wide, num_tiles=len(node.tiles), is_large=is_large)
    for place, tile in enumerate(node.tiles):
        row, col = divmod(place, _PER_ROW)
        corner = (x + 0.1 + col * step, y + frame - 0.36 - (row + 1) * (tall + 0.1) + 0.06)
        _tile(plane, facts, node, tile, corner, (step - 0.08, tall), theme, is_large)


def _step(facts: MeshMap, wide: float, *, num_tiles: int, is_large: bool) -> float:
    """Return the distance between the left edges of two tiles in inches."""
    per_row = min(_PER_ROW, facts.per_node if is_large else max(num_tiles, 1))
    return min((wide - 0.12) / per_row, 2.4)


def _shared(node: NodeBox) -> tuple[str, ...]:
    """Return the coordinates that all ranks of a node share, as texts such as "pp 0"."""
    tiles = [tile.at for tile in node.tiles if tile is not None]
    return tuple(word for word in tiles[0] if all(word in at for at in tiles[1:]))


def _tile(
    plane: Plane,
    facts: MeshMap,
    node: NodeBox,
    tile: Tile | None,
    at: tuple[float, float],
    room: tuple[float, float],
    theme: Theme,
    is_large: bool,
) -> None:
    (x, y), (wide, tall) = at, room
    middle = x + wide / 2
    if tile is None:
        text = fitted(f"{node.missing:,} more", wide, SMALL)
        write(plane, middle, y + tall / 2, text, theme, size=SMALL, across="center", up="center")
        return
    ink = shard_ink(tile.shard, facts.num_shards)
    box(plane, x, y, wide, tall, ink, edge=theme.line, gid=f"rank {tile.rank}")
    colour, size = theme.text_on(ink.colour), SMALL if is_large else 8.0
    lines = [f"rank {tile.rank}", *tile.at] if is_large else [f"{tile.rank}"]
    for number, line in enumerate(lines):
        down = tall - 0.28 - 0.19 * number if is_large else tall / 2
        write(
            plane, middle, y + down, fitted(line, wide, size), theme, size=size,
            colour=colour, weight="bold" if number == 0 and is_large else "normal",
            across="center", up="baseline" if is_large else "center",
            bbox=behind(ink),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _LaneTable:
    """The list of lanes: the lines of text of each lane, all in one size, and its height."""

    lines: tuple[tuple[str, ...], ...]
    size: float
    height: float


def _lane_table(lanes: Sequence[Lane], room: float) -> _LaneTable:
    """Return the texts of the lanes, in one size for all: wrapped if that is not large enough."""
    texts = [lane_in_words(lane) for lane in lanes]
    bold = [bool(lane.crosses) for lane in lanes]
    for size in (TEXT, SMALL):
        widths = [width_of(text, size, bold=b) for text, b in zip(texts, bold, strict=True)]
        if max(widths, default=0.0) <= room:
            break
    lines = [tuple(wrapped(text, room, size, most=3, bold=b))
             for text, b in zip(texts, bold, strict=True)]  # fmt: skip
    height = sum(0.14 + 0.17 * len(each) for each in lines) + (0.3 if lanes else 0.0)
    return _LaneTable(tuple(lines), size, height)


def _lanes(
    plane: Plane,
    at: tuple[float, float],
    indent: float,
    lanes: Sequence[Lane],
    table: _LaneTable,
    theme: Theme,
) -> None:
    """Write the text of each lane, with the letter that marks its arrow if there are arrows.

    Args:
        plane: The plane.
        at: Left end and baseline of the first line.
        indent: Width of the space for letters; 0.0 for no letters.
        lanes: The lanes.
        table: Their texts.
        theme: Colours of the picture.
    """
    edge, y = at
    for number, (lane, lines) in enumerate(zip(lanes, table.lines, strict=True)):
        if indent:
            _badge(plane, edge + 0.14, y + 0.05, number, theme)
        for line in lines:
            write(
                plane, edge + indent, y, line, theme, size=table.size,
                colour=theme.bad if lane.crosses else theme.ink,
                weight="bold" if lane.crosses else "normal", gid="lane",
            )  # fmt: skip
            y -= 0.17
        y -= 0.14


def _badge(plane: Plane, x: float, y: float, number: int, theme: Theme) -> None:
    """Draw the letter of a lane in a ring: the colours of the map are those of shards."""
    plane.plot(
        [x], [y], marker="o", markersize=13, color=theme.paper, markeredgecolor=theme.ink,
        markeredgewidth=0.9, zorder=6,
    )  # fmt: skip
    write(
        plane, x, y - 0.004, "abcdefgh"[number], theme, size=SMALL, weight="bold", zorder=7,
        across="center", up="center",
    )  # fmt: skip


def _arrows(
    plane: Plane,
    facts: MeshMap,
    lanes: Sequence[Lane],
    corners: dict[int, tuple[float, float]],
    wide: float,
    *,
    y_low: float,
    theme: Theme,
) -> None:
    """Draw an arrow in the first node for lanes within nodes, and one for lanes across nodes.

    Args:
        plane: The plane.
        facts: The facts.
        lanes: The lanes to mark.
        corners: (left edge, middle of the height) of each node, by its number.
        wide: Width of a node.
        y_low: Lower edge of the first node.
        theme: Colours of the picture.
    """
    outside = [n for n, lane in enumerate(lanes) if lane.crosses]
    inside = [n for n, lane in enumerate(lanes) if not lane.crosses]
    numbers = sorted(corners)
    x = corners[numbers[0]][0]
    if outside and len(numbers) > 1:
        at = x + wide + 0.16
        low, high = corners[numbers[-1]][1], corners[numbers[0]][1]
        style = {"arrowstyle": "<->", "color": theme.bad, "lw": 2.0}
        plane.annotate("", (at, low), (at, high), arrowprops=style, gid="across")
        step = min(0.32, (high - low - 0.3) / max(len(outside), 1))
        top = (low + high) / 2 + step * (len(outside) - 1) / 2
        for place, number in enumerate(outside):
            _badge(plane, at + 0.28, top - place * step, number, theme)
    if inside and facts.per_node > 1:
        step = _step(facts, wide, num_tiles=facts.per_node, is_large=True)
        first, y = x + 0.1 + (step - 0.08) / 2, y_low + 0.2
        end = first + step * (facts.per_node - 1)
        style = {"arrowstyle": "<->", "color": theme.quiet, "lw": 1.6}
        plane.annotate("", (first, y), (end, y), arrowprops=style)
        left = (first + end) / 2 - 0.28 * (len(inside) - 1) / 2
        for place, number in enumerate(inside):
            _badge(plane, left + place * 0.28, y, number, theme)
