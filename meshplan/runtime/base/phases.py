"""Phases of a training step: announced by the code that runs them, received by measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[str], None]] = []


def begin(phase: str) -> None:
    """Announce that a phase begins: "forward", "loss", "backward" or "step"."""
    for listener in _listeners:
        listener(phase)


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Call `listener` with the name of each phase that begins inside the `with` block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
