"""What `verify` finds when it runs a plan beside one process, and when the two differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from meshplan.errors import Problem
from meshplan.memory import StateBytes
from meshplan.traffic import Difference


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


SINGLE: Final = Tolerance(loss=1e-4, relative=1e-2, noise=1e-4)
HALF: Final = Tolerance(loss=5e-2, relative=0.25, noise=5e-2)
"""[Empirical]: recipes and models of the tests stay ten times below; a gradient that is counted
twice, halved or left out on one rank is 0.3 and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What training left: the loss and the gradient norm of each step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The parameters after the last step, beside those of one process.

    Args:
        num_judged: Parameters that moved far enough to tell.
        num_still: Parameters that did not, and are equal but for rounding.
        wrong: (parameter, how far it is apart, relative to its movement), the worst first.
        worst: The largest of these distances among all that were judged.
    """

    num_judged: int
    num_still: int
    wrong: tuple[tuple[str, float], ...]
    worst: float


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
    sent: tuple[Difference, ...]
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
        microbatches: Into how many it had to cut its batch, as the plan does, to compute the
            same: BatchNorm takes its statistics over what runs together.
    """

    world: int
    notes: tuple[str, ...]
    unmatched: tuple[str, ...]
    refusal: str = ""
    mesh: str = ""
    num_tensors: int = 0
    tolerance: Tolerance = SINGLE
    together: Training | None = None
    alone: Training | None = None
    microbatches: int = 1
    moved: Moved | None = None
    ranks: tuple[RankReport, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether nothing differs."""
        return not self.refusal and not self.findings()

    def findings(self) -> list[str]:
        """What differs, as words."""
        out = []
        assert self.together is not None
        assert self.alone is not None
        assert self.moved is not None
        for what, share, mine, other in (
            ("loss", self.tolerance.loss, self.together.losses, self.alone.losses),
            ("gradient norm", self.tolerance.relative, self.together.norms, self.alone.norms),
        ):
            # A quantity that is no number is near nothing.
            pairs = zip(mine, other, strict=True)
            if not all(abs(a - b) <= share * max(abs(b), 1e-6) for a, b in pairs):
                out.append(what)
        if self.moved.wrong:
            out.append("parameters")
        if any(rank.held != rank.predicted for rank in self.ranks):
            out.append("bytes held")
        if any(rank.sent and not rank.unknown for rank in self.ranks):
            out.append("collectives")
        return out


def refused(problems: Iterable[Problem]) -> Verdict:
    """The verdict on a plan that is wrong before a process starts."""
    return Verdict(world=0, notes=(), unmatched=(), refusal="\n".join(map(str, problems)))
