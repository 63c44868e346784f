"""How a plan computes its loss: what is on while a model, its loss and their backward run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from meshplan.plan import Plan
from meshplan.runtime.chunked import ChunkedLoss
from meshplan.runtime.loss import LossParallel


def loss_mode(plan: Plan) -> AbstractContextManager[Any]:
    """On parts of the vocabulary, over parts of the tokens, or as torch does it."""
    if plan.assignment.loss_parallel:
        return LossParallel()
    return ChunkedLoss(plan) if plan.assignment.chunked_loss is not None else nullcontext()
