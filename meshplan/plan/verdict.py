"""Results of `check`, and of `verify`, which compares training under a plan with one process."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Final

from meshplan.errors import Problem
from meshplan.shown import shown

if TYPE_CHECKING:
    from meshplan.memory import StateBytes
    from meshplan.plan.plan import Plan
    from meshplan.traffic import RouteDifference


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of `check_plan`.

    Args:
        plan: The plan; None if problems prevent one, or if no model is known.
        problems: Errors that make the plan unusable.
        warnings: Settings that work but are probably not intended.
        notes: Remarks that the user needs to interpret the result.
    """

    plan: Plan | None = None
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        return not self.problems


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Relative differences that rounding may cause.

    Args:
        loss: Limit for the difference of a loss, relative to the loss.
        relative: Limit for a gradient norm, and for a parameter relative to the distance that
            training moved it.
        noise: Fraction of the mean distance that all parameters moved; a parameter that moved less
            is not compared, because rounding alone may have moved it.
    """

    loss: float
    relative: float
    noise: float


SINGLE: Final = Tolerance(loss=2e-5, relative=2e-3, noise=1e-4)
HALF: Final = Tolerance(loss=5e-2, relative=0.25, noise=5e-2)
"""Limits of full and of half precision. [Empirical]: the differences of recipes and test models are
ten times smaller; a gradient that is counted twice, halved or left out on one rank gives 0.3 or
more.
"""
ROUNDINGS: Final = 3.0
"""[Empirical]: a plan may differ from one process by this many times the change that the plan's
precision causes in one process, because a plan also rounds at other places
(tests/bench/verify_verdicts.md).
"""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The loss and the gradient norm of each training step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """One parameter or buffer after the last step, compared with its value in one process.

    Args:
        name: Fqn of the parameter or buffer.
        is_buffer: True for a buffer.
        is_visible: True if training moved it further than rounding alone could.
        moved: Distance between its values before and after training in one process.
        apart: Distance between its values after training under the plan and in one process.
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
        """`apart`, relative to `moved`."""
        return self.apart / self.moved if self.moved else float("inf") if self.apart else 0.0

    @property
    def allowed_share(self) -> float:
        """`allowed`, relative to `moved`."""
        return self.allowed / self.moved if self.moved else 0.0

    @property
    def nearness(self) -> float:
        """`apart`, relative to `allowed`; above 1 is wrong."""
        return _nearness(self.apart, self.allowed)


def _nearness(difference: float, allowed: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    return difference / allowed if allowed else math.inf if difference else 0.0


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class StateComparison:
    """All parameters and buffers after the last step, compared with those of one process."""

    shifts: tuple[Shift, ...]

    def nearest(self, *, is_buffer: bool) -> Shift | None:
        """Return the parameter or buffer with the largest `nearness`; None if there is none."""
        found = [shift for shift in self.shifts if shift.is_buffer == is_buffer]
        # If several are equally near, take the one that training moved most.
        return max(found, key=lambda shift: (shift.nearness, shift.moved), default=None)

    @property
    def num_judged(self) -> int:
        """Number of parameters that moved far enough to be compared."""
        return sum(shift.is_visible and not shift.is_buffer for shift in self.shifts)

    @property
    def num_still(self) -> int:
        """Number of parameters that moved too little to be compared."""
        return sum(not shift.is_visible and not shift.is_buffer for shift in self.shifts)

    @property
    def num_buffers(self) -> int:
        return sum(shift.is_buffer for shift in self.shifts)

    @property
    def wrong(self) -> tuple[Shift, ...]:
        """The parameters and buffers beyond their limit, the largest `share` first."""
        found = [shift for shift in self.shifts if shift.is_wrong]
        return tuple(sorted(found, key=lambda shift: -shift.share))

    @property
    def worst(self) -> float:
        """The largest `share` among the parameters that were compared."""
        judged = (s.share for s in self.shifts if s.is_visible and not s.is_buffer)
        return max(judged, default=0.0)


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity that was compared.

    Args:
        what: The quantity, in words.
        step: Training step, from 1; 0 if the quantity describes the whole training.
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
        """`difference`, relative to `allowed`; above 1 is wrong."""
        return _nearness(self.difference, self.allowed)


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The measurements of one rank, next to the predictions.

    Args:
        measured: Measured bytes of parameters, gradients and other state.
        predicted: The same bytes according to the layouts.
        sent: Differences between the collectives of a step and the predicted ones.
        num_collectives: Number of collectives of the step.
        collective_bytes: Bytes of these collectives together.
        unknown: Reasons why collectives could not be predicted; if there are any, `sent` is not
            judged.
        num_routed: Number of collectives whose size depends on a router; they are compared with
            bounds only.
    """

    measured: StateBytes
    predicted: StateBytes
    sent: tuple[RouteDifference, ...]
    num_collectives: int
    collective_bytes: int
    unknown: tuple[str, ...]
    num_routed: int = 0


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The complete result of `verify`.

    Args:
        world: Number of processes that ran.
        notes: Remarks on how model and mesh were scaled down.
        unmatched: Rules that match modules of the whole model but none of the scaled-down model.
        refusal: The reason why the plan does not run; "" if it ran. The arguments below are set
            only if it ran.
        mesh: The mesh on which the plan ran.
        num_tensors: Number of parameters and buffers, each compared with the plan on every rank.
        tolerance: Limits that the comparison used.
        together: Losses and norms under the plan.
        alone: Losses and norms in one process.
        rounded: Losses and norms of trainings in one process with the rounding of the plan's
            precision.
        microbatches: Number of parts into which the one process split its batch, as the plan does;
            above 1 if BatchNorm is used, whose statistics are over the samples of one forward.
        own_statistics: Fqns of norms whose statistics are over the samples of one data rank; the
            one process computed them in the same way.
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
        """True if the plan ran and no quantity is beyond its limit."""
        return not self.refusal and not self.findings()

    def findings(self) -> list[str]:
        """Return the names of the quantities that are beyond their limits."""
        return list(dict.fromkeys(each.what for each in self.comparisons() if not each.is_ok))

    def comparisons(self) -> list[Comparison]:
        """Return everything that was compared, each with its limit."""
        assert self.together is not None
        assert self.alone is not None
        assert self.moved is not None
        out = []
        for what, share, together, others, repeated in (
            (
                "loss", self.tolerance.loss, self.together.losses, self.alone.losses,
                [each.losses for each in self.rounded],
            ),
            (
                "gradient norm", self.tolerance.relative, self.together.norms, self.alone.norms,
                [each.norms for each in self.rounded],
            ),
        ):  # fmt: skip
            for number, (own, other) in enumerate(zip(together, others, strict=True)):
                moved = max((abs(each[number] - other) for each in repeated), default=0.0)
                allowed = max(share * max(abs(other), 1e-6), ROUNDINGS * moved)
                out.append(
                    Comparison(
                        what=what,
                        step=number + 1,
                        together=own,
                        alone=other,
                        difference=abs(own - other),
                        allowed=allowed,
                    )
                )
        for what, is_buffer in (("parameters", False), ("buffers", True)):
            shift = self.moved.nearest(is_buffer=is_buffer)
            if shift is not None:
                scale = shift.moved or 1.0
                apart, allowed = shift.apart / scale, shift.allowed / scale
                out.append(Comparison(what=what, difference=apart, allowed=allowed))
        bytes_apart = max((_bytes_apart(rank) for rank in self.ranks), default=0)
        out.append(Comparison(what="bytes held", difference=bytes_apart, allowed=0))
        sent = max((len(rank.sent) for rank in self.ranks if not rank.unknown), default=0)
        out.append(Comparison(what="collectives", difference=sent, allowed=0))
        return out


def _bytes_apart(rank: RankReport) -> int:
    pairs = zip(astuple(rank.measured), astuple(rank.predicted), strict=True)
    return sum(abs(measured - predicted) for measured, predicted in pairs)


def refused(problems: Iterable[Problem]) -> Verdict:
    """Return the verdict on a plan that is refused before any process starts."""
    return Verdict(world=0, notes=(), unmatched=(), refusal="\n".join(map(str, problems)))
