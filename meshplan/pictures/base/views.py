"""Several HTML elements in one place of a page, with buttons to choose which one is shown."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

POLICY: Final = (
    """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; """
    """style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">"""
)
"""Content security policy of every page: it makes browsers refuse to fetch anything."""

STYLE: Final = (
    ".views { display: flex; flex-wrap: wrap; gap: .4rem; margin: .4rem 0; } "
    ".views button { font: inherit; padding: .2rem .8rem; cursor: pointer; color: inherit; "
    "background: transparent; border: 2px solid; border-radius: .4rem; opacity: .75; } "
    ".views button[aria-pressed=true] { font-weight: 700; opacity: 1; "
    "text-decoration: underline; } "
    ".views button:focus-visible { outline: 3px solid; outline-offset: 2px; } "
    "@media print { .views button[aria-pressed=false] { display: none; } } "
    ".narrow { display: none; } "
    "@media screen and (max-width: 46rem) { .narrow { display: block; } .wide { display: none; } }"
)
"""CSS of the buttons, of which the pressed one also differs in weight and underline, and of
pictures that are drawn twice, for a wide and for a narrow screen."""


def switched(what: str, views: Sequence[tuple[str, str]]) -> str:
    """Return one HTML element with a button per view; the page shows the first view at the start.

    Args:
        what: Label of the group of buttons.
        views: Pairs (name on the button, HTML element).
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
    """Return the JavaScript that makes the buttons work."""
    return (files("meshplan.pictures.base") / "views.js").read_text(encoding="utf-8")
