"""Steps on tensors without numbers: what code that asks a tensor for a number gets.

A trace of memory runs the very code of a training step on fake tensors, in a process that stands
for one rank of many. Where that code looks at numbers, or asks the other ranks, it is told that
they are as this rank is.
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
"""What is done to each module that the data axes would be applied to, by who only looks on."""


def is_fake_execution() -> bool:
    """Whether tensors have no numbers, and other ranks do not answer."""
    return _PRETENDING.get()


@contextmanager
def fake_execution() -> Iterator[None]:
    """Inside, `numbers` answers in place of tensors."""
    token = _PRETENDING.set(True)
    try:
        yield
    finally:
        _PRETENDING.reset(token)


def numbers(tensor: torch.Tensor, otherwise: _T) -> _T:
    """`tensor.tolist()`, or `otherwise` where there are no numbers."""
    return otherwise if _PRETENDING.get() else tensor.tolist()
