"""Text for terminals: aligned columns, wrapped lines, colours, and the JSON envelope.

Text must be understandable without its colours. Tables are made here without rich, whose import
would double the start-up time of the quick subcommands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TextIO

from meshplan.units import format_gib
from meshplan.version import __version__

WIDTH: Final = 100
"""Highest number of characters per wrapped line: longer lines of prose are hard to read."""
_SMALL_INDENT: Final = 4
_NARROWEST: Final = 40
"""Lowest width that lines are folded to. In less, a table would be one word per line."""
_COLOURS: Final[Mapping[str, str]] = {
    "green": "32", "red": "31", "yellow": "33", "bold": "1", "dim": "2",
}  # fmt: skip


def wants_colour(stream: TextIO | None = None, no_color: bool = False) -> bool:
    """Return True if the stream is a terminal and neither `--no-color` nor NO_COLOR forbids colour.

    Source: no-color.org: NO_COLOR forbids colour if it is set and not empty.
    """
    stream = stream or sys.stdout
    return not no_color and not os.environ.get("NO_COLOR") and stream.isatty()


def paint(text: str, colour: str, is_on: bool) -> str:
    """Return the text in a colour or weight; unchanged if `is_on` is False."""
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if is_on else text


_STEERING: Final = re.compile(
    rf"\x1b\[(?:{'|'.join(_COLOURS.values())}|0)m"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
"""Pattern of control characters of terminals and text direction, and of whole `paint` sequences."""
_ANY_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


def without_steering(text: str) -> str:
    r"""Escape all control sequences of a terminal, except the colours of `paint`.

    Names of modules, files and models may come from strangers and could contain such sequences.

    >>> print(without_steering("a" + chr(27) + "]0;title" + chr(7)))
    a\x1b]0;title\x07
    """

    def shown(found: re.Match[str]) -> str:
        steering = found.group()
        return steering if len(steering) > 1 else steering.encode("unicode_escape").decode()

    return _STEERING.sub(shown, text)


class PlainStream:
    """A text stream that escapes control sequences of a terminal.

    Attributes:
        beneath: The original stream, for output that needs control sequences: a progress bar.
    """

    def __init__(self, stream: TextIO) -> None:
        self.beneath = stream

    def write(self, text: str) -> int:
        self.beneath.write(without_steering(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


def columns(rows: Iterable[Sequence[str]], align: str, gap: int = 2) -> list[str]:
    """Format rows as lines of aligned cells.

    Args:
        rows: Rows of cells.
        align: For each column, "<" to align its cells to the left, or ">" to the right.
        gap: Number of spaces between columns.

    >>> columns([("ddp", "9.5"), ("zero1", "10.0")], "<>")
    ['ddp     9.5', 'zero1  10.0']
    """
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        (" " * gap)
        .join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True))
        .rstrip()
        for row in table
    ]


def terminal_width() -> int | None:
    """Return the width that COLUMNS states, or else the terminal's; None if there is neither.

    The output of a pipe has no width, so that it does not depend on where a command was run.
    """
    width = shutil.get_terminal_size((0, 0)).columns
    return max(width, _NARROWEST) if width else None


def folded(line: str, width: int) -> list[str]:
    """Split a line at spaces into lines of at most `width` characters, unless a word is longer.

    The further lines are indented to where the last column begins, if that leaves half of the width
    for them, and else by two spaces more than the line.

    >>> folded("batch.micro  4  samples that each rank computes at a time", 40)
    ['batch.micro  4  samples that each rank', '                computes at a time']
    """
    if _visible(line) <= width:
        return [line]
    plain = _without_colours(line)
    starts = [gap.end() for gap in re.finditer(r"(?<=\S) {2,}", plain) if gap.end() <= width // 2]
    margin = len(plain) - len(plain.lstrip(" "))
    indent = " " * (starts[-1] if starts else min(margin + 2, width // 2))
    lines = [""]
    for gap, cell in re.findall(r"( *)(\S+(?: \S+)*)", line):
        if _visible(lines[-1] + gap + cell) <= width:
            lines[-1] += gap + cell
            continue
        is_last_column = len(lines) == 1 and _visible(lines[-1] + gap) == len(indent)
        if lines[-1].strip() and not is_last_column and _visible(indent + cell) <= width:
            lines.append(indent + cell)
            continue
        for number, word in enumerate(cell.split(" ")):
            space = " " if number else gap
            if lines[-1].strip() and _visible(lines[-1] + space + word) > width:
                lines.append(indent + word)
            else:
                lines[-1] += space + word
    return lines


def _visible(text: str) -> int:
    """Return the number of characters without the escape sequences of colours."""
    return len(_without_colours(text))


def _without_colours(text: str) -> str:
    return _STEERING.sub("", _ANY_COLOUR.sub("", text))


def wrapped(text: str, indent: int = 0) -> list[str]:
    """Wrap text at spaces to lines of at most WIDTH characters, or of the terminal's width.

    All lines but the first are indented by `indent` spaces.

    >>> wrapped("  " + "word " * 20, indent=4)[1]
    '    word'
    """
    found = textwrap.wrap(
        text, _prose_width(), subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False, drop_whitespace=True,
    )  # fmt: skip
    return found or [""]


def _prose_width() -> int:
    return min(WIDTH, terminal_width() or WIDTH)


def packed(head: str, parts: Iterable[str]) -> list[str]:
    """Join parts with ";" after a head, as many per line as fit; the next lines are indented.

    The next lines begin below the first part, unless the head fills more than half of a line.

    >>> packed("+1%  ", ["mesh: {dp_shard: 8}", "strategy: zero1"])
    ['+1%  mesh: {dp_shard: 8}; strategy: zero1']
    """
    width = _prose_width()
    indent = len(head) if len(head) <= width // 2 else _SMALL_INDENT
    lines, start = ([], head) if indent == len(head) else ([head.rstrip()], " " * indent)
    line = start
    for part in parts:
        if line == start:
            line += part
        elif len(line) + len(part) + 2 < width:
            line += f"; {part}"
        else:
            lines.append(f"{line};")
            line = " " * indent + part
    return [piece for each in (*lines, line) for piece in wrapped(each, indent + 2)]


def envelope(schema: str, result: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Return the JSON that `--json` prints: version, schema, result and notes.

    >>> envelope("estimate/1", {"num_gpus": 8})
    '{"meshplan": "0.1.0", "schema": "estimate/1", "result": {"num_gpus": 8}, "notes": []}'
    """
    content = {
        "meshplan": __version__, "schema": schema, "result": result, "notes": list(notes),
    }  # fmt: skip
    return json.dumps(content)


def gib(num_bytes: int) -> str:
    """Return a size in GiB without the unit, which the head of a column has."""
    return format_gib(num_bytes).removesuffix(" GiB")
