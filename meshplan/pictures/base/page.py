"""The sheet that every picture is drawn on: its title, legend, notes, and the body between them.

Text is measured before it is placed, so that nothing overlaps and nothing is cut off. Lengths are
in inches, font sizes in points.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from meshplan.pictures.base.fonts import drawable, families_of, font_of
from meshplan.pictures.base.palette import Ink, Theme, between, ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH: Final = 10.0
EDGE: Final = 0.3
TITLE: Final = 15.0
TEXT: Final = 10.5
SMALL: Final = 9.0
_LEADING: Final = 1.35
_SWATCH: Final = 0.26
_POINTS: Final = 72.0
_LARGE: Final = 72.0
"""Font size in points for measuring characters, so large that pixel rounding is negligible."""
_HINTED: Final = 1.06
"""Factor by which a line may be wider when its letters are aligned to whole pixels. [Empirical]:
between 0.94 and 1.06 for most lines at 100 dots per inch.
"""
_UNIT: Final = re.compile(r"(\d) (GiB|MiB|KiB|B|GB/s|min|ms|us|s)\b")

Item = tuple[str, Ink]
"""An entry of a legend: its label and its fill."""


class Sheet:
    """A figure with a title above, notes below, and a body between them.

    Args:
        theme: Colours of the figure.
        title: The title.
        body: Height of the body in inches.
        legend: Labels and fills of the legend.
        notes: Notes for the reader.
        width: Width of the figure in inches.

    Attributes:
        theme: Colours of the figure.
        width: Width of the figure in inches.
        figure: The matplotlib figure.
        bottom: Distance of the body from the figure's lower edge in inches.
        height: Height of the body in inches.
    """

    def __init__(
        self,
        theme: Theme,
        title: str,
        body: float,
        *,
        legend: Sequence[Item] = (),
        notes: Sequence[str] = (),
        width: float = WIDTH,
    ) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.theme, self.width, self.height = theme, width, body
        room = width - 2 * EDGE
        titles = wrapped(title, room, TITLE, most=3, bold=True)
        footers = [line for note in notes for line in wrapped(note, room, SMALL, most=3)]
        rows = _legend_rows(legend, room)
        top = EDGE + len(titles) * _line(TITLE) + 0.1 + len(rows) * 0.28 + 0.1
        self.bottom = EDGE * 0.7 + len(footers) * _line(SMALL) + (0.08 if footers else 0.0)
        self.figure: Figure = Figure(
            figsize=(width, self.bottom + body + top), facecolor=theme.paper
        )
        FigureCanvasAgg(self.figure)
        self._all = Plane(self.figure)
        y = self.total - EDGE
        for line in titles:
            y -= _line(TITLE)
            self._write(EDGE, y, line, size=TITLE, weight="bold")
        y -= 0.1
        for row in rows:
            y -= 0.28
            for x, (label, ink) in row:
                box(self._all, x, y, _SWATCH, 0.17, ink, edge=theme.quiet)
                self._write(x + _SWATCH + 0.07, y + 0.025, label, size=SMALL, colour=theme.ink)
        y = self.bottom - 0.08
        for line in footers:
            y -= _line(SMALL)
            self._write(EDGE, y, line, size=SMALL, colour=theme.quiet)

    @property
    def total(self) -> float:
        """Height of the whole figure in inches."""
        return float(self.figure.get_figheight())

    def _write(self, x: float, y: float, text: str, **style: Any) -> None:
        write(self._all, x, y, text, self.theme, **style)

    def axes(
        self,
        *,
        left: float = 0.9,
        right: float = 0.3,
        top: float = 0.05,
        bottom: float = 0.55,
    ) -> Axes:
        """Return axes in the body, with margins in inches for their labels."""
        width, total = self.width, self.total
        at = (
            left / width,
            (self.bottom + bottom) / total,
            (width - left - right) / width,
            (self.height - top - bottom) / total,
        )
        axes = self.figure.add_axes(at, facecolor=self.theme.paper)
        theme = self.theme
        for name, spine in axes.spines.items():
            spine.set_color(theme.line)
            spine.set_visible(name in ("left", "bottom"))
        axes.tick_params(colors=theme.quiet, labelcolor=theme.ink, labelsize=SMALL)
        axes.xaxis.label.set_color(theme.ink)
        axes.yaxis.label.set_color(theme.ink)
        axes.xaxis.label.set_fontsize(TEXT)
        axes.yaxis.label.set_fontsize(TEXT)
        axes.set_axisbelow(True)
        return axes

    def plane(self) -> Plane:
        """Return the body as a plane in inches, with the origin in its lower left corner."""
        return Plane(self.figure, (0.0, self.bottom))

    def plot(
        self, *, left: float, bottom: float, units: tuple[float, float], most: float, label: str
    ) -> Plane:
        """Return a part of the body for horizontal bars, with a scale below and labels on the left.

        Args:
            left: Distance of the corner from the figure's left edge in inches.
            bottom: Distance of the corner from the body's lower edge in inches.
            units: Units per inch, horizontally and vertically.
            most: Largest value of the ticks.
            label: Label of the scale.
        """
        from matplotlib.ticker import MaxNLocator

        corner = (left, self.bottom + bottom)
        plane, body = Plane(self.figure, corner, units), Plane(self.figure, corner)
        theme, tall = self.theme, self.height - bottom
        for tick in MaxNLocator(nbins=6).tick_values(0.0, most):
            if 0 <= tick <= most:
                x = tick / units[0]
                body.plot([x, x], [0, tall - 0.3], color=theme.line, lw=0.6, zorder=0.5)
                body.plot([x, x], [-0.05, 0], color=theme.quiet, lw=0.8)
                write(body, x, -0.1, f"{tick:g}", theme, size=SMALL, across="center", up="top")
        wide = self.width - left - EDGE
        body.plot([0, wide], [0, 0], color=theme.line, lw=0.8)
        write(body, wide / 2, -0.3, label, theme, across="center", up="top")
        return plane


class Plane:
    """A part of a figure to draw on, with the methods of matplotlib's axes that pictures need.

    Real axes would take as long as everything drawn on them, because they create ticks before these
    can be turned off.

    Args:
        figure: The figure.
        corner: Distance from the figure's lower left corner in inches, horizontally and vertically.
        units: Units per inch, horizontally and vertically.
    """

    def __init__(
        self,
        figure: Figure,
        corner: tuple[float, float] = (0.0, 0.0),
        units: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        from matplotlib.transforms import Affine2D

        self.figure = figure
        inches = Affine2D().scale(1.0 / units[0], 1.0 / units[1]).translate(*corner)
        self._at = inches + figure.dpi_scale_trans

    def text(self, x: float, y: float, text: str, **style: Any) -> Any:
        """Add a text."""
        return self.figure.text(x, y, text, transform=self._at, **style)

    def add_patch(self, patch: Any) -> Any:
        """Add a patch that does not belong to a figure yet."""
        patch.set_transform(self._at)
        return self.figure.add_artist(patch)

    def plot(self, xs: Sequence[float], ys: Sequence[float], **style: Any) -> Any:
        """Add a line through points."""
        from matplotlib.lines import Line2D

        return self.figure.add_artist(Line2D(xs, ys, transform=self._at, **style))

    def annotate(
        self, text: str, to: tuple[float, float], at: tuple[float, float], **style: Any
    ) -> Any:
        """Add a text with an arrow."""
        from matplotlib.text import Annotation

        return self.figure.add_artist(
            Annotation(text, to, at, xycoords=self._at, textcoords=self._at, **style)
        )


def ticks_up_to(axes: Axes, most: float) -> None:
    """Limit ticks and grid lines to `most`, so that none is behind text to the right of bars."""
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(nbins=6).tick_values(0.0, most)
    axes.set_xticks([tick for tick in ticks if 0 <= tick <= most])


def write(
    axes: Axes | Plane,
    x: float,
    y: float,
    text: str,
    theme: Theme,
    *,
    size: float = TEXT,
    colour: str | None = None,
    weight: str = "normal",
    across: str = "left",
    up: str = "baseline",
    **more: Any,
) -> Any:
    """Write a text literally: a name with "$" is not parsed as mathematics."""
    return axes.text(
        x, y, text, fontsize=size, color=colour or theme.ink, fontweight=weight, ha=across, va=up,
        parse_math=False, fontfamily=families_of(text), **more,
    )  # fmt: skip


def box(
    axes: Axes | Plane,
    x: float,
    y: float,
    width: float,
    height: float,
    ink: Ink,
    *,
    edge: str = "none",
    line: float = 0.8,
    **more: Any,
) -> Any:
    """Add a filled rectangle."""
    from matplotlib.patches import Rectangle

    # matplotlib draws a hatch in the edge's colour, so hatch and edge need two rectangles.
    is_twice = bool(ink.hatch) and edge != "none"
    stroke = hatch_colour(ink) if ink.hatch else edge
    width_of_line = 0.0 if is_twice or edge == "none" else line
    patch = Rectangle(
        (x, y), width, height, facecolor=ink.colour, edgecolor=stroke, hatch=ink.hatch or None,
        linewidth=width_of_line, **more,
    )  # fmt: skip
    axes.add_patch(patch)
    if is_twice:
        around = Rectangle((x, y), width, height, fill=False, edgecolor=edge, linewidth=line)
        around.set_zorder(patch.get_zorder())
        axes.add_patch(around)
    return patch


def hatch_colour(ink: Ink) -> str:
    """Return the colour of a hatch: a little darker or brighter than its background."""
    return between(ink.colour, ink_on(ink.colour), 0.45)


def width_of(text: str, size: float = TEXT, *, bold: bool = False) -> float:
    """Return the width of the longest line in inches.

    >>> width_of("a") < width_of("aa") < width_of("aa", bold=True)
    True
    """
    return max(_measured(line, size, bold) for line in text.split("\n"))


def height_of(text: str, size: float = TEXT) -> float:
    """Return the height of all lines in inches."""
    return (text.count("\n") + 1) * _line(size)


def _line(size: float) -> float:
    return size * _LEADING / _POINTS


def _measured(line: str, size: float, bold: bool) -> float:
    return sum(_advance(c, bold) for c in line) * size * _HINTED


@lru_cache(maxsize=4096)
def _advance(character: str, bold: bool) -> float:
    """Return the width of a character in inches per point of size, without kerning.

    Kerning mostly moves characters closer. Characters without a font are measured as their escapes.
    """
    font = font_of(character, bold=bold)
    if font is None:
        return sum(_advance(c, bold) for c in drawable(character))
    font.set_size(_LARGE, _POINTS)
    return font.load_char(ord(character)).linearHoriAdvance / 65536 / _LARGE / _POINTS


def fitted(text: str, room: float, size: float = TEXT, *, bold: bool = False) -> str:
    """Shorten a text in its middle until it fits into `room` inches; "" if nothing fits.

    >>> fitted("model.layers.0.mlp", 9.0)
    'model.layers.0.mlp'
    """
    if width_of(text, size, bold=bold) <= room:
        return text
    low, high = 0, len(text)
    while low < high:
        kept = (low + high + 1) // 2
        low, high = (kept, high) if _fits(text, kept, room, size, bold) else (low, kept - 1)
    return _short(text, low) if low >= 2 else ""


def fitted_name(name: str, room: float, size: float = TEXT) -> str:
    """Shorten an fqn from its front until it fits into `room` inches.

    >>> fitted_name("model.layers.{0..31}.mlp.up_proj.weight", 1.0)
    '…up_proj'
    """
    short = name.removesuffix(".weight")
    parts = short.split(".")
    for first in range(len(parts)):
        text = ("…" if first else "") + ".".join(parts[first:])
        # A dot within a range such as {0..31} does not separate names.
        if text.count("{") == text.count("}") and width_of(text, size) <= room:
            return text
    return fitted(parts[-1], room, size)


def _fits(text: str, kept: int, room: float, size: float, bold: bool) -> bool:
    return width_of(_short(text, kept), size, bold=bold) <= room


def _short(text: str, kept: int) -> str:
    """Keep this many characters at both ends, which distinguish names better than the middle."""
    head = kept // 3
    return f"{text[:head]}…{text[len(text) - (kept - head) :]}"


def wrapped(
    text: str, room: float, size: float = TEXT, *, most: int = 9, bold: bool = False
) -> list[str]:
    """Wrap text to at most `most` lines of `room` inches; the last line is shortened to fit."""
    lines: list[str] = []
    line = ""
    # Keep numbers with their units, and shapes together.
    text = text.replace(" × ", "\u00a0×\u00a0")
    for word in _UNIT.sub("\\1\u00a0\\2", text).split(" "):
        more = f"{line} {word}".strip()
        if not line or width_of(more, size, bold=bold) <= room:
            line = more
        else:
            lines.append(line)
            line = word
    lines.append(line)
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [fitted(each, room, size, bold=bold) for each in lines]


def _legend_rows(legend: Sequence[Item], room: float) -> list[list[tuple[float, Item]]]:
    """Return the entries of a legend with their x in inches, as many per row as fit."""
    rows: list[list[tuple[float, Item]]] = []
    x = room + 1
    for label, ink in legend:
        label = fitted(label, room - 1.0, SMALL)
        wide = _SWATCH + 0.07 + width_of(label, SMALL) + 0.28
        if x + wide - 0.28 > EDGE + room:
            rows.append([])
            x = EDGE
        rows[-1].append((x, (label, ink)))
        x += wide
    return rows
