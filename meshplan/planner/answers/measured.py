"""`meshplan compare`: what a run took beside what its plan predicts, and what would close the gap.

`runtime.train.run.Run` writes the files that `read_run` reads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from meshplan.cost.profile import Profile
from meshplan.errors import MeshplanError, Origin, Problem, SpecError
from meshplan.files import read_bytes
from meshplan.memory import MemoryEstimate
from meshplan.plan.plan import Plan
from meshplan.planner.answers.difference import Figure, bytes_by_route
from meshplan.planner.problem.request import cluster_of
from meshplan.planner.tables.whole_plan import Costed
from meshplan.shown import shown
from meshplan.spec.match import any_number
from meshplan.textbook.inputs import read_limit
from meshplan.traffic import forecast

FORMAT: Final = "meshplan/run/1"
_MOST_BYTES: Final = 1 << 26

CONSTANTS: Final = (
    "efficiency", "attention_efficiency", "memory_bytes_per_s", "kernel_s", "launch_s",
    "intra_bytes_per_s", "inter_bytes_per_s", "pcie_bytes_per_s",
)  # fmt: skip
"""Constants of a profile that may close a difference in seconds."""
_FARTHEST: Final = 16.0
"""A constant that must change by more than this factor does not explain a difference."""
_NO_PEAK: Final = "measured on accelerators only"
_STEPS: Final = 30
"""Halvings of the interval in which a constant is looked for: to one part in 10^8."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The figures of a run, as its run.json states them.

    Args:
        file: Path of the file.
        plan: Digest of the plan's decisions.
        ranks: Number of ranks.
        device: Name of rank 0's device.
        step_s: Median seconds of a step on rank 0; None if no step was taken.
        phases_s: Median seconds of "data", "forward", "backward", "communication" (what of the
            other phases waited for collectives, which is not in them) and "optimizer".
        peak_bytes: Most bytes that the allocator gave out, by rank; () where it was not measured.
        reserved_bytes: Most bytes that the allocator held, by rank; () where it was not measured.
        routes: {(kind of collective, axes): bytes of the whole tensors in one step of rank 0}.
        flops: FLOPs of matrix products and attention in one step of rank 0, without recomputation;
            None where they were not counted.
        modules: {modules of rank 0 whose fqns differ in numbers only, with * for the numbers:
            seconds of their forwards in one step}, the slowest first.
        accumulate: Parts that the samples of a rank were cut into, in each of the steps to which
            the figures belong; None where no step was taken.
    """

    file: str
    plan: str
    ranks: int
    device: str
    step_s: float | None
    phases_s: Mapping[str, float]
    peak_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    routes: Mapping[tuple[str, tuple[str, ...]], int]
    flops: float | None
    modules: Mapping[str, float]
    accumulate: int | None = None


@shown
@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure, predicted and measured.

    Args:
        what: What it is, such as "a step" or "all_gather over dp_shard".
        unit: "s" or "bytes".
        predicted: The prediction, or why there is none.
        measured: The measurement, or why there is none.
    """

    what: str
    unit: str
    predicted: Figure
    measured: Figure

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None if one of them is unknown or 0 is measured."""
        if self.predicted.value is None or not self.measured.value:
            return None
        return self.predicted.value / self.measured.value - 1


@shown
@dataclass(frozen=True, slots=True)
class ClosingConstant:
    """A constant of the profile with which the predicted step would take as long as the measured.

    Args:
        name: Name in the profile.
        now: Its value in the profile that predicted.
        needed: The value that closes the difference, if nothing else changes.
    """

    name: str
    now: float
    needed: float


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """A run beside its plan.

    Args:
        run: The run.
        figures: Seconds, memory and collectives, predicted and measured.
        peak_flops: FLOP/s of the device at most, in the precision of the plan; None if not known.
        constants: Constants that would close the difference of the step's seconds, the smallest
            change first; () if it is within the tolerance, or unknown.
        tolerance: Relative error up to which a prediction holds.
    """

    run: MeasuredRun
    figures: tuple[ComparedFigure, ...]
    constants: tuple[ClosingConstant, ...]
    tolerance: float
    peak_flops: float | None = None

    @property
    def flops_per_s(self) -> float | None:
        """FLOP/s of rank 0 over a whole step, its data and communication included."""
        run = self.run
        return run.flops / run.step_s if run.flops is not None and run.step_s else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: `flops_per_s` as a share of what the device does at most."""
        both = self.flops_per_s, self.peak_flops
        return both[0] / both[1] if both[0] is not None and both[1] else None

    @property
    def apart(self) -> tuple[ComparedFigure, ...]:
        """The figures whose error exceeds the tolerance."""
        return tuple(
            each
            for each in self.figures
            if (predicted := each.predicted.value) is not None
            and (measured := each.measured.value) is not None
            and abs(predicted - measured) > self.tolerance * measured
        )


def read_run(path: str | os.PathLike[str]) -> MeasuredRun:
    """Read a run.json.

    Raises:
        SpecError: The file cannot be read, or was not written by `meshplan.Run`.
    """
    origin = Origin(os.fspath(path))
    fix = "name the file that meshplan.Run wrote at the end of a run"
    try:
        data = read_bytes(path, _MOST_BYTES, "the run")
    except FileNotFoundError:
        raise SpecError(Problem("there is no such file", origin, fix)) from None
    try:
        content = json.loads(data)
        if content["format"] != FORMAT:
            raise ValueError("another format")
        return MeasuredRun(
            file=os.fspath(path),
            plan=str(content["plan"]),
            ranks=int(content["ranks"]),
            device=str(content["device"]),
            step_s=_number(content["step_s"]),
            phases_s={str(k): float(v) for k, v in content["phases_s"].items()},
            peak_bytes=_bytes_by_rank(content["peak_bytes"]),
            reserved_bytes=_bytes_by_rank(content["reserved_bytes"]),
            routes=_routes(content["collectives"]),
            flops=_number(content.get("flops")),
            modules={str(m["name"]): float(m["forward_s"]) for m in content.get("modules") or ()},
            accumulate=None if (count := content.get("accumulate")) is None else int(count),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"this is no run.json of {FORMAT}: {type(error).__name__}: {error}"
        raise SpecError(Problem(what, origin, fix)) from None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _bytes_by_rank(values: Any) -> tuple[int, ...]:
    return () if any(value is None for value in values) else tuple(int(v) for v in values)


def _routes(items: Any) -> dict[tuple[str, tuple[str, ...]], int]:
    routes: dict[tuple[str, tuple[str, ...]], int] = {}
    for item in items:
        key = str(item["kind"]), tuple(map(str, item["axes"]))
        routes[key] = routes.get(key, 0) + int(item["bytes"])
    return routes


def comparison_of(
    run: MeasuredRun,
    plan: Plan,
    memory: MemoryEstimate | MeshplanError,
    step_s: float | None = None,
    *,
    device: str = "",
    profile: Profile | None = None,
    tolerance: float,
) -> RunComparison:
    """Compare a run with the predictions for its plan.

    Args:
        run: The run.
        plan: Its plan.
        memory: The estimate of the plan's memory, or why there is none.
        step_s: Predicted seconds of a step, for a model without a config; None to predict them from
            the config.
        device: Name of the device; "" for the one that the plan states.
        profile: Measured speeds of the machine; None for the tables of known devices.
        tolerance: Relative error up to which a prediction holds.

    Raises:
        PlanError: The run had another number of ranks than the plan.
    """
    if run.ranks != plan.mesh.world_size:
        what = f"the run had {run.ranks} ranks, but the plan has {plan.mesh.world_size}"
        raise SpecError(Problem(what, Origin(run.file), "name the plan of the run with -f"))
    costed: Costed | None = None
    seconds = Figure(step_s) if step_s is not None else Figure(None, "unknown")
    if step_s is None:
        try:
            device = device or read_limit(None, None, plan.spec)[0]
            costed = Costed(plan, cluster_of(plan.spec, device, profile), profile)
            seconds = Figure(costed.seconds)
        except MeshplanError as error:
            seconds = Figure(None, error.problems[0].what)
    taken = sum(s for name, s in run.phases_s.items() if name != "data") or None
    measured = _measured(taken, "no step was taken")
    step = ComparedFigure("a step, without its data", "s", seconds, measured)
    figures = (step, *_phases(run, costed), *_modules(run, costed), *_memory(run, memory),
               *_traffic(run, plan))  # fmt: skip
    closing: tuple[ClosingConstant, ...] = ()
    if costed is not None and step.error is not None and abs(step.error) > tolerance:
        assert taken is not None
        closing = tuple(_closing(costed, taken))
    return RunComparison(
        run=run, figures=figures, constants=closing, tolerance=tolerance,
        peak_flops=_peak_flops(run, costed),
    )  # fmt: skip


def _peak_flops(run: MeasuredRun, costed: Costed | None) -> float | None:
    """Return the FLOP/s of the run's device at most; None if the plan is for another device."""
    if costed is None or costed.profile.device.partition("-")[0] not in run.device.lower():
        return None
    return costed.profile.peak_flops


def _measured(value: float | None, why: str) -> Figure:
    return Figure(None, why) if value is None else Figure(value)


def _phases(run: MeasuredRun, costed: Costed | None) -> Iterator[ComparedFigure]:
    """Yield the phases of a step. No plan predicts how long the data takes."""
    predicted = costed.phases if costed is not None else None
    why = "predicted from a config only, without pp"
    if "communication" not in run.phases_s:
        predicted, why = None, "a phase of this run has its communication in it"
    for name, seconds in run.phases_s.items():
        value = predicted.get(name) if predicted is not None else None
        unknown = "no plan says how long a loader takes" if name == "data" else why
        yield ComparedFigure(name, "s", _measured(value, unknown), Figure(seconds))


def _modules(run: MeasuredRun, costed: Costed | None) -> Iterator[ComparedFigure]:
    """Yield the forwards of the slowest modules. Predicted are those of blocks."""
    blocks: dict[str, float] = {}
    if costed is not None and run.modules:
        count = int(costed.row["microbatches"][0])
        for name in filter(None, dict.fromkeys(costed.chain.names)):
            if costed.row["pp"][0] == 1:
                key = any_number(name)
                blocks[key] = blocks.get(key, 0.0) + count * costed.block(name).forward_s
    why = "predicted of whole blocks from a config only, without pp"
    for name, seconds in run.modules.items():
        predicted = _measured(blocks.get(name), why)
        yield ComparedFigure(f"forward of {name}", "s", predicted, Figure(seconds))


def _memory(run: MeasuredRun, memory: MemoryEstimate | MeshplanError) -> Iterator[ComparedFigure]:
    """Yield the peaks of each class of equal ranks; its highest measurement counts."""
    if isinstance(memory, MeshplanError):
        why = Figure(None, memory.problems[0].what)
        highest = max(run.peak_bytes, default=None)
        yield ComparedFigure("peak allocated", "bytes", why, _measured(highest, _NO_PEAK))
        return
    for group in memory.groups:
        ranks = f"{group.ranks[0]}" if len(group.ranks) == 1 else f"{group.ranks[0]}, ..."
        where = "" if len(memory.groups) == 1 else f", rank {ranks}"
        for what, values, predicted in (
            ("peak allocated", run.peak_bytes, group.peak.allocated_bytes),
            ("peak reserved", run.reserved_bytes, group.peak.reserved_bytes),
        ):
            most = max((values[rank] for rank in group.ranks), default=None) if values else None
            yield ComparedFigure(
                what + where, "bytes", Figure(float(predicted)),
                _measured(most, _NO_PEAK),
            )  # fmt: skip


def _traffic(run: MeasuredRun, plan: Plan) -> Iterator[ComparedFigure]:
    """Yield the bytes of each kind of collective over each group of axes."""
    sent = forecast(plan)
    predicted = bytes_by_route(sent)
    for key in dict.fromkeys((*predicted, *run.routes)):
        kind, axes = key
        # What activations send along tp, cp, ep and pp follows from a recorded forward only.
        why = f"unknown from a config: {sent.unknown[0]}" if sent.unknown else ""
        value = None if sent.unknown else predicted.get(key, 0)
        measured = run.routes.get(key, 0) if run.routes else None
        yield ComparedFigure(
            f"{kind} over {', '.join(axes)}", "bytes",
            _measured(value, why),
            _measured(measured, "no step's collectives were counted"),
        )  # fmt: skip


def _closing(costed: Costed, measured_s: float) -> list[ClosingConstant]:
    """Return the constants of which one alone would close the difference, the nearest first."""
    profile, found = costed.profile, []
    for name in CONSTANTS:
        now = getattr(profile, name)
        if not now or not math.isfinite(now):
            continue

        def seconds(factor: float, name: str = name, now: float = now) -> float:
            changed: dict[str, Any] = {name: now * factor}
            return costed.with_profile(replace(profile, **changed)).seconds

        factor = _root(lambda x, of=seconds: of(x) - measured_s)  # type: ignore[misc]
        if factor is not None:
            found.append((abs(math.log(factor)), ClosingConstant(name, now, now * factor)))
    return [constant for _, constant in sorted(found, key=lambda pair: pair[0])]


def _root(gap: Callable[[float], float]) -> float | None:
    """Return a factor between 1/16 and 16 at which a monotonic function is 0; None without one."""
    low, high = 1 / _FARTHEST, _FARTHEST
    at_low, at_high = gap(low), gap(high)
    if at_low * at_high > 0 or at_low == at_high:
        return None
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        if gap(middle) * at_low > 0:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
