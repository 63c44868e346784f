"""What a live model tells the planner: `runtime.live.planned` traces it; no torch here."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from meshplan.cost.types import Chain
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.plan.plan import Plan
from meshplan.spec.spec import Spec


class Priced(NamedTuple):
    """A plan of a live model, as it is stated.

    Attributes:
        plan: Decided for the model.
        memory: As `estimate` tells it.
        chain: The model as one rank of tp runs it, what runs again in backward included.
        flops: Of one sample, forward and backward, of all ranks of tp and without what runs again.
    """

    plan: Plan
    memory: MemoryEstimate
    chain: Chain
    flops: float


class Traced(Protocol):
    """A model that was run on tensors without numbers."""

    def refuses(self, spec: Spec) -> str:
        """Why something in a spec has no figures, "" if all has."""

    def is_priced(self, spec: Spec) -> bool:
        """Tell whether a spec with nothing left open has figures, searched or not."""

    def priced(self, spec: Spec) -> Priced:
        """Price a plan that leaves nothing open.

        Raises:
            PlanError: The plan does not fit the model, or something in it has no figures.
        """

    def chain(self) -> Chain:
        """What its blocks cost, and what lies before and after them.

        Raises:
            PlanError: The model cannot be traced.
        """

    def memory(self, plan: Plan, most_bytes: float = float("inf")) -> MemoryEstimate:
        """What every rank needs, never less than it is.

        Args:
            most_bytes: What the tensors of a rank may be at the most for the rest to matter.

        Raises:
            PlanError: Something in the plan has no rule.
            OverError: Some rank's tensors are more than `most_bytes`.
        """

    def certify(self, plan: Plan) -> MemoryEstimate:
        """The same from a microbatch traced as the plan has it; `memory` knows it from now on."""
