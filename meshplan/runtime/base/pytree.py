"""Tensors inside whatever models take and return: tuples, mappings, dataclasses.

`tensors_in` lists them; `shape_of` keeps the form of a result without its tensors, and `fill`
makes such a result again around others.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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


def given_to(value: Any) -> list[torch.Tensor]:
    """The tensors that an operator is given or gives, in order.

    Operators know of no more than lists, tuples and keywords; asked of each, this has to be quick.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    out: list[torch.Tensor] = []
    for part in value:
        if isinstance(part, torch.Tensor):
            out.append(part)
        elif isinstance(part, tuple | list | dict):
            out += given_to(part)
    return out


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, Mapping):  # Before dataclasses: transformers' outputs are both.
        yield from ((str(key), part) for key, part in item.items())
    elif isinstance(item, tuple | list):
        yield from ((str(place), part) for place, part in enumerate(item))
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for f in dataclasses.fields(item):
            try:
                # Past a `__getattribute__` of its own: a configuration may guard its fields.
                yield f.name, object.__getattribute__(item, f.name)
            except AttributeError:  # A field without a default that nobody has set yet.
                continue


_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
"""What a form keeps as it is."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor stood."""

    value: int


@dataclass(frozen=True, slots=True)
class Opaque:
    """Where something stood that cannot be made again."""

    type: str


@dataclass(frozen=True, slots=True)
class TreeStructure:
    """Something nested: what makes it from its parts, and these."""

    make: Callable[[list[Any]], Any]
    parts: list[Any]


def shape_of(item: Any, value_of: Callable[[torch.Tensor], int]) -> Any:
    """The form of `item`, each tensor a `Slot` with what `value_of` says of it."""
    if isinstance(item, torch.Tensor):
        return Slot(value_of(item))
    if isinstance(item, _PLAIN):
        return item
    parts = [shape_of(part, value_of) for _, part in _parts(item)]
    cls = type(item)
    if isinstance(item, Mapping):
        keys = list(item)
        if dataclasses.is_dataclass(item):  # transformers' outputs
            return TreeStructure(lambda found: cls(**dict(zip(keys, found, strict=True))), parts)
        return TreeStructure(lambda found: cls(zip(keys, found, strict=True)), parts)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return TreeStructure(lambda found: cls(*found), parts)
    if isinstance(item, tuple | list):
        return TreeStructure(lambda found: cls(found), parts)
    if dataclasses.is_dataclass(item) and all(f.init for f in dataclasses.fields(item)):
        names = [name for name, _ in _parts(item)]
        return TreeStructure(lambda found: cls(**dict(zip(names, found, strict=True))), parts)
    return Opaque(cls.__name__)


def fill(form: Any, get: Callable[[int], Any]) -> Any:
    """A result of this form with the tensors that `get` gives."""
    if isinstance(form, Slot):
        return get(form.value)
    if isinstance(form, TreeStructure):
        return form.make([fill(part, get) for part in form.parts])
    return None if isinstance(form, Opaque) else form


def opaque_in(form: Any) -> Iterator[str]:
    """The types in a form that cannot be made again."""
    if isinstance(form, Opaque):
        yield form.type
    elif isinstance(form, TreeStructure):
        for part in form.parts:
            yield from opaque_in(part)
