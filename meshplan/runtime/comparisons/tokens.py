"""Compare the loss of a batch with the losses of the two halves of its tokens.

This is done if a microbatch has only one sample, and under context parallelism. Along cp every rank
has a part of each sample, and the step averages the losses of the ranks. So the losses of parts of
the sequence must combine to the loss of the sequence as those of samples combine to the loss of the
batch. Only a loss that follows a wrong rule exactly is rejected, such as a sum in place of a mean.
A loss that depends on neighbouring tokens follows no rule exactly, and is accepted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from meshplan.errors import Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.loss_weights import IGNORED, PAIR, tokens_by_sample
from meshplan.runtime.comparisons.cutting import mask_sum, num_elements
from meshplan.runtime.comparisons.halves import Three, agrees, mask_mean, token_mean

TOKENS, MASK, ELEMENTS = AMOUNTS = range(3)
"""Indices into the result of `amounts_of`: the kinds of elements that a mean may be taken over.
Parts of a batch may contain unequal numbers of each kind."""


def amounts_of(targets: Any) -> tuple[float, ...]:
    """Return (number of targets that are not -100, sum of a mask, number of elements).

    An entry is 0 if the targets have no such tensor. Elements are counted only if the number of
    targets that are not -100 is not known.
    """
    tokens = tokens_by_sample(targets)
    if tokens is None:
        return 0.0, mask_sum(targets) or 0.0, num_elements(targets)
    return float(tokens.sum()), mask_sum(targets) or 0.0, 0.0


@dataclass(frozen=True, slots=True)
class Uneven:
    """Conclusions from losses of halves of the tokens about what the loss is a mean over.

    Attributes:
        problems: By index (`TOKENS`, `MASK` or `ELEMENTS`), the problem to raise if parts of a step
            turn out to contain unequal numbers of these elements. Has an entry for each kind that
            the loss may be a mean over, according to these losses.
        is_over: For each index, False if the loss is certainly no mean over these elements.
    """

    problems: dict[int, Problem] = field(default_factory=dict)
    is_over: tuple[bool, ...] = (True, True, True)


def uneven_of(three: Three, plan: Plan) -> Uneven:
    """Find out what the loss is a mean over, from the losses of halves of the tokens."""
    whole, first, second = three.whole, three.first, three.second
    if plan.spec.loss != "mean" or whole.count is not None:
        return Uneven()
    is_none = math.isnan(whole.loss) and whole.tokens == 0
    if not math.isfinite(whole.loss) and not is_none:
        return Uneven()
    if agrees(first.loss + second.loss, three):  # All zeros, or one half without any token.
        return Uneven()
    shown = f"{whole.loss:.6g}, and {first.loss:.6g} and {second.loss:.6g} for the two halves"
    # Without token counts, test if the loss is a mean over all elements, which is the mean of the
    # losses of the two halves.
    of_all = (first.loss + second.loss) / 2 if first.tokens is None else None
    means = (token_mean(three), mask_mean(three), of_all)
    follows = [mean is not None and agrees(mean, three) for mean in means]
    follows[TOKENS] |= is_none
    where = "the batch" if plan.assignment.context is None else "the sequence"
    over = (f"the targets that are not {IGNORED}", "the elements that a mask keeps", "all tokens")
    fixes = (
        f"set loss: tokens; or {PAIR}",
        PAIR,
        f"{PAIR}; or set batch: {{per_rank: true}} if each rank's batch is independent",
    )
    problems = {
        amount: Problem(
            f"loss_fn returns a mean over {over[amount]} ({shown}), and parts of {where} "
            "contain unequal numbers of them: the mean of the parts' losses is not the loss of one "
            "process",
            plan.spec.origin("loss"),
            fixes[amount],
        )
        for amount in AMOUNTS
        if follows[amount] and not (amount == ELEMENTS and plan.spec.batch.per_rank)
    }
    halves = zip(
        (first.tokens, first.masked, None), (second.tokens, second.masked, None), strict=True
    )
    return Uneven(problems, tuple(f or a == b for f, (a, b) in zip(follows, halves, strict=True)))


def lone_problem(three: Three, plan: Plan) -> Problem | None:
    """Return a problem if the plan expects a mean, but the loss of one sample is a sum over tokens.

    Nothing else can be concluded from a single sample: if the loss depends on neighbouring tokens,
    the losses of its halves need not combine to that of the sample.
    """
    whole, first, second = three.whole, three.first, three.second
    if plan.spec.loss != "mean" or whole.count is not None or not math.isfinite(whole.loss):
        return None
    of_tokens = token_mean(three)
    is_mean = of_tokens is not None and agrees(of_tokens, three)
    if is_mean or not agrees(first.loss + second.loss, three):
        return None
    shown = f"{whole.loss:.6g}, and {first.loss:.6g} and {second.loss:.6g} for the two halves"
    what = f"loss_fn returns a sum, but the plan expects a mean: {shown}"
    fix = "set loss: sum, or divide by the number of samples"
    return Problem(what, plan.spec.origin("loss"), fix)


def sequence_problem(three: Three, plan: Plan) -> Problem | None:
    """Return why the losses of a sequence's halves do not combine under cp; None if they do."""
    whole, first, second = three.whole, three.first, three.second
    kind, origin = plan.spec.loss, plan.spec.origin("loss")
    if not math.isfinite(whole.loss):
        return None
    is_sum = agrees(first.loss + second.loss, three)
    is_mean = agrees((first.loss + second.loss) / 2, three)
    of_tokens = token_mean(three)
    is_token_mean = of_tokens is not None and agrees(of_tokens, three)
    if is_sum and (is_mean or is_token_mean):  # All zeros, or one half without any token.
        return None
    shown = (
        f"loss_fn returns {whole.loss:.6g} for a part of the sequence, and {first.loss:.6g} and "
        f"{second.loss:.6g} for the two halves of that part"
    )
    if whole.count is not None:
        return _count_problem(three, is_sum, is_mean or is_token_mean, shown)
    if kind == "sum" and (is_mean or is_token_mean):
        what = (
            "the plan states loss: sum, so the losses that ranks of cp compute for their parts of "
            f"the sequence are added up, but loss_fn averages over tokens: {shown}"
        )
        return Problem(what, origin, f"return the sum over tokens; or {PAIR}")
    if kind != "sum" and is_sum:
        what = (
            "loss_fn returns a sum over tokens, but the losses that ranks of cp compute for their "
            f"parts of the sequence are averaged: {shown}"
        )
        return Problem(what, origin, f"divide by the number of given tokens; or {PAIR}")
    return None


def _count_problem(three: Three, is_sum: bool, is_mean: bool, shown: str) -> Problem | None:
    """Return a problem if the sum and count that loss_fn returns are not over the same elements.

    Along cp both are added up over ranks, so both must be over the tokens of this rank.

    Args:
        three: Values for a part of the sequence and its two halves.
        is_sum: If True, the sums of the halves add up to that of the whole.
        is_mean: If True, the sums of the halves average to that of the whole.
        shown: The three sums as text.
    """
    counts = [value.count or 0.0 for value in (three.whole, three.first, three.second)]
    is_counted = abs(counts[0] - counts[1] - counts[2]) <= 1e-6 * abs(counts[0])
    is_constant = counts[0] == counts[1] == counts[2]
    if not (is_sum and is_constant) and not (is_mean and not is_sum and is_counted):
        return None
    over = "tokens and the count is not" if is_sum else "samples and the count is of tokens"
    return Problem(
        "loss_fn returns (sum, count), which are added up over ranks of cp, but the sum is over "
        f"{over}: {shown}, with counts {', '.join(f'{count:g}' for count in counts)}",
        fix="compute both over the tokens that loss_fn is given; divide neither",
    )
