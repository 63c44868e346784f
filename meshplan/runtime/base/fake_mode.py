"""The flag that a step runs on fake tensors, and stand-ins for the values that fake tensors lack.

A memory trace runs the code of a real training step on fake tensors, in one process that simulates
one rank of many. Code that reads values or communicates asks `is_fake_execution`, and continues
with the values it would get if all ranks had the same data as this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

import torch
from torch import nn

_T = TypeVar("_T")
_PRETENDING: Final[ContextVar[bool]] = ContextVar("pretending", default=False)

INSTEAD_OF_WRAPPING: Final[ContextVar[Callable[[nn.Module], None] | None]] = ContextVar(
    "instead_of_wrapping", default=None
)
"""A function that is called with each module in place of wrapping it in FSDP2 or DDP; None to wrap
it."""


def is_fake_execution() -> bool:
    """Return True in a fake step: tensors have no values, and no other ranks answer."""
    return _PRETENDING.get()


@contextmanager
def fake_execution() -> Iterator[None]:
    """Make `is_fake_execution` return True inside the `with` block."""
    token = _PRETENDING.set(True)
    try:
        yield
    finally:
        _PRETENDING.reset(token)


def numbers(tensor: torch.Tensor, otherwise: _T) -> _T:
    """Return `tensor.tolist()`, or `otherwise` in a fake step, where the tensor has no values."""
    return otherwise if _PRETENDING.get() else tensor.tolist()
