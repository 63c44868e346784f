"""Pictures as HTML elements, with unique ids, and colours that follow the light or dark theme."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from typing import Final

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


@dataclass(slots=True)
class Colours:
    """CSS variables for all colours of a page that differ between the light and the dark theme.

    Attributes:
        names: Names of CSS variables, by (light colour, dark colour).
    """

    names: dict[tuple[str, str], str] = field(default_factory=dict)

    def name(self, light: str, dark: str) -> str:
        """Return the colour as CSS: a variable, or the colour itself if both themes share it."""
        if light == dark:
            return light
        return f"var({self.names.setdefault((light, dark), f'--c{len(self.names)}')})"

    def sheet(self, *, is_dark: bool) -> str:
        """Return the CSS declarations that set all variables for one theme."""
        return " ".join(f"{name}: {pair[is_dark]};" for pair, name in self.names.items())


def figure(key: str, light: Picture, dark: Picture, colours: Colours) -> str:
    """Return a `<figure>` whose picture follows the theme and the width of the page.

    The picture's own title says what it shows, so there is no caption; screen readers read the
    title and the description.

    Args:
        key: Prefix of all ids in the picture; no other picture of the page may have it.
        light: The picture in the light theme.
        dark: The picture in the dark theme.
        colours: Colours of the page; the picture's colours are added.
    """
    if not light.views:
        return f'<figure id="{key}">{_element(key, light, dark, colours)}</figure>'
    views = zip(light.views, dark.views, strict=True)
    shown = [(name, _element(f"{key}-{number}", one, other, colours))
             for number, ((name, one), (_, other)) in enumerate(views)]  # fmt: skip
    return f'<figure id="{key}">{switched(light.choice, shown)}</figure>'


def _element(key: str, light: Picture, dark: Picture, colours: Colours) -> str:
    """Return the wide and the narrow drawing, of which the page's style shows one."""
    if light.narrow is None or dark.narrow is None:
        return _drawing(key, light, dark, colours)
    narrow = _drawing(f"{key}-narrow", light.narrow(), dark.narrow(), colours)
    wide = _drawing(key, light, dark, colours)
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def _drawing(key: str, light: Picture, dark: Picture, colours: Colours) -> str:
    """Return one drawing that follows the theme."""
    label = html.escape(f"{light.title}. {light.alt}", quote=True)
    drawn = _both(_bare(light, key), _bare(dark, key), colours) or (
        f'<div class="light">{_bare(light, key)}</div>'
        f'<div class="dark">{_bare(dark, f"{key}-dark")}</div>'
    )
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{label}" ')


def _both(light: str, dark: str, colours: Colours) -> str:
    """Return one svg that uses the variables of `colours`; "" if a single svg cannot be both."""
    if _COLOUR.split(light) != _COLOUR.split(dark):
        return ""
    pairs = zip(_COLOUR.findall(light), _COLOUR.findall(dark), strict=True)
    named = iter([colours.name(*pair) for pair in pairs])
    text = _COLOUR.sub(lambda _: next(named), light)
    # Browsers resolve CSS variables in `style` attributes, but not in attributes such as `fill`.
    return "" if '="var(' in text else text


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
