"""How a plan computes its loss: what is on while a model, its loss and their backward run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from meshplan.plan.plan import Plan
from meshplan.runtime.apply.chunked_loss import ChunkedLossMode
from meshplan.runtime.apply.vocab_parallel_loss import LossParallel


def loss_mode(plan: Plan, *, is_trial: bool = False) -> AbstractContextManager[Any]:
    """On parts of the vocabulary, over parts of the tokens, or as torch does it.

    Args:
        is_trial: Whether a forward runs beside the training, of which no loss need be taken.
    """
    if plan.assignment.loss_parallel:
        return LossParallel()
    if plan.assignment.chunked_loss is None:
        return nullcontext()
    return ChunkedLossMode(plan, is_trial=is_trial)
