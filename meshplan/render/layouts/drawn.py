"""Pictures in the terminal: mesh, layout, memory, pipeline and modules as lines of characters.

Colours only repeat what the characters show, so that piped output loses no information.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Final, TextIO

from meshplan.pictures.base.palette import PASSES, Ink, ink_on, shard_ink
from meshplan.pictures.base.words import in_short, ranks_in_words
from meshplan.pictures.graphs.tree import Tree
from meshplan.pictures.memory.bars import INKS, MemoryBars
from meshplan.pictures.mesh.links import Links
from meshplan.pictures.mesh.mesh_map import MeshMap, lane_in_words
from meshplan.pictures.mesh.tensor import DimSlice, Face, TensorLayout, span_in_words
from meshplan.pictures.plans.gantt import Gantt
from meshplan.render.base.text import folded, terminal_width, without_steering
from meshplan.units import format_count, format_gib

Run = tuple[str, str]
"""A text and its style in rich; "" for no style."""
Line = Sequence[Run]

_WIDE: Final = 64
_NARROW: Final = 8
"""Characters of a drawing in the narrowest terminal."""
_LETTERS: Final = {
    "parameters": "P", "gradients": "G", "optimizer": "O", "buffers": "b", "inputs": "i",
    "gathered parameters": "g", "communication buffers": "c", "activations": "A",
    "logits and loss": "L", "library workspaces": "w", "temporaries": "t", "rounding": "r",
    "unused in segments": "u", "driver": "d",
}  # fmt: skip


def print_lines(lines: Iterable[Line], stream: TextIO, *, colour: bool) -> None:
    """Print the lines, in colour if `colour` is True, folded to the terminal's width."""
    width = terminal_width()
    if colour:  # The stream of the command line escapes all colours but those of `paint`.
        texts, stream = _coloured(lines), getattr(stream, "beneath", stream)
    else:
        texts = ["".join(text for text, _ in line).rstrip() for line in lines]
    for text in texts:
        for piece in [text] if width is None else folded(text, width):
            print(piece, file=stream)


def _coloured(lines: Iterable[Line]) -> list[str]:
    """Return the lines with the escape sequences of their styles, and those of names escaped."""
    from rich.console import Console
    from rich.text import Text

    out = StringIO()
    console = Console(file=out, highlight=False, soft_wrap=True, force_terminal=True)
    for line in lines:
        runs = ((without_steering(text), style) for text, style in line)
        console.print(Text.assemble(*runs))
    return out.getvalue().splitlines()


def _fitting(wide: int, beside: int) -> int:
    """Return how wide to draw beside so many characters: `wide`, or less in a narrow terminal."""
    width = terminal_width()
    return wide if width is None else max(_NARROW, min(wide, width - beside))


def mesh_lines(facts: MeshMap) -> list[Line]:
    """Return a row per node, with a cell per rank that shows its shard."""
    lines: list[Line] = [[(facts.title, "bold")], []]
    ranks, shards = len(str(facts.num_ranks - 1)), len(str(facts.num_shards - 1))
    wide = ranks + shards + len(" : ") + 1
    for node in facts.nodes:
        if not node.tiles:
            lines.append([(f"  … {node.number:,} more {facts.noun}s", "dim")])
            continue
        head = f"  {facts.noun} {node.number:<6,}"
        per_row = max(1, _fitting(wide * len(node.tiles), len(head)) // wide)
        for first in range(0, len(node.tiles), per_row):
            cells: list[Run] = [(head if not first else " " * len(head), "dim")]
            for tile in node.tiles[first : first + per_row]:
                if tile is None:
                    cells.append((f" … {node.missing:,} more ", "dim"))
                    continue
                text = f" {tile.rank:>{ranks}}:{tile.shard:<{shards}} "
                cells.append((text, _on(shard_ink(tile.shard, facts.num_shards))))
                cells.append((" ", ""))
            lines.append(cells)
    lines += [[], [("  each cell is rank:shard; equal shards hold the same parameters", "dim")]]
    return [*lines, *_links(facts.links, facts)]


def _links(links: Links, facts: MeshMap) -> list[Line]:
    lines: list[Line] = [[]] if facts.lanes else []
    for lane in facts.lanes:
        lines.append([(f"  {lane_in_words(lane)}", "bold red" if lane.crosses else "")])
    if links.unknown:
        lines.append([(f"  unknown, and not counted: {in_short(links.unknown)}", "dim")])
    return lines


def memory_lines(facts: MemoryBars) -> list[Line]:
    """Return a bar per group of ranks, drawn with a letter for each category, and the limit."""
    used = [name for name in INKS if any(name in dict(bar.parts) for bar in facts.bars)]
    limit = facts.limit_bytes or 0
    most = max([limit, *(bar.high_bytes or bar.total_bytes for bar in facts.bars)]) or 1
    name_wide = max(len(bar.name) for bar in facts.bars)
    texts = [f"  {format_gib(bar.total_bytes)}: {facts.verdict(bar)}" for bar in facts.bars]
    wide = _fitting(_WIDE, len("    ") + name_wide + 1 + max(map(len, texts)))
    lines: list[Line] = [[(facts.title, "bold")], []]
    for bar, text in zip(facts.bars, texts, strict=True):
        cells: list[Run] = [(f"  {bar.name:<{name_wide}}  ", "")]
        at, drawn = 0, 0
        for name, size in bar.parts:
            at += size
            count = round(at / most * wide) - drawn
            drawn += count
            cells.append((_LETTERS[name] * count, _on(INKS[name])))
        if bar.high_bytes is not None:
            more = round(bar.high_bytes / most * wide) - drawn
            cells.append(("-" * more, "dim"))
            drawn += more
        else:
            cells.append(("?" * 4, "dim"))
            drawn += 4
        edge = round(limit / most * wide)
        if limit and edge > drawn:
            cells.append((" " * (edge - drawn) + "|", ""))
            drawn = edge + 1
        is_over = facts.verdict(bar).startswith("OVER")
        style = "bold red" if is_over else "bold green" if bar.fits else "bold"
        cells.append((" " * max(0, wide + 1 - drawn) + text, style))
        lines.append(cells)
    key: list[list[Run]] = [[("  ", "")]]
    width = terminal_width()
    for name in used:
        entry = [(_LETTERS[name], _on(INKS[name])), (f" {name}  ", "")]
        if width is not None and len("".join(t for t, _ in (*key[-1], *entry)).rstrip()) > width:
            key.append([("  ", "")])
        key[-1] += entry
    end = "  - up to the upper end of the estimate" + ("; | the limit" if limit else "")
    lines += [[], *key, [(end if not facts.unknown else f"  ? unknown: {facts.unknown}", "dim")]]
    return lines


def layout_lines(facts: TensorLayout) -> list[Line]:
    """Return a table at rest and one in forward and backward; each cell has a shard's ranks."""
    lines: list[Line] = [[(facts.title, "bold")]]
    for face in facts.faces:
        sides = [side.words for side in (face.rows, face.columns) if side is not None]
        lines += [[], [(f"  {face.when}: {face.spelled}", "bold")]]
        lines += [[(f"    {words}", "dim")] for words in (*sides, *face.hidden)]
        lines += _face_lines(face)
    return lines


def _face_lines(face: Face) -> list[Line]:
    rows = face.rows.pieces if face.rows else (None,)
    columns = face.columns.pieces if face.columns else (None,)
    noun = "columns" if face.rows else "elements"
    heads = [span_in_words(column, noun) if column else "" for column in columns]
    names = [span_in_words(row, "rows") if row else "" for row in rows]
    cells = [[_cell(face, row, column) for column in columns] for row in rows]
    left = max(map(len, names))
    wide = [
        max(len(head), *(len(line[n][0]) for line in cells)) + 2 for n, head in enumerate(heads)
    ]
    out: list[Line] = [
        [("    " + " " * left + "  ", ""),
         *((f"{head:^{w}} ", "dim") for head, w in zip(heads, wide, strict=True))]
    ]  # fmt: skip
    for name, line in zip(names, cells, strict=True):
        parts = zip(line, wide, strict=True)
        out.append(
            [(f"    {name:>{left}}  ", ""),
             *(run for (text, style), w in parts for run in ((f"{text:^{w}}", style), (" ", "")))]
        )  # fmt: skip
    return out


def _cell(face: Face, row: DimSlice | None, column: DimSlice | None) -> Run:
    if any(piece is not None and piece.number < 0 for piece in (row, column)):
        return "…", "dim"
    num = face.columns.num if face.columns else 1
    shard = (row.number if row else 0) * num + (column.number if column else 0)
    return ranks_in_words(face.ranks(row, column)), _on(shard_ink(shard, face.num_shards))


def gantt_lines(facts: Gantt, wide: int = 96) -> list[Line]:
    """Return a row per rank, in which each of `wide` characters is an equal part of the step."""
    lines: list[Line] = [[(facts.title, "bold")], []]
    wide = _fitting(wide, len("  ranks  ") + len(f"  in flight {max(facts.most_kept):,}"))
    rows: dict[int, list[str]] = {rank: ["."] * wide for rank in range(facts.ranks)}
    per = facts.step / wide
    for block in facts.blocks:
        # A character shows the pass that runs in the middle of the character's part of the step.
        for cell in range(wide):
            if block.begin <= (cell + 0.5) * per < block.end:
                rows[block.rank][cell] = block.kind
    shown = list(rows) if facts.ranks <= 32 else [*range(30), facts.ranks - 1]
    for rank in shown:
        if facts.ranks > 32 and rank == facts.ranks - 1:
            lines.append([(f"  … {facts.ranks - 31:,} more ranks", "dim")])
        cells: list[Run] = [(f"  pp {rank:<4}" if facts.schedule else "  ranks  ", "dim")]
        cells += [(kind, _on(PASSES[kind]) if kind in PASSES else "dim") for kind in rows[rank]]
        cells.append((f"  in flight {facts.most_kept[rank]:,}", ""))
        lines.append(cells)
    kinds = dict.fromkeys(block.kind for block in facts.blocks)
    words = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "of weights"}
    key = ", ".join(f"{kind} {words[kind]}" for kind in kinds)
    lines += [
        [],
        [(f"  {key}, . waiting; a step is {facts.time(facts.step)}", "dim")],
        [("  in flight: the most forwards that wait for their backward at once", "dim")],
        [(f"  {facts.assumed}", "dim")],
    ]
    return lines


def _on(ink: Ink) -> str:
    """Return the rich style of text on a background colour."""
    return f"{ink_on(ink.colour)} on {ink.colour}"


def graph_lines(facts: Tree) -> list[Line]:
    """Return a row per node of the tree; a row for several equal modules states their number."""
    lines: list[Line] = [[(facts.title, "bold")], []]
    names = [f"{'  ' * (row.depth + 1)}{row.name}" for row in facts.rows]
    wide = min(max(map(len, names)), _WIDE)
    for name, row in zip(names, facts.rows, strict=True):
        size = format_count(row.num_params) if row.num_params else ""
        hidden = f" (+{row.num_hidden:,} rows below)" if row.num_hidden else ""
        lines.append(
            [(f"{name:<{wide}}  ", ""), (f"{row.type}{hidden}  ", "dim"), (f"{size}  ", ""),
             (row.group, "")]
        )  # fmt: skip
    return lines
