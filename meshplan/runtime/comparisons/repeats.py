"""Check that a loss function returns the same for the second microbatch as it would for the first.

One process calls it once in a step, and a step of several microbatches once for each. A function
that counts its calls, as for a weight that grows, or that keeps a running mean of its losses, then
gives later microbatches another loss.
"""

from __future__ import annotations

from typing import Any

import torch

from meshplan.errors import Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.lazy_logits import LazyLogits
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.comparisons.asking import LossFn, ask, refuse_alone
from meshplan.runtime.comparisons.halves import value_of

_SAME, _SAME_OF_HALF = 1e-5, 1e-2
"""Relative differences of two calls that kernels may make which add up in any order."""


def repeat_problem(
    loss_fn: LossFn, output: Any, targets: Any, given: Any, plan: Plan
) -> Problem | None:
    """Call the loss function for the first microbatch again; return why its losses differ.

    Args:
        loss_fn: The user's loss function.
        output: Output of the model for the microbatch.
        targets: Targets of the microbatch.
        given: Return value of the training's own call.
        plan: The plan that the model runs under.

    Returns:
        None if both calls return the same loss, or cannot be compared: the function is random, or
        returns no loss.
    """
    first = value_of(given, targets)
    try:
        again = ask(loss_fn, output, targets)
    except Exception as error:  # A function that asserts something about its state.
        if any(isinstance(tensor, LazyLogits) for _, tensor in tensors_in(output)):
            refuse_alone(error)  # Other ranks may wait in the head's collectives.
        return None
    second = value_of(again.returned, targets)
    if first is None or second is None or again.is_random:
        return None
    before, after = first[0].loss, second[0].loss
    share = _SAME if torch.finfo(first[1]).bits >= 32 else _SAME_OF_HALF
    if before != before or abs(before - after) <= share * max(abs(before), abs(after)):
        return None
    return Problem(
        f"loss_fn returns {before:.6g} for a microbatch, and {after:.6g} when it is called for it "
        "again: it keeps something from call to call, such as a count or a mean. One process calls "
        f"it once in a step, this plan {plan.num_microbatches} times",
        plan.spec.origin("pipeline.microbatches" if plan.assignment.stages else "batch"),
        "change what it keeps once a step, outside of loss_fn, or take one microbatch",
    )
