"""The interface between a live model and the planner, which does not import torch.

`runtime.live.traced` implements it.
"""

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

    def chain(self) -> Chain:
        """Return the costs of the blocks, and of the modules before and after them.

        Raises:
            PlanError: The model cannot be traced.
        """

    def memory(self, plan: Plan, stop_above_bytes: float = float("inf")) -> MemoryEstimate:
        """Estimate the memory of every rank; the estimate is never below what the plan needs.

        Args:
            plan: A plan of this model.
            stop_above_bytes: Bytes that a rank may reserve before the estimate is abandoned.

        Raises:
            PlanError: The memory of something in the plan cannot be estimated.
            OverError: Some rank reserves more than `stop_above_bytes`.
        """

    def certify(self, plan: Plan) -> MemoryEstimate:
        """Estimate the memory of every rank from a microbatch traced under this very plan.

        Later calls of `memory` use the trace, too.
        """
