"""When Python looks for garbage in cycles."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_MOST_NEW: Final = 1 << 20
"""Objects that may be there beyond those of before until cycles among them are looked for."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Inside, cycles are looked for once in a million objects.

    A search makes millions and next to no cycles; to look for those takes a tenth of its time.
    What is there afterwards is old, and looked through with all that is, and not at once.
    """
    before = gc.get_threshold()
    gc.set_threshold(_MOST_NEW, *before[1:])
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # What somebody else froze stays so.
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*before)


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, cycles are not looked for.

    To look for them among tens of thousands of tuples takes a third of the time; what a step on
    fake tensors leaves would be freed at any moment, and is none that counts. Of a whole function,
    so that they are gone when it is looked for again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def leave_at_once() -> None:
    """Let a process that ends give all it holds to the system, and look for no cycles in it.

    With torch loaded there are half a million objects to look through, several times.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
