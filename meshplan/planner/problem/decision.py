"""The planner's request (`PlanRequest`) and its answer (`Decision`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from meshplan.cost.profile import Profile
from meshplan.cost.types import Chain
from meshplan.layout.hardware import Cluster
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.model.graph import ModelGraph
from meshplan.plan.plan import Plan
from meshplan.planner.problem.live_model import Priced, Traced
from meshplan.planner.solve.config import Candidate
from meshplan.planner.solve.shares import Shares
from meshplan.planner.space.space import PRICED_ALONE, Rejected
from meshplan.shown import shown
from meshplan.spec.keys import TIME_LIMIT_S
from meshplan.spec.spec import Spec


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A model, a machine and a plan file whose open choices are to be planned.

    Args:
        read: Returns the spec of the plan file with the given "path=value" statements on top.
        graph: The model.
        few: The model with only a few blocks, used to try which choices it allows; None to use
            `graph`.
        shorter: Builds the model with a given number of blocks, or with only the blocks of the
            given indices; None if that is not possible.
        objective: The measure by which plans are compared: "time", "memory", "balanced" or "cost".
        is_stopped: Returns True once the user wants the best plan found so far.
        other_layouts: If True, the fastest plan of each other kind of layout is searched too, as
            `Decision.other_layouts`.
        identity: Returns a hash of the code, the modules and the recorded forward of a live model;
            "" if the forward cannot be recorded, or if the model is no live one.
        profile: Measured speeds of the machine; None to use the tables of known devices.
        profile_path: The file that `profile` was read from; None if it was read from none.
        device: A device name of `layout.hardware`, or "cuda".
        limit_bytes: Bytes of memory that one device may use.
        cluster: The machine.
        time_limit_s: Seconds after which the best plan so far is the answer; None for no limit.
        traced: Costs and memory of a live model; None if the model's config gives them.
        chains: Cache of the block costs derived so far, by (id of the graph, repr of the spec, size
            of ep).
        certify: Estimates the memory of a complete plan from a trace of the model, or returns why
            the model cannot be traced; None if there is no model to trace, or if `traced` does
            this.
        price: Traces a plan with nothing left open, for its memory and its costs; None if there is
            no model to trace, or if `traced` does this.
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
    price: Callable[[Spec], Priced] | None = None
    identity: Callable[[], str] = field(default=lambda: "", compare=False)
    objective: str = "time"
    is_stopped: Callable[[], bool] = lambda: False
    other_layouts: bool = False
    profile: Profile | None = None
    profile_path: Path | None = None
    chains: dict[tuple[int, str, int], Chain] = field(default_factory=dict, compare=False)

    def stating(self, statements: Sequence[str]) -> PlanRequest:
        """Return the request with "path=value" statements on top of the plan file."""
        return replace(self, read=lambda more: self.read([*statements, *more]))

    @property
    def limit_s(self) -> float:
        """`time_limit_s`, or the default limit, for searches that never run without one."""
        return TIME_LIMIT_S if self.time_limit_s is None else self.time_limit_s


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A complete plan with its step time and its memory estimate.

    Args:
        stated: {path: value} statements that turn the plan file into this plan.
        seconds: Seconds of one step.
        plan: The decided plan.
        memory: Memory estimate of the plan.
        candidate: The candidate of the search that became this plan; None if the plan does not
            come from a search.
    """

    stated: Mapping[str, Any]
    seconds: float
    plan: Plan
    memory: MemoryEstimate
    candidate: Candidate | None = None


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLayout:
    """The fastest plan that fits of one kind of layout, which the chosen plan is not of.

    Args:
        kind: The kind, a key of `planner.objectives.layouts.KINDS`, such as "tp".
        evaluated: The plan; None if there is none.
        why: The reason why there is no plan; "" if there is one.
        is_whole: If True, `evaluated` is proved to be the fastest of its kind, or `why` is proved.
            If False, the search was stopped before.
        is_in_space: If False, the search space has no configuration of this kind.
    """

    kind: str
    evaluated: Evaluated | None = None
    why: str = ""
    is_whole: bool = True
    is_in_space: bool = True


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Seconds of a step of the plan, and of the best plan on an idealised machine.

    Args:
        roofline_s: Seconds of the model's FLOPs at the devices' peak throughput.
        no_network_s: Seconds of the best plan if communication took no time.
        no_memory_limit_s: Seconds of the best plan if devices had unlimited memory.
        plan_s: Seconds of the fastest plan that fits.
        shares: The parts of `plan_s`; None if they are not known.
    """

    roofline_s: float
    no_network_s: float
    no_memory_limit_s: float
    plan_s: float
    shares: Shares | None = None


class Sensitivity(NamedTuple):
    """The chosen plan beside the fastest plan, if something in the cost model is off.

    Attributes:
        case: What is off, such as "bandwidth between nodes 10% lower".
        constant: Name of the constant, a field of `Profile`; "communication" for all of them.
        change: Share by which the constant is larger, such as -0.1.
        seconds: Seconds of a step of the chosen plan then.
        best: The fastest plan then. Its `seconds` are those of the constants as they are.
        best_s: Seconds of a step of `best` then.
    """

    case: str
    constant: str
    change: float
    seconds: float
    best: Evaluated
    best_s: float

    @property
    def regret(self) -> float:
        """Share by which the chosen plan is slower than the fastest."""
        return self.seconds / self.best_s - 1


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness:
    """Loss of the chosen plan if constants of the cost model are off.

    The regret of a plan is the largest share by which it is slower than the fastest plan, over all
    `sensitivities` and the constants as they are.

    Args:
        share: Share by which each constant is taken to be off, such as 0.1.
        sensitivities: One for each constant that plans depend on and each direction, and one each
            for slower and for faster communication against computation; the largest regret first.
        regret: Regret of the chosen plan.
        fastest: The fastest plan by the constants as they are.
        fastest_regret: Regret of `fastest`.
        least_regret: Lower bound on the regret of every plan of the space.
        is_changed: If True, the chosen plan is another one than without `solve.robust`.
        is_whole: If True, the fastest plan of every sensitivity was proved. If False, a search was
            stopped before, and regrets may be larger.
    """

    share: float
    sensitivities: tuple[Sensitivity, ...]
    regret: float
    fastest: Evaluated
    fastest_regret: float
    least_regret: float
    is_changed: bool
    is_whole: bool


class Bound(NamedTuple):
    """Lower bounds on the step time and on the memory of one configuration.

    Attributes:
        seconds: Seconds of a step, with unlimited memory.
        num_bytes: Bytes of the fullest rank, with unlimited time.
    """

    seconds: float
    num_bytes: int


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The chosen plan, the alternatives, and how far the search got.

    Args:
        spec: The spec of the plan file.
        chosen: The simplest plan within `SLACK` of the best one; None if nothing fits.
        best_s: Seconds of a step of the fastest plan that fits; infinite if nothing fits.
        gap: Share by which some plan of the space may be faster than the fastest plan found. If the
            objective is not "time", share by which it may be better by that objective.
        alternatives: Other plans that fit, fastest first.
        rejected: Values left out of the space, and configurations that were refused, with reasons.
        ladder: The best step times on idealised machines; None if they were not searched.
        num_configs: Number of configurations in the space.
        num_options: Number of options that each block chooses from.
        num_measured: Number of candidates whose memory was estimated.
        search_s: Seconds that planning took.
        samples: Samples of a step, summed over ranks.
        flops: Flops of a step, summed over ranks, without recomputation.
        profile: Speeds of the machine that the search used.
        limit_bytes: Bytes of memory that one device may use.
        is_whole: If True, the search ran to its end; if False, it was stopped before.
        is_interrupted: If True, the user stopped the search. If both this and `is_whole` are False,
            the time limit stopped it.
        objective: The objective that the plan was chosen by.
        profile_path: The file that the profile was read from; None if the speeds are those that
            meshplan knows of the devices.
        bounds: Lower bounds of each configuration on time and memory.
        measured: Plans with complete memory estimates, whether they fit or not.
        unoffloaded_s: Seconds of a step of the fastest plan that fits and offloads no more than the
            plan file states; infinite if there is no such plan; None if no search ran.
        other_layouts: The fastest plan of each kind of layout that the chosen plan is not of; () if
            the request did not ask for them, or if they are not searched for its objective.
        robustness: What the chosen plan loses if constants are off; None unless the plan file
            states `solve.robust` and plans were compared.
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
    other_layouts: tuple[OtherLayout, ...] = ()
    robustness: Robustness | None = None

    @property
    def why_priced(self) -> str:
        """Reason why only the plan as it is stated was priced; "" if plans were searched."""
        return next((each.why for each in self.rejected if each.what == PRICED_ALONE), "")

    @property
    def evaluated_plans(self) -> tuple[Evaluated, ...]:
        """The chosen plan, if any, and its alternatives. All of them fit."""
        return (*((self.chosen,) if self.chosen else ()), *self.alternatives)

    @property
    def tokens(self) -> int:
        """Tokens of a step, summed over ranks."""
        return self.samples * (self.spec.batch.seq_len or 0)

    def tokens_per_s(self, evaluated: Evaluated) -> float:
        """Return the tokens per second and device of a plan."""
        return self.tokens / evaluated.seconds / evaluated.plan.mesh.world_size

    def samples_per_s(self, evaluated: Evaluated) -> float:
        """Return the samples per second and device of a plan."""
        return self.samples / evaluated.seconds / evaluated.plan.mesh.world_size

    def mfu(self, evaluated: Evaluated) -> float:
        """Return the model flops utilisation (MFU) of a plan, between 0 and 1.

        It is the share of the devices' peak throughput that the model's flops use. Recomputed flops
        do not count.
        """
        return (
            self.flops
            / evaluated.seconds
            / self.profile.peak_flops
            / evaluated.plan.mesh.world_size
        )
