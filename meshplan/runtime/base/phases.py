"""Phases of a training step: the code that runs a phase announces it to registered listeners.

Measurements of time and memory listen.
"""

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
