"""Dry runs: extra forwards of modules during training that leave no trace, made by checks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import nn

from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.module_state import containers_kept, has_own_class, own_attributes
from meshplan.runtime.torch_private.values import versions_kept

_ASIDE: Final[ContextVar[bool]] = ContextVar("aside", default=False)


def in_dry_run() -> bool:
    """Return True inside `dry_run`, where a forward is a check and not a part of training."""
    return _ASIDE.get()


@contextmanager
def dry_run(module: nn.Module, *, evaluates: bool = True) -> Iterator[None]:
    """Run forwards in evaluation mode inside the `with` block, and undo their side effects.

    Evaluation mode turns dropout off, so that two runs are comparable. Afterwards buffers and
    attributes have their previous values, even if a forward wrote into them in place. Modules with
    parameters of a class of their own, such as quantised ones, keep their mode: bitsandbytes packs
    weights for good in their first evaluation on some CPUs, and gives no gradients from then on.

    Args:
        module: The module that the `with` block runs.
        evaluates: If False, the modules keep their training mode.
    """
    modes = [(m, m.training) for m in module.modules()]
    kept = [(m, own_attributes(m), dict(m._buffers)) for m, _ in modes]
    values = [value for _, *tables in kept for table in tables for value in table.values()]
    token = _ASIDE.set(True)
    with untouched(values):
        for m, _ in modes if evaluates else ():
            if not any(has_own_class(each) for each in m._parameters.values()):
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
    """Restore the given tensors, and the items of `containers_in` the values, after the block.

    The tensors' version counters do not change, so that a backward that saved one of them before
    does not raise because of a write inside the block.
    """
    values = list(values)
    tensors = {id(t): (t, t._version, t.detach().clone()) for t in _tensors(values)}
    written = (tensor for tensor, _, _ in tensors.values())
    with containers_kept(values), versions_kept(written):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, version, before in tensors.values():
                    if tensor._version != version:
                        tensor.copy_(before)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among these values, and those directly in a list, tuple or dict.

    Callers copy these tensors, so those deeper inside, which may be many, are not among them.
    """
    for value in values:
        inside = value.values() if type(value) is dict else value
        for each in inside if type(value) in (list, tuple, dict) else (value,):
            # An inference tensor has no version counter, and cannot be written outside
            # `torch.inference_mode`.
            if isinstance(each, torch.Tensor) and not each.is_inference():
                yield each


def noise(name: str, local: torch.Tensor, width: int) -> torch.Tensor | None:
    """Return random values for a weight of equal elements; None if its elements are not equal.

    Many weights start as zeros, and zeros hide mistakes in a comparison: adding the row of a wrong
    position or multiplying with a wrong value gives the same result. The values are normally
    distributed around the constant, with standard deviation 1 / sqrt(width), as in a newly
    initialised projection. The same name and local shape give the same values on every rank.

    Args:
        name: The fqn of the weight, the seed of the random values.
        local: The weight's values, or this rank's shard of them.
        width: Unsharded size of the weight's last dim.
    """
    if not local.numel() or not local.is_floating_point() or is_fake_execution():
        return None
    low, high = torch.aminmax(local)
    if low != high or (local.numel() == 1 and low):
        return None
    generator = torch.Generator(local.device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty_like(local).normal_(float(low), width**-0.5, generator=generator)
