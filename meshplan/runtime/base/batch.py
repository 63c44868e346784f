"""Batches: tensors nested in tuples, lists and mappings, with the samples along dim 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshplan.errors import ApplyError, Problem


def chunked(value: Any, count: int) -> list[Any]:
    """Split a batch into `count` equal microbatches along dim 0."""
    return [microbatch(value, count, number) for number in range(count)]


def microbatch(value: Any, count: int, number: int = 0) -> Any:
    """Return microbatch `number`, from 0, of the `count` equal microbatches of a batch."""
    if count == 1:
        return value
    return mapped(value, lambda tensor: part_of(tensor, count, number, "microbatches"))


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

    def of(number: int) -> Any:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.ndim == 0:
                return tensor
            own = (part_of(tensor, ranks, rank, "data ranks") for rank in range(ranks))
            return torch.cat([part_of(each, count, number, "microbatches") for each in own])

        return mapped(value, cut)

    return [value] if count == 1 else [of(number) for number in range(count)]


def part_of(tensor: torch.Tensor, count: int, number: int, what: str) -> torch.Tensor:
    """Return part `number` of `count` equal parts of a tensor along dim 0.

    A tensor without dims is returned unchanged.

    Args:
        what: Name of the parts for the error message, such as "microbatches".

    Raises:
        ApplyError: The number of samples is not a multiple of `count`.
    """
    if tensor.ndim == 0:
        return tensor
    if tensor.shape[0] % count:
        raise ApplyError(
            Problem(
                f"a batch of {tensor.shape[0]} samples does not divide into {count} {what}",
                fix=f"use a multiple of {count}",
            )
        )
    size = tensor.shape[0] // count
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
