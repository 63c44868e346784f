"""Losses of halves of the tokens: what they tell where samples cannot be parted, or are under cp.

Along cp every rank has a part of each sample, and the step averages over ranks: so a loss must be
put together from those of parts of the sequence as it is from those of samples. Only exact laws
are refused. A loss that looks at neighbouring tokens follows none of them, and is let be.
"""

from __future__ import annotations

import math

from meshplan.errors import Problem
from meshplan.plan import Plan
from meshplan.runtime.checks.halves import Three, agrees, token_mean
from meshplan.runtime.loss_weights import IGNORED, PAIR


def lone_problem(three: Three, are_uneven: bool, plan: Plan) -> Problem | None:
    """What the halves of one sample tell of a loss that the plan takes for a mean over samples.

    Args:
        are_uneven: Whether samples hold unequal numbers of targets that are not -100.
    """
    whole, first, second = three.whole, three.first, three.second
    if plan.spec.loss != "mean" or whole.count is not None or not math.isfinite(whole.loss):
        return None
    of_tokens = token_mean(three)
    shown = f"it is {whole.loss:.6g}, and {first.loss:.6g} and {second.loss:.6g} for each half"
    origin = plan.spec.origin("loss")
    if of_tokens is not None and agrees(of_tokens, three):
        what = (
            f"loss_fn returns a mean over the targets that are not {IGNORED} ({shown}), and "
            "microbatches of one sample each hold unequal numbers of them: the mean of their means "
            "is not that of one process"
        )
        return Problem(what, origin, f"say loss: tokens; or {PAIR}") if are_uneven else None
    if agrees(first.loss + second.loss, three):
        what = f"loss_fn returns a sum, and the plan takes it for a mean: {shown}"
        return Problem(what, origin, "say loss: sum, or divide by the number of samples")
    return None  # A loss that looks at neighbours says no more about parts of one sample.


def sequence_problem(three: Three, are_uneven: bool, plan: Plan) -> Problem | None:
    """Why losses of parts of the sequence, put together as the plan says, are not the loss.

    Args:
        are_uneven: Whether ranks of cp hold unequal numbers of targets that are not -100.
    """
    whole, first, second = three.whole, three.first, three.second
    kind, origin = plan.spec.loss, plan.spec.origin("loss")
    is_over_none = whole.tokens == 0 and math.isnan(whole.loss)
    if not math.isfinite(whole.loss) and not is_over_none:
        return None
    is_sum = agrees(first.loss + second.loss, three)
    is_mean = agrees((first.loss + second.loss) / 2, three)
    of_tokens = token_mean(three)
    is_token_mean = of_tokens is not None and agrees(of_tokens, three)
    if is_sum and (is_mean or is_token_mean):  # Zeros, or one half without any token.
        return None
    shown = (
        f"it is {whole.loss:.6g} for a part of the sequence, and {first.loss:.6g} and "
        f"{second.loss:.6g} for each half of that"
    )
    if whole.count is not None:
        return _count_problem(three, is_sum, is_mean or is_token_mean, shown)
    if kind == "sum" and (is_mean or is_token_mean):
        what = (
            "the plan says loss: sum, and the losses of the parts of the sequence that ranks of cp "
            f"hold are added up, but loss_fn averages over tokens: {shown}"
        )
        return Problem(what, origin, f"add up over tokens; or {PAIR}")
    if kind != "sum" and is_sum:
        what = (
            "loss_fn adds up over tokens, and ranks of cp, each with a part of the sequence, are "
            f"averaged: {shown}"
        )
        return Problem(what, origin, f"divide by the number of tokens it was given; or {PAIR}")
    if kind == "mean" and are_uneven and (is_over_none or (is_token_mean and not is_mean)):
        what = (
            f"loss_fn returns a mean over the targets that are not {IGNORED} ({shown}), and parts "
            "of the sequence hold unequal numbers of them: the mean of the means of ranks of cp is "
            "not that of one process"
        )
        return Problem(what, origin, f"say loss: tokens; or {PAIR}")
    return None


def _count_problem(three: Three, is_sum: bool, is_mean: bool, shown: str) -> Problem | None:
    """Why the sums over parts of the sequence, divided by their counts, are not the mean."""
    counts = [value.count or 0.0 for value in (three.whole, three.first, three.second)]
    is_counted = abs(counts[0] - counts[1] - counts[2]) <= 1e-6 * abs(counts[0])
    is_constant = counts[0] == counts[1] == counts[2]
    if not (is_sum and is_constant) and not (is_mean and not is_sum and is_counted):
        return None
    over = "tokens, and the count does not" if is_sum else "samples, and the count is of tokens"
    return Problem(
        f"loss_fn returns (sum, count), of which ranks of cp hold parts: the sum is over {over}: "
        f"{shown}, and counts {', '.join(f'{count:g}' for count in counts)}",
        fix="let both be over the tokens it was given, neither divided",
    )
