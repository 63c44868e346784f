"""All candidates of a search by memory and step time: lower bounds, measured and chosen plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from meshplan.pictures.base.page import SMALL, Sheet, fitted, width_of, write
from meshplan.pictures.base.palette import BLUE, YELLOW, Ink, Theme
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import counted
from meshplan.units import GIB, format_gib, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from meshplan.planner.problem.decision import Decision, Evaluated

_LOG: Final = 12.0
"""An axis is logarithmic if its largest value divided by its smallest one exceeds this."""
_BINS: Final = 90


@dataclass(frozen=True, slots=True)
class Dot:
    """The dot of a plan, or of a configuration's lower bounds.

    Args:
        num_bytes: Peak bytes of the rank that needs most.
        seconds: Seconds of a step.
        words: Description of the plan; "" for a lower bound.
    """

    num_bytes: int
    seconds: float
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """The facts that `draw_pareto` draws.

    Args:
        bounds: A dot per configuration: no plan of it takes less memory, and none takes less time.
        measured: Plans whose memory was simulated event by event.
        chosen: The chosen plan; None if nothing fits.
        limit_bytes: Bytes that one device may use.
        num_configs: Number of configurations in the space.
        is_whole: If True, the search was complete: neither interrupted nor out of time.
    """

    bounds: tuple[Dot, ...]
    measured: tuple[Dot, ...]
    chosen: Dot | None
    limit_bytes: int
    num_configs: int
    is_whole: bool

    @property
    def frontier(self) -> tuple[Dot, ...]:
        """Measured plans that no other measured plan beats in both memory and time."""
        out: list[Dot] = []
        for dot in sorted(self.measured, key=lambda d: (d.num_bytes, d.seconds)):
            if not out or dot.seconds < out[-1].seconds:
                out.append(dot)
        return tuple(out)

    @property
    def num_hopeless(self) -> int:
        """Number of configurations whose lower bound already exceeds the limit."""
        return sum(dot.num_bytes > self.limit_bytes for dot in self.bounds)

    @property
    def title(self) -> str:
        """The picture's title: the answer in one sentence."""
        many = counted(self.num_configs, "configuration")
        limit = format_gib(self.limit_bytes)
        if self.chosen is None:
            found = "fits" if self.is_whole else "was found in time to fit"
            return f"None of {many} {found} into {limit}"
        return (
            f"Chosen of {many}: {format_seconds(self.chosen.seconds)} a step and "
            f"{format_gib(self.chosen.num_bytes)} of {limit}"
        )

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        won = f" The star is the plan: {self.chosen.words}." if self.chosen else ""
        return (
            "Seconds of a step against memory of the rank that needs most: "
            f"{counted(len(self.measured), 'candidate')} measured, "
            f"{counted(len(self.bounds), 'configuration')} with lower bounds, "
            f"{self.num_hopeless:,} of them beyond the limit of "
            f"{format_gib(self.limit_bytes)}.{won}"
        )


def pareto(decision: Decision) -> Pareto:
    """Return the facts of the picture for a search."""
    chosen = decision.chosen
    evaluated_plans = [*decision.measured, *([chosen] if chosen else []), *decision.alternatives]
    measured = dict.fromkeys(_dot(evaluated) for evaluated in evaluated_plans)
    return Pareto(
        bounds=tuple(Dot(bound.num_bytes, bound.seconds) for bound in decision.bounds),
        measured=tuple(measured),
        chosen=_dot(chosen) if chosen else None,
        limit_bytes=decision.limit_bytes,
        num_configs=decision.num_configs,
        is_whole=decision.is_whole,
    )


def _dot(evaluated: Evaluated) -> Dot:
    return Dot(evaluated.memory.worst.band[1], evaluated.seconds, words_of(evaluated))


def words_of(evaluated: Evaluated) -> str:
    """Return a line with the mesh, strategy, batch and recomputation of a plan."""
    plan, again = evaluated.plan, evaluated.plan.assignment.recompute
    modes = [each.policy.mode for each in again.values()]
    recomputed = [f"recomputed: {modes.count(m)} blocks {m}" for m in dict.fromkeys(modes)]
    batch = f"{counted(plan.micro or 0, 'sample')} a rank × {plan.accumulate}"
    return ", ".join([str(plan.mesh), plan.assignment.strategy.name, batch, *recomputed])


def draw_pareto(facts: Pareto, theme: Theme) -> Picture:
    """Draw the dots, memory to the right and step time upward; memory over the limit is shaded."""
    notes = [
        "A ring shows a configuration's lower bounds: its least memory at any step time, its least "
        "step time at any memory. Dots have simulated memory, and times of the cost model."
    ]
    legend = [
        ("the plan", Ink(YELLOW)),
        ("measured, fits", Ink(BLUE)),
        ("measured, does not fit", Ink(theme.bad)),
        ("ring or cross: lower bound of a configuration", Ink(theme.paper)),
        ("beyond the limit", Ink(theme.forbidden)),
    ]
    sheet = Sheet(theme, facts.title, 4.9, legend=legend, notes=notes)
    left, right = 0.95, 0.4
    axes = sheet.axes(left=left, right=right, top=0.3, bottom=0.6)
    every = [*facts.bounds, *facts.measured] or [Dot(facts.limit_bytes, 1.0)]
    limit = facts.limit_bytes / GIB
    axes.set_xlim(_scale(axes.xaxis, [limit, *(d.num_bytes / GIB for d in every)]))
    axes.set_ylim(_scale(axes.yaxis, [d.seconds for d in every]))
    axes.axvspan(limit, axes.get_xlim()[1], color=theme.forbidden, gid="forbidden",
                 zorder=0)  # fmt: skip
    axes.axvline(limit, color=theme.ink, lw=1.8, gid="limit")
    thinned = list(_thinned(facts.bounds))
    inside = [d for d in thinned if d.num_bytes <= facts.limit_bytes]
    beyond = [d for d in thinned if d.num_bytes > facts.limit_bytes]
    for dots, marker, name in ((inside, "o", "bounds"), (beyond, "x", "bounds beyond")):
        axes.plot([d.num_bytes / GIB for d in dots], [d.seconds for d in dots], ls="", ms=4.5,
                  marker=marker, mfc="none", mec=theme.quiet, mew=0.9, gid=name)  # fmt: skip
    axes.plot([d.num_bytes / GIB for d in facts.frontier], [d.seconds for d in facts.frontier],
              color=BLUE, lw=1.2, gid="frontier")  # fmt: skip
    fits = [d for d in facts.measured if d.num_bytes <= facts.limit_bytes]
    over = [d for d in facts.measured if d.num_bytes > facts.limit_bytes]
    for dots, marker, colour, name in (
        (fits, "o", BLUE, "measured"),
        (over, "X", theme.bad, "over"),
    ):
        axes.plot([d.num_bytes / GIB for d in dots], [d.seconds for d in dots], ls="", ms=7,
                  marker=marker, color=colour, mec=theme.paper, gid=name, zorder=4)  # fmt: skip
    if facts.chosen is not None:
        _star(sheet, axes, facts, facts.chosen, sheet.width - left - right, theme)
    axes.set_xlabel("GiB of the rank that needs most")
    axes.set_ylabel("seconds of a step")
    axes.grid(True, color=theme.line, lw=0.5)
    _limit(axes, facts, sheet.width - left - right, theme)
    return Picture("pareto", facts.title, facts.alt, sheet.figure)


def _scale(axis: Any, values: Sequence[float]) -> tuple[float, float]:
    """Return (lowest, highest) value of an axis; make it logarithmic if these are far apart."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values), max(values)
    if low <= 0 or high / low <= _LOG:
        return max(0.0, low - 0.12 * (high - low) - 0.02 * high), high * 1.12 or 1.0
    low, high = low / 1.25, high * 1.35
    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    firsts = (1, 2, 5) if len(decades) < 5 else (1,)
    ticks = [first * 10.0**decade for decade in decades for first in firsts]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    return low, high


def _limit(axes: Axes, facts: Pareto, room: float, theme: Theme) -> None:
    """Write the memory limit above the line that marks it."""
    text = f"limit {format_gib(facts.limit_bytes)}"
    half = width_of(text, SMALL, bold=True) / 2 / room
    at = _across(axes, facts.limit_bytes / GIB)
    at = min(max(at, half), 1 - half)
    write(axes, at, 1.02, text, theme, size=SMALL, weight="bold", across="center",
          transform=axes.transAxes)  # fmt: skip


def _across(axes: Axes, value: float) -> float:
    """Return the position of a value on the horizontal axis, from 0 (left) to 1 (right)."""
    point = axes.transData.transform((value, axes.get_ylim()[0]))
    return float(axes.transAxes.inverted().transform(point)[0])


def _star(sheet: Sheet, axes: Axes, facts: Pareto, chosen: Dot, room: float, theme: Theme) -> None:
    """Draw a star for the chosen plan, and its description in a box that covers few dots."""
    x, y = chosen.num_bytes / GIB, chosen.seconds
    axes.plot([x], [y], marker="*", ms=19, color=YELLOW, mec="#000000", mew=1.0, zorder=6,
              ls="", gid="chosen")  # fmt: skip
    lines = [
        f"chosen: {format_seconds(chosen.seconds)} a step, {format_gib(chosen.num_bytes)}",
        *chosen.words.split(", "),
    ]
    text = "\n".join(fitted(line, room * 0.42, SMALL) for line in lines)
    share, up = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
    wide = width_of(text, SMALL) / room + 0.03
    tall = len(lines) * SMALL * 1.45 / 72 / (sheet.height - 0.9) + 0.03
    every = (*_thinned(facts.bounds), *facts.measured)
    at_data = axes.transData.transform([(d.num_bytes / GIB, d.seconds) for d in every])
    dots = axes.transAxes.inverted().transform(at_data).tolist()
    limit = _across(axes, facts.limit_bytes / GIB)

    def cost(place: tuple[float, float]) -> float:
        x0, y1 = place
        hidden = sum(x0 <= a <= x0 + wide and y1 - tall <= b <= y1 for a, b in dots)
        hidden += 2 * (x0 - 0.02 <= limit <= x0 + wide + 0.02)
        is_on = x0 - 0.04 <= share <= x0 + wide + 0.04 and y1 - tall - 0.06 <= up <= y1 + 0.06
        away = abs(x0 + wide / 2 - share) + abs(y1 - tall / 2 - up)
        return float(hidden + 100 * is_on + away)

    across = [n / 20 * (0.97 - wide) + 0.015 for n in range(21)]
    upward = [tall + 0.02 + n / 20 * (0.96 - tall) for n in range(21)]
    at, top = min(((x, y) for x in across for y in upward), key=cost)
    at, top = at + 0.015, top - 0.015
    axes.annotate(
        "", (share, up), (at + wide / 2, top - tall / 2), xycoords="axes fraction",
        textcoords="axes fraction", arrowprops={"arrowstyle": "-", "color": theme.ink, "lw": 1.0},
        zorder=5,
    )  # fmt: skip
    write(
        axes, at, top, text, theme, size=SMALL, up="top", transform=axes.transAxes, zorder=7,
        bbox={"facecolor": theme.panel, "edgecolor": theme.line, "pad": 4.0}, linespacing=1.4,
    )  # fmt: skip


def _thinned(dots: Sequence[Dot]) -> Iterator[Dot]:
    """Yield dots, but only the first of those that would be drawn at nearly the same position."""
    seen = set()
    for dot in dots:
        key = (round(_BINS * math.log(max(dot.num_bytes, 1))),
               round(_BINS * math.log(max(dot.seconds, 1e-12))))  # fmt: skip
        if key not in seen:
            seen.add(key)
            yield dot
