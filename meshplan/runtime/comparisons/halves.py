"""Compare the loss of a batch with the losses of its halves: do the parts add up to the whole?

A step is computed in parts, which are combined as the plan says the loss is: a mean, a sum, a mean
over tokens. If that is wrong, every gradient is wrong, and nothing shows it. So if a step has
several parts, the loss function is called three times on the same output: for all samples, and for
each half of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from meshplan.errors import Problem
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.lazy_logits import LazyLogits
from meshplan.runtime.apply.loss.loss_weights import IGNORED, PAIR, token_targets, tokens_by_sample
from meshplan.runtime.base.mesh import local_of
from meshplan.runtime.base.pytree import tensors_in
from meshplan.runtime.comparisons.asking import LossCall, LossFn, ask, coarsest, refuse_alone
from meshplan.runtime.comparisons.cutting import cut, mask_sum, spread, thinned

WIDE: Final = 1 << 22
"""Elements up to which losses are compared in double precision. There rounding hides nothing, not
even in means that are small compared with what they are taken of."""
_TOLERANCE: Final = {torch.float64: 1e-7, torch.float32: 3e-5}
_HALF: Final = 2e-2
"""Relative differences up to which rounding may be the cause [Empirical]."""
_GATHER: Final = (
    "gather the samples to compare with meshplan.gather_batch; or set batch: {per_rank: true} if "
    "each rank's batch is meant to be independent"
)

_SHIFTED: Final = (
    "let loss_fn return (loss * n, n) with n = (labels[:, 1:] != -100).sum(), because the model "
    "itself shifts the labels"
)


@dataclass(frozen=True, slots=True)
class LossValue:
    """A loss as a number.

    Attributes:
        loss: The loss, or the sum.
        count: Number that the sum was taken over, if the loss function returns it; None otherwise.
        tokens: Number of targets that are not -100; None if no targets are of that kind.
        shifted: Number of these that are not the first of their row, because transformers' models
            shift the labels themselves; None if there are no such rows.
        masked: Sum of a mask of zeros and ones among the targets; None if there is no mask.
    """

    loss: float
    count: float | None = None
    tokens: float | None = None
    shifted: float | None = None
    masked: float | None = None


@dataclass(frozen=True, slots=True)
class Three:
    """Losses of a batch and of its two halves.

    Attributes:
        whole: Loss of the batch.
        first: Loss of its first half.
        second: Loss of its second half.
        tolerance: Absolute difference that rounding may cause.
        again: Computes the loss of the whole once more; None if that is not possible.
    """

    whole: LossValue
    first: LossValue
    second: LossValue
    tolerance: float
    again: Callable[[], LossCall] | None = None

    def confirms(self, problem: Problem | None) -> Problem | None:
        """Return a problem that these losses show, if the function returns the same once more.

        A function that depends on the number of its calls, such as a weight that warms up, or on
        anything else that cannot be restored, shows nothing about parts; then None is returned.
        """
        if problem is None or self.again is None:
            return problem
        try:
            answer = self.again()
        except Exception:  # The user's function did not raise the first time.
            return None
        told = value_of(answer.given, ())
        if told is None or answer.is_random:
            return None
        are_none = math.isnan(told[0].loss) and math.isnan(self.whole.loss)  # Means over no token.
        return problem if are_none or agrees(told[0].loss, self) else None


def value_of(given: Any, targets: Any) -> tuple[LossValue, torch.dtype] | None:
    """Return the value of a loss, and the dtype it was computed in; None if it is no number."""
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    loss, count = given if is_pair else (given, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
        return None
    tokens = tokens_by_sample(targets)
    told = None if tokens is None else float(tokens.sum())
    rows = [t[:, 1:] for t in token_targets(targets) if t.ndim == 2]
    shifted = float((rows[0] != IGNORED).sum()) if told is not None and rows else None
    number = None if count is None else float(count)
    return LossValue(float(loss.detach()), number, told, shifted, mask_sum(targets)), loss.dtype


def three_of(
    loss_fn: LossFn,
    output: Any,
    targets: Any,
    given: Any,
    samples: int,
    tokens: int | None = None,
    most: int = WIDE,
) -> Three | None:
    """Call the loss function for all samples and for halves of them.

    For a single sample, the halves are those of its tokens.

    Args:
        loss_fn: The user's loss function.
        output: Output of the model.
        targets: Targets of the same samples.
        given: Return value of the loss function for all samples; None if it was not called.
        samples: Number of samples.
        tokens: Size of dim 1, to halve the tokens instead of the samples; None for the samples.
        most: Elements up to which losses are computed in double precision.

    Returns:
        The three losses, or None if they cannot be compared: samples do not lie along dim 0, or
        the function is random.
    """
    tensors = [t for _, t in tensors_in((output, targets))]
    size = sum(
        t.numel() for t in tensors if t.is_floating_point() and not isinstance(t, LazyLogits)
    )
    dim, length = (0, samples) if tokens is None else (1, tokens)
    if tokens is None and samples == 1:
        rows = [t for t in token_targets(targets) if t.ndim > 1]
        dim, length = 1, rows[0].shape[1] if rows else 1
    if dim == 0 and size // max(1, length) > most // 2:
        # With some vocabularies even two samples are too large.
        fewer = thinned(output, targets, samples, most)
        if fewer is not None:
            return three_of(loss_fn, fewer[0], fewer[1], None, fewer[2])
    row = max(1, size // max(1, length))
    half = min(length // 2, most // (2 * row))
    # If not even two rows fit, compare all of them in their own dtype.
    is_wide, half = half > 0, half or length // 2
    if not half:
        return None
    places: list[int] | slice = slice(0, 2 * half)
    if dim and 2 * half < length and not any(isinstance(t, LazyLogits | DTensor) for t in tensors):
        places = spread(targets, length, 2 * half)
    parts = [places] + (
        [places[:half], places[half:]]
        if isinstance(places, list)
        else [slice(0, half), slice(half, 2 * half)]
    )
    outputs = cut(output, length, parts, is_output=True, dim=dim, like=targets)
    wanted = cut(targets, length, parts, is_output=False, dim=dim)
    if outputs is None or wanted is None:
        return None
    # Of large outputs only halves are computed, which takes less memory than their backward.
    is_known = given is not None and 2 * half == length
    return three_of_parts(
        loss_fn,
        outputs,
        wanted,
        is_wide=is_wide,
        known=value_of(given, targets) if is_known else None,
    )


def three_of_parts(
    loss_fn: LossFn,
    outputs: Sequence[Any],
    targets: Sequence[Any],
    *,
    is_wide: bool = True,
    known: tuple[LossValue, torch.dtype] | None = None,
) -> Three | None:
    """Call the loss function for a whole and for two parts of it.

    Args:
        loss_fn: The user's loss function.
        outputs: Outputs of the whole, the first part and the second part.
        targets: Targets of the same three.
        is_wide: If True, try double precision first.
        known: Loss of the whole in its own dtype, if it is known; None otherwise.

    Returns:
        The three losses, or None if they cannot be compared: the function raises, or is random.
    """
    found = [t for _, t in tensors_in((outputs[0], targets[0])) if not isinstance(t, LazyLogits)]
    found = [tensor for tensor in found if tensor.is_floating_point()]
    is_half = any(torch.finfo(tensor.dtype).bits < 32 for tensor in found)
    wide = [torch.float64] if is_wide else [torch.float32] if is_half else []
    # Try a wide dtype first; a function that does not accept it is called with its own.
    for dtype in (*wide, None):
        asked = list(zip(outputs, targets, strict=True))
        values: list[tuple[LossValue, torch.dtype] | None] = []
        if dtype is None and known is not None:
            values.append(known)
        try:
            for o, t in asked[len(values) :]:
                values.append(told_by(ask(loss_fn, o, t, dtype), t))
        except Exception as error:  # The user's function may not support this: fewer
            # samples, another dtype. Errors on its own inputs are raised in the training.
            if any(isinstance(t, LazyLogits) for _, t in tensors_in(outputs[0])):
                refuse_alone(error)  # Other ranks may wait in the head's collectives.
            continue
        if None in values:
            return None
        # If ranks compute the loss together, one rank must not call it alone once more.
        is_apart = any(isinstance(t, LazyLogits | DTensor) for _, t in tensors_in(outputs[0]))
        again = None if is_apart else partial(ask, loss_fn, *asked[0], dtype)
        return three_from([value for value in values if value is not None], found, again=again)
    return None


def told_by(answer: LossCall, targets: Any) -> tuple[LossValue, torch.dtype] | None:
    """Return the value of a call, and the coarsest dtype it rounded to; None if it is random."""
    value = None if answer.is_random else value_of(answer.given, targets)
    return value and (
        value[0],
        min(value[1], answer.dtype, key=lambda each: torch.finfo(each).bits),
    )


def three_from(
    values: list[tuple[LossValue, torch.dtype]],
    terms: list[torch.Tensor],
    of_forwards: torch.dtype | None = None,
    again: Callable[[], LossCall] | None = None,
) -> Three:
    """Return three losses to compare, with the tolerance for rounding.

    Args:
        values: Losses of the whole, the first half and the second half, each with its dtype.
        terms: Tensors that the losses were computed from.
        of_forwards: The coarsest dtype of the forwards, if each loss had one of its own, whose
            kernels may differ; None for a common forward.
        again: Computes the loss of the whole once more; None if that is not possible.
    """
    whole, first, second = (value for value, _ in values)
    dtype = of_forwards or coarsest(*(d for _, d in values))
    size = max((abs(v.loss) for v, _ in values if math.isfinite(v.loss)), default=0.0)
    tolerance = _TOLERANCE.get(dtype, _HALF) * size
    if dtype != torch.float64 and terms:
        largest = max(float(local_of(t).detach().abs().max()) for t in terms if t.numel())
        tolerance += 2 * torch.finfo(dtype).eps * largest if math.isfinite(largest) else 0.0
    return Three(whole, first, second, tolerance + 1e-30, again)


def loss_problem(three: Three, plan: Plan) -> Problem | None:
    """Return why the losses of parts do not add up to the loss of the whole; None if they do."""
    whole, first, second = three.whole, three.first, three.second
    if not math.isfinite(whole.loss):
        return None
    shown = (
        f"loss_fn returns {whole.loss:.6g} for some samples, and {first.loss:.6g} and "
        f"{second.loss:.6g} for the two halves of them"
    )
    if whole.count is not None:
        return _pair_problem(three, shown)
    kind = plan.spec.loss
    origin = plan.spec.origin("loss")
    if kind == "sum":
        if agrees(first.loss + second.loss, three):
            return None
        what = f"the plan states loss: sum, but loss_fn does not return a sum over samples: {shown}"
        fix = "set loss: mean, or tokens for a mean over the targets that are not -100; or " + PAIR
        return Problem(what, origin, fix)
    of_tokens = token_mean(three)
    if kind == "tokens":
        if of_tokens is None or agrees(of_tokens, three):
            return None
        what = (
            f"the plan states loss: tokens, but loss_fn does not return the mean over the targets "
            f"that are not {IGNORED}: {shown}, which contain {first.tokens:.0f} and "
            f"{second.tokens:.0f} such targets"
        )
        fix = f"set the targets that loss_fn leaves out to {IGNORED}; or {PAIR}"
        return Problem(what, origin, _SHIFTED if _is_shifted(three) else fix)
    return _mean_problem(three, of_tokens, shown, plan)


def _mean_problem(three: Three, of_tokens: float | None, shown: str, plan: Plan) -> Problem | None:
    whole, first, second = three.whole, three.first, three.second
    origin = plan.spec.origin("loss")
    are_finite = math.isfinite(first.loss) and math.isfinite(second.loss)
    if are_finite and agrees((first.loss + second.loss) / 2, three):
        return None
    if are_finite and agrees(first.loss + second.loss, three):
        what = f"loss_fn returns a sum over samples, but the plan expects their mean: {shown}"
        return Problem(what, origin, "set loss: sum, or divide by the number of samples")
    if of_tokens is not None and agrees(of_tokens, three) and first.tokens != second.tokens:
        what = (
            f"loss_fn returns a mean over the targets that are not {IGNORED}, and parts of a batch "
            f"contain unequal numbers of them ({first.tokens:.0f} and {second.tokens:.0f}): the "
            f"mean of the parts' losses is not the loss of one process ({shown})"
        )
        return Problem(what, origin, f"set loss: tokens; or {PAIR}")
    low, high = min(first.loss, second.loss), max(first.loss, second.loss)
    if _is_shifted(three):
        what = (
            "the loss is a mean over all labels except the first of each row, and parts of a batch "
            f"contain unequal numbers of these ({first.shifted:.0f} and {second.shifted:.0f}): "
            f"{shown}"
        )
        return Problem(what, origin, _SHIFTED)
    if plan.spec.batch.per_rank:
        return None
    if not are_finite or low <= whole.loss <= high:
        what = (
            "loss_fn returns a mean whose total weight differs between parts of a batch (such as a "
            f"mask or class weights): {shown}, so the loss is not the mean of the halves' losses"
        )
        return Problem(what, origin, f"{PAIR}; or {_GATHER}")
    what = (
        f"loss_fn compares samples with one another: {shown}, so the losses of ranks and "
        "microbatches do not combine to the loss of the batch"
    )
    return Problem(what, origin, _GATHER)


def _pair_problem(three: Three, shown: str) -> Problem | None:
    whole, first, second = three.whole, three.first, three.second
    counts = [v.count for v in (whole, first, second) if v.count is not None]
    adds_up = len(counts) == 3 and abs(counts[0] - counts[1] - counts[2]) <= 1e-6 * abs(counts[0])
    # A mean over no token is NaN, and NaN times a count of 0 is still NaN.
    parts = [value.loss for value in (first, second) if value.count or math.isfinite(value.loss)]
    if adds_up and agrees(sum(parts), three):
        return None
    what = "sum" if adds_up else "count"
    return Problem(
        f"the {what} that loss_fn returns does not add up over parts of a batch: {shown}, "
        f"with counts {', '.join(f'{c:g}' for c in counts)}",
        fix="return the sum over the given samples or tokens, and their number, neither divided",
    )


def token_mean(three: Three) -> float | None:
    """Return the mean over all tokens, computed from those of the halves."""
    return _weighted(three, three.first.tokens, three.second.tokens)


def mask_mean(three: Three) -> float | None:
    """Return the mean over what a mask leaves, computed from those of the halves."""
    return _weighted(three, three.first.masked, three.second.masked)


def _is_shifted(three: Three) -> bool:
    """Return True if the loss is a mean over the targets that are not the first of their row."""
    counts = three.first.shifted, three.second.shifted
    of_tokens = _weighted(three, *counts)
    return of_tokens is not None and counts[0] != counts[1] and agrees(of_tokens, three)


def _weighted(three: Three, first: float | None, second: float | None) -> float | None:
    if first is None or second is None or not first + second:
        return None
    pairs = ((three.first.loss, first), (three.second.loss, second))
    return sum(loss * count for loss, count in pairs if count) / (first + second)


def agrees(expected: float, three: Three) -> bool:
    """Return True if the loss of the whole is as expected, except for rounding."""
    return abs(three.whole.loss - expected) <= three.tolerance
