"""The context in which a model, its loss and their backward run, as the plan's loss demands."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.chunked_loss import ChunkedLossMode
from meshplan.runtime.apply.loss.vocab_parallel_loss import LossParallel


def loss_mode(plan: Plan, *, is_trial: bool = False) -> AbstractContextManager[Any]:
    """Return the context for the plan's loss: vocabulary-parallel, chunked over tokens, or plain.

    Args:
        plan: The plan of the model.
        is_trial: If True, the forward is a trial outside of training, and it is no error if it
            computes no loss.
    """
    if plan.assignment.loss_parallel:
        return LossParallel()
    if plan.assignment.chunked_loss is None:
        return nullcontext()
    return ChunkedLossMode(plan, is_trial=is_trial)
