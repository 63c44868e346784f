"""Freedoms of a command of meshplan, whose process is its own.

It may run in this process what a library call leaves to a subprocess, such as opening a fake
process group, and need not import torch twice. It may also exit without tidying up.
"""

from __future__ import annotations

import atexit
import gc
from contextvars import ContextVar
from typing import Final

IS_OWN: Final[ContextVar[bool]] = ContextVar("IS_OWN", default=False)
"""True while the command line answers."""


_FEW_SEARCHES: Final = 100_000
"""Objects made between two searches for cycles; Python's default is 700."""


def search_rarely() -> None:
    """Let the interpreter search for cycles of objects less often.

    With the default it searches 380 times while torch is imported, whose objects all stay.
    """
    gc.set_threshold(_FEW_SEARCHES)


def leave_at_once() -> None:
    """Let the process exit without searching its objects for cycles.

    With torch loaded, the interpreter would search half a million objects several times at exit.
    `gc.freeze` exempts them.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
