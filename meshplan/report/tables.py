"""Tables of a report, as HTML; the script of the page lets readers sort them."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from meshplan.units import format_bytes, format_gib, format_step

_LONG: Final = 24
"""Number of characters above which a cell's text is wrapped."""

_DOT: Final = re.compile(r"(?<=\w)\.(?=\w|\{)")


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        text: The text.
        number: Sort key; None sorts by the text.
        depth: Indentation in levels of a tree.
        mark: CSS class of the text: "good", "bad", or "" for none.
    """

    text: str
    number: float | None = None
    depth: int = 0
    mark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with a caption.

    Args:
        caption: Caption of the table.
        columns: Names of the columns. A leading ">" marks a column of numbers, which is
            right-aligned.
        rows: Rows with one cell per column.
        is_ordered: If True, the order of the rows has a meaning, and readers cannot sort them.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    is_ordered: bool = False

    def to_html(self) -> str:
        """Return the table as HTML, in a box that scrolls if the table is wider than the page."""
        kinds = [' class="number"' if name.startswith(">") else "" for name in self.columns]
        heads = "".join(
            f'<th scope="col"{kind}>{html.escape(name.removeprefix(">"))}</th>'
            for name, kind in zip(self.columns, kinds, strict=True)
        )
        body = "".join(
            f"<tr>{''.join(map(_cell, row, kinds, [not place for place in range(len(row))]))}</tr>"
            for row in self.rows
        )
        sortable = "" if self.is_ordered else ' class="sortable"'
        caption = html.escape(self.caption)
        return (
            f'<div class="scroll" tabindex="0" role="group" aria-label="{caption}">'
            f"<table{sortable}><caption>{caption}</caption><thead><tr>{heads}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )


def _cell(cell: Cell, kind: str, is_first: bool) -> str:
    tag, more = ("th", ' scope="row"') if is_first else ("td", "")
    if not kind and len(cell.text) > _LONG:
        kind = ' class="long"'
    if cell.number is not None:
        more += f' data-by="{cell.number!r}"'
    if cell.depth:
        more += f' style="padding-left: {0.5 + cell.depth}em"'
    text = html.escape(cell.text)
    if "long" in kind:
        # Browsers break lines at spaces only, and names are longer than a column is wide.
        text = _DOT.sub(".<wbr>", text)
    if cell.mark:
        text = f'<span class="{cell.mark}">{text}</span>'
    return f"<{tag}{kind}{more}>{text}</{tag}>"


def gib(num_bytes: int | float) -> Cell:
    """Return a cell that shows a number of bytes in GiB."""
    return Cell(format_gib(num_bytes), float(num_bytes))


def size(num_bytes: int | float) -> Cell:
    """Return a cell that shows a number of bytes in the unit that suits it."""
    return Cell(format_bytes(num_bytes), float(num_bytes))


def share(value: float, *, signed: bool = False) -> Cell:
    """Return a cell that shows a fraction in per cent."""
    return Cell(f"{value:+.1%}" if signed else f"{value:.1%}", value)


def seconds(value: float) -> Cell:
    """Return a cell that shows a step time, as `format_step` does."""
    return Cell(format_step(value), value)
