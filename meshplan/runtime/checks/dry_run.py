"""Dry runs of modules during training, to compare them with each other without side effects."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import nn

from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.module_state import own_attributes
from meshplan.runtime.torch_private.values import versions_kept

_ASIDE: Final[ContextVar[bool]] = ContextVar("aside", default=False)


def in_dry_run() -> bool:
    """Return True if a module runs in a dry run, on whose inputs and outputs nothing trains."""
    return _ASIDE.get()


@contextmanager
def dry_run(module: nn.Module, *, evaluates: bool = True) -> Iterator[None]:
    """Run forwards in evaluation mode, so that nothing is random, and undo their side effects.

    Buffers and attributes, including those written in place, have their previous values afterwards.
    Nested containers inside the list, tuple or dict of an attribute are not restored.

    Args:
        module: The module that the `with` block runs.
        evaluates: If False, the modules keep their mode.
    """
    modes = [(m, m.training) for m in module.modules()]
    kept = [(m, own_attributes(m), dict(m._buffers)) for m, _ in modes]
    values = [value for _, *tables in kept for table in tables for value in table.values()]
    token = _ASIDE.set(True)
    with untouched(values):
        for m, _ in modes if evaluates else ():
            m.training = False
        try:
            yield
        finally:
            _ASIDE.reset(token)
            for m, mode in modes:
                m.training = mode
            for m, own, buffers in kept:
                for name in own_attributes(m).keys() - own.keys():
                    del vars(m)[name]
                vars(m).update(own)
                m._buffers.update(buffers)


@contextmanager
def untouched(values: Iterable[Any]) -> Iterator[None]:
    """Restore the values of tensors, and the items of lists, dicts and sets, afterwards.

    A backward that has saved one of the tensors does not notice that it was written in between.
    """
    values = list(values)
    tensors = {id(t): (t, t._version, t.detach().clone()) for t in _tensors(values)}
    insides = [(value, value.copy()) for value in values if type(value) in (list, dict, set)]
    with versions_kept(tensor for tensor, _, _ in tensors.values()):
        try:
            yield
        finally:
            for value, before in insides:
                value.clear()
                value.extend(before) if isinstance(value, list) else value.update(before)
            with torch.no_grad():
                for tensor, version, before in tensors.values():
                    if tensor._version != version:
                        tensor.copy_(before)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among these values, and those directly in a list, tuple or dict."""
    for value in values:
        inside = value.values() if type(value) is dict else value
        for each in inside if type(value) in (list, tuple, dict) else (value,):
            # An inference tensor has no version counter, and no code writes into it here.
            if isinstance(each, torch.Tensor) and not each.is_inference():
                yield each


def noise(name: str, local: torch.Tensor, width: int) -> torch.Tensor | None:
    """Return random values for a constant weight, or None if the weight is not constant.

    Many weights start as zeros, and zeros hide mistakes: which position's row was added, or what
    the weight was multiplied with. The noise is centred on the weight's constant value. It is equal
    wherever name and shape are equal.

    Args:
        name: The fqn of the weight.
        local: The weight's values, or this rank's shard of them.
        width: Unsharded size of its last dim; the noise has the spread of a fresh projection.
    """
    if not local.numel() or not local.is_floating_point() or is_fake_execution():
        return None
    low, high = torch.aminmax(local)
    if low != high or (local.numel() == 1 and low):
        return None
    generator = torch.Generator(local.device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty_like(local).normal_(float(low), width**-0.5, generator=generator)
