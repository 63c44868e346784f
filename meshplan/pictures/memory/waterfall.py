"""The steps that lead from the textbook's formula for memory to the estimate of a rank's peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshplan.memory.answer.estimate import MemoryEstimate, ReconcileStep
from meshplan.memory.answer.rank_classes import equal_ranks
from meshplan.memory.answer.reconcile import textbook_row
from meshplan.memory.answer.states import state_bytes
from meshplan.pictures.base.page import SMALL, Sheet, box, fitted, width_of, wrapped, write
from meshplan.pictures.base.palette import GREY, Ink, Theme
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import ranks_in_words
from meshplan.pictures.memory.bars import INKS, missing_of
from meshplan.pictures.mesh.counted import is_counted
from meshplan.plan.plan import Plan
from meshplan.units import GIB, format_bytes, format_gib

_WHY: Final = 3.3
_COUNTER: Final = 8
"""Largest difference in bytes between a counted plan's states and the textbook that is ignored.

It is the step counter of Adam, which the textbook leaves out.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """The facts that `draw_waterfall` draws.

    Args:
        ranks: The ranks with the highest peak.
        steps: Steps as in `MemoryEstimate.reconciliation`; the first has the textbook's bytes.
        limit_bytes: Bytes that one GPU may use; None if no limit is known.
        unknown: Reason why only the states are known; "" if the whole step is known.
        missing: Name of the bytes that are not known.
    """

    ranks: tuple[int, ...]
    steps: tuple[ReconcileStep, ...]
    limit_bytes: int | None
    unknown: str = ""
    missing: str = "activations"

    @property
    def total_bytes(self) -> int:
        return self.steps[-1].total_bytes

    @property
    def title(self) -> str:
        """The picture's title: the answer in one sentence."""
        first, *rest = self.steps
        book, exact = format_bytes(first.total_bytes), format_bytes(self.total_bytes)
        if self.unknown:
            changed = f", {exact} as the plan shards them" if rest else ""
            return f"The textbook's {book} of states{changed}; {self.missing} are unknown"
        if not rest:
            return f"The textbook's {book} are exact"
        most = max(rest, key=lambda step: abs(step.delta_bytes))
        return (
            f"From the textbook's {book} to {exact}: the largest change is {most.name}, "
            f"{signed(most.delta_bytes)}"
        )

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        first = self.steps[0]
        if self.unknown:
            return (
                f"A bar for each step from {first.name} ({format_bytes(first.total_bytes)}) to the "
                f"states of {ranks_in_words(self.ranks)} ({format_bytes(self.total_bytes)}); "
                f"memory for the rest of a step is unknown: {self.unknown}."
            )
        ways = ", ".join(f"{step.name} {signed(step.delta_bytes)}" for step in self.steps[1:])
        return (
            f"A bar for each step from {first.name} ({format_bytes(first.total_bytes)}) to what "
            f"{ranks_in_words(self.ranks)} really need ({format_bytes(self.total_bytes)}): {ways}."
        )


def signed(num_bytes: int) -> str:
    """Return a difference in bytes as text, with its sign.

    >>> signed(-2048), signed(3 * 2**30)
    ('−2.0 KiB', '+3.0 GiB')
    """
    return f"{'+' if num_bytes >= 0 else '−'}{format_bytes(abs(num_bytes))}"


def waterfall(estimate: MemoryEstimate) -> Waterfall:
    """Return the steps for an estimate of the whole step."""
    return Waterfall(
        ranks=estimate.worst.ranks,
        steps=estimate.reconciliation,
        limit_bytes=estimate.limit_bytes,
    )


def waterfall_of_states(plan: Plan, limit_bytes: int | None, why: str) -> Waterfall:
    """Return the steps for the training states alone, for plans whose step cannot be estimated.

    Args:
        plan: The plan.
        limit_bytes: Bytes that one GPU may use; None if no limit is known.
        why: Reason why the step cannot be estimated.
    """
    a, optimizer = plan.assignment, plan.spec.optimizer
    groups = equal_ranks(a)
    ranks = max(groups, key=lambda group: state_bytes(a, optimizer, group[0]).total_bytes)
    held = state_bytes(a, optimizer, ranks[0])
    row = textbook_row(a, is_mixed=plan.spec.precision.is_mixed)
    nodes = plan.mesh.size("dp_replicate") if row.strategy == "hybrid_shard" else 1
    book = row.terms(plan.graph.num_params, plan.mesh.world_size, nodes)
    real = {
        "weights": ("parameters", held.parameters_bytes),
        "gradients": ("gradients", held.gradients_bytes),
        "adam": ("optimizer", held.optimizer_bytes),
    }
    start = sum(book.values())
    steps = [ReconcileStep(f"textbook: {row.strategy}, {row.formula}", start, start, row.source)]
    for name, size in book.items():
        what, exact = real.get(name, (f"textbook's {name.replace('_', ' ')}", 0))
        reason = "by the plan's layouts, dtypes and optimizer" if name in real else (
            "needed during a step, not a state"
        )  # fmt: skip
        # Adam has a step counter per tensor; the number of tensors of a counted plan is unknown.
        if abs(exact - size) > (_COUNTER if is_counted(plan) else 0):
            total = steps[-1].total_bytes + exact - size
            steps.append(ReconcileStep(what, exact - size, total, reason))
    if held.buffers_bytes:
        total = steps[-1].total_bytes + held.buffers_bytes
        reason = "tensors of the model that are not parameters"
        steps.append(ReconcileStep("buffers", held.buffers_bytes, total, reason))
    return Waterfall(
        ranks=ranks, steps=tuple(steps), limit_bytes=limit_bytes, unknown=why,
        missing=missing_of(plan),
    )  # fmt: skip


def draw_waterfall(facts: Waterfall, theme: Theme) -> Picture:
    """Draw a row for each step, and the total in the last row."""
    steps = facts.steps
    note = (
        f"For {ranks_in_words(facts.ranks)}, which need most. Categories are those at the peak of "
        "a step; the text on the right explains each difference."
    )
    if facts.unknown:
        note = f"States only, of {ranks_in_words(facts.ranks)}: {facts.unknown}."
    sheet = Sheet(
        theme,
        facts.title,
        0.36 * (len(steps) + 1) + 1.0,
        notes=[note],
    )
    last_name = "states alone" if facts.unknown else "peak, all included"
    names = [step.name for step in steps] + [last_name]
    left = min(max(width_of(name, SMALL) for name in names), 3.2) + 0.4
    axes = sheet.axes(left=left, right=_WHY + 0.1, top=0.32, bottom=0.6)
    room = sheet.width - left - _WHY - 0.1
    tops = [max(s.total_bytes, s.total_bytes - s.delta_bytes) for s in steps[1:]]
    most = max([facts.total_bytes, facts.limit_bytes or 0, steps[0].total_bytes, *tops]) / GIB
    scale = (most or 1.0) / (room - 0.95)
    axes.set_xlim(0, room * scale)
    axes.set_ylim(len(names) - 0.4, -0.6)
    before = 0
    for place, step in enumerate(steps):
        begin = 0 if place == 0 else before
        low, high = sorted((begin, step.total_bytes))
        ink = INKS.get(step.name, Ink(GREY))
        name = f"step {place}: {step.delta_bytes} B"
        box(axes, low / GIB, place - 0.32, (high - low) / GIB, 0.64, ink, edge=theme.quiet,
            line=0.4, gid=name)  # fmt: skip
        text = format_bytes(step.total_bytes) if place == 0 else signed(step.delta_bytes)
        write(axes, high / GIB + 0.07 * scale, place, text, theme, size=SMALL, up="center")
        axes.plot([step.total_bytes / GIB] * 2, [place + 0.32, place + 0.68], lw=0.8,
                  color=theme.quiet)  # fmt: skip
        why = "\n".join(wrapped(step.why, _WHY - 0.1, 8.0, most=2))
        write(axes, (room + 0.1) * scale, place, why, theme, size=8.0, colour=theme.quiet,
              up="center", clip_on=False)  # fmt: skip
        before = step.total_bytes
    last = len(steps)
    box(axes, 0, last - 0.32, facts.total_bytes / GIB, 0.64, Ink(theme.ink), gid="total")
    write(axes, facts.total_bytes / GIB + 0.07 * scale, last, format_gib(facts.total_bytes), theme,
          size=SMALL, weight="bold", up="center")  # fmt: skip
    axes.set_yticks(range(len(names)))
    axes.set_yticklabels([fitted(n, left - 0.3, SMALL) for n in names], parse_math=False)
    axes.set_xlabel("GiB of one GPU")
    axes.xaxis.grid(True, color=theme.line, lw=0.6)
    if facts.limit_bytes is not None:
        axes.axvline(facts.limit_bytes / GIB, color=theme.ink, lw=2.0, gid="limit")
        text = f"limit {format_gib(facts.limit_bytes)}"
        half = width_of(text, SMALL, bold=True) / 2 * scale
        at = min(max(facts.limit_bytes / GIB, half), room * scale - half)
        write(axes, at, -0.7, text, theme, size=SMALL, weight="bold", across="center")
    return Picture("waterfall", facts.title, facts.alt, sheet.figure)
