"""One step of a pipeline on a time axis: passes of each rank, waiting, and forwards in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshplan.cost.simulate import SimulatedStep, simulate
from meshplan.errors import PlanError, Problem
from meshplan.layout.schedules import SCHEDULES
from meshplan.pictures.base.words import counted
from meshplan.plan.plan import Plan
from meshplan.planner.tables.whole_plan import StepParts
from meshplan.units import format_seconds

ENDS: Final = "first gathers and last reductions"
OPTIMIZER: Final = "optimizer"
_MOST_BLOCKS: Final = 20_000


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
        runs: Runs of the pipeline in a step, of which the picture shows one.
        parts: Without a pipeline, what the seconds of a step are spent on, as pairs (name,
            seconds); () if times are not in seconds.
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
    parts: tuple[tuple[str, float], ...] = ()
    runs: int = 1

    @property
    def whole_step(self) -> float:
        """Duration of the step with the last reductions and the optimizer, if these are known."""
        return sum(seconds for _, seconds in self.parts) or self.step

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
            if self.parts:
                (first, most), *rest = self.parts
                name = max(rest, key=lambda part: part[1])[0]
                return (
                    f"No pipeline: {most / self.whole_step:.0%} of a step of "
                    f"{self.time(self.whole_step)} is {first}; most of the rest: {name}"
                )
            return f"No pipeline: every rank computes {many} in turn, and waits for no stage"
        stages = f"{self.ranks * self.virtual} stages on {self.ranks} ranks"
        run = "a step" if self.runs == 1 else f"each of {self.runs} runs in a step,"
        whole = f"{run} of {self.time(self.step)}" if self.is_seconds else "the time"
        return (
            f"{self.schedule}: ranks wait {self.idle_share:.1%} of {whole} "
            f"({stages}, {counted(self.microbatches, 'microbatch', 'microbatches')})"
        )

    @property
    def alt(self) -> str:
        """The picture's alt text, for readers who cannot see it."""
        most = self.most_kept
        if not self.schedule:
            parts = "; ".join(f"{name} {self.time(part)}" for name, part in self.parts)
            return (
                f"One row, since all ranks do the same: {counted(self.microbatches, 'forward')}, "
                "each followed by its backward."
                + (f" A bar for each use of the time: {parts}." if parts else "")
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
    parts: StepParts | None = None,
    assumed: str = "",
) -> Gantt:
    """Simulate the pipeline schedule of a plan, and return the facts of the picture.

    Args:
        plan: The plan.
        forward_s: Seconds of the forward of one microbatch, by stage. If (), all stages of a rank
            together take 1, and the facts have no seconds.
        backward_s: Seconds of the backward of one microbatch, by stage; () for twice the forward.
        crossing_s: Seconds to send the activations or gradients of one microbatch to another rank.
        parts: Without a pipeline, what the seconds of a step are spent on; None if not known.
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
        parts=() if parts is None else _named(parts),
        runs=1 if stages is None else plan.accumulate,
    )


def _named(parts: StepParts) -> tuple[tuple[str, float], ...]:
    """Return the parts of a step that take time, with their names; the computation is first."""
    pairs = (
        ("computation", parts.compute_s),
        ("recomputation", parts.recompute_s),
        ("communication of tp, ep and cp", parts.model_parallel_s),
        ("waits for data parallelism", parts.data_parallel_s),
        (ENDS, parts.ends_s),
        (OPTIMIZER, parts.update_s),
    )
    return tuple((name, max(part, 0.0)) for name, part in pairs
                 if part > 0 or name == "computation")  # fmt: skip


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
    kept = 0
    # At equal times, the end of a backward (-1) sorts before the start of a forward (+1).
    for when, change in sorted(changes):
        kept += change
        if out and out[-1][0] == when:
            out[-1] = (when, kept)
        else:
            out.append((when, kept))
    return tuple(out)
