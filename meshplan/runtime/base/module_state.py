"""What modules remember from one forward to the next: their buffers and attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from meshplan.model.flow import AttributeWrite
from meshplan.runtime.base.pytree import tensors_in

_PLAIN: Final = (bool, int, float, complex, str, type(None))

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What the module's own code put on it: neither parameters, buffers, modules nor hooks."""
    return {n: v for n, v in vars(module).items() if n not in _OF_EVERY_MODULE}


def plain_attributes(model: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """By module and name: numbers that the model's own code keeps, such as counts of its calls.

    Not switches: what sets one, as a preparation at the first call does, does more than that.
    """
    return {
        (module, name): value
        for module in model.modules()
        for name, value in own_attributes(module).items()
        if type(value) in (int, float, complex)
    }


def tensor_attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """By dotted name: tensors that the model's own code keeps in attributes."""
    return {
        f"{fqn}.{name}" if fqn else name: value
        for fqn, module in model.named_modules()
        for name, value in own_attributes(module).items()
        if type(value) is torch.Tensor and not value.is_meta
    }


def contents(model: nn.Module) -> dict[tuple[str, str], Any]:
    """By module and name: what attributes are, and what lists, tables and objects among them hold.

    Told by values where these are plain and by which object it is else, so that nothing is held.
    """
    return {
        (fqn, name): _inside(value)
        for fqn, module in model.named_modules()
        for name, value in own_attributes(module).items()
    }


def _inside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((_sign(key), _sign(each)) for key, each in value.items())
    if isinstance(value, list | tuple | set):
        return tuple(map(_sign, value))
    own = getattr(value, "__dict__", None)
    if own is None or isinstance(value, nn.Module | torch.Tensor | type):
        return _sign(value)
    return id(value), _inside(own)


def _sign(value: Any) -> Any:
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def hooks_of(module: nn.Module) -> Iterator[Mapping[Any, Any]]:
    """What is called around its forward and its backward, kind by kind."""
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        yield vars(module)[name]


def module_state_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """By module and name: tensors and plain values that are no parameters."""
    out: dict[tuple[str, str], Any] = {}
    for fqn, module in model.named_modules():
        for name, value in (*module._buffers.items(), *own_attributes(module).items()):
            if isinstance(value, _PLAIN):
                out[fqn, name] = value
            else:
                out.update(((fqn, path), tensor) for path, tensor in tensors_in(value, name))
    return out


def changes(
    before: Mapping[tuple[str, str], Any],
    after: Mapping[tuple[str, str], Any],
    value_of: Callable[[torch.Tensor], int],
) -> Iterator[AttributeWrite]:
    """What is not the same object, or plain value, any more."""
    for module, name in dict.fromkeys((*before, *after)):
        old, new = before.get((module, name)), after.get((module, name))
        is_tensor = isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor)
        if old is new or (not is_tensor and old == new):
            continue
        ids = (value_of(t) if isinstance(t, torch.Tensor) else None for t in (old, new))
        yield AttributeWrite(module=module, name=name, old=next(ids), new=next(ids))
