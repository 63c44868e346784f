"""Step times from the physical limit to the plan: what network, memory and simplicity cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshplan.errors import PlanError, Problem
from meshplan.pictures.base.page import (
    SMALL,
    TEXT,
    Sheet,
    box,
    fitted,
    ticks_up_to,
    width_of,
    write,
)
from meshplan.pictures.base.palette import BLUE, GREEN, GREY, SKY, Ink, Theme
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import counted
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
        PlanError: No plan was found that fits.
    """
    found = decision.ladder
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


def draw_ladder(facts: LadderFacts, theme: Theme) -> Picture:
    """Draw a bar for each rung."""
    inks = [Ink(GREY), Ink(SKY, "//"), Ink(SKY), Ink(BLUE), Ink(GREEN)]
    notes = [
        "Each bar is the fastest step in the search space on such a machine, in seconds of the "
        "cost model."
    ]
    sheet = Sheet(theme, facts.title, 0.62 * len(facts.rungs) + 0.75, notes=notes)
    left = max(width_of(rung.name, TEXT) for rung in facts.rungs) + 0.45
    axes = sheet.axes(left=left, right=0.35, top=0.05, bottom=0.6)
    room = sheet.width - left - 0.35
    words = [f"{format_seconds(rung.seconds)}: {rung.why}" for rung in facts.rungs]
    words = [fitted(text, room * 0.6, TEXT) for text in words]
    most = max(rung.seconds for rung in facts.rungs)
    # Make the longest bar and its text as wide as the axes; shorter bars leave space for theirs.
    scale = most / (room - max(width_of(text, TEXT) for text in words) - 0.2)
    axes.set_xlim(0, room * scale)
    axes.set_ylim(len(facts.rungs) - 0.4, -0.6)
    for place, (rung, ink) in enumerate(zip(facts.rungs, inks, strict=True)):
        gid = f"rung {rung.name}: {rung.seconds!r} s"
        box(axes, 0, place - 0.28, rung.seconds, 0.56, ink, edge=theme.quiet, line=0.5, gid=gid)
        write(axes, rung.seconds + 0.1 * scale, place, words[place], theme, up="center")
    limit = facts.rungs[0].seconds
    axes.axvline(limit, color=theme.ink, lw=1.4, ls="--", gid="limit")
    axes.set_yticks(range(len(facts.rungs)))
    axes.set_yticklabels([rung.name for rung in facts.rungs], fontsize=TEXT)
    ticks_up_to(axes, most)
    axes.set_xlabel("seconds of a step; the dashed line is the physical limit", fontsize=SMALL)
    axes.xaxis.grid(True, color=theme.line, lw=0.6)
    return Picture("ladder", facts.title, facts.alt, sheet.figure)
