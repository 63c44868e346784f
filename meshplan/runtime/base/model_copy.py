"""Copies of a model whose patched methods belong to the copy.

Libraries wrap the forward of a model or a layer: `layer.forward = wrap(layer.forward)`. The wrapper
is a function that holds the layer, and `copy.deepcopy` does not copy functions, so the copy would
run the modules of the original.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn


def copy_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a model, in which functions that hold its modules hold the copies.

    Args:
        model: The model.
        memo: As for `copy.deepcopy`: what stands for an object, by the object's id.
    """
    for module in model.modules():
        for value in vars(module).values():
            # torch copies no results; the hook of `nn.utils.weight_norm` leaves its weight as one.
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo.setdefault(id(value), value.detach().clone())
    copied = copy.deepcopy(model, memo)
    copies = {id(each): memo[id(each)] for each in model.modules() if id(each) in memo}
    for module in copied.modules():
        attributes = vars(module)
        for name, value in list(attributes.items()):
            if callable(value) and (moved := _moved(value, copies, {})) is not value:
                attributes[name] = moved
    return copied


def _moved(value: Any, copies: Mapping[int, nn.Module], seen: dict[int, Any]) -> Any:
    """Return a value with the copies in place of modules that it is, is bound to or closes over."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = value
    found = value
    if isinstance(value, MethodType):
        owner = _moved(value.__self__, copies, seen)
        function = _moved(value.__func__, copies, seen)
        if owner is not value.__self__ or function is not value.__func__:
            found = MethodType(function, owner)
    elif isinstance(value, partial):
        function = _moved(value.func, copies, seen)
        args = tuple(_moved(each, copies, seen) for each in value.args)
        keywords = {key: _moved(each, copies, seen) for key, each in value.keywords.items()}
        before = (value.func, *value.args, *value.keywords.values())
        after = (function, *args, *keywords.values())
        if any(old is not new for old, new in zip(before, after, strict=True)):
            found = partial(function, *args, **keywords)
    elif isinstance(value, FunctionType) and value.__closure__:
        found = _moved_function(value, copies, seen)
    seen[id(value)] = found
    return found


def _moved_function(
    function: FunctionType, copies: Mapping[int, nn.Module], seen: dict[int, Any]
) -> FunctionType:
    """Return a function that closes over the copies; the same one if it closes over no module."""
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    seen[id(function)] = made  # Before its cells are filled: one may hold the function itself.
    is_moved = False
    for cell, new in zip(function.__closure__ or (), cells, strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # Not assigned yet.
            continue
        new.cell_contents = moved = _moved(content, copies, seen)
        is_moved |= moved is not content and moved is not made
    if not is_moved:
        return function
    made.__kwdefaults__ = function.__kwdefaults__
    made.__doc__, made.__qualname__ = function.__doc__, function.__qualname__
    made.__dict__.update({k: _moved(v, copies, seen) for k, v in function.__dict__.items()})
    return made
