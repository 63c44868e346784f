"""Batches: tensors nested in tuples, lists and mappings, with the samples along dim 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshplan.errors import ApplyError, Problem


def chunked(value: Any, count: int) -> list[Any]:
    """`value` as `count` equal microbatches."""
    if count == 1:
        return [value]

    def part(number: int) -> Any:
        return mapped(value, lambda tensor: chunk(tensor, count, "microbatches")[number])

    return [part(number) for number in range(count)]


def taken_together(value: Any, ranks: int, count: int) -> list[Any]:
    """A global batch as the `count` microbatches that its data ranks take one after the other.

    Each rank has an equal part of the batch and cuts that: not what `chunked` makes of the whole.
    """

    def part(number: int) -> Any:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.ndim == 0:
                return tensor
            own = chunk(tensor, ranks, "data ranks")
            return torch.cat([chunk(each, count, "microbatches")[number] for each in own])

        return mapped(value, cut)

    return [value] if count == 1 else [part(number) for number in range(count)]


def chunk(tensor: torch.Tensor, count: int, what: str) -> tuple[torch.Tensor, ...]:
    """A tensor in equal parts along dim 0; one without dims is in every part.

    Raises:
        ApplyError: The samples do not divide.
    """
    if tensor.ndim == 0:
        return (tensor,) * count
    if tensor.shape[0] % count:
        raise ApplyError(
            Problem(
                f"a batch of {tensor.shape[0]} samples does not divide into {count} {what}",
                fix=f"use a multiple of {count}",
            )
        )
    return tensor.chunk(count)


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same tuple, list or mapping with every tensor passed through `function`."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(arguments, keyword arguments) of inputs in any of the three forms."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}
