"""What a training step is doing: said by whoever does it, heard by whoever measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[str], None]] = []


def begin(phase: str) -> None:
    """Say that a phase begins: "forward", "loss", "backward" or "step"."""
    for listener in _listeners:
        listener(phase)


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Inside, `listener` gets the name of each phase as it begins."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
