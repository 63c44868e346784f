"""The terminal: aligned columns, colour that is never the only sign, the JSON envelope.

Plain text only: a table of rich would double the start-up of the quick verbs.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TextIO

from meshplan.version import __version__

WIDTH: Final = 100
"""Of the lines that are broken, whatever the terminal: what is piped reads the same."""
_COLOURS: Final[Mapping[str, str]] = {
    "green": "32", "red": "31", "yellow": "33", "bold": "1", "dim": "2",
}  # fmt: skip


def wants_colour(stream: TextIO | None = None, no_color: bool = False) -> bool:
    """Whether to colour: a terminal, and neither `--no-color` nor NO_COLOR forbids it.

    Source: no-color.org: the variable counts when it is not empty.
    """
    stream = stream or sys.stdout
    return not no_color and not os.environ.get("NO_COLOR") and stream.isatty()


def paint(text: str, colour: str, is_on: bool) -> str:
    """The text in a colour or weight, or as it is."""
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if is_on else text


_STEERING: Final = re.compile(
    rf"\x1b\[(?:{'|'.join(_COLOURS.values())}|0)m"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
"""Characters that steer a terminal, or turn a text's direction; or whole, a colour of ours."""


def without_steering(text: str) -> str:
    r"""The text with orders to a terminal spelled out, but for colours as `paint` makes them.

    Names of modules, files and models come from anybody.

    >>> print(without_steering("a" + chr(27) + "]0;title" + chr(7)))
    a\x1b]0;title\x07
    """

    def shown(found: re.Match[str]) -> str:
        steering = found.group()
        return steering if len(steering) > 1 else steering.encode("unicode_escape").decode()

    return _STEERING.sub(shown, text)


class PlainStream:
    """A stream to which nothing is written that would steer a terminal.

    Attributes:
        beneath: The stream itself, for what has to steer: a bar of progress.
    """

    def __init__(self, stream: TextIO) -> None:
        self.beneath = stream

    def write(self, text: str) -> int:
        self.beneath.write(without_steering(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


def columns(rows: Iterable[Sequence[str]], align: str, gap: int = 2) -> list[str]:
    """Lines of aligned cells; `align` has "<" or ">" per column.

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


def wrapped(text: str, indent: int = 0) -> list[str]:
    """Lines of at most WIDTH letters, broken at spaces; those after the first are indented.

    >>> wrapped("  " + "word " * 20, indent=4)[1]
    '    word'
    """
    found = textwrap.wrap(
        text, WIDTH, subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False, drop_whitespace=True,
    )  # fmt: skip
    return found or [""]


def packed(head: str, parts: Iterable[str]) -> list[str]:
    """Lines that begin under each other after a head, with as many parts each as there is room for.

    >>> packed("+1%  ", ["mesh: {dp_shard: 8}", "strategy: zero1"])
    ['+1%  mesh: {dp_shard: 8}; strategy: zero1']
    """
    indent = len(head)
    lines, line = [], head
    for part in parts:
        if line == head:
            line += part
        elif len(line) + len(part) + 2 < WIDTH:
            line += f"; {part}"
        else:
            lines.append(f"{line};")
            line = " " * indent + part
    return [piece for each in (*lines, line) for piece in wrapped(each, indent + 2)]


def envelope(schema: str, result: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """What `--json` prints: version, schema, result and notes.

    >>> envelope("estimate/1", {"num_gpus": 8})
    '{"meshplan": "0.1.0", "schema": "estimate/1", "result": {"num_gpus": 8}, "notes": []}'
    """
    content = {
        "meshplan": __version__, "schema": schema, "result": result, "notes": list(notes),
    }  # fmt: skip
    return json.dumps(content)
