"""Batches: tensors nested in tuples, lists and mappings, with the samples along dim 0.

The first tensor with dims has a row for each sample. Another with one row is shared by all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.base.batch_agreement import num_samples


def chunked(value: Any, count: int) -> list[Any]:
    """Split a batch into `count` equal microbatches along dim 0."""
    return [microbatch(value, count, number) for number in range(count)]


def microbatch(value: Any, count: int, number: int = 0) -> Any:
    """Return microbatch `number`, from 0, of the `count` equal microbatches of a batch."""
    if count == 1:
        return value
    rows = num_samples(value)
    return mapped(value, lambda tensor: part_of(tensor, count, number, "microbatches", rows))


def taken_together(value: Any, ranks: int, count: int) -> list[Any]:
    """Split a global batch into the `count` microbatches that its data ranks process together.

    Each rank takes an equal part of the batch and splits that part into microbatches. Microbatch i
    consists of microbatch i of every rank, so its samples are not those of
    `chunked(value, count)[i]`.

    Args:
        value: The global batch, any pytree of tensors.
        ranks: Number of data ranks.
        count: Number of microbatches per rank.
    """
    rows = num_samples(value)

    def of(number: int) -> Any:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.ndim == 0 or is_shared(tensor, rows):
                return tensor
            own = (part_of(tensor, ranks, rank, "data ranks") for rank in range(ranks))
            return torch.cat([part_of(each, count, number, "microbatches") for each in own])

        return mapped(value, cut)

    return [value] if count == 1 else [of(number) for number in range(count)]


def is_shared(tensor: torch.Tensor, samples: int | None) -> bool:
    """Return True if all samples share a tensor: it has one row, such as one row of positions.

    Args:
        tensor: A tensor with dims.
        samples: Number of samples of the batch; None if not known.
    """
    return samples is not None and samples > 1 and len(tensor) == 1


def part_of(
    tensor: torch.Tensor, count: int, number: int, name: str, samples: int | None = None
) -> torch.Tensor:  # fmt: skip
    """Return part `number` of `count` equal parts of a tensor along dim 0.

    A tensor without dims, and one that all samples share, is returned unchanged.

    Args:
        name: Name of the parts for the error message, such as "microbatches".
        samples: Number of samples of the batch; None if it is that of the tensor.

    Raises:
        ApplyError: The number of rows is not a multiple of `count`.
    """
    if tensor.ndim == 0 or is_shared(tensor, samples):
        return tensor
    rows = tensor.shape[0]
    if rows % count:
        what = f"a batch of {rows} sample{'s' if rows > 1 else ''}"
        fix = f"use a multiple of {count}"
        if samples not in (None, rows):
            what = f"a tensor of shape {tuple(tensor.shape)} in a batch of {samples} samples"
            fix = "give it one row for each sample, or one row if all samples share it"
        raise ApplyError(Problem(f"{what} does not divide into {count} {name}", fix=fix))
    size = rows // count
    return tensor[number * size : (number + 1) * size]


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `function` to every tensor in nested tuples, lists and mappings; keep the rest."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs (a tensor, a tuple or list, or a mapping) as (args, kwargs) of a call."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}
