"""The page of a report: its frame, style and script, and functions for common HTML elements."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from meshplan.pictures.base.palette import THEMES
from meshplan.pictures.base.views import POLICY, STYLE, script
from meshplan.report.figures import sheet

_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{policy}
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script>
{script}</script>
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A question and its answers.

    Args:
        key: Id of the section's element.
        title: The question.
        parts: HTML elements of the answer.
    """

    key: str
    title: str
    parts: Sequence[str]

    def to_html(self) -> str:
        """Return the section as HTML, with its heading."""
        return (
            f'<section id="{self.key}" aria-labelledby="{self.key}-title">'
            f'<h2 id="{self.key}-title">{html.escape(self.title)}</h2>{"".join(self.parts)}'
            "</section>"
        )


def page(title: str, top: str, sections: Iterable[Section], foot: str) -> str:
    """Return the whole HTML page.

    Args:
        title: Title of the document.
        top: HTML before the sections.
        sections: The sections; a section without parts is left out.
        foot: HTML after the sections.
    """
    shown = [section for section in sections if section.parts]
    links = "".join(f'<li><a href="#{s.key}">{html.escape(s.title)}</a></li>' for s in shown)
    style = f"{_file('page.css')}{STYLE}\n"
    for name, theme in THEMES.items():
        style = style.replace(f"/*{name}*/", sheet(theme))
    body = [
        f"<header>{top}<nav aria-label='Contents'><ul>{links}</ul></nav></header>",
        f"<main>{''.join(section.to_html() for section in shown)}</main>",
        f'<footer class="quiet">{foot}</footer>',
    ]
    return _PAGE.format(
        policy=POLICY,
        title=html.escape(title),
        style=style,
        body="\n".join(body),
        script=_file("page.js") + script(),
    )


def paragraph(text: str, kind: str = "") -> str:
    """Return an HTML paragraph with the text; `kind` is its CSS class, "" for none."""
    return f"<p{_class(kind)}>{html.escape(text)}</p>"


def heading(text: str) -> str:
    """Return an HTML heading for a part of a section."""
    return f"<h3>{html.escape(text)}</h3>"


def folded(title: str, element: str) -> str:
    """Return an element that readers open by its title; "" for no element."""
    if not element:
        return ""
    return f"<details><summary>{html.escape(title)}</summary>{element}</details>"


def bullets(items: Iterable[str]) -> str:
    """Return an HTML list; "" for no items."""
    found = "".join(f"<li>{html.escape(item)}</li>" for item in items)
    return f"<ul>{found}</ul>" if found else ""


def pairs(items: Iterable[tuple[str, str]], kind: str = "pairs") -> str:
    """Return an HTML description list of (name, value); "" for no items.

    Args:
        items: Pairs (name, value).
        kind: CSS class; "figures" puts each name with its value in a box.
    """
    found = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd></div>"
        if kind == "figures"
        else f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>"
        for name, text in items
    )
    return f"<dl{_class(kind)}>{found}</dl>" if found else ""


def numbered(text: str) -> str:
    """Return the content of a file as HTML, with its lines numbered."""
    lines = text.rstrip("\n").split("\n")
    wide = len(str(len(lines)))
    found = "\n".join(
        f"<b>{number:>{wide}}</b>  {html.escape(line)}" for number, line in enumerate(lines, 1)
    )
    return f'<pre tabindex="0">{found}</pre>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _file(name: str) -> str:
    return (files("meshplan.report") / name).read_text(encoding="utf-8")
