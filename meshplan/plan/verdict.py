"""What `check` finds, and `verify` when it runs a plan beside one process: when the two differ."""

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
    """What `check_plan` found.

    Args:
        plan: The decision; None where problems forbid one, or where no model is known.
        problems: What is wrong.
        warnings: What works but is probably not meant.
        notes: What a reader has to know about this answer.
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
    """What rounding may make.

    Args:
        loss: Of a loss.
        relative: Of a norm or the movement of a parameter.
        noise: Of the mean movement of all parameters: less than this moves by rounding alone.
    """

    loss: float
    relative: float
    noise: float


SINGLE: Final = Tolerance(loss=2e-5, relative=2e-3, noise=1e-4)
HALF: Final = Tolerance(loss=5e-2, relative=0.25, noise=5e-2)
"""[Empirical]: recipes and models of the tests stay ten times below; a gradient that is counted
twice, halved or left out on one rank is 0.3 and more."""
ROUNDINGS: Final = 3.0
"""[Empirical]: how many times what the precision moves in one process a plan may be apart, which
rounds at other places too (tests/bench/verify_verdicts.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """What training left: the loss and the gradient norm of each step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """One parameter or buffer after the last step, beside that of one process.

    Args:
        is_visible: Whether it moved further than rounding does.
        moved: How far one process moved it.
        apart: How far the plan's is from there.
        allowed: How far it may be.
    """

    name: str
    is_buffer: bool
    is_visible: bool
    moved: float
    apart: float
    allowed: float

    @property
    def is_wrong(self) -> bool:
        return not self.apart <= self.allowed  # What is no number is near nothing.

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
    """The parameters and buffers after the last step, beside those of one process."""

    shifts: tuple[Shift, ...]

    def nearest(self, *, is_buffer: bool) -> Shift | None:
        """The one that is nearest to what is allowed, or furthest beyond; None where none is."""
        found = [shift for shift in self.shifts if shift.is_buffer == is_buffer]
        # Of several at the same distance one that moved tells more.
        return max(found, key=lambda shift: (shift.nearness, shift.moved), default=None)

    @property
    def num_judged(self) -> int:
        """Parameters that moved far enough to tell."""
        return sum(shift.is_visible and not shift.is_buffer for shift in self.shifts)

    @property
    def num_still(self) -> int:
        """Parameters that did not, and are equal but for rounding."""
        return sum(not shift.is_visible and not shift.is_buffer for shift in self.shifts)

    @property
    def num_buffers(self) -> int:
        return sum(shift.is_buffer for shift in self.shifts)

    @property
    def wrong(self) -> tuple[Shift, ...]:
        """What is further apart than allowed, the worst first."""
        found = [shift for shift in self.shifts if shift.is_wrong]
        return tuple(sorted(found, key=lambda shift: -shift.share))

    @property
    def worst(self) -> float:
        """The largest share among the parameters that were judged."""
        judged = (s.share for s in self.shifts if s.is_visible and not s.is_buffer)
        return max(judged, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One thing that was compared.

    Args:
        what: The thing, in words.
        step: From 1; 0 where it is of the whole training.
        together: Under the plan; None where no one number tells it.
        alone: In one process.
        difference: Between the two, in the unit of `allowed`.
        allowed: The largest difference that is no finding.
    """

    what: str
    step: int = 0
    together: float | None = None
    alone: float | None = None
    difference: float
    allowed: float

    @property
    def is_ok(self) -> bool:
        return self.difference <= self.allowed  # What is no number is near nothing.

    @property
    def nearness(self) -> float:
        """The difference, relative to the allowed one."""
        return _nearness(self.difference, self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank found about itself.

    Args:
        held: Bytes of state; `predicted` is what the layouts say.
        sent: Where the collectives of a step are others than predicted.
        unknown: What no prediction was made of.
        num_routed: Collectives whose size a router decides, compared with its bounds only.
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
    """Everything that `verify` found.

    Args:
        world: How many processes ran.
        notes: What was made smaller.
        unmatched: Rules that match the whole model and nothing of the small one.
        refusal: Why the plan does not run; "" when it does, and the rest is set.
        mesh: The mesh it ran on.
        num_tensors: Parameters and buffers, each compared with the plan on every rank.
        together: Under the plan.
        alone: In one process.
        rounded: In one process, rounded otherwise as the plan's precision does.
        microbatches: Into how many it had to cut its batch, as the plan does, to compute the
            same: BatchNorm takes its statistics over what runs together.
        own_statistics: Norms that take or keep statistics of each data rank's own samples, as
            the one process then did too.
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
        """Whether nothing differs."""
        return not self.refusal and not self.findings()

    def findings(self) -> list[str]:
        """What differs, as words."""
        return list(dict.fromkeys(each.what for each in self.comparisons() if not each.is_ok))

    def comparisons(self) -> list[Comparison]:
        """Everything that was compared, each with what is allowed."""
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
    """The verdict on a plan that is wrong before a process starts."""
    return Verdict(world=0, notes=(), unmatched=(), refusal="\n".join(map(str, problems)))
