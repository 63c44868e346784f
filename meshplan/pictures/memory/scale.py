"""The scale of a picture of memory: its unit, its end, and where the limit is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshplan.pictures.base.page import SMALL, Plane, Sheet, width_of, write
from meshplan.units import GIB, KIB, MIB, format_gib

_FAR: Final = 10
"""A limit that is more than this many times the largest bar is not drawn: bars would be slivers."""
_PAST: Final = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryScale:
    """The scale on which bars of memory are drawn.

    Args:
        unit_bytes: Bytes of one unit.
        unit: Name of the unit.
        most: End of the scale, in units.
        limit: Bytes that one GPU may use, in units; None if this is unknown or not on the scale.
        note: A sentence on a limit that is not on the scale; "" if there is none.
    """

    unit_bytes: int
    unit: str
    most: float
    limit: float | None
    note: str = ""

    def crosses(self, middle: float, wide: float) -> bool:
        """Return True if the limit would run through a text of this middle and width, in units."""
        return self.limit is not None and abs(self.limit - middle) < wide / 2 * 1.1


def scale_of(largest_bytes: float, limit_bytes: int | None) -> MemoryScale:
    """Return the scale for bars of at most `largest_bytes`, with the limit if it is near enough.

    >>> scale_of(40 * 2**30, 80 * 2**30).limit, scale_of(3 * 2**30, 80 * 2**30).limit
    (80.0, None)
    """
    is_far = limit_bytes is not None and limit_bytes > _FAR * max(largest_bytes, 1)
    shown = largest_bytes if is_far or limit_bytes is None else max(largest_bytes, limit_bytes)
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    unit_bytes, unit = next((each for each in units if shown >= each[0] / 2), units[-1])
    note = ""
    if is_far and limit_bytes is not None:
        note = f"The limit, {format_gib(limit_bytes)}, is far beyond the right end of the scale."
    return MemoryScale(
        unit_bytes=unit_bytes,
        unit=unit,
        most=(shown / unit_bytes or 1.0) * _PAST,
        limit=None if is_far or limit_bytes is None else limit_bytes / unit_bytes,
        note=note,
    )


def draw_limit(
    plane: Plane,
    sheet: Sheet,
    scale: MemoryScale,
    bars: Sequence[tuple[float, float]],
    top: float,
) -> None:
    """Draw the limit across the bars, and its label above them; nothing if it is not on the scale.

    In a narrow picture each bar has its text above it. The line is then drawn across each bar
    alone, because it would run through these texts.

    Args:
        plane: The plane of the bars, in units of the scale and rows.
        sheet: The sheet.
        scale: The scale.
        bars: (lowest, highest) position of each bar on the plane.
        top: Position of the upper end of the line on the plane.
    """
    if scale.limit is None:
        return
    theme, limit = sheet.theme, scale.limit
    ends = [(min(low for low, _ in bars), top)]
    if sheet.is_narrow:
        ends = [(low - 0.03, high + 0.03) for low, high in bars]
    for low, high in ends:
        plane.plot([limit, limit], [low, high], color=theme.ink, lw=2.0, gid="limit")
    text = f"limit {format_gib(round(limit * scale.unit_bytes))}"
    x, y = plane.inches(limit, top)
    half = width_of(text, SMALL, bold=True) / 2
    x = min(max(x, sheet.edge + half), sheet.width - sheet.edge - half)
    whole = Plane(sheet.figure)
    write(whole, x, y + 0.07, text, theme, size=SMALL, weight="bold", across="center", gid="limit")
