"""Control of when Python's garbage collector searches for reference cycles."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_MOST_NEW: Final = 1 << 20
"""New objects that may be allocated before the collector searches them for cycles."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Let the garbage collector run once per million new objects inside the context.

    A search of the planner makes millions of objects and next to no cycles; looking for cycles
    takes a tenth of its time. At the end the new objects are moved to the oldest generation, so
    that they are searched with all other old objects instead of immediately.
    """
    before = gc.get_threshold()
    gc.set_threshold(_MOST_NEW, *before[1:])
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # Leave frozen what other code has frozen.
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*before)


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn the garbage collector off inside the context.

    Searching tens of thousands of tuples for cycles takes a third of the time. It would also free
    the leftovers of a step on fake tensors at arbitrary moments. Decorate a whole function with
    this, so that the function's objects are gone when the collector is turned on again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def leave_at_once() -> None:
    """Let a process exit without searching its objects for cycles.

    With torch loaded the interpreter would look through half a million objects, several times.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
