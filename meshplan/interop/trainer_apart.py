"""A copy of a Trainer on which a loss is computed without effects on the Trainer itself.

A pipeline computes a loss once for each part of a microbatch, but what a loss counts and logs is
that of the whole microbatch.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn

_ORIGINAL: Final = "_meshplan_original"
_LOGS: Final = "_meshplan_logs"
_MISSING: Final = object()


def apart(trainer: Any) -> Any:
    """Return a copy of a Trainer that copies what is read of it, and keeps what is written to it.

    Tensors and containers are copied when they are read first, so that writing into them has no
    effect on the Trainer; other objects are the Trainer's own. Nothing is logged.
    """
    kind: Any = type(trainer)
    made: Any = object.__new__(_kind(kind))
    object.__getattribute__(made, "__dict__").update({_ORIGINAL: trainer, _LOGS: []})
    return made


@functools.cache
def _kind(base: Any) -> type:
    class Apart(base):
        def __getattribute__(self, name: str) -> Any:
            own = object.__getattribute__(self, "__dict__")
            given = vars(own[_ORIGINAL])
            if name in given and name not in own:
                own[name] = _copied(given[name])
            return super().__getattribute__(name)

        def log(self, *args: Any, **kwargs: Any) -> None:
            logs: list[Any] = vars(self)[_LOGS]
            logs.append((args, kwargs))

    Apart.__name__ = base.__name__
    return Apart


def changes(copied: Any) -> dict[str, Any]:
    """Return the attributes of a copy that are not those of its Trainer."""
    own = vars(copied)
    before = vars(own[_ORIGINAL])
    return {
        name: value
        for name, value in own.items()
        if name not in (_ORIGINAL, _LOGS) and not same(value, before.get(name, _MISSING))
    }


def logs_of(copied: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each call of a copy's `log`."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = vars(copied)[_LOGS]
    return found


def _copied(value: Any) -> Any:
    """Return a value with copies of the tensors and containers in it."""
    if isinstance(value, torch.Tensor):
        is_trained = isinstance(value, nn.Parameter) or value.requires_grad
        return value if is_trained else value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        made = copy.copy(value)  # Of the same kind, such as a defaultdict.
        made.update({key: _copied(each) for key, each in value.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    if type(value) is deque:
        return deque((_copied(each) for each in value), value.maxlen)
    return copy.copy(value) if isinstance(value, set) else value


def same(one: Any, other: Any) -> bool:
    """Return True if two values are equal: tensors by their numbers, other objects by identity."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        is_one_memory = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
        return (is_one_memory and not one.is_meta) or torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return isinstance(one, int | str | bytes | complex | set) and bool(one == other)
