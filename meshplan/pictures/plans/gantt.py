"""One step of a pipeline on a time axis: passes of each rank, waiting, and forwards in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshplan.cost.simulate import SimulatedStep, simulate
from meshplan.errors import PlanError, Problem
from meshplan.layout.schedules import SCHEDULES
from meshplan.pictures.base.page import SMALL, Item, Sheet, box, fitted, width_of, write
from meshplan.pictures.base.palette import PASSES, STAGES, Ink, Theme, ink_on
from meshplan.pictures.base.types import Picture
from meshplan.pictures.base.words import counted
from meshplan.plan.plan import Plan
from meshplan.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES: Final = {
    "F": "forward",
    "B": "backward",
    "I": "backward, gradients of inputs",
    "W": "backward, gradients of weights",
}
_MOST_RANKS: Final = 16
_MOST_SINGLE: Final = 500
_MOST_BLOCKS: Final = 20_000
_MOST_LINES: Final = 8


@dataclass(frozen=True, slots=True)
class GanttBar:
    """A forward or backward of one microbatch in one stage.

    Args:
        rank: Coordinate along pp of the rank that computes it.
        kind: F, B, I or W, as in `schedules.Action`.
        stage: Number of the stage.
        microbatch: Number of the microbatch.
        begin: Start time, in the unit of `Gantt.is_seconds`.
        end: End time, in the same unit.
    """

    rank: int
    kind: str
    stage: int
    microbatch: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gantt:
    """The facts that `draw_gantt` draws.

    Args:
        schedule: Name of the schedule; "" without a pipeline.
        ranks: Number of ranks along pp.
        virtual: Number of stages per rank.
        microbatches: Number of microbatches in a step.
        idle_share: Share of the step that ranks wait, averaged over all ranks.
        blocks: Forwards and backwards; those of one rank are in order of time.
        kept: For each rank, pairs (time, number of forwards whose activations are kept for backward
            from this time on).
        step: Duration of the step.
        is_seconds: If True, times are in seconds; if False, the unit is the time that the forward
            of all stages of one rank takes.
        assumed: The assumption behind the times, as a sentence.
    """

    schedule: str
    ranks: int
    virtual: int
    microbatches: int
    idle_share: float
    blocks: tuple[GanttBar, ...]
    kept: tuple[tuple[tuple[float, int], ...], ...]
    step: float
    is_seconds: bool
    assumed: str

    @property
    def most_kept(self) -> tuple[int, ...]:
        """For each rank, the maximum number of forwards that are kept at the same time."""
        return tuple(max(count for _, count in row) for row in self.kept)

    def time(self, value: float) -> str:
        """Return a time as text, with its unit."""
        return format_seconds(value) if self.is_seconds else f"{value:,.4g} forwards of a stage"

    @property
    def title(self) -> str:
        """The picture's title: the answer in one sentence."""
        if not self.schedule:
            many = counted(self.microbatches, "microbatch", "microbatches")
            return f"No pipeline: every rank computes {many} in turn, and waits for no stage"
        stages = f"{self.ranks * self.virtual} stages on {self.ranks} ranks"
        whole = f"a step of {self.time(self.step)}" if self.is_seconds else "the time"
        return (
            f"{self.schedule}: ranks wait {self.idle_share:.1%} of {whole} "
            f"({stages}, {counted(self.microbatches, 'microbatch', 'microbatches')})"
        )

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        most = self.most_kept
        if not self.schedule:
            return (
                f"One row, since all ranks do the same: {counted(self.microbatches, 'forward')}, "
                "each followed by its backward."
            )
        return (
            f"A row for each rank along pp, its forwards and backwards on a time axis of "
            f"{self.time(self.step)}; gaps are the bubble, {self.idle_share:.1%}. Below, "
            f"how many forwards each rank keeps for backward: at most {most[0]} on the first "
            f"and {most[-1]} on the last."
        )


def gantt(
    plan: Plan,
    forward_s: Sequence[float] = (),
    backward_s: Sequence[float] = (),
    *,
    crossing_s: float = 0.0,
    assumed: str = "",
) -> Gantt:
    """Simulate the pipeline schedule of a plan, and return the facts of the picture.

    Args:
        plan: The plan.
        forward_s: Seconds of the forward of one microbatch, by stage. If (), all stages of a rank
            together take 1, and the facts have no seconds.
        backward_s: Seconds of the backward of one microbatch, by stage; () for twice the forward.
        crossing_s: Seconds to send the activations or gradients of one microbatch to another rank.
        assumed: A sentence that explains these times; "" for the default assumption.

    Raises:
        PlanError: The step has too many microbatches to draw.
    """
    stages = plan.assignment.stages
    ranks, virtual = (1, 1) if stages is None else (stages.num_ranks, stages.virtual)
    count = plan.accumulate if stages is None else stages.microbatches
    if (num := 2 * ranks * virtual * count) > _MOST_BLOCKS:
        what = f"{count:,} microbatches make {num:,} bars on a timeline, too many to see"
        path = "batch.accumulate" if stages is None else "pipeline.microbatches"
        fix = f"fewer microbatches have the same pattern: add --set {path}={4 * ranks * virtual}"
        raise PlanError(Problem(what, plan.spec.origin(path), fix))
    is_known = bool(forward_s)
    forward_s = forward_s or [1.0 / virtual] * (ranks * virtual)
    backward_s = backward_s or [2.0 * each for each in forward_s]
    name = "1F1B" if stages is None else stages.schedule
    run = simulate(
        SCHEDULES[name], forward_s, backward_s, ranks=ranks, microbatches=count,
        crossing_s=crossing_s,
    )  # fmt: skip
    blocks = tuple(
        GanttBar(s.rank, s.action.kind, s.action.stage, s.action.microbatch, s.begin_s, s.end_s)
        for s in run.spans
    )
    return Gantt(
        schedule="" if stages is None else name,
        ranks=ranks,
        virtual=virtual,
        microbatches=count,
        idle_share=max(0.0, run.idle_share),
        blocks=blocks,
        kept=tuple(_kept(run, rank) for rank in range(ranks)),
        step=run.seconds,
        is_seconds=is_known,
        assumed=assumed
        or "Assumed: stages are equal, and a backward takes twice as long as its forward.",
    )


def _kept(run: SimulatedStep, rank: int) -> tuple[tuple[float, int], ...]:
    """Return the pairs of `Gantt.kept` for one rank; a forward is kept until its backward ends."""
    splits = any(span.action.kind == "W" for span in run.spans)
    changes = [(0.0, 0)]
    for span in run.spans:
        if span.rank == rank and span.action.kind == "F":
            changes.append((span.begin_s, 1))
        if span.rank == rank and span.action.kind in (("B", "W") if splits else ("B",)):
            changes.append((span.end_s, -1))
    out: list[tuple[float, int]] = []
    held = 0
    # At equal times, the end of a backward (-1) sorts before the start of a forward (+1).
    for when, change in sorted(changes):
        held += change
        if out and out[-1][0] == when:
            out[-1] = (when, held)
        else:
            out.append((when, held))
    return tuple(out)


def draw_gantt(facts: Gantt, theme: Theme) -> Picture:
    """Draw a row per rank, and below these the number of kept forwards, on one time axis."""
    shown = _some(facts.ranks)
    kinds = [kind for kind in PASSES if any(block.kind == kind for block in facts.blocks)]
    legend: list[Item] = [(_NAMES[kind], PASSES[kind]) for kind in kinds]
    legend.append(("waiting (the bubble)", Ink(theme.forbidden)))
    row = 0.42 if len(shown) <= 8 else 0.3
    tall, low = row * len(shown) + 0.1, 1.5
    sheet = Sheet(theme, facts.title, tall + low + 0.75, legend=legend, notes=_notes(facts, shown))
    labels = [_label(facts, rank) for rank in shown]
    left = max(max(width_of(label, SMALL) for label in labels) + 0.45, 0.95)
    right = 1.25
    above = sheet.axes(left=left, right=right, top=0.05, bottom=low + 0.75)
    above.set_xlim(0, facts.step)
    above.set_ylim(len(shown), 0)
    above.set_facecolor(theme.forbidden)
    above.tick_params(bottom=False, labelbottom=False)
    above.set_yticks([place + 0.5 for place in range(len(shown))])
    above.set_yticklabels(labels)
    per_inch = facts.step / (sheet.width - left - right)
    place_of = {rank: place for place, rank in enumerate(shown) if rank is not None}
    drawn = [block for block in facts.blocks if block.rank in place_of]
    if len(drawn) <= _MOST_SINGLE:
        for block in drawn:
            room = (block.end - block.begin) / per_inch
            _draw_block(above, facts, block, place_of[block.rank], room, theme)
    else:
        _draw_many(above, drawn, place_of, theme)
    for place, rank in enumerate(shown):
        if rank is None:
            box(above, 0, place, facts.step, 1, Ink(theme.panel))
            more = f"… {facts.ranks - len(shown) + 1} more ranks"
            write(above, facts.step / 2, place + 0.5, more, theme, size=SMALL, across="center",
                  up="center")  # fmt: skip
    below = sheet.axes(left=left, right=right, top=tall + 0.15, bottom=0.55)
    _draw_kept(below, facts, theme, right)
    unit = "seconds" if facts.is_seconds else "1 = the forward of one rank's stages"
    below.set_xlabel(f"time in a step ({unit})")
    return Picture("gantt", facts.title, facts.alt, sheet.figure)


def _draw_block(
    above: Axes, facts: Gantt, block: GanttBar, y: int, room: float, theme: Theme
) -> None:
    ink = PASSES[block.kind]
    name = f"{block.kind} stage {block.stage} microbatch {block.microbatch}"
    box(above, block.begin, y + 0.08, block.end - block.begin, 0.84, ink, edge=theme.paper,
        line=0.5, gid=name)  # fmt: skip
    if text := _inside(facts, block, room):
        write(
            above, (block.begin + block.end) / 2, y + 0.5, text, theme, size=8.0,
            colour=ink_on(ink.colour), across="center", up="center",
        )  # fmt: skip


def _draw_many(
    above: Axes, blocks: Sequence[GanttBar], place_of: Mapping[int, int], theme: Theme
) -> None:
    """Draw blocks that are too small for text; one matplotlib collection per rank and kind."""
    rows: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for block in blocks:
        span = (block.begin, block.end - block.begin)
        rows.setdefault((block.rank, block.kind), []).append(span)
    for (rank, kind), spans in rows.items():
        above.broken_barh(
            spans, (place_of[rank] + 0.08, 0.84), facecolor=PASSES[kind].colour,
            edgecolor=theme.paper, linewidth=0.2, gid=f"{kind} on pp {rank}: {len(spans)}",
        )  # fmt: skip


def _draw_kept(below: Axes, facts: Gantt, theme: Theme, right: float) -> None:
    """Draw the number of forwards kept for backward, one line per rank."""
    from matplotlib.ticker import MaxNLocator

    most = max(facts.most_kept, default=1)
    below.set_xlim(0, facts.step)
    below.set_ylim(0, most * 1.12 + 0.2)
    below.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    below.set_ylabel("forwards\nkept", fontsize=SMALL)
    ranks = _spread(facts.ranks, _MOST_LINES)
    ends: list[float] = []
    for number, rank in enumerate(ranks):
        times = [when for when, _ in facts.kept[rank]] + [facts.step]
        counts = [count for _, count in facts.kept[rank]]
        ink = STAGES[number % len(STAGES)]
        style = ("-", "--", "-.", ":")[number % 4]
        below.plot(
            times, [*counts, counts[-1]], drawstyle="steps-post", color=ink.colour, lw=1.7,
            ls=style, gid=f"kept on pp {rank}",
        )  # fmt: skip
        at = 1 - (number + 0.5) / len(ranks)
        ends.append(at)
        below.plot([1.015, 1.05], [at, at], transform=below.transAxes, color=ink.colour, lw=2.2,
                   ls=style, clip_on=False)  # fmt: skip
        name = "all ranks" if not facts.schedule else f"pp {rank}: {facts.most_kept[rank]:,}"
        write(below, 1.06, at, fitted(name, right - 0.35, 8.0), theme, size=8.0, up="center",
              transform=below.transAxes)  # fmt: skip


def _label(facts: Gantt, rank: int | None) -> str:
    if rank is None:
        return ""
    if not facts.schedule:
        return "every rank"
    stages = sorted({block.stage for block in facts.blocks if block.rank == rank})
    words = ", ".join(map(str, stages[:3])) + (", …" if len(stages) > 3 else "")
    return f"pp {rank}: stage{'s' if len(stages) > 1 else ''} {words}"


def _inside(facts: Gantt, block: GanttBar, room: float) -> str:
    """Return the text in a block, such as "F3", or "F3/5" if ranks have several stages."""
    long = f"{block.kind}{block.microbatch}"
    if facts.virtual > 1 and width_of(f"{long}/{block.stage}", 8.0) < room - 0.04:
        return f"{long}/{block.stage}"
    if width_of(long, 8.0) < room - 0.04:
        return long
    short = str(block.microbatch)
    return short if width_of(short, 8.0) < room - 0.03 else ""


def _notes(facts: Gantt, shown: Sequence[int | None]) -> list[str]:
    notes = [facts.assumed]
    if facts.virtual > 1:
        notes.insert(
            0, "F3/5 is the forward of microbatch 3 in stage 5; 3 alone is its microbatch."
        )
    else:
        notes.insert(0, "F3 is the forward of microbatch 3; a number alone is a microbatch.")
    if facts.ranks > _MOST_LINES:
        notes.append("Kept forwards are drawn for some ranks only.")
    return notes


def _some(ranks: int) -> list[int | None]:
    if ranks <= _MOST_RANKS:
        return list(range(ranks))
    return [*range(_MOST_RANKS - 3), None, ranks - 1]


def _spread(ranks: int, most: int) -> list[int]:
    """Return at most `most` ranks at equal distances, including the first and the last."""
    if ranks <= most:
        return list(range(ranks))
    return [round(place * (ranks - 1) / (most - 1)) for place in range(most)]
