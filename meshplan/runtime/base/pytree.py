"""Tensors inside the values that models take and return: tuples, lists, mappings, dataclasses.

`tensors_in` lists the tensors. `shape_of` keeps the structure of a value without its tensors, and
`fill` builds such a value again from other tensors.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


def tensors_in(item: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for each tensor, in order; a path is keys and indices joined by dots.

    Values other than tuples, lists, mappings, dataclasses and tensors are skipped.
    """
    if isinstance(item, torch.Tensor):
        yield path, item
        return
    for key, part in _parts(item):
        yield from tensors_in(part, f"{path}.{key}" if path else key)


def given_to(value: Any) -> list[torch.Tensor]:
    """Return the tensors in the arguments or results of an operator, in order.

    Unlike `tensors_in`, this looks into lists, tuples and dicts only, because operators take
    nothing else that holds tensors. It runs for every operator, so it must be fast.
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
                # Bypass the class's own `__getattribute__`: a configuration may guard its fields.
                yield f.name, object.__getattribute__(item, f.name)
            except AttributeError:  # A field without a default that nobody has set yet.
                continue


_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
"""Types of values that a structure keeps unchanged."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A placeholder for a tensor in a structure.

    Attributes:
        value: The value that `value_of` of `shape_of` returned for the tensor.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Opaque:
    """A placeholder for a value that cannot be rebuilt.

    Attributes:
        type: Name of the value's class.
    """

    type: str


@dataclass(frozen=True, slots=True)
class TreeStructure:
    """The structure of a tuple, list, mapping or dataclass.

    Attributes:
        make: Builds such a value from a list of its items.
        parts: The structure of each item: a TreeStructure, Slot, Opaque or plain value.
    """

    make: Callable[[list[Any]], Any]
    parts: list[Any]


def shape_of(item: Any, value_of: Callable[[torch.Tensor], Any]) -> Any:
    """Return the structure of a nested value, with a `Slot(value_of(tensor))` for each tensor.

    Plain values, such as numbers, stay as they are; any other object becomes an `Opaque`.
    """
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


def fill(form: Any, get: Callable[[Any], Any] = lambda value: value) -> Any:
    """Build a value of the structure `form`, which `shape_of` returned.

    `get(slot.value)` takes the place of each Slot, and None that of each Opaque.
    """
    if isinstance(form, Slot):
        return get(form.value)
    if isinstance(form, TreeStructure):
        return form.make([fill(part, get) for part in form.parts])
    return None if isinstance(form, Opaque) else form


def opaque_in(form: Any) -> Iterator[str]:
    """Yield the names of the types in a structure that cannot be rebuilt."""
    if isinstance(form, Opaque):
        yield form.type
    elif isinstance(form, TreeStructure):
        for part in form.parts:
            yield from opaque_in(part)
