"""Cut parts out of outputs and targets: some of the samples, or some tokens of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshplan.runtime.apply.loss.lazy_logits import LazyLogits
from meshplan.runtime.apply.loss.loss_weights import IGNORED, token_targets
from meshplan.runtime.base.pytree import fill, opaque_in, shape_of, tensors_in


def cut(
    item: Any,
    samples: int,
    parts: Sequence[slice | list[int]],
    *,
    is_output: bool,
    dim: int = 0,
    like: Any = (),
) -> list[Any] | None:
    """Cut parts out of all tensors of a nested value.

    Args:
        item: An output or targets.
        samples: Number of samples, or of tokens: the size of `dim` in each tensor.
        parts: For each part, its indices along `dim`.
        is_output: If True, the item comes from the model, which may have moved the samples to
            another dim.
        dim: The dim that is cut: 0 for samples, 1 for tokens.
        like: The targets. If an output has the same first two sizes as one of them, its samples and
            tokens are along the same dims.

    Returns:
        For each part, a value of the same structure. None if a tensor may not have the samples (or
        tokens) along `dim`.
    """
    tensors = [tensor for _, tensor in tensors_in(item)]
    form = shape_of(item, lambda tensor: tensor)
    if any(opaque_in(form)):
        return None
    shapes = [tensor.shape for _, tensor in tensors_in(like) if tensor.ndim > 1]
    shapes = [shape for shape in shapes if shape[0] != shape[1]]
    whole = {id(tensor) for tensor in tensors if is_output and is_parameter(tensor)}
    for tensor in tensors:
        if id(tensor) in whole:
            continue
        if not tensor.ndim and tensor.is_floating_point():
            return None
        if tensor.ndim and (tensor.ndim <= dim or tensor.shape[dim] != samples):
            return None
        # If a later dim has the same size, only the targets can show which of the two is the right.
        matches_targets = any(tensor.shape[:2] == each[:2] for each in shapes)
        if is_output and not matches_targets and samples in tensor.shape[dim + 1 :]:
            return None

    def part(which: slice | list[int], tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in whole:
            return tensor
        tensor = tensor if isinstance(tensor, LazyLogits) else tensor.detach()
        return tensor[(slice(None),) * dim + (which,)] if tensor.ndim else tensor

    return [fill(form, partial(part, which)) for which in parts]


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return True if a tensor in an output is a parameter or a view of one.

    Such a tensor belongs to no sample, so it is never cut.
    """
    if isinstance(tensor, LazyLogits):
        return False
    owner = tensor if tensor._base is None else tensor._base
    # A stage of a pipeline gets its inputs as leaves that require gradients, too.
    return isinstance(owner, nn.Parameter) and owner.requires_grad


def spread(targets: Any, length: int, count: int) -> list[int]:
    """Return sorted positions of tokens, half of them where all samples have a target.

    The other half are positions where only some samples have a target that is not -100. Parts of
    the batch then contain unequal numbers of targets, without which a mean over tokens and a mean
    over samples could not be distinguished.

    Args:
        targets: Targets of the samples.
        length: Number of tokens of each sample.
        count: Number of positions to choose.
    """
    rows = [t for t in token_targets(targets) if t.ndim > 1 and t.shape[1] == length]
    if count >= length or not rows:
        return _evenly(list(range(length)), count)
    kept = (rows[0] != IGNORED).reshape(len(rows[0]), length, -1).any(-1).sum(0).tolist()
    whole = [place for place, each in enumerate(kept) if each == max(kept)]
    partly = [place for place, each in enumerate(kept) if 0 < each < max(kept)]
    rest = [place for place, each in enumerate(kept) if not each]
    chosen = _evenly(whole, count - min(count // 2, len(partly or rest)))
    chosen += _evenly(partly or rest, count - len(chosen))
    others = sorted(set(range(length)) - set(chosen))
    return sorted(chosen + _evenly(others, count - len(chosen)))


def _evenly(places: list[int], count: int) -> list[int]:
    step = max(1.0, len(places) / max(1, count))
    return [places[int(number * step)] for number in range(min(count, len(places)))]


def thinned(output: Any, targets: Any, samples: int, most: int) -> tuple[Any, Any, int] | None:
    """Cut a few tokens of up to 8 samples out of an output and targets.

    Args:
        output: Output of the model.
        targets: Targets of the same samples.
        samples: Number of samples.
        most: Limit of the elements of both together.

    Returns:
        (output, targets, number of samples), or None if tokens are not along dim 1 of each tensor.
    """
    tensors = [tensor for _, tensor in tensors_in((output, targets))]
    rows = [tensor for _, tensor in tensors_in(targets) if tensor.ndim > 1]
    if not rows or any(isinstance(tensor, LazyLogits | DTensor) for tensor in tensors):
        return None
    length, few = rows[0].shape[1], min(samples // 2 * 2, 8)
    size = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
    count = most * length * samples // max(1, size * few)
    found: list[Any] = []
    for item, is_output in ((output, True), (targets, False)):
        own = cut(item, samples, [slice(0, few)], is_output=is_output, like=targets)
        found += own or [None]
    if count < 2 or None in found:
        return None
    places = spread(found[1], length, count)
    for number, is_output in enumerate((True, False)):
        own = cut(found[number], length, [places], is_output=is_output, dim=1, like=targets)
        if own is None:
            return None
        found[number] = own[0]
    return found[0], found[1], few


def mask_sum(targets: Any) -> float | None:
    """Return the sum of the mask among the targets; None if there is no mask or several.

    A mask is a tensor of zeros and ones with two dims or more.
    """
    found = [
        tensor
        for _, tensor in tensors_in(targets)
        if tensor.ndim > 1 and bool(((tensor == 0) | (tensor == 1)).all())
    ]
    return float(found[0].sum(dtype=torch.float64)) if len(found) == 1 else None


def num_elements(targets: Any) -> float:
    """Return the number of elements of all target tensors with two dims or more."""
    return float(sum(tensor.numel() for _, tensor in tensors_in(targets) if tensor.ndim > 1))
