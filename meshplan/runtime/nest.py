"""Tensors inside whatever models take and return: tuples, mappings, dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_in(item: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) for each tensor, in order; a path is keys and places joined by dots.

    What is none of tuple, list, mapping, dataclass and tensor is passed over.
    """
    if isinstance(item, torch.Tensor):
        yield path, item
        return
    for key, part in _parts(item):
        yield from tensors_in(part, f"{path}.{key}" if path else key)


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, Mapping):  # Before dataclasses: transformers' outputs are both.
        yield from ((str(key), part) for key, part in item.items())
    elif isinstance(item, tuple | list):
        yield from ((str(place), part) for place, part in enumerate(item))
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        yield from ((f.name, getattr(item, f.name)) for f in dataclasses.fields(item))
