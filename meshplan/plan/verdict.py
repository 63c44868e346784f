"""Results of `check`, and of `verify`, which compares a run under the plan with one process."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Final

from meshplan.errors import Problem

if TYPE_CHECKING:
    from meshplan.memory import StateBytes
    from meshplan.plan.plan import Plan
    from meshplan.traffic import RouteDifference


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of `check_plan`.

    Args:
        plan: The decision; None if problems prevent one, or if no model is known.
        problems: Errors that make the plan unusable.
        warnings: Settings that work but are probably not intended.
        notes: Remarks that the reader needs to interpret this answer.
    """

    plan: Plan | None = None
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Relative differences that rounding may cause.

    Args:
        loss: Limit for a loss.
        relative: Limit for a gradient norm or for the movement of a parameter.
        noise: Fraction of the mean movement of all parameters; a smaller movement is rounding
            alone.
    """

    loss: float
    relative: float
    noise: float


SINGLE: Final = Tolerance(loss=2e-5, relative=2e-3, noise=1e-4)
HALF: Final = Tolerance(loss=5e-2, relative=0.25, noise=5e-2)
"""[Empirical]: recipes and models of the tests stay ten times below; a gradient that is counted
twice, halved or left out on one rank is 0.3 and more.
"""
ROUNDINGS: Final = 3.0
"""[Empirical]: a plan may differ by this many times what the precision changes in one process,
since it also rounds at other places (tests/bench/verify_verdicts.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The loss and the gradient norm of each training step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """One parameter or buffer after the last step, compared with that of one process.

    Args:
        name: Fqn of the parameter or buffer.
        is_buffer: True for a buffer.
        is_visible: True if it moved further than rounding does.
        moved: Distance that one process moved it.
        apart: Distance between its values under the plan and in one process.
        allowed: Largest `apart` that is accepted.
    """

    name: str
    is_buffer: bool
    is_visible: bool
    moved: float
    apart: float
    allowed: float

    @property
    def is_wrong(self) -> bool:
        return not self.apart <= self.allowed  # NaN counts as a difference.

    @property
    def share(self) -> float:
        """The distance, relative to the movement."""
        return self.apart / self.moved if self.moved else float("inf") if self.apart else 0.0

    @property
    def allowed_share(self) -> float:
        """The distance that is allowed, relative to the movement."""
        return self.allowed / self.moved if self.moved else 0.0

    @property
    def nearness(self) -> float:
        """The distance, relative to the one that is allowed."""
        return _nearness(self.apart, self.allowed)


def _nearness(difference: float, allowed: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    return difference / allowed if allowed else math.inf if difference else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComparison:
    """The parameters and buffers after the last step, compared with those of one process."""

    shifts: tuple[Shift, ...]

    def nearest(self, *, is_buffer: bool) -> Shift | None:
        """Return the one closest to its limit, or furthest beyond it; None if there is none."""
        found = [shift for shift in self.shifts if shift.is_buffer == is_buffer]
        # Among equal distances, a parameter that moved says more.
        return max(found, key=lambda shift: (shift.nearness, shift.moved), default=None)

    @property
    def num_judged(self) -> int:
        """Number of parameters that moved far enough to be compared."""
        return sum(shift.is_visible and not shift.is_buffer for shift in self.shifts)

    @property
    def num_still(self) -> int:
        """Number of parameters that did not, and are equal but for rounding."""
        return sum(not shift.is_visible and not shift.is_buffer for shift in self.shifts)

    @property
    def num_buffers(self) -> int:
        return sum(shift.is_buffer for shift in self.shifts)

    @property
    def wrong(self) -> tuple[Shift, ...]:
        """Shifts beyond their limit, the largest share first."""
        found = [shift for shift in self.shifts if shift.is_wrong]
        return tuple(sorted(found, key=lambda shift: -shift.share))

    @property
    def worst(self) -> float:
        """The largest share among the parameters that were judged."""
        judged = (s.share for s in self.shifts if s.is_visible and not s.is_buffer)
        return max(judged, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity that was compared.

    Args:
        what: The quantity, in words.
        step: Step, from 1; 0 if it is of the whole training.
        together: Value under the plan; None if no single number describes it.
        alone: Value in one process; None if no single number describes it.
        difference: Difference between the two, in the unit of `allowed`.
        allowed: The largest difference that is accepted.
    """

    what: str
    step: int = 0
    together: float | None = None
    alone: float | None = None
    difference: float
    allowed: float

    @property
    def is_ok(self) -> bool:
        return self.difference <= self.allowed  # NaN counts as a difference.

    @property
    def nearness(self) -> float:
        """The difference, relative to the allowed one."""
        return _nearness(self.difference, self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The measurements of one rank, next to the predictions.

    Args:
        held: Measured bytes of state.
        predicted: Bytes of state according to the layouts.
        sent: Differences between the collectives of a step and the predicted ones.
        num_collectives: Number of collectives.
        collective_bytes: Bytes of the collectives.
        unknown: Descriptions of what has no prediction.
        num_routed: Number of collectives whose size a router decides, compared with bounds only.
    """

    held: StateBytes
    predicted: StateBytes
    sent: tuple[RouteDifference, ...]
    num_collectives: int
    collective_bytes: int
    unknown: tuple[str, ...]
    num_routed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The complete result of `verify`.

    Args:
        world: Number of processes that ran.
        notes: Remarks on what was scaled down.
        unmatched: Rules that match the whole model but nothing of the small one.
        refusal: The reason why the plan does not run; "" when it runs, and the rest is set.
        mesh: The mesh on which it ran.
        num_tensors: Number of parameters and buffers, each compared with the plan on every rank.
        tolerance: Limits that the comparison used.
        together: Losses and norms under the plan.
        alone: Losses and norms in one process.
        rounded: Losses and norms of trainings in one process that round as the plan's precision
            does.
        microbatches: Number of parts into which the one process had to split its batch, as the
            plan does, to compute the same; BatchNorm's statistics are over samples that run
            together.
        own_statistics: Norms that use or keep statistics of each data rank's own samples; the one
            process then did the same.
        moved: Comparison of parameters and buffers after the last step.
        ranks: Measurements of each rank.
    """

    world: int
    notes: tuple[str, ...]
    unmatched: tuple[str, ...]
    refusal: str = ""
    mesh: str = ""
    num_tensors: int = 0
    tolerance: Tolerance = SINGLE
    together: TrainingRun | None = None
    alone: TrainingRun | None = None
    rounded: tuple[TrainingRun, ...] = ()
    microbatches: int = 1
    own_statistics: tuple[str, ...] = ()
    moved: StateComparison | None = None
    ranks: tuple[RankReport, ...] = ()

    @property
    def is_ok(self) -> bool:
        """True if nothing differs."""
        return not self.refusal and not self.findings()

    def findings(self) -> list[str]:
        """Return the names of the quantities that differ."""
        return list(dict.fromkeys(each.what for each in self.comparisons() if not each.is_ok))

    def comparisons(self) -> list[Comparison]:
        """Return everything that was compared, each with its limit."""
        assert self.together is not None
        assert self.alone is not None
        assert self.moved is not None
        out = []
        for what, share, mines, others, again in (
            (
                "loss", self.tolerance.loss, self.together.losses, self.alone.losses,
                [each.losses for each in self.rounded],
            ),
            (
                "gradient norm", self.tolerance.relative, self.together.norms, self.alone.norms,
                [each.norms for each in self.rounded],
            ),
        ):  # fmt: skip
            for number, (mine, other) in enumerate(zip(mines, others, strict=True)):
                moved = max((abs(each[number] - other) for each in again), default=0.0)
                allowed = max(share * max(abs(other), 1e-6), ROUNDINGS * moved)
                out.append(
                    Comparison(
                        what=what,
                        step=number + 1,
                        together=mine,
                        alone=other,
                        difference=abs(mine - other),
                        allowed=allowed,
                    )
                )
        for what, is_buffer in (("parameters", False), ("buffers", True)):
            shift = self.moved.nearest(is_buffer=is_buffer)
            if shift is not None:
                scale = shift.moved or 1.0
                apart, allowed = shift.apart / scale, shift.allowed / scale
                out.append(Comparison(what=what, difference=apart, allowed=allowed))
        held = max((_bytes_apart(rank) for rank in self.ranks), default=0)
        out.append(Comparison(what="bytes held", difference=held, allowed=0))
        sent = max((len(rank.sent) for rank in self.ranks if not rank.unknown), default=0)
        out.append(Comparison(what="collectives", difference=sent, allowed=0))
        return out


def _bytes_apart(rank: RankReport) -> int:
    pairs = zip(astuple(rank.held), astuple(rank.predicted), strict=True)
    return sum(abs(held - predicted) for held, predicted in pairs)


def refused(problems: Iterable[Problem]) -> Verdict:
    """Return the verdict on a plan that is wrong before a process starts."""
    return Verdict(world=0, notes=(), unmatched=(), refusal="\n".join(map(str, problems)))
