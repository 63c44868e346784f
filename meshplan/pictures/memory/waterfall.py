"""The steps that lead from the textbook's formula for memory to the estimate of a rank's peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshplan.memory.answer.estimate import MemoryEstimate, ReconcileStep
from meshplan.memory.answer.rank_classes import equal_ranks
from meshplan.memory.answer.reconcile import textbook_row
from meshplan.memory.answer.states import state_bytes
from meshplan.pictures.base.page import (
    SMALL,
    WIDTH,
    Sheet,
    box,
    fitted,
    is_narrow,
    width_of,
    wrapped,
    write,
)
from meshplan.pictures.base.palette import GREY, Ink, Theme
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import ranks_in_words
from meshplan.pictures.memory.bars import INKS, missing_of
from meshplan.pictures.memory.scale import draw_limit, scale_of
from meshplan.pictures.mesh.counted import is_counted
from meshplan.plan.plan import Plan
from meshplan.units import format_bytes, format_gib

_WHY: Final = 2.8
_LEAST: Final = 0.003
"""Share of the largest total below which a step is too small to see."""
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
    states = state_bytes(a, optimizer, ranks[0])
    row = textbook_row(a, is_mixed=plan.spec.precision.is_mixed)
    nodes = plan.mesh.size("dp_replicate") if row.strategy == "hybrid_shard" else 1
    book = row.terms(plan.graph.num_params, plan.mesh.world_size, nodes)
    real = {
        "weights": ("parameters", states.parameters_bytes),
        "gradients": ("gradients", states.gradients_bytes),
        "adam": ("optimizer", states.optimizer_bytes),
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
    if states.buffers_bytes:
        total = steps[-1].total_bytes + states.buffers_bytes
        reason = "tensors of the model that are not parameters"
        steps.append(ReconcileStep("buffers", states.buffers_bytes, total, reason))
    return Waterfall(
        ranks=ranks, steps=tuple(steps), limit_bytes=limit_bytes, unknown=why,
        missing=missing_of(plan),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the picture: its name, the text of its change, its bar from `begin` to `end`."""

    name: str
    change: str
    begin_bytes: int
    end_bytes: int
    ink: Ink
    why: str
    gid: str


def _rows(facts: Waterfall, theme: Theme) -> list[_Row]:
    """Return the rows: steps too small to see share one, and the total is the last one."""
    first, *rest = facts.steps
    least = _LEAST * max(facts.total_bytes, first.total_bytes)
    small = [step for step in rest if abs(step.delta_bytes) < least]
    if len(small) < 2:
        small = []
    gid = f"step 0: {first.delta_bytes} B"
    out = [_Row(first.name, format_bytes(first.total_bytes), 0, first.total_bytes, Ink(GREY),
                first.why.partition(";")[0], gid)]  # fmt: skip
    at = first.total_bytes
    changes = [(step.name, step.delta_bytes, step.why) for step in rest if step not in small]
    if small:
        names = ", ".join(step.name for step in small)
        size = sum(step.delta_bytes for step in small)
        changes.append((f"{len(small)} smaller changes", size, names))
    for place, (name, size, why) in enumerate(changes, 1):
        ink, gid = INKS.get(name, Ink(GREY)), f"step {place}: {size} B"
        out.append(_Row(name, signed(size), at, at + size, ink, why, gid))
        at += size
    name = "states alone" if facts.unknown else "peak, all included"
    total = facts.total_bytes
    out.append(_Row(name, format_gib(total), 0, total, Ink(theme.ink), "", "total"))
    return out


def draw_waterfall(facts: Waterfall, theme: Theme, width: float = WIDTH) -> Picture:
    """Draw a row for each step, and the total in the last row.

    Names and changes are columns of their own, so that neither bars nor the limit run through them.
    """
    rows = _rows(facts, theme)
    note = f"For {ranks_in_words(facts.ranks)}, which need most, at the peak of a step."
    if facts.unknown:
        note = f"States only, of {ranks_in_words(facts.ranks)}: {facts.unknown}."
    largest = max(max(row.begin_bytes, row.end_bytes) for row in rows)
    scale = scale_of(largest, facts.limit_bytes)
    notes = [note, *([scale.note] if scale.note else [])]
    narrow = is_narrow(width)
    tall = 0.46 if narrow else 0.36
    sheet = Sheet(theme, facts.title, tall * len(rows) + 0.95, notes=notes, width=width)
    changes = max(width_of(row.change, SMALL, bold=row is rows[-1]) for row in rows) + 0.1
    names = min(max(width_of(row.name, SMALL) for row in rows), 2.9) + 0.1
    left = sheet.edge + (0.06 if narrow else names + changes + 0.1)
    room = width - left - (0.1 if narrow else _WHY + 0.2) - sheet.edge
    units = (scale.most / room, 1 / tall)
    plane = sheet.plot(left=left, bottom=0.6, units=units, most=scale.most,
                       label=f"{scale.unit} of one GPU")  # fmt: skip
    words = sheet.plane()
    low, high = (0.08, 0.56) if narrow else (0.14, 0.86)
    for place, row in enumerate(rows):
        y, is_last = len(rows) - place - 1, row is rows[-1]
        begin, end = sorted((row.begin_bytes / scale.unit_bytes, row.end_bytes / scale.unit_bytes))
        box(plane, begin, y + low, end - begin, high - low, row.ink, edge=theme.quiet, line=0.4,
            gid=row.gid)  # fmt: skip
        if not is_last and not narrow:
            x = row.end_bytes / scale.unit_bytes
            plane.plot([x, x], [y + low, y - 1 + high], lw=0.8, color=theme.quiet)
        weight = "bold" if is_last else "normal"
        at = 0.6 + (y + (0.78 if narrow else 0.5)) * tall
        name = fitted(row.name, (width - changes - 0.3) if narrow else names - 0.05, SMALL)
        x = left if narrow else sheet.edge + names
        write(words, x, at, name, theme, size=SMALL, weight=weight, up="center",
              across="left" if narrow else "right")  # fmt: skip
        x = width - sheet.edge - 0.05 if narrow else left - 0.1
        write(words, x, at, row.change, theme, size=SMALL, weight=weight, up="center",
              across="right", gid="change")  # fmt: skip
        if not narrow:
            why = "\n".join(wrapped(row.why, _WHY - 0.05, 8.0, most=2))
            write(words, width - sheet.edge - _WHY, at, why, theme, size=8.0, colour=theme.quiet,
                  up="center")  # fmt: skip
    bars = [(y + low, y + high) for y in range(len(rows))]
    draw_limit(plane, sheet, scale, bars, float(len(rows)))
    return Picture("waterfall", facts.title, facts.alt, sheet.figure)
