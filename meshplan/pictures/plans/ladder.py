"""Step times from the physical limit to the plan: what network, memory and simplicity cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshplan.errors import PlanError, Problem
from meshplan.pictures.base.page import (
    SMALL,
    TEXT,
    WIDTH,
    Sheet,
    box,
    fitted,
    is_narrow,
    width_of,
    write,
)
from meshplan.pictures.base.palette import BLUE, GREEN, GREY, SKY, Ink, Theme
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import counted, time_scale
from meshplan.units import format_seconds

if TYPE_CHECKING:
    from meshplan.planner.problem.decision import Decision


@dataclass(frozen=True, slots=True)
class Rung:
    """A bar of the picture: the fastest step under one assumption, or the step of the plan.

    Args:
        name: The assumption, such as "no communication".
        seconds: Seconds of a step.
        why: Comment next to the bar.
    """

    name: str
    seconds: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderFacts:
    """The facts that `draw_ladder` draws.

    Args:
        rungs: The bars, from the physical limit to the plan.
        num_configs: Number of configurations in the space.
    """

    rungs: tuple[Rung, ...]
    num_configs: int

    @property
    def title(self) -> str:
        """The picture's title: the answer in one sentence."""
        limit, plan = self.rungs[0].seconds, self.rungs[-1].seconds
        return (
            f"A step of {format_seconds(plan)} is {plan / limit:.1f} times the physical limit of "
            f"{format_seconds(limit)}"
        )

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        ways = ", ".join(f"{rung.name} {format_seconds(rung.seconds)}" for rung in self.rungs)
        return f"A bar for the fastest step of each machine, from the best to the real one: {ways}."


def ladder(decision: Decision) -> LadderFacts:
    """Return the facts of the picture for a search.

    Raises:
        PlanError: No plan was found that fits, or only the stated plan was priced.
    """
    found = decision.ladder
    if found is None and decision.chosen is not None:
        what = (
            "the ladder shows a search for the fastest plan, and this answer is of another kind: "
        )
        what += decision.why_priced or "the plan has another objective"
        fix = "see meshplan draw --what gantt for where the seconds of a step go"
        raise PlanError(Problem(what, None, fix))
    if found is None or decision.chosen is None:
        what = "there is no step to compare with its limits: no plan was found that fits"
        raise PlanError(Problem(what, None, "allow more memory, more devices, or more time"))
    evaluated = decision.chosen
    network = found.plan_s / found.no_network_s - 1
    memory = found.plan_s / found.no_memory_limit_s - 1
    slower = evaluated.seconds / found.plan_s - 1
    rungs = [
        Rung(
            "all flops at peak",
            found.roofline_s,
            f"MFU of the plan {decision.mfu(evaluated):.1%}",
        ),
        Rung("no communication", found.no_network_s, f"the network costs {network:.1%}"),
        Rung("unlimited memory", found.no_memory_limit_s, f"the memory limit costs {memory:.1%}"),
        Rung(
            "fastest that fits",
            found.plan_s,
            f"of {counted(decision.num_configs, 'configuration')}",
        ),
    ]
    rungs.append(
        Rung(
            "this plan",
            evaluated.seconds,
            f"{slower:.1%} slower, and simpler" if slower > 5e-4 else "it is the fastest",
        )
    )
    return LadderFacts(rungs=tuple(rungs), num_configs=decision.num_configs)


def draw_ladder(facts: LadderFacts, theme: Theme, width: float = WIDTH) -> Picture:
    """Draw a bar for each rung."""
    inks = [Ink(GREY), Ink(SKY, "//"), Ink(SKY), Ink(BLUE), Ink(GREEN)]
    notes = [
        "Each bar is the fastest step in the search space on such a machine, in seconds of the "
        "cost model. The dashed line is the physical limit."
    ]
    narrow, rows = is_narrow(width), facts.rungs
    tall, low, high = (0.56, 0.05, 0.6) if narrow else (0.62, 0.22, 0.78)
    sheet = Sheet(theme, facts.title, tall * len(rows) + 0.75, notes=notes, width=width)
    words = [f"{format_seconds(rung.seconds)}: {rung.why}" for rung in rows]
    names = max(width_of(rung.name, TEXT) for rung in rows) + 0.15
    left = sheet.edge + (0.06 if narrow else names)
    most = max(rung.seconds for rung in rows)
    room = width - left - sheet.edge - 0.1
    if not narrow:
        # The longest bar and its text are as wide as the sheet; others leave space for theirs.
        words = [fitted(text, room * 0.6, TEXT) for text in words]
        room -= max(width_of(text, TEXT) for text in words) + 0.2
    unit, shown = time_scale(most)
    axes = sheet.plot(left=left, bottom=0.6, units=(most / room, 1 / tall), most=most,
                      label=f"{unit} of a step", shown=shown)  # fmt: skip
    texts = sheet.plane()
    for place, (rung, ink) in enumerate(zip(rows, inks, strict=True)):
        y = len(rows) - place - 1
        gid = f"rung {rung.name}: {rung.seconds!r} s"
        box(axes, 0, y + low, rung.seconds, high - low, ink, edge=theme.quiet, line=0.5, gid=gid)
        at = 0.6 + (y + (0.78 if narrow else 0.5)) * tall
        if narrow:
            said = fitted(words[place], width - 2 * left - width_of(rung.name, SMALL) - 0.15, SMALL)
            write(texts, left, at, rung.name, theme, size=SMALL, up="center")
            write(texts, width - left, at, said, theme, size=SMALL, up="center", across="right")
        else:
            end = left + rung.seconds / most * room + 0.1
            write(texts, left - 0.1, at, rung.name, theme, across="right", up="center")
            # Grid lines do not run through the text.
            write(texts, end, at, words[place], theme, up="center",
                  bbox={"facecolor": theme.paper, "edgecolor": "none", "pad": 1.5})  # fmt: skip
        limit = rows[0].seconds
        axes.plot([limit] * 2, [y + low - (0 if narrow else low), y + high if narrow else y + 1],
                  color=theme.ink, lw=1.4, ls="--", gid="limit")  # fmt: skip
    return Picture("ladder", facts.title, facts.alt, sheet.figure)
