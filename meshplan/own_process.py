"""Freedoms of a command of meshplan, whose process is its own.

It may run in this process what a library call leaves to a subprocess, such as opening a fake
process group, and need not import torch twice. It may also exit without tidying up.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from contextvars import ContextVar
from typing import Final, NoReturn

IS_OWN: Final[ContextVar[bool]] = ContextVar("IS_OWN", default=False)
"""True while the command line answers."""

IS_COMMAND: Final[ContextVar[bool]] = ContextVar("IS_COMMAND", default=False)
"""True in a process that was started for one command; False if Python code calls `main`."""

_FEW_SEARCHES: Final = 1 << 20
"""Objects made between two searches for cycles; Python's default is 700."""


def search_rarely() -> None:
    """Let the interpreter search for cycles of objects less often.

    With the default it searches 380 times while torch is imported, whose objects all stay.
    """
    gc.set_threshold(_FEW_SEARCHES)


def leave_at_once(code: int) -> NoReturn:
    """Exit without freeing every object, which takes a tenth of a second once torch is imported.

    The functions registered with `atexit` run and the standard streams are flushed, as in any exit.
    If other threads run, which a usual exit would wait for, this is a usual exit.

    Args:
        code: The exit code.
    """
    if threading.active_count() > 1:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # The reader closed the pipe, or it was closed here.
            sys.exit(code)
    os._exit(code)
