"""Check that the losses of a batch's halves combine to the loss of the batch.

A step computes the loss in parts, on ranks and microbatches. It combines these losses as the plan's
`loss` states: as a mean, a sum, or a mean over tokens. If the user's loss function computes
something else, every gradient is wrong without any error. So if a step has several parts, the loss
function is called three times on parts of one output: for all samples, and for each half of them.
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
"""Number of elements up to which an output is converted to double precision to compare losses.
Rounding then hides no difference, even if a mean is far smaller than the values it averages."""
_TOLERANCE: Final = {torch.float64: 1e-7, torch.float32: 3e-5}
_HALF: Final = 2e-2
"""Largest relative differences that rounding may cause; `_HALF` is for half precision
[Empirical]."""
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
    """A loss, and the numbers of elements that it may be a mean over.

    Attributes:
        loss: The loss; the sum if the loss function returns (sum, count).
        count: The count if the loss function returns (sum, count); None otherwise.
        tokens: Number of targets that are not -100; None unless exactly one tensor among the
            targets contains integers.
        shifted: Like `tokens`, without the first target of each row: transformers' models shift
            the labels themselves and drop it. None if `tokens` is, or targets have no rows.
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
        tolerance: Largest absolute difference that rounding may cause.
        call_again: Computes the loss of the batch once more; None if that is not possible.
    """

    whole: LossValue
    first: LossValue
    second: LossValue
    tolerance: float
    call_again: Callable[[], LossCall] | None = None

    def confirms(self, problem: Problem | None) -> Problem | None:
        """Return `problem` if calling the loss function on the whole batch again repeats its loss.

        Otherwise return None: the loss depends on state that cannot be restored, such as a weight
        that warms up with the number of calls, and the difference between whole and halves may be
        due to that state.
        """
        if problem is None or self.call_again is None:
            return problem
        try:
            answer = self.call_again()
        except Exception:  # It returned the first time, so its result depends on some state.
            return None
        value = value_of(answer.returned, ())
        if value is None or answer.is_random:
            return None
        # Both losses are NaN if they are means over no token.
        are_none = math.isnan(value[0].loss) and math.isnan(self.whole.loss)
        return problem if are_none or agrees(value[0].loss, self) else None


def value_of(returned: Any, targets: Any) -> tuple[LossValue, torch.dtype] | None:
    """Return (value of a loss, its dtype); None if the loss is not a tensor with one element.

    Args:
        returned: Return value of the loss function: a loss, or (sum, count).
        targets: Targets that the loss was computed for.
    """
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    loss, count = returned if is_pair else (returned, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
        return None
    tokens = tokens_by_sample(targets)
    num_tokens = None if tokens is None else float(tokens.sum())
    rows = [t[:, 1:] for t in token_targets(targets) if t.ndim == 2]
    shifted = float((rows[0] != IGNORED).sum()) if num_tokens is not None and rows else None
    number = None if count is None else float(count)
    return LossValue(
        float(loss.detach()), number, num_tokens, shifted, mask_sum(targets)
    ), loss.dtype


def three_of(
    loss_fn: LossFn,
    output: Any,
    targets: Any,
    given: Any,
    samples: int,
    tokens: int | None = None,
    most: int = WIDE,
) -> Three | None:
    """Call the loss function for all samples and for each half of them.

    A single sample is halved along its tokens, and so are all samples if `tokens` is given. Of
    large outputs only some rows are used.

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
        # Two samples exceed the limit if the vocabulary is large, so take some tokens of each.
        fewer = thinned(output, targets, samples, most)
        if fewer is not None:
            return three_of(loss_fn, fewer[0], fewer[1], None, fewer[2])
    row = max(1, size // max(1, length))
    half = min(length // 2, most // (2 * row))
    # If not even two rows fit into the limit, compare all of them without conversion to double.
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
    # The known loss is that of all rows. If only some rows were taken, their loss is computed too.
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
    """Call the loss function for a batch and for two parts of it.

    Args:
        loss_fn: The user's loss function.
        outputs: Outputs of the batch, its first part and its second part.
        targets: Targets of the same three.
        is_wide: If True, try double precision first.
        known: Loss of the batch, and its dtype, as the training computed it; None if not known.

    Returns:
        The three losses, or None if they cannot be compared: the function raises, or is random.
    """
    found = [t for _, t in tensors_in((outputs[0], targets[0])) if not isinstance(t, LazyLogits)]
    found = [tensor for tensor in found if tensor.is_floating_point()]
    is_half = any(torch.finfo(tensor.dtype).bits < 32 for tensor in found)
    wide = [torch.float64] if is_wide else [torch.float32] if is_half else []
    # Try a wide dtype first. A function that raises for it gets the tensors in their own dtype.
    for dtype in (*wide, None):
        cases = list(zip(outputs, targets, strict=True))
        values: list[tuple[LossValue, torch.dtype] | None] = []
        if dtype is None and known is not None:
            values.append(known)
        try:
            for o, t in cases[len(values) :]:
                values.append(value_of_call(ask(loss_fn, o, t, dtype), t))
        except Exception as error:  # The user's function may not support fewer samples or
            # another dtype. Errors on its usual inputs are raised in the training.
            if any(isinstance(t, LazyLogits) for _, t in tensors_in(outputs[0])):
                refuse_alone(error)  # Other ranks may wait in the head's collectives.
            continue
        if None in values:
            return None
        # If ranks compute the loss together, its collectives would hang in a call by one rank.
        is_apart = any(isinstance(t, LazyLogits | DTensor) for _, t in tensors_in(outputs[0]))
        call_again = None if is_apart else partial(ask, loss_fn, *cases[0], dtype)
        return three_from(
            [value for value in values if value is not None], found, call_again=call_again
        )
    return None


def value_of_call(answer: LossCall, targets: Any) -> tuple[LossValue, torch.dtype] | None:
    """Return (value of a call, coarsest dtype that it rounded to).

    Return None if the call drew random numbers, or did not return a loss.
    """
    value = None if answer.is_random else value_of(answer.returned, targets)
    return value and (
        value[0],
        min(value[1], answer.dtype, key=lambda each: torch.finfo(each).bits),
    )


def three_from(
    values: list[tuple[LossValue, torch.dtype]],
    terms: list[torch.Tensor],
    of_forwards: torch.dtype | None = None,
    call_again: Callable[[], LossCall] | None = None,
) -> Three:
    """Return three losses to compare, with the tolerance for rounding.

    Args:
        values: Losses of the batch, its first half and its second half, each with its dtype.
        terms: Tensors that the losses were computed from; their largest element adds to the
            tolerance.
        of_forwards: The coarsest dtype of the forwards if each loss is of a separate forward,
            because its kernels may round differently; None if all losses are of one forward.
        call_again: Computes the loss of the batch once more; None if that is not possible.
    """
    whole, first, second = (value for value, _ in values)
    dtype = of_forwards or coarsest(*(d for _, d in values))
    size = max((abs(v.loss) for v, _ in values if math.isfinite(v.loss)), default=0.0)
    tolerance = _TOLERANCE.get(dtype, _HALF) * size
    if dtype != torch.float64 and terms:
        largest = max(float(local_of(t).detach().abs().max()) for t in terms if t.numel())
        tolerance += 2 * torch.finfo(dtype).eps * largest if math.isfinite(largest) else 0.0
    return Three(whole, first, second, tolerance + 1e-30, call_again)


def loss_problem(three: Three, plan: Plan) -> Problem | None:
    """Return why the halves' losses do not combine to the batch's loss; None if they do.

    The plan's `loss` states how they should combine: as a mean, a sum, or a mean over tokens.
    """
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
    # A half without tokens has count 0, and its sum may be NaN: a mean of NaN times 0 is NaN.
    parts = [value.loss for value in (first, second) if value.count or math.isfinite(value.loss)]
    if adds_up and agrees(sum(parts), three):
        return None
    what = "sum" if adds_up else "count"
    return Problem(
        f"the {what} that loss_fn returns does not add up over parts of a batch: {shown}, "
        f"with counts {', '.join(f'{c:g}' for c in counts)}",
        fix="return the sum over the samples or tokens that loss_fn is given, and the number of "
        "them; divide neither",
    )


def token_mean(three: Three) -> float | None:
    """Return the mean over all tokens if the halves' losses are means over tokens.

    Return None if the number of tokens is not known or 0.
    """
    return _weighted(three, three.first.tokens, three.second.tokens)


def mask_mean(three: Three) -> float | None:
    """Return the mean over all unmasked elements if the halves' losses are means over these.

    Return None if there is no mask or its sum is 0.
    """
    return _weighted(three, three.first.masked, three.second.masked)


def _is_shifted(three: Three) -> bool:
    """Return True if the loss is a mean over the targets without the first of each row."""
    counts = three.first.shifted, three.second.shifted
    of_tokens = _weighted(three, *counts)
    return of_tokens is not None and counts[0] != counts[1] and agrees(of_tokens, three)


def _weighted(three: Three, first: float | None, second: float | None) -> float | None:
    if first is None or second is None or not first + second:
        return None
    pairs = ((three.first.loss, first), (three.second.loss, second))
    return sum(loss * count for loss, count in pairs if count) / (first + second)


def agrees(expected: float, three: Three) -> bool:
    """Return True if the loss of the batch equals `expected`, except for rounding."""
    return abs(three.whole.loss - expected) <= three.tolerance
