"""What is asked of the planner, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from meshplan.cost.profile import Profile
from meshplan.cost.types import Chain
from meshplan.layout.hardware import Cluster
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.model.graph import ModelGraph
from meshplan.plan.plan import Plan
from meshplan.planner.problem.live_model import Traced
from meshplan.planner.solve.config import Candidate
from meshplan.planner.space.space import Rejected
from meshplan.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is to be planned.

    Args:
        read: The spec of the plan file with more statements.
        graph: The model.
        few: The same with few blocks, for trials of what it allows; None takes the model itself.
        shorter: The same with so many blocks, or with these of its own; None where nobody can
            make it.
        objective: By which one plan is better: time, memory, balanced or cost.
        is_stopped: Whether somebody wants the best so far now.
        profile: What the machine was measured to reach; None takes what is known of such devices.
        profile_path: The file that it is from.
        device: A name of `hardware`, or "cuda".
        limit_bytes: What one may hold.
        cluster: The machine.
        time_limit_s: After which the best so far is the answer; None for no limit.
        traced: What a live model tells; None where its config tells all.
        chains: What was read off for the planner before, by what it was read off of.
        certify: What a trace says of a plan with nothing left open, or why none tells; None where
            there is no model to trace, or `traced` does.
    """

    read: Callable[[Sequence[str]], Spec]
    graph: ModelGraph
    device: str
    limit_bytes: int
    cluster: Cluster
    time_limit_s: float | None = None
    few: ModelGraph | None = None
    shorter: Callable[[int | tuple[int, ...]], ModelGraph] | None = None
    traced: Traced | None = None
    certify: Callable[[Spec], MemoryEstimate | str] | None = None
    objective: str = "time"
    is_stopped: Callable[[], bool] = lambda: False
    profile: Profile | None = None
    profile_path: Path | None = None
    chains: dict[tuple[int, str, int], Chain] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One way to train the model that fits: as words, decided, and with its memory.

    Args:
        stated: What the plan file would have to say, by path.
        seconds: Of a step.
        candidate: Of the search that it is from; None where it is from none.
    """

    stated: Mapping[str, Any]
    seconds: float
    plan: Plan
    memory: MemoryEstimate
    candidate: Candidate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The same search on better and better machines, in seconds of a step."""

    roofline_s: float
    no_network_s: float
    no_memory_limit_s: float
    plan_s: float


class Bound(NamedTuple):
    """One configuration from below: nothing with it takes less time, and nothing less memory.

    Attributes:
        seconds: Of a step, whatever memory it takes.
        num_bytes: Of the rank that holds most, whatever time that takes.
    """

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the planner came to.

    Args:
        spec: As the plan file says it.
        chosen: The simplest of those within SLACK of the best; None where nothing fits.
        best_s: Seconds of the fastest.
        gap: How much faster something in the space may be than the fastest; by another objective,
            how much better by that.
        alternatives: Others that fit, fastest first.
        rejected: What is not in the space, or not the answer, and why.
        num_configs: Rows of the space.
        num_options: Choices of each block.
        samples: Of a step.
        flops: Of a step, without recomputation.
        is_whole: Whether the search came to its end.
        is_interrupted: Whether somebody ended it; else the time was up.
        profile_path: The file that the profile is from; None for one of meshplan's own.
        bounds: Of all configurations.
        measured: What the memory room was asked for, and told, fitting or not.
        unoffloaded_s: As of `Found`; None where nobody looked.
        objective: By which it is the best.
    """

    spec: Spec
    chosen: Evaluated | None
    best_s: float
    gap: float
    alternatives: tuple[Evaluated, ...]
    rejected: tuple[Rejected, ...]
    ladder: Ladder | None
    num_configs: int
    num_options: int
    num_measured: int
    search_s: float
    samples: int
    tokens: int
    flops: float
    profile: Profile
    limit_bytes: int
    is_whole: bool = True
    is_interrupted: bool = False
    objective: str = "time"
    profile_path: Path | None = None
    bounds: tuple[Bound, ...] = ()
    measured: tuple[Evaluated, ...] = ()
    unoffloaded_s: float | None = None

    @property
    def ways(self) -> tuple[Evaluated, ...]:
        """All that are told: each fits."""
        return (*((self.chosen,) if self.chosen else ()), *self.alternatives)

    def tokens_per_s(self, way: Evaluated) -> float:
        """Of one device."""
        return self.tokens / way.seconds / way.plan.mesh.world_size

    def samples_per_s(self, way: Evaluated) -> float:
        """Of one device."""
        return self.samples / way.seconds / way.plan.mesh.world_size

    def mfu(self, way: Evaluated) -> float:
        """Share of the peak that the model's own flops are: what is recomputed does not count."""
        return self.flops / way.seconds / self.profile.peak_flops / way.plan.mesh.world_size
