"""One parameter as a rectangle that is divided into shards, with the ranks that have each shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshplan.assign import Placed
from meshplan.errors import Origin, Problem, SpecError
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.layout import Layout
from meshplan.layout.mesh import SHARD_AXES, Mesh
from meshplan.model.graph import is_inside
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
    write,
)
from meshplan.pictures.base.palette import Ink, Theme, shard_ink
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import ranks_in_words
from meshplan.pictures.mesh.links import members, strides
from meshplan.plan.plan import Plan
from meshplan.spec.match import nearest
from meshplan.units import format_bytes

_MOST: Final = 10
_TALL: Final = 3.4


@dataclass(frozen=True, slots=True)
class DimSlice:
    """A contiguous slice of a dim, which is a shard or a part of one.

    Args:
        number: Number of the shard along this dim; -1 for a gap, where shards are left out.
        start: First index along the dim.
        stop: Last index plus one.
        offset: A rank that has this shard, minus the rank with the same other coordinates that has
            shard 0.
    """

    number: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnDim:
    """A dim of the tensor and its shards.

    Args:
        dim: Number of the dim, from 0.
        name: Name of the dim; "" if unknown.
        size: Size of the dim.
        axes: Axes that shard it, in the order of sharding.
        num: Number of shards along the dim.
        pieces: Slices of all shards, in the order of their indices. A shard of a packed dim, such
            as that of a fused QKV weight, has several.
    """

    dim: int
    name: str
    size: int
    axes: tuple[str, ...]
    num: int
    pieces: tuple[DimSlice, ...]

    @property
    def words(self) -> str:
        """A text such as "dim 0 (out), 4,096: cut 8 ways by dp_shard"."""
        name = f" ({self.name})" if self.name else ""
        cut = f"cut {self.num:,} ways by {', '.join(self.axes)}" if self.num > 1 else "whole"
        return f"dim {self.dim}{name}, {self.size:,}: {cut}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """The layout of the tensor during one part of the step.

    Args:
        when: "at rest" or "in forward and backward".
        spelled: The layout as text.
        rows: The dim drawn vertically; None for a vector or a scalar.
        columns: The dim drawn horizontally; None for a scalar.
        hidden: Dims that are not drawn, as text.
        num_shards: Number of different shards.
        copies: Number of ranks that have each shard.
        others: The ranks that have shard 0.
    """

    when: str
    spelled: str
    rows: DrawnDim | None
    columns: DrawnDim | None
    hidden: tuple[str, ...]
    num_shards: int
    copies: int
    others: tuple[int, ...]

    def ranks(self, row: DimSlice | None, column: DimSlice | None) -> tuple[int, ...]:
        """Return the ranks that have the shard at this row and column; None for a missing dim."""
        offset = (row.offset if row else 0) + (column.offset if column else 0)
        return tuple(sorted(offset + other for other in self.others))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """The facts that `draw_layout` draws.

    Args:
        fqn: Fqn of the parameter.
        shape: Shape of the whole parameter.
        dtype: Dtype at rest.
        local_shape: Shape at rest on the first rank that has the parameter.
        faces: The layout at rest, and the one in forward and backward if it differs.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    local_shape: tuple[int, ...]
    faces: tuple[Face, ...]

    @property
    def title(self) -> str:
        """The picture's title: the answer in one sentence."""
        rest = self.faces[0]
        local = _times(self.local_shape)
        held = {1: "held once", 2: "held twice"}.get(rest.copies, f"held {rest.copies:,} times")
        if rest.num_shards == 1:
            held = "on its only rank" if rest.copies == 1 else f"on each of {rest.copies:,} ranks"
            return f"{self.fqn} is whole {held}"
        most = "" if self.is_even else "at most "
        return f"{self.fqn} is cut into {rest.num_shards:,} shards of {most}{local}, each {held}"

    @property
    def is_even(self) -> bool:
        """True if all shards have the same shape."""
        sides = (self.faces[0].rows, self.faces[0].columns)
        return all(side is None or side.size % side.num == 0 for side in sides)

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        size = DTYPE_BYTES[self.dtype]
        for each in self.local_shape:
            size *= each
        ways = "; ".join(f"{face.when} {face.spelled}" for face in self.faces)
        return (
            f"The tensor {self.fqn}, {_times(self.shape)} of {self.dtype}, as a rectangle: {ways}. "
            f"Rank {self.faces[0].others[0]} holds {format_bytes(size)} of it at rest."
        )


def _times(shape: Sequence[int]) -> str:
    """Return a shape as text."""
    return " × ".join(f"{size:,}" for size in shape) if shape else "a single number"


def tensor_layout(plan: Plan, name: str | None = None) -> TensorLayout:
    """Return the layouts of one parameter.

    Args:
        plan: The plan.
        name: Fqn of a parameter, or of a module, which stands for its largest parameter; None for
            the largest parameter of the model.

    Raises:
        SpecError: There is no such module or parameter.
    """
    placed = find_parameter(plan, name)
    mesh, stages = plan.mesh, plan.assignment.stages
    info = placed.info
    places: tuple[int, ...] = (0,)
    if stages is not None:
        places = tuple(dict.fromkeys(map(stages.rank_of, stages.tensors[info.fqn])))
    faces = [_face("at rest", placed, placed.stored, mesh, places)]
    if placed.computed.spell(mesh) != placed.stored.spell(mesh):
        faces.append(_face("in forward and backward", placed, placed.computed, mesh, places))
    first = faces[0].others[0]
    return TensorLayout(
        fqn=info.fqn,
        shape=info.shape,
        dtype=placed.dtype,
        local_shape=placed.local_shape(mesh, first),
        faces=tuple(faces),
    )


def find_parameter(plan: Plan, name: str | None) -> Placed:
    """Return a parameter or buffer, found as `tensor_layout` describes for `name`.

    Raises:
        SpecError: There is no such module or parameter.
    """
    tensors = plan.assignment.tensors.values()
    known = [p for p in tensors if not p.info.is_buffer] or list(tensors)
    if name is not None:
        exact = [p for p in tensors if name in p.info.names]
        below = [p for p in known if any(is_inside(n, name) for n in p.info.names)]
        if not exact and not below:
            names = [n for p in known for n in p.info.names] + list(plan.graph.modules)
            close = nearest(name, names)
            fix = f"did you mean '{close}'?" if close else "name a module or a parameter of it"
            what = f"the model has no module or parameter '{name}'"
            if name in plan.graph.modules:
                what, fix = f"'{name}' has no parameter", "name a module that has parameters"
            raise SpecError(Problem(what, Origin("--module"), fix))
        known = exact or below
    if not known:
        what = "the model has no parameter whose layout could be drawn"
        raise SpecError(Problem(what, None, "use a model that has parameters"))
    return max(known, key=lambda placed: placed.info.numel)


def _face(when: str, placed: Placed, layout: Layout, mesh: Mesh, places: Sequence[int]) -> Face:
    info = placed.info
    sides = [_side(placed, layout, mesh, dim) for dim in range(len(info.shape))]
    # Two dims can be drawn. Choose sharded dims first, then the largest.
    order = sorted(sides, key=lambda side: (side.num == 1, -side.size))
    drawn = sorted(order[:2], key=lambda side: side.dim)
    rows = drawn[0] if len(drawn) == 2 else None
    columns = drawn[-1] if drawn else None
    cutting = mesh.spread(layout.axes)
    others = [axis.name for axis in mesh if axis.name not in cutting and axis.name != "pp"]
    for loan in mesh.loans:
        if loan.within in others and {loan.name, loan.rest} & set(cutting):
            others.remove(loan.within)
            others += [n for n in (loan.name, loan.rest) if n not in cutting]
    pp = strides(mesh, ("pp",))
    same = [
        place * (pp[0][1] if pp else 0) + rank
        for place in (places if pp else (0,))
        for rank in members(mesh, others)
    ]
    hidden = tuple(side.words for side in order[2:])
    return Face(
        when=when,
        spelled=layout.spell(mesh).replace("R", "whole"),
        rows=rows,
        columns=columns,
        hidden=hidden,
        num_shards=layout.num_shards(mesh),
        copies=len(same),
        others=tuple(sorted(same)),
    )


def _side(placed: Placed, layout: Layout, mesh: Mesh, dim: int) -> DrawnDim:
    info = placed.info
    axes = [axis for axis in _in_order(layout.cuts[dim], mesh) if mesh.size(axis) > 1]
    spans = strides(mesh, axes)
    num = mesh.size(*axes) if axes else 1
    numbers = range(num) if num <= _MOST else [*range(_MOST - 3), -1, num - 1]
    pieces: list[DimSlice] = []
    for number in numbers:
        if number < 0:
            pieces.append(DimSlice(-1, 0, 0, 0))
            continue
        offset, rest = 0, number
        for size, stride in reversed(spans):
            rest, place = divmod(rest, size)
            offset += place * stride
        ranges = layout.ranges(info.shape, mesh, offset)[dim]
        pieces += [DimSlice(number, each.start, each.stop, offset) for each in ranges]
    gaps = [piece for piece in pieces if piece.number < 0]
    pieces.sort(key=lambda piece: (piece.start, piece.number))
    if gaps:
        pieces = [p for p in pieces if p.number >= 0]
        pieces.insert(_MOST - 3, gaps[0])
    name = info.dims[dim] if dim < len(info.dims) else ""
    return DrawnDim(
        dim=dim, name=name, size=info.shape[dim], axes=tuple(axes), num=num, pieces=tuple(pieces)
    )


def _in_order(axes: Sequence[str], mesh: Mesh) -> list[str]:
    """Return the axes in the order in which they divide the dim.

    Adjacent axes of `SHARD_AXES` divide it as one flattened axis, so they are put in mesh order.
    """
    out: list[str] = []
    for is_joint, group in itertools.groupby(axes, lambda axis: axis in SHARD_AXES):
        names = list(group)
        out += [n for n in mesh.names if n in names] if is_joint else names
    return out


def draw_layout(facts: TensorLayout, theme: Theme, width: float = WIDTH) -> Picture:
    """Draw a rectangle for each layout: side by side, or below each other in a narrow picture."""
    narrow, faces = is_narrow(width), facts.faces
    tall = 2.4 if narrow else _TALL
    # Space of the lines above a rectangle.
    above = 0.62 + 0.2 * max(sum(s is not None for s in (f.rows, f.columns)) for f in faces)
    each = tall + above + 0.25
    sheet = Sheet(theme, facts.title, each * (len(faces) if narrow else 1) + 0.1,
                  notes=_notes(facts), width=width)  # fmt: skip
    plane = sheet.plane()
    gap = 0.35
    across = 1 if narrow else len(faces)
    wide = (room_of(width) - gap * (across - 1)) / across
    for number, face in enumerate(faces):
        x = sheet.edge + (0.0 if narrow else number * (wide + gap))
        top = sheet.height - (number * each if narrow else 0.0)
        _panel(plane, face, (x, top), (wide, tall), above, theme)
    return Picture("layout", facts.title, facts.alt, sheet.figure)


def _notes(facts: TensorLayout) -> list[str]:
    notes = [
        f"{_times(facts.shape)} of {facts.dtype}. One colour (and hatch) is one shard; rows and "
        "columns are counted from 0, both ends included."
    ]
    hidden = dict.fromkeys(words for face in facts.faces for words in face.hidden)
    if hidden:
        notes.append(f"Not drawn: {'; '.join(hidden)}.")
    return notes


def _panel(
    plane: Plane,
    face: Face,
    corner: tuple[float, float],
    room: tuple[float, float],
    above: float,
    theme: Theme,
) -> None:
    """Draw one layout.

    Args:
        plane: The plane.
        face: The layout.
        corner: Upper left corner of the panel.
        room: Width of the panel, and height of the rectangle in it.
        above: Height of the lines of text above the rectangle.
        theme: Colours of the picture.
    """
    (x, top), (wide, whole) = corner, room
    head = f"{face.when}: {face.spelled}"
    write(plane, x, top - 0.22, fitted(head, wide, TEXT, bold=True), theme, weight="bold")
    rows = face.rows.pieces if face.rows else (None,)
    columns = face.columns.pieces if face.columns else (None,)
    named = [("rows", face.rows), ("columns" if face.rows else "elements", face.columns)]
    said = [f"{noun}: {side.words}" for noun, side in named if side] or ["no dims"]
    for number, line in enumerate(said):
        write(plane, x, top - 0.44 - 0.2 * number, fitted(line, wide, SMALL), theme, size=SMALL,
              colour=theme.quiet)  # fmt: skip
    # The lines above say which side has the rows, so that its labels need not.
    labels = [_bare(span_in_words(row, "rows")) for row in rows if row is not None]
    left = 0.0
    if face.rows is not None:
        left = min(max(width_of(label, SMALL) for label in labels), wide * 0.3) + 0.1
    tall, broad = whole / len(rows), (wide - left) / len(columns)
    base = top - above
    for number, column in enumerate(columns):
        if column is not None:
            text = fitted(_bare(span_in_words(column, "columns")), broad - 0.06, SMALL)
            middle = x + left + (number + 0.5) * broad
            write(plane, middle, base + 0.07, text, theme, size=SMALL, across="center")
    for place, row in enumerate(rows):
        y = base - (place + 1) * tall
        if row is not None:
            label = fitted(labels[place], left - 0.06, SMALL)
            write(plane, x + left - 0.06, y + tall / 2, label, theme, size=SMALL, across="right",
                  up="center")  # fmt: skip
        for number, column in enumerate(columns):
            at = (x + left + number * broad, y)
            _cell(plane, face, row, column, at, (broad, tall), theme)


def _cell(
    plane: Plane,
    face: Face,
    row: DimSlice | None,
    column: DimSlice | None,
    at: tuple[float, float],
    room: tuple[float, float],
    theme: Theme,
) -> None:
    (x, y), (wide, tall) = at, room
    middle = (x + wide / 2, y + tall / 2)
    if any(piece is not None and piece.number < 0 for piece in (row, column)):
        box(plane, x, y, wide, tall, Ink(theme.panel), edge=theme.line)
        write(plane, *middle, "…", theme, across="center", up="center")
        return
    num = face.columns.num if face.columns else 1
    shard = (row.number if row else 0) * num + (column.number if column else 0)
    ink = shard_ink(shard, face.num_shards)
    ranks = face.ranks(row, column)
    words = ranks_in_words(ranks)
    spans = [span_in_words(row, "rows")] if row else []
    spans += [span_in_words(column, "columns" if row else "elements")] if column else []
    name = ", ".join([f"shard {shard}: {words}", *spans])
    box(plane, x, y, wide, tall, ink, edge=theme.paper, line=1.2, gid=name)
    is_empty = any(piece is not None and piece.start == piece.stop for piece in (row, column))
    text = (
        f"{words}\nnothing" if is_empty and tall > 0.4 else f"{words}: nothing" * is_empty or words
    )
    size = TEXT if width_of(text, TEXT) < wide - 0.2 and tall > 0.3 else SMALL
    text = "\n".join(fitted(line, wide - 0.1, size) for line in text.split("\n"))
    if tall > 0.18 and text.strip():
        write(
            plane, *middle, text, theme, size=size, colour=theme.text_on(ink.colour),
            across="center", up="center", bbox=behind(ink),
        )  # fmt: skip


def _bare(span: str) -> str:
    """Return a text of `span_in_words` without its noun, such as "0–511"."""
    if " " not in span:
        return span
    return "none" if span.startswith("no ") else span.partition(" ")[2]


def span_in_words(piece: DimSlice | None, noun: str) -> str:
    """Return the indices of a slice as text, with `noun` in plural; "…" for a gap.

    >>> span_in_words(DimSlice(0, 0, 512, 0), "rows"), span_in_words(DimSlice(3, 7, 7, 0), "rows")
    ('rows 0–511', 'no rows')
    """
    if piece is None or piece.number < 0:
        return "…"
    if piece.start == piece.stop:
        return f"no {noun}"
    if piece.start + 1 == piece.stop:
        return f"{noun[:-1]} {piece.start:,}"
    return f"{noun} {piece.start:,}–{piece.stop - 1:,}"
