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
NARROW: Final = 4.2
"""Width of a picture for a phone, on which `SMALL` text is then about 11 CSS pixels high."""
EDGE: Final = 0.3
_NARROW_EDGE: Final = 0.05
_STACKED: Final = 6.0
"""Pictures that are narrower than this have their parts below each other, not side by side."""
TITLE: Final = 15.0
_NARROW_TITLE: Final = 12.5
TEXT: Final = 10.5
SMALL: Final = 9.0
_LEADING: Final = 1.35
_SWATCH: Final = 0.26
_POINTS: Final = 72.0
_LARGE: Final = 72.0
"""Font size in points for measuring characters, so large that pixel rounding is negligible."""
_HINTED: Final = 1.06
"""Upper bound of drawn width divided by measured width, because letters are aligned to pixels.
[Empirical]: this ratio is between 0.94 and 1.06 for most lines at 100 dots per inch.
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
        notes: Lines of text below the body.
        width: Width of the figure in inches.

    Attributes:
        theme: Colours of the figure.
        width: Width of the figure in inches.
        edge: Margin at the left and right in inches.
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
        self.edge, room = edge_of(width), room_of(width)
        size, most = (_NARROW_TITLE, 6) if is_narrow(width) else (TITLE, 3)
        titles = wrapped(title, room, size, most=most, bold=True)
        footers = [line for note in notes for line in wrapped(note, room, SMALL, most=2 * most)]
        rows = _legend_rows(legend, room, self.edge)
        top = self.edge + len(titles) * _line(size) + 0.1 + len(rows) * 0.28 + 0.1
        self.bottom = EDGE * 0.7 + len(footers) * _line(SMALL) + (0.08 if footers else 0.0)
        self.figure: Figure = Figure(
            figsize=(width, self.bottom + body + top), facecolor=theme.paper
        )
        FigureCanvasAgg(self.figure)
        self._all = Plane(self.figure)
        y = self.total - self.edge
        for line in titles:
            y -= _line(size)
            self._write(self.edge, y, line, size=size, weight="bold")
        y -= 0.1
        for row in rows:
            y -= 0.28
            for x, (label, ink) in row:
                box(self._all, x, y, _SWATCH, 0.17, ink, edge=theme.quiet)
                self._write(x + _SWATCH + 0.07, y + 0.025, label, size=SMALL, colour=theme.ink)
        y = self.bottom - 0.08
        for line in footers:
            y -= _line(SMALL)
            self._write(self.edge, y, line, size=SMALL, colour=theme.quiet)

    @property
    def is_narrow(self) -> bool:
        """If True, the parts of the picture go below each other instead of side by side."""
        return is_narrow(self.width)

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
        """Return matplotlib axes in the body, with these margins in inches for ticks and labels."""
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
        """Return a plane over the body, in inches, whose origin is the body's lower left corner."""
        return Plane(self.figure, (0.0, self.bottom))

    def plot(
        self,
        *,
        left: float,
        bottom: float,
        units: tuple[float, float],
        most: float,
        label: str,
        grid: float | None = None,
        shown: float = 1.0,
    ) -> Plane:
        """Return a plane for horizontal bars, with a scale from 0 drawn below.

        Args:
            left: Distance of the plane's lower left corner from the figure's left edge in inches.
            bottom: Distance of this corner from the body's lower edge in inches.
            units: (horizontal, vertical) data units per inch.
            most: Largest value that has a tick.
            label: Text below the scale.
            grid: Height of the grid lines in inches; None for all of the body.
            shown: Number that the scale shows for one data unit.
        """
        from matplotlib.ticker import MaxNLocator

        corner = (left, self.bottom + bottom)
        plane, body = Plane(self.figure, corner, units), Plane(self.figure, corner)
        theme = self.theme
        tall = self.height - bottom - 0.3 if grid is None else grid
        num_ticks = 4 if self.is_narrow else 6
        for tick in MaxNLocator(nbins=num_ticks).tick_values(0.0, most * shown):
            if 0 <= tick <= most * shown:
                x = tick / shown / units[0]
                if not self.is_narrow:  # There, texts are between the bars.
                    body.plot([x, x], [0, tall], color=theme.line, lw=0.6, zorder=0.5)
                body.plot([x, x], [-0.05, 0], color=theme.quiet, lw=0.8)
                write(body, x, -0.1, f"{tick:g}", theme, size=SMALL, across="center", up="top")
        wide = most / units[0]
        body.plot([0, wide], [0, 0], color=theme.line, lw=0.8)
        half = width_of(label) / 2
        middle = max(wide / 2, self.edge + half - left)
        middle = min(middle, self.width - self.edge - half - left)
        write(body, middle, -0.3, label, theme, across="center", up="top")
        return plane


class Plane:
    """A part of a figure to draw on, with the methods of matplotlib's axes that pictures need.

    `Axes` create ticks before these can be turned off, which would take as long as drawing
    everything else.

    Args:
        figure: The figure.
        corner: (x, y) of the origin in the figure, in inches from its lower left corner.
        units: (horizontal, vertical) data units per inch.
    """

    def __init__(
        self,
        figure: Figure,
        corner: tuple[float, float] = (0.0, 0.0),
        units: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        from matplotlib.transforms import Affine2D

        self.figure, self._corner, self._units = figure, corner, units
        inches = Affine2D().scale(1.0 / units[0], 1.0 / units[1]).translate(*corner)
        self._at = inches + figure.dpi_scale_trans

    def inches(self, x: float, y: float) -> tuple[float, float]:
        """Return a point of the plane in inches from the figure's lower left corner."""
        (left, low), (wide, tall) = self._corner, self._units
        return left + x / wide, low + y / tall

    def text(self, x: float, y: float, text: str, **style: Any) -> Any:
        """Add a text."""
        return self.figure.text(x, y, text, transform=self._at, **style)

    def add_patch(self, patch: Any) -> Any:
        """Add a matplotlib patch that is not part of a figure yet."""
        patch.set_transform(self._at)
        return self.figure.add_artist(patch)

    def plot(self, xs: Sequence[float], ys: Sequence[float], **style: Any) -> Any:
        """Add a line through points."""
        from matplotlib.lines import Line2D

        return self.figure.add_artist(Line2D(xs, ys, transform=self._at, **style))

    def annotate(
        self, text: str, to: tuple[float, float], at: tuple[float, float], **style: Any
    ) -> Any:
        """Add a text at `at` with an arrow to `to`."""
        from matplotlib.text import Annotation

        return self.figure.add_artist(
            Annotation(text, to, at, xycoords=self._at, textcoords=self._at, **style)
        )


def is_narrow(width: float) -> bool:
    """Return True if a picture this wide has its parts below each other, as on a phone."""
    return width < _STACKED


def edge_of(width: float) -> float:
    """Return the margin of a picture in inches: a phone's page has one of its own."""
    return _NARROW_EDGE if is_narrow(width) else EDGE


def room_of(width: float) -> float:
    """Return the width between the margins of a picture in inches."""
    return width - 2 * edge_of(width)


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
    """Write a text at (x, y), literally: matplotlib would parse "$" in a name as mathematics.

    Args:
        axes: The axes or plane to write on.
        x: Horizontal position in data units.
        y: Vertical position in data units.
        text: The text.
        theme: The theme, whose `ink` is the default colour.
        size: Font size in points.
        colour: Colour as "#rrggbb".
        weight: "normal" or "bold".
        across: Horizontal alignment: "left", "center" or "right".
        up: Vertical alignment, as in matplotlib.
        more: Further properties of matplotlib's text.
    """
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
    """Add a filled rectangle whose lower left corner is (x, y).

    Args:
        axes: The axes or plane to draw on.
        x: Left edge in data units.
        y: Lower edge in data units.
        width: Width in data units.
        height: Height in data units.
        ink: The fill.
        edge: Colour of the edge; "none" for no edge.
        line: Width of the edge in points.
        more: Further properties of matplotlib's rectangle.
    """
    from matplotlib.patches import Rectangle

    # matplotlib draws hatch and edge in one colour, so two colours need two rectangles.
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


def behind(ink: Ink) -> dict[str, Any] | None:
    """Return the `bbox` of a text on a fill: its colour covers the hatch, which runs through it."""
    return {"facecolor": ink.colour, "edgecolor": "none", "pad": 1.0} if ink.hatch else None


def width_of(text: str, size: float = TEXT, *, bold: bool = False) -> float:
    """Return the width of a text in inches, that of its longest line.

    >>> width_of("a") < width_of("aa") < width_of("aa", bold=True)
    True
    """
    return max(_measured(line, size, bold) for line in text.split("\n"))


def height_of(text: str, size: float = TEXT) -> float:
    """Return the height of a text in inches, of all its lines together."""
    return (text.count("\n") + 1) * _line(size)


def _line(size: float) -> float:
    return size * _LEADING / _POINTS


def _measured(line: str, size: float, bold: bool) -> float:
    return sum(_advance(c, bold) for c in line) * size * _HINTED


@lru_cache(maxsize=4096)
def _advance(character: str, bold: bool) -> float:
    """Return the width of a character in inches per point of size, without kerning.

    With kerning, text is mostly narrower. A character that no font has is measured as its escape.
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
    """Shorten an fqn until it fits into `room` inches; names are dropped from the front.

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
    """Keep `kept` characters, a third at the start and the rest at the end, where names differ."""
    head = kept // 3
    return f"{text[:head]}…{text[len(text) - (kept - head) :]}"


def wrapped(
    text: str, room: float, size: float = TEXT, *, most: int = 9, bold: bool = False
) -> list[str]:
    """Wrap text to at most `most` lines of `room` inches; the last line is shortened to fit."""
    lines: list[str] = []
    line = ""
    # Do not break a line inside a shape, or between a number and its unit.
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


def _legend_rows(
    legend: Sequence[Item], room: float, edge: float
) -> list[list[tuple[float, Item]]]:
    """Return the rows of a legend, each a list of (x in inches, entry) that fits into `room`."""
    rows: list[list[tuple[float, Item]]] = []
    x = room + 1
    for label, ink in legend:
        label = fitted(label, room - 1.0, SMALL)
        wide = _SWATCH + 0.07 + width_of(label, SMALL) + 0.28
        if x + wide - 0.28 > edge + room:
            rows.append([])
            x = edge
        rows[-1].append((x, (label, ink)))
        x += wide
    return rows
