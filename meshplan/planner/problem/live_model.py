"""The interface between a live model and the planner, which does not import torch.

`runtime.live.traced` implements it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from meshplan.cost.types import Chain
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.plan.plan import Plan
from meshplan.spec.spec import Spec


class TpChoice(NamedTuple):
    """The choices of tensor parallelism that a block's costs and memory depend on.

    Attributes:
        size: Size of tp.
        sequence_parallel: If True, tp shards activations along the sequence.
        loss_parallel: If True, tp shards the loss along the vocabulary.
    """

    size: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False

    @classmethod
    def of(cls, spec: Spec) -> TpChoice:
        """Return the choices of a spec that states its mesh; `NO_TP` if tp is 1."""
        size = spec.mesh.get("tp", 1) if isinstance(spec.mesh, Mapping) else 1
        if not isinstance(size, int) or size == 1:
            return NO_TP
        return cls(size, spec.sequence_parallel, spec.loss_parallel)


NO_TP: Final = TpChoice()


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

    def decide(self, spec: Spec) -> Plan:
        """Return the plan that a spec declares for the model.

        Raises:
            PlanError: The plan does not fit the model, or the forward cannot be recorded.
        """

    def chain(self, tp: TpChoice) -> Chain:
        """Return the costs of the blocks, and of the modules before and after them.

        Args:
            tp: The choice of tensor parallelism. The costs are those of one rank of tp.

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
