"""The largest microbatch that fits: found by the memory model, and confirmed by a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from meshplan.api.checking import decide, estimate_memory
from meshplan.api.source import PlanSource, Source, SourceArguments, source_of
from meshplan.errors import Origin, PlanError, Problem
from meshplan.plan.plan import Plan
from meshplan.shown import shown


@shown
@dataclass(frozen=True, slots=True)
class BatchSize:
    """The largest microbatch that fits into the memory of every rank.

    Args:
        micro: Samples of a microbatch on one rank, for `batch: {micro: N}`.
        peak_bytes: Upper end of the estimated memory of the fullest rank, in bytes.
        limit_bytes: Memory of one device, in bytes.
        tried: Numbers of samples whose memory was estimated, in this order.
    """

    micro: int
    peak_bytes: int
    limit_bytes: int
    tried: tuple[int, ...]


def find_batch_size(
    plan: PlanSource | Source,
    overrides: Sequence[str] = (),
    *,
    step: Callable[[int], object] | None = None,
    most: int = 4096,
    report: Callable[[str], None] = lambda text: None,
    **given: Unpack[SourceArguments],
) -> BatchSize:
    """Return the largest microbatch that fits, by estimates of memory and, if given, by a step.

    If the plan states `batch.global`, only microbatches are tried that it can be divided into. The
    planner also chooses the microbatch, together with all else that a plan leaves open
    (`batch: {micro: auto}`); here everything else stays as it is.

    Args:
        plan: Path of a plan file, its content as a mapping, or a whole `Source`.
        overrides: `KEY=VALUE` statements that change the plan.
        step: Takes one training step with so many samples in each microbatch of a rank. If it runs
            out of memory, it is called with the next smaller number. On several ranks it cannot be
            called again, since the others have lost their peer: its error is raised.
        most: Largest number of samples to try.
        report: Called with a line for each estimate.
        given: The model and the machine, by the names of `Source`.

    Raises:
        SpecError: The plan or the model cannot be read.
        PlanError: The memory of a device is not stated, or not even the smallest microbatch fits.
    """
    source = source_of(plan, overrides, **given)
    if source.spec.batch.global_ is not None:  # It follows from the other two.
        source = source.with_overrides(["batch.accumulate="])
    decided = decide(source.with_overrides(["batch.micro=", "batch.global="]))
    sizes = _sizes(source.spec.batch.global_, decided, most)
    if not sizes:
        what = f"no microbatch of at most {most} samples divides over the data ranks and stages"
        fix = "state another batch.global, or a larger number of samples to try"
        raise PlanError(Problem(what, decided.spec.origin("batch.global"), fix))
    found: dict[int, BatchSize | None] = {}

    def fits(size: int) -> bool:
        if size not in found:
            report(f"estimating a microbatch of {size}")
            estimate = estimate_memory(source.with_overrides([f"batch.micro={size}"]), fixes=False)
            if estimate.limit_bytes is None:
                fix = "state hardware: {gpu: ...} or {memory: 80GB} in the plan"
                raise PlanError(Problem("the memory of a device is not stated", None, fix))
            peak = estimate.high_bytes
            found[size] = BatchSize(size, peak, estimate.limit_bytes, ()) if estimate.fits else None
        return found[size] is not None

    if not fits(sizes[0]):
        what = f"not even a microbatch of {sizes[0]} fits"
        fix = "meshplan estimate --fixes names changes that make it fit"
        raise PlanError(Problem(what, Origin(str(source.plan)), fix))
    low, high = 0, 1  # Indices of a size that fits and, in the end, of the smallest that does not.
    while high < len(sizes) and fits(sizes[high]):
        low, high = high, 2 * high
    high = min(high, len(sizes))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    if step is not None:
        low = _confirmed(step, sizes, low)
        fits(sizes[low])
    chosen = found[sizes[low]]
    assert chosen is not None
    return replace(chosen, tried=tuple(found))


def _sizes(global_batch: int | None, plan: Plan, most: int) -> Sequence[int]:
    """Return the microbatches to choose from, in ascending order."""
    stages = plan.assignment.stages
    unit = 1 if stages is None else stages.microbatches
    every = range(unit, most + 1, unit)
    if global_batch is None:
        return every
    return [size for size in every if global_batch % (size * plan.num_data_ranks) == 0]


def _confirmed(step: Callable[[int], object], sizes: Sequence[int], index: int) -> int:
    """Return the index of the largest size, from this one down, with which a step runs."""
    while True:
        try:
            step(sizes[index])
        except RuntimeError as error:
            # torch is not imported here: its error is known by its name.
            if type(error).__name__ != "OutOfMemoryError" or index == 0:
                raise
            index -= 1
            continue
        return index
