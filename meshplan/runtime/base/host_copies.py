"""Copies between the device's memory and the host's, and which of the two a copy is made in.

On a machine without an accelerator both are the same memory, but the copies are real ones: a
step there makes and frees tensors as it does on a GPU, and whoever counts bytes is told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, auto

import torch

from meshplan.runtime.base.mesh import device


class MemorySide(Enum):
    """Whose memory."""

    DEVICE = auto()
    HOST = auto()


CROSSING: ContextVar[MemorySide | None] = ContextVar("crossing", default=None)
"""Where a copy between the two is being made; None while nothing crosses."""


@contextmanager
def crossing_to(side: MemorySide) -> Iterator[None]:
    """What is made inside is a copy that lies on this side."""
    token = CROSSING.set(side)
    try:
        yield
    finally:
        CROSSING.reset(token)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, pinned where there is a device to copy from.

    It waits for the copy, as `save_on_cpu` does: the device's memory is given back at once.
    """
    is_apart = device().type != "cpu"
    with crossing_to(MemorySide.HOST), torch.no_grad():
        copy = torch.empty_like(tensor, device="cpu", pin_memory=is_apart)
        copy.copy_(tensor)
    return copy


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the device's memory of what `to_host` gave."""
    with crossing_to(MemorySide.DEVICE), torch.no_grad():
        copy = torch.empty_like(tensor, device=device(), pin_memory=False)
        copy.copy_(tensor, non_blocking=True)
    return copy
