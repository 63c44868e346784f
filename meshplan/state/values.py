"""Values that are no tensors of a model, as JSON: hyperparameters, schedulers, positions in data.

JSON has no tuples, and only strings as keys. These, and tensors, become objects with a single key
that begins with "$". Nothing is pickled: a state from elsewhere can run no code.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from meshplan.errors import Problem, StateError

_TUPLE, _ITEMS, _SET, _FLOAT, _TENSOR, _BYTES = (
    "$tuple", "$items", "$set", "$float", "$tensor", "$bytes",
)  # fmt: skip
_DEEPEST: Final = 64
"""Levels of nesting; a value that contains itself is deeper."""


def to_json(
    value: Any, name: str, tensor: Callable[[Any, str], str | None] = lambda value, name: None
) -> Any:
    """Return a value in a form that JSON can express.

    Args:
        value: Numbers, strings, bytes, None, tensors, and lists, tuples, sets and mappings of them.
        name: What the value is called in messages, such as "extra".
        tensor: Called with each other object and its name. Saves a tensor and returns the key under
            which it is found again; returns None if the object is no tensor. By default tensors are
            refused.

    Raises:
        StateError: The value contains something else.
    """
    return _encode(value, name, tensor, 0)


def _encode(value: Any, name: str, tensor: Callable[[Any, str], str | None], depth: int) -> Any:
    if depth > _DEEPEST:
        raise StateError(Problem(f"{name} is nested too deeply, or contains itself"))
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}

    def inside(each: Any, key: object) -> Any:
        return _encode(each, f"{name}[{key!r}]", tensor, depth + 1)

    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: inside(each, key) for key, each in value.items()}
        return {_ITEMS: [[inside(k, k), inside(v, k)] for k, v in value.items()]}
    if isinstance(value, list | tuple | set | frozenset):
        items = [inside(each, number) for number, each in enumerate(value)]
        if isinstance(value, list):
            return items
        return {_TUPLE if isinstance(value, tuple) else _SET: items}
    if isinstance(value, bool | int | str):  # An enum of numbers or strings, for example.
        return value.real if isinstance(value, int) else str.__str__(value)
    key = tensor(value, name)
    if key is not None:
        return {_TENSOR: key}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # A scalar of NumPy.
        return _encode(value.item(), name, tensor, depth + 1)
    raise StateError(
        Problem(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which is not saved: "
            "a state has numbers, strings, tensors, and lists and mappings of them",
            fix="save what it can be made from again, such as its name and its arguments",
        )
    )


def _no_tensor(key: str) -> Any:
    raise ValueError(f"unexpected tensor {key}")


def from_json(value: Any, tensor: Callable[[str], Any] = _no_tensor) -> Any:
    """Return the value that `to_json` returned the form of.

    Args:
        value: The form, as read from JSON.
        tensor: Returns the tensor of a key. By default a value with tensors is a ValueError.
    """
    if isinstance(value, list):
        return [from_json(each, tensor) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, content),) = value.items()
        match key:
            case "$tuple":
                return tuple(from_json(each, tensor) for each in content)
            case "$set":
                return {from_json(each, tensor) for each in content}
            case "$items":
                return {from_json(k, tensor): from_json(v, tensor) for k, v in content}
            case "$float":
                return float(content)
            case "$bytes":
                return base64.b64decode(content)
            case "$tensor":
                return tensor(content)
    return {key: from_json(each, tensor) for key, each in value.items()}
