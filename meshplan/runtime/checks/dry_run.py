"""Running modules beside the training, to compare them with themselves: nothing of it stays."""

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
    """Whether a module runs beside the training: what it is fed then, nobody trains on."""
    return _ASIDE.get()


@contextmanager
def dry_run(module: nn.Module, *, evaluates: bool = True) -> Iterator[None]:
    """In evaluation, so that nothing is random, and with what the forwards leave taken back.

    Args:
        evaluates: False leaves the module in the mode that it is in.

    Buffers and attributes, also those written in place, are as they were afterwards. What lies
    deeper than one list, tuple or dict inside an attribute is not looked at.
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
    """Give tensors, and lists, dicts and sets, the numbers and the parts that they had.

    A backward that a tensor is saved for does not see that it was written meanwhile.
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
    """Return the tensors among these, and those in a list, tuple or dict among them."""
    for value in values:
        inside = value.values() if type(value) is dict else value
        for each in inside if type(value) in (list, tuple, dict) else (value,):
            # A tensor of inference mode has no version, and nothing here writes into it.
            if isinstance(each, torch.Tensor) and not each.is_inference():
                yield each


def noise(name: str, local: torch.Tensor, width: int) -> torch.Tensor | None:
    """What tells more than a weight whose numbers are all equal, or None.

    Many weights are zeros at first, and nothing shows in zeros: neither which position's row was
    added, nor what they were multiplied with. The noise lies around the weight's number and is the
    same wherever the name and the shape are the same.

    Args:
        name: The fqn of the weight.
        local: Its numbers, or this rank's part of them.
        width: Its last size, whole: the noise has the spread of a fresh projection.
    """
    if not local.numel() or not local.is_floating_point() or is_fake_execution():
        return None
    low, high = torch.aminmax(local)
    if low != high or (local.numel() == 1 and low):
        return None
    generator = torch.Generator(local.device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty_like(local).normal_(float(low), width**-0.5, generator=generator)
