"""Find a font that has a character, among the fonts that matplotlib finds on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.ft2font import FT2Font

FIRST: Final = "DejaVu Sans"
"""The font that comes with matplotlib; it has Latin, Greek and Cyrillic letters."""
_KNOWN: Final = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans SC", "Noto Sans JP",
    "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback",
    "PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Microsoft YaHei", "Yu Gothic",
    "Malgun Gothic", "Noto Sans", "Arial Unicode MS",
)  # fmt: skip
"""Fonts for many scripts, in the order in which they are tried; all other fonts are tried later."""
_NO_LETTERS: Final = ("Last Resort",)
"""Fonts that draw a box for every character."""


def families_of(text: str) -> list[str]:
    """Return the font families that are needed to draw a text, most preferred first.

    >>> families_of("layer 0")
    ['DejaVu Sans']
    """
    if text.isascii():
        return [FIRST]
    others = {family: None for c in text if (family := family_of(c))}
    return list({FIRST: None} | others)


@lru_cache(maxsize=4096)
def family_of(character: str) -> str | None:
    """Return the font family that draws a character; None if no font has it."""
    code = ord(character)
    if _font(FIRST).get_char_index(code):
        return FIRST
    return next((name for name, codes in _others() if code in codes), None)


def font_of(character: str, *, bold: bool = False) -> FT2Font | None:
    """Return the loaded font that draws a character; None if no font has it."""
    family = family_of(character)
    return None if family is None else _font(family, bold=bold)


def drawable(text: str) -> str:
    r"""Replace characters that no font has by escapes such as \u0900.

    >>> drawable("слой")
    'слой'
    """
    if text.isascii():
        return text
    return "".join(c if c == "\n" or family_of(c) else f"\\u{ord(c):04x}" for c in text)


@lru_cache(maxsize=32)
def _font(family: str, *, bold: bool = False) -> FT2Font:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    weight = "bold" if bold else "normal"
    return get_font(findfont(FontProperties(family=family, weight=weight)))


@lru_cache(maxsize=1)
def _others() -> Sequence[tuple[str, frozenset[int]]]:
    """Return (family, code points of its characters) for all fonts of this machine but `FIRST`."""
    from matplotlib.font_manager import fontManager, get_font

    paths: dict[str, str] = {}
    for entry in fontManager.ttflist:
        if entry.name != FIRST and not entry.name.startswith(_NO_LETTERS):
            paths.setdefault(entry.name, entry.fname)
    found = []
    for name in sorted(paths, key=lambda name: (name not in _KNOWN, name)):
        try:
            font = get_font(paths[name])
        except (OSError, RuntimeError):
            continue  # The file cannot be read, or was removed after matplotlib listed it.
        if font.scalable:
            found.append((name, frozenset(font.get_charmap())))
    return found
