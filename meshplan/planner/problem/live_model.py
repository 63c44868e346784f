"""Interface of a live model to the planner, without torch; `runtime.live.traced` implements it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from meshplan.cost.types import Chain
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.plan.plan import Plan
from meshplan.spec.spec import Spec


class Priced(NamedTuple):
    """A plan of a live model with nothing left open, with its memory and its costs.

    Attributes:
        plan: The plan, decided for the model.
        memory: The memory estimate, as `estimate` reports it.
        chain: Block costs as one rank of tp runs them under this plan, recompute included.
        flops: Flops of one sample, forward and backward, of all ranks of tp, without recompute.
    """

    plan: Plan
    memory: MemoryEstimate
    chain: Chain
    flops: float


class Traced(Protocol):
    """Costs and memory of a live model that ran on fake tensors."""

    def refuses(self, spec: Spec) -> str:
        """Return why a spec cannot be searched; "" if it can."""

    def is_priced(self, spec: Spec) -> bool:
        """Return True if a spec with nothing left open can be priced, searched or not."""

    def priced(self, spec: Spec) -> Priced:
        """Price a plan that leaves nothing open.

        Raises:
            PlanError: The plan does not fit the model, or something in it has no figures.
        """

    def chain(self) -> Chain:
        """Return the costs of the blocks, and of the modules before and after them.

        Raises:
            PlanError: The model cannot be traced.
        """

    def memory(self, plan: Plan, stop_above_bytes: float = float("inf")) -> MemoryEstimate:
        """Estimate the memory of every rank, never below what the plan needs.

        Args:
            plan: A plan of this model.
            stop_above_bytes: Bytes that a rank may reserve before the estimate is abandoned.

        Raises:
            PlanError: Something in the plan has no rule.
            OverError: Some rank reserves more than `stop_above_bytes`.
        """

    def certify(self, plan: Plan) -> MemoryEstimate:
        """Estimate the memory of every rank from a microbatch traced under this very plan.

        `memory` uses the trace from now on.
        """
