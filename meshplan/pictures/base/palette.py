"""The colours of all pictures, for the light and the dark theme: each colour has one meaning.

The hues are those of Okabe and Ito, which colour-blind readers can distinguish. There are more
memory categories than hues that readers can distinguish, so hatches and words name them too.

Source: Okabe and Ito 2008, "Color universal design".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from meshplan.errors import Problem, SpecError
from meshplan.memory.log.events import Term


@dataclass(frozen=True, slots=True)
class Ink:
    """The fill of a shape.

    Args:
        colour: Colour as "#rrggbb".
        hatch: Hatch pattern of matplotlib; "" for none.
    """

    colour: str
    hatch: str = ""


BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
ORANGE: Final = "#E69F00"
RED: Final = "#D55E00"
PINK: Final = "#CC79A7"
YELLOW: Final = "#F0E442"
GREY: Final = "#9A9A9A"

TERMS: Final[Mapping[str, Ink]] = MappingProxyType(
    {
        Term.PARAMETERS: Ink(BLUE),
        Term.GRADIENTS: Ink(ORANGE),
        Term.OPTIMIZER: Ink(GREEN),
        Term.BUFFERS: Ink("#7FA6C9", ".."),
        Term.INPUTS: Ink("#B08D57", "--"),
        Term.GATHERED: Ink(SKY, "//"),
        Term.COMMUNICATION: Ink(PINK, "\\\\"),
        Term.ACTIVATIONS: Ink(RED),
        Term.LOSS: Ink(YELLOW, "xx"),
        Term.WORKSPACES: Ink("#6F6F6F", "++"),
        Term.TEMPORARIES: Ink("#B9B9B9", "oo"),
    }
)
"""Fills of the categories in the memory of a rank."""

ROUNDING: Final = Ink("#D8C7B0", "||")
UNUSED: Final = Ink("#CFCFCF", "//")
DRIVER: Final = Ink("#4D4D4D")
SMALLER: Final = Ink("#8A8A8A")
"""Fill of several categories together that are too small to be seen alone."""
UNKNOWN: Final = Ink("#FFFFFF", "////")
"""Fill for bytes that are not known: hatched, so that it looks like no category."""

PASSES: Final[Mapping[str, Ink]] = MappingProxyType(
    {
        "F": Ink(BLUE),
        "B": Ink(ORANGE),
        "I": Ink("#B36B00"),
        "W": Ink(YELLOW),
    }
)
"""Fills of forwards and backwards: forwards look like parameters, backwards like gradients."""

PLACEMENTS: Final = (
    Ink(BLUE), Ink(GREEN), Ink(SKY, "//"), Ink(PINK), Ink(YELLOW, ".."), Ink("#7FA6C9", "\\\\"),
    Ink("#B08D57", "--"), Ink(GREY, "xx"),
)  # fmt: skip
"""Fills of sharded layouts, given out in this order; all further layouts get the last one."""

WHOLE: Final = Ink("#C44E6A", "xx")
"""A striking fill for tensors that several ranks replicate although an axis could shard them."""

STAGES: Final = (
    Ink(BLUE), Ink(SKY, "//"), Ink(GREEN), Ink("#8C6BB1", ".."), Ink(PINK, "\\\\"), Ink("#B08D57"),
    Ink(GREY, "--"), Ink("#7FA6C9", "xx"),
)  # fmt: skip
SHARDS: Final = (
    Ink(BLUE), Ink(YELLOW), Ink(GREEN), Ink(PINK), Ink(SKY), Ink("#B08D57"), Ink("#5F4B8B"),
    Ink("#A6C36F"),
)  # fmt: skip
"""Fills of the shards of a tensor. If there are more shards than fills, see `shard_ink`."""

_HATCHES: Final = ("", "//", "..", "\\\\")

HEAT: Final = "#2380BC"
"""The largest value of a heat map; smaller ones are as much more transparent. The text colours of
both themes can be read on it."""

COLLECTIVES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "all_gather": SKY,
        "reduce_scatter": ORANGE,
        "all_reduce": GREEN,
        "all_to_all": PINK,
        "broadcast": "#B08D57",
        "send": YELLOW,
        "recv": YELLOW,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours that differ between light and dark.

    Args:
        name: "light", "dark" or "page".
        paper: Background of the figure.
        panel: Background of a box that groups other shapes.
        line: Colour of frames and grids.
        ink: Colour of text.
        quiet: Colour of less important text.
        good: Colour of a good verdict, in addition to its words.
        bad: Colour of a bad verdict, in addition to its words.
        forbidden: Background of an area beyond a limit.
    """

    name: str
    paper: str
    panel: str
    line: str
    ink: str
    quiet: str
    good: str
    bad: str
    forbidden: str

    def text_on(self, colour: str) -> str:
        """Return the colour of text on a fill: black or white, or `ink` on a background."""
        return self.ink if colour in (self.paper, self.panel, self.forbidden) else ink_on(colour)


THEMES: Final[Mapping[str, Theme]] = MappingProxyType(
    {
        "light": Theme(
            name="light", paper="#FFFFFF", panel="#F3F3F0", line="#C9C9C4", ink="#1A1A1A",
            quiet="#5C5C5C", good="#006B4E", bad="#B23A00", forbidden="#F6DDD2",
        ),
        "dark": Theme(
            name="dark", paper="#15181C", panel="#22272D", line="#454D56", ink="#F0F0EC",
            quiet="#A9B1BA", good="#4CC9A0", bad="#FF8A50", forbidden="#43281D",
        ),
    }
)  # fmt: skip

PAGE: Final = Theme(
    name="page", paper="#FFFFFE", panel="#F3F3F1", line="#C9C9C5", ink="#1A1A1B", quiet="#5C5C5D",
    good="#006B4F", bad="#B23A01", forbidden="#F6DDD3",
)  # fmt: skip
"""The theme of a drawing in which a page replaces each of these colours with its own. No other
colour of a picture equals one of them."""


def theme_of(name: str) -> Theme:
    """Return the theme of this name: one of `THEMES`, or `PAGE`.

    Raises:
        SpecError: There is no such theme.
    """
    if name == PAGE.name:
        return PAGE
    if name not in THEMES:
        what = f"'{name}' is no theme"
        raise SpecError(Problem(what, None, f"write one of {', '.join(THEMES)}"))
    return THEMES[name]


def shard_ink(number: int, count: int) -> Ink:
    """Return the fill of shard `number` of `count`.

    Up to 32 shards get different colours and hatches; more shards get brighter from first to last.

    >>> shard_ink(0, 4).colour, shard_ink(9, 16).hatch, shard_ink(0, 64) == shard_ink(63, 64)
    ('#0072B2', '//', False)
    """
    if count <= len(SHARDS) * len(_HATCHES):
        rounds, place = divmod(number, len(SHARDS))
        return Ink(SHARDS[place].colour, _HATCHES[rounds])
    return Ink(between("#00224E", "#FDE737", number / (count - 1)))


def between(low: str, high: str, share: float) -> str:
    """Return a mix of two colours: `low` for share 0, `high` for share 1."""
    pairs = zip(rgb(low), rgb(high), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02X}" for a, b in pairs)


def ink_on(colour: str) -> str:
    """Return black or white, whichever has more contrast on a colour.

    Source: WCAG 2.1, relative luminance.
    """
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (channel / 255 for channel in rgb(colour))
    )
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#FFFFFF" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


def rgb(colour: str) -> tuple[int, int, int]:
    """Return (red, green, blue) of "#rrggbb", each from 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
