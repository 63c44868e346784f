"""Copies between device memory and host memory, each marked with the memory it is made in.

On a machine without an accelerator both memories are the same, but the copies are still made, so
that a step makes and frees the same tensors as on a GPU. The memory tracker reads the marks to
count device memory and host memory separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, auto

import torch

from meshplan.runtime.base.mesh import device


class MemorySide(Enum):
    """The memory that a tensor is in: the device's or the host's."""

    DEVICE = auto()
    HOST = auto()


CROSSING: ContextVar[MemorySide | None] = ContextVar("crossing", default=None)
"""The memory in which a copy is being made at the moment; None while no copy is being made."""


@contextmanager
def crossing_to(side: MemorySide) -> Iterator[None]:
    """Mark the tensors made inside the `with` block as copies in the memory `side`."""
    token = CROSSING.set(side)
    try:
        yield
    finally:
        CROSSING.reset(token)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, pinned if the device has separate memory.

    The call waits for the copy to finish, as `torch.autograd.graph.save_on_cpu` does, so that the
    caller may free `tensor` at once.
    """
    is_apart = device().type != "cpu"
    with crossing_to(MemorySide.HOST), torch.no_grad():
        copy = torch.empty_like(tensor, device="cpu", pin_memory=is_apart)
        copy.copy_(tensor)
    return copy


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, in device memory, of a tensor that `to_host` returned."""
    with crossing_to(MemorySide.DEVICE), torch.no_grad():
        copy = torch.empty_like(tensor, device=device(), pin_memory=False)
        copy.copy_(tensor, non_blocking=True)
    return copy
