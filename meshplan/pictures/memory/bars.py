"""Peak memory of every group of equal ranks, by category, compared with the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshplan.memory.answer.estimate import MemoryEstimate, RankGroup, left_in_words, size_in_words
from meshplan.memory.answer.rank_classes import equal_ranks
from meshplan.memory.answer.states import state_bytes
from meshplan.pictures.base.palette import DRIVER, ROUNDING, TERMS, UNUSED
from meshplan.pictures.base.words import ranks_in_words
from meshplan.plan.plan import Plan
from meshplan.units import format_bytes

_MOST_BARS: Final = 10
INKS: Final = {**{str(term): ink for term, ink in TERMS.items()}, "rounding": ROUNDING,
               "unused in segments": UNUSED, "driver": DRIVER}  # fmt: skip
"""Fill of each category of a bar, in the order in which a bar is stacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The bar of a group of equal ranks.

    Args:
        name: The ranks and their stages, as text.
        parts: Pairs (category, bytes). They add up to the number that `nvidia-smi` would show.
        high_bytes: Upper end of the estimate's band; None if activations are not known.
        where: Phase and module of the peak, as text.
        fits: True if the bar is within the limit; None if that is not known.
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    high_bytes: int | None
    where: str
    fits: bool | None

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBars:
    """The facts that `draw_memory` draws.

    Args:
        bars: The largest groups, in order of rank.
        num_more: Number of groups with lower peaks that are not shown.
        limit_bytes: Bytes that one GPU may use; None if no limit is known.
        unknown: Reason why only the states are known; "" if the whole step is known.
        missing: Name of the bytes that are not known.
        bound: Reason why the bars are only upper bounds; "" if they are estimates.
    """

    bars: tuple[Bar, ...]
    num_more: int
    limit_bytes: int | None
    unknown: str = ""
    missing: str = "activations"
    bound: str = ""

    @property
    def worst(self) -> Bar:
        """The bar with the highest upper end."""
        return max(self.bars, key=lambda bar: bar.high_bytes or bar.total_bytes)

    def verdict(self, bar: Bar) -> str:
        """Return the difference between one bar and the limit as text."""
        if self.limit_bytes is None:
            return "no limit stated"
        left = self.limit_bytes - (bar.high_bytes or bar.total_bytes)
        if bar.high_bytes is None and left >= 0:
            return f"{format_bytes(left)} left for the unknown part"
        return left_in_words(self.limit_bytes - left, self.limit_bytes)

    def size(self, bar: Bar) -> str:
        """Return the bytes of one bar, its upper end and the limit as text."""
        expected = None if self.bound else bar.total_bytes
        return size_in_words(bar.high_bytes or bar.total_bytes, self.limit_bytes, expected)

    @property
    def notes(self) -> list[str]:
        """The sentences below the picture."""
        out = ["The whisker ends at the upper end, which decides whether the plan fits."]
        if self.unknown:
            out = [f"Activations and buffers of the step are unknown: {self.unknown}."]
        if self.bound:
            out.append(f"An upper bound: {self.bound}.")
        if self.num_more:
            out.append(f"{self.num_more} more groups of ranks need no more than these.")
        return out

    @property
    def title(self) -> str:
        """The picture's title: the answer in one sentence."""
        worst = self.worst
        needs = format_bytes(worst.high_bytes or worst.total_bytes)
        whose = worst.name.split(", stage")[0]
        if self.unknown:
            states = f"States alone take {needs} on {whose}; {self.missing} are unknown"
            if self.limit_bytes is not None and worst.total_bytes > self.limit_bytes:
                return f"Does not fit: states alone are {self.verdict(worst)} on {whose}"
            return states
        if self.limit_bytes is None:
            size = self.size(worst)
            return f"{size[0].upper()}{size[1:]} on {whose}; the plan states no GPU memory"
        if worst.fits:
            if len(self.bars) + self.num_more == 1:
                return f"It fits: {self.size(worst)} on every rank"
            need = "needs" if whose.startswith("rank ") else "need"
            return f"It fits: {self.size(worst)} on {whose}, which {need} most"
        are = "is" if whose.startswith("rank ") else "are"
        return f"It does not fit: {self.size(worst)}; {whose} {are} {self.verdict(worst)}"

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        worst = self.worst
        largest = max(worst.parts, key=lambda part: part[1], default=("nothing", 0))
        most = f"most of it {largest[0]}, {format_bytes(largest[1])}"
        where = f" {worst.where}" if worst.where else ""
        return (
            f"One bar for each group of equal ranks, stacked by category: "
            f"{worst.name} hold {format_bytes(worst.total_bytes)}{where}, {most}; "
            f"{self.verdict(worst)}."
        )


def memory_bars(estimate: MemoryEstimate) -> MemoryBars:
    """Return the bars for an estimate of the whole step."""
    groups = list(estimate.groups)
    keep = sorted(groups, key=lambda group: -group.band[1])[:_MOST_BARS]
    return MemoryBars(
        bars=tuple(_bar(group) for group in groups if group in keep),
        num_more=len(groups) - len(keep),
        limit_bytes=estimate.limit_bytes,
        bound=estimate.bound,
    )


def parts_of(group: RankGroup) -> tuple[tuple[str, int], ...]:
    """Return pairs (category, bytes) that add up to a group's total, with the driver's bytes."""
    peak = group.peak
    more = {
        "rounding": peak.allocated_bytes - peak.requested_bytes,
        "unused in segments": peak.reserved_bytes - peak.allocated_bytes,
        "driver": peak.driver_bytes,
    }
    terms = {str(term): size for term, size in group.terms.items()} | more
    return tuple((name, terms[name]) for name in INKS if terms.get(name))


def _bar(group: RankGroup) -> Bar:
    stages = f", stage{'s' if len(group.stages) > 1 else ''} {', '.join(map(str, group.stages))}"
    at = group.at
    where = f"in {at.phase} of {at.module}" if at.module else f"in {at.phase}, for {at.term}"
    return Bar(
        name=ranks_in_words(group.ranks) + (stages if group.stages else ""),
        parts=parts_of(group),
        high_bytes=group.band[1],
        where=where,
        fits=group.fits,
    )


def missing_of(plan: Plan) -> str:
    """Return the name of the memory that a step needs in addition to its states."""
    cuts = plan.assignment.strategy.cuts
    is_gathered = bool(cuts) and "parameter" not in cuts
    return "activations and gathered parameters" if is_gathered else "activations"


def states_alone(plan: Plan, limit_bytes: int | None, why: str) -> MemoryBars:
    """Return bars of the training states, for plans whose step cannot be estimated.

    Args:
        plan: The plan.
        limit_bytes: Bytes that one GPU may use; None if no limit is known.
        why: Reason why the step cannot be estimated.
    """
    bars = []
    for ranks in equal_ranks(plan.assignment):
        states = state_bytes(plan.assignment, plan.spec.optimizer, ranks[0])
        parts = {
            "parameters": states.parameters_bytes,
            "gradients": states.gradients_bytes,
            "optimizer": states.optimizer_bytes,
            "buffers": states.buffers_bytes,
        }
        bars.append(
            Bar(
                name=ranks_in_words(ranks),
                parts=tuple((name, size) for name, size in parts.items() if size),
                high_bytes=None,
                where="before the optimizer's step",
                fits=None,
            )
        )
    keep = sorted(bars, key=lambda bar: -bar.total_bytes)[:_MOST_BARS]
    return MemoryBars(
        bars=tuple(bar for bar in bars if bar in keep),
        num_more=len(bars) - len(keep),
        limit_bytes=limit_bytes,
        unknown=why,
        missing=missing_of(plan),
    )
