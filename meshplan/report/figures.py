"""Pictures as HTML elements, with unique ids, and colours that follow the light or dark theme."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Final

from meshplan.pictures.base.palette import PAGE, Theme
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.views import switched

_COLOUR: Final = re.compile(r"#[0-9a-fA-F]{6}\b")
_ID: Final = re.compile(r'\bid="([^"]*)"')
_USE: Final = re.compile(r'url\(#([^)]*)\)|(xlink:href|href)="#([^"]*)"')
_STYLE: Final = re.compile(r"<style.*?</style>", re.DOTALL)
_METADATA: Final = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_SIZE: Final = re.compile(r'(<svg[^>]*?) width="[^"]*"|(<svg[^>]*?) height="[^"]*"')
_PLACES: Final = re.compile(r'\b(?:d|x|y|x1|x2|y1|y2|width|height|points)="[^"]*"')
_LONG: Final = re.compile(r"-?\d+\.\d{3,}")
_TEXT: Final = re.compile(r'<text style="([^"]*)"')
_FILL: Final = re.compile(r";? *\bfill: (#[0-9a-f]{6})")
_BLANK: Final = re.compile(r">\s+<")


_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {getattr(PAGE, each.name).lower(): each.name for each in fields(PAGE) if each.name != "name"}
)
"""Names of the CSS variables of a page, by the colour that stands for them in a drawing."""


def sheet(theme: Theme) -> str:
    """Return the CSS declarations that set the variables of a page to the colours of a theme."""
    return " ".join(f"--{name}: {getattr(theme, name)};" for name in _VARIABLES.values())


def figure(key: str, picture: Picture) -> str:
    """Return a `<figure>` whose picture follows the theme and the width of the page.

    The picture's own title says what it shows, so there is no caption; screen readers read the
    title and the description.

    Args:
        key: Prefix of all ids in the picture; no other picture of the page may have it.
        picture: The picture, drawn in the theme `palette.PAGE`.
    """
    if not picture.views:
        return f'<figure id="{key}">{_element(key, picture)}</figure>'
    shown = [(name, _element(f"{key}-{number}", one))
             for number, (name, one) in enumerate(picture.views)]  # fmt: skip
    return f'<figure id="{key}">{switched(picture.choice, shown)}</figure>'


def _element(key: str, picture: Picture) -> str:
    """Return the wide and the narrow drawing, of which the page's style shows one."""
    wide = _drawing(key, picture)
    if picture.narrow is None:
        return wide
    narrow = _drawing(f"{key}-narrow", picture.narrow())
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def _drawing(key: str, picture: Picture) -> str:
    """Return one drawing, in the variables of the page."""
    label = html.escape(f"{picture.title}. {picture.alt}", quote=True)
    drawn = _COLOUR.sub(_themed, _bare(picture, key))
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{label}" ')


def _themed(found: re.Match[str]) -> str:
    name = _VARIABLES.get(found[0].lower())
    return f"var(--{name})" if name else found[0]


def _bare(picture: Picture, key: str) -> str:
    """Return the svg without a fixed size, metadata and unused ids, and with shorter numbers."""
    text = picture.svg()
    text = _METADATA.sub("", _STYLE.sub("", text[text.index("<svg") :]))
    for _ in range(2):
        text = _SIZE.sub(lambda found: found[1] or found[2], text, count=1)
    text = _PLACES.sub(lambda found: _LONG.sub(_shorter, found[0]), text)
    return _BLANK.sub("><", _renamed(_TEXT.sub(_coloured, text), key)).strip()


def _coloured(text: re.Match[str]) -> str:
    """Put the colour of a text last in its style: matplotlib leaves it out where it is black."""
    found = _FILL.search(text[1])
    colour = found[1] if found else "#000000"
    return f'<text style="{_FILL.sub("", text[1])}; fill: {colour}"'


def _renamed(text: str, key: str) -> str:
    """Rename used ids to "KEY-NUMBER", and drop the others, so that no two pictures share an id."""
    used = dict.fromkeys(found[1] or found[3] for found in _USE.finditer(text))
    new = {old: f"{key}-{number}" for number, old in enumerate(used)}

    def use(found: re.Match[str]) -> str:
        name = new[found[1] or found[3]]
        return f"url(#{name})" if found[1] else f'{found[2]}="#{name}"'

    text = _ID.sub(lambda found: f'id="{new[found[1]]}"' if found[1] in new else "", text)
    return _USE.sub(use, text)


def _shorter(found: re.Match[str]) -> str:
    """Round a coordinate to a hundredth of a point, a difference that no reader can see."""
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")
