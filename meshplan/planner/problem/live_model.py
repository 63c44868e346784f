"""The interface between a live model and the planner, which does not import torch.

`runtime.live.traced` implements it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, Protocol

from meshplan.cost.types import Chain
from meshplan.errors import PlanError, Problem
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.plan.plan import Plan
from meshplan.spec.spec import AUTO, Precision, Spec


class TracedChoices(NamedTuple):
    """The choices of a plan on which the costs and the activations of a live model's blocks depend.

    Attributes:
        tp: Size of tp.
        sequence_parallel: If True, tp shards activations along the sequence.
        loss_parallel: If True, tp shards the loss along the vocabulary.
        tp_plan: Where the styles of tp come from; "" if tp is 1.
        precision: The dtypes.
        loss_chunks: The number of chunks of the loss, as the plan states it.
        rules: The selectors and settings of rules that change what a block computes.
    """

    tp: int
    sequence_parallel: bool
    loss_parallel: bool
    tp_plan: str
    precision: Precision
    loss_chunks: int | str
    rules: tuple[Hashable, ...]

    @classmethod
    def of(cls, spec: Spec) -> TracedChoices:
        """Return the choices of a spec; tp is 1 if the spec leaves its size open."""
        size = spec.mesh.get("tp", 1) if isinstance(spec.mesh, Mapping) else 1
        tp = size if isinstance(size, int) else 1
        rules = (
            (rule.match, tuple(sorted(rule.place.items())), rule.data, rule.precision, rule.apply)
            for rule in spec.rules
        )
        # Where the plan states no styles, the planner adds `tp_plan: auto` with tp.
        is_auto = spec.tp_plan == "none" and "tp_plan" not in spec.origins
        return cls(
            tp=tp,
            sequence_parallel=tp > 1 and spec.sequence_parallel,
            loss_parallel=tp > 1 and spec.loss_parallel,
            tp_plan="" if tp == 1 else AUTO if is_auto else spec.tp_plan,
            precision=spec.precision,
            loss_chunks=1 if spec.loss_chunks == AUTO else spec.loss_chunks,
            rules=tuple(rule for rule in rules if any(rule[1:])),
        )


class StageError(PlanError):
    """A pipeline stage of a live model cannot run as a plan cuts it.

    Attributes:
        place: Index along pp of the rank that has the stage.
    """

    def __init__(self, problems: Iterable[Problem], place: int) -> None:
        super().__init__(problems)
        self.place = place


class Priced(NamedTuple):
    """A plan with nothing left open, with its memory and its costs.

    Attributes:
        plan: The plan, decided for the model.
        memory: The memory estimate, as `meshplan estimate` reports it.
        chain: Block costs of one tp rank under this plan, recompute included.
        flops: Flops of the forward and backward of one sample, summed over tp ranks, without
            recompute.
    """

    plan: Plan
    memory: MemoryEstimate
    chain: Chain
    flops: float


class Traced(Protocol):
    """Costs and memory of a live model that ran on fake tensors."""

    def refuses(self, spec: Spec) -> str:
        """Return why the planner cannot search the choices of a spec; "" if it can."""

    def is_priced(self, spec: Spec) -> bool:
        """Return True if `priced` takes a spec with nothing left open.

        Such a spec may use features that `refuses` rejects for a search.
        """

    def priced(self, spec: Spec) -> Priced:
        """Return the memory and the costs of a plan that leaves nothing open.

        Raises:
            PlanError: The plan does not suit the model, or the cost model has no figures for
                something in it.
        """

    def decide(self, spec: Spec) -> Plan:
        """Return the plan that a spec declares for the model.

        Raises:
            PlanError: The plan does not fit the model, or the forward cannot be recorded.
        """

    def chain(self, spec: Spec, stage_samples: int = 0) -> Chain:
        """Return the costs of the blocks, and of the modules before and after them.

        Args:
            spec: A spec whose `TracedChoices` count. The costs are those of one rank of tp. With
                `stage_samples`, it has a pipeline.
            stage_samples: As in `ProgramKey`.

        Raises:
            PlanError: The model cannot be traced.
        """

    def memory(self, plan: Plan, stop_above_bytes: float = float("inf")) -> MemoryEstimate:
        """Estimate the memory of every rank; the estimate is never below what the plan needs.

        Args:
            plan: A plan of this model.
            stop_above_bytes: Bytes that a rank may reserve before the estimate is abandoned.

        Raises:
            StageError: A pipeline stage cannot run as the plan cuts it.
            PlanError: The memory of something in the plan cannot be estimated.
            OverError: Some rank reserves more than `stop_above_bytes`.
        """

    def certify(self, plan: Plan) -> MemoryEstimate:
        """Estimate the memory of every rank from a microbatch traced under this very plan.

        Later calls of `memory` use the trace, too.
        """
