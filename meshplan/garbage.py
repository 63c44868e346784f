"""Control of when Python's garbage collector searches for reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_MOST_NEW: Final = 1 << 20
"""Number of new objects after which the collector searches them for cycles."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Let the garbage collector run only once per million new objects inside the context.

    A search of the planner makes millions of objects and next to no cycles; without this the
    collector would take a tenth of the search's time. At the end, the new objects are moved to the
    oldest generation, because the collector would otherwise search all of them immediately.
    """
    before = gc.get_threshold()
    gc.set_threshold(_MOST_NEW, *before[1:])
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # `unfreeze` would also unfreeze objects of other code.
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*before)


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn the garbage collector off inside the context.

    A memory estimate makes tens of thousands of tuples, and searching them for cycles would take a
    third of its time. A collection could also free objects of a step on fake tensors at any point
    of the step. Decorate a whole function with this: when the collector is turned on again, the
    function has returned and its local objects are already freed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
