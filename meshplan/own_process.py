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


def leave_at_once() -> None:
    """Let the process exit without searching its objects for cycles.

    With torch loaded, the interpreter would search half a million objects several times at exit.
    `gc.freeze` exempts them.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
