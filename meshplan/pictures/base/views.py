"""Several pictures in one place of a page, and buttons that say which is shown."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

POLICY: Final = (
    """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; """
    """style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">"""
)
"""In the head of every page: that nothing is fetched is not only so, browsers allow nothing."""

STYLE: Final = (
    ".views { display: flex; flex-wrap: wrap; gap: .4rem; margin: .4rem 0; } "
    ".views button { font: inherit; padding: .2rem .8rem; cursor: pointer; color: inherit; "
    "background: transparent; border: 2px solid; border-radius: .4rem; opacity: .75; } "
    ".views button[aria-pressed=true] { font-weight: 700; opacity: 1; "
    "text-decoration: underline; } "
    ".views button:focus-visible { outline: 3px solid; outline-offset: 2px; } "
    "@media print { .views button[aria-pressed=false] { display: none; } }"
)
"""Which button is pressed is seen by more than its colour."""


def switched(what: str, views: Sequence[tuple[str, str]]) -> str:
    """One element after another, the first one shown, with a button for each.

    Args:
        what: What the buttons choose.
        views: (name, element).
    """
    buttons = "".join(
        f'<button type="button" aria-pressed="{str(not number).lower()}">{html.escape(name)}'
        "</button>"
        for number, (name, _) in enumerate(views)
    )
    shown = "".join(
        f'<div class="view"{" hidden" if number else ""}>{element}</div>'
        for number, (_, element) in enumerate(views)
    )
    label = html.escape(what, quote=True)
    return f'<div><div class="views" role="group" aria-label="{label}">{buttons}</div>{shown}</div>'


def script() -> str:
    """What the buttons do."""
    return (files("meshplan.pictures.base") / "views.js").read_text(encoding="utf-8")
