"""Steps on fake tensors: answers for code that reads the values of a tensor.

A memory trace runs the code of a real training step on fake tensors, in a process that stands for
one rank of many. Where that code reads values or asks other ranks, it is given the answer it would
get if the other ranks were equal to this one.
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
"""Called with each module instead of applying the data axes to it; None to apply them."""


def is_fake_execution() -> bool:
    """Return True in a fake step: tensors have no values, and no other ranks answer."""
    return _PRETENDING.get()


@contextmanager
def fake_execution() -> Iterator[None]:
    """Make `numbers` return its fallback inside the `with` block, because tensors are fake."""
    token = _PRETENDING.set(True)
    try:
        yield
    finally:
        _PRETENDING.reset(token)


def numbers(tensor: torch.Tensor, otherwise: _T) -> _T:
    """Return `tensor.tolist()`, or `otherwise` in a fake step."""
    return otherwise if _PRETENDING.get() else tensor.tolist()
