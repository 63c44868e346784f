"""Show a problem that ends a rank once, and last, in what torchrun prints."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Final

from meshplan.errors import MeshplanError
from meshplan.runtime.watch.stack import is_of_user

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file that torchrun reads after a rank has failed.

Source: torch 2.13, distributed/elastic/multiprocessing/errors: `ErrorHandler.record_exception` has
the form, and `ChildFailedError` prints `py_callstack` for the rank that failed first."""


def show_uncaught(error: BaseException, hook: Hook) -> None:
    """Print an exception that ends this rank.

    Under torchrun a problem of a plan or a model is printed without a traceback, by the first rank
    of each node, and written to the error file that torchrun's summary shows at the end. Likewise a
    Ctrl-C is one line. With MESHPLAN_TRACEBACK=1, without torchrun, and for errors of other kinds,
    `hook` prints it.

    Args:
        error: The exception.
        hook: The `sys.excepthook` of before.
    """
    file = os.environ.get(_ERROR_FILE)
    if file and isinstance(error, KeyboardInterrupt) and not os.environ.get("MESHPLAN_TRACEBACK"):
        if os.environ.get("LOCAL_RANK", "0") == "0":  # Ctrl-C reaches all ranks at once.
            print(f"interrupted{_called_at(error)}", file=sys.stderr, flush=True)
        return
    if not file or not isinstance(error, MeshplanError) or os.environ.get("MESHPLAN_TRACEBACK"):
        hook(type(error), error, error.__traceback__)
        return
    text = f"{error}{_called_at(error)}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)
    info = {"py_callstack": text, "timestamp": str(int(time.time()))}
    try:
        with open(file, "x", encoding="utf-8") as out:
            json.dump({"message": {"message": text, "extraInfo": info}}, out)
    except OSError:  # torchrun's summary then only names the exit code.
        return


def _called_at(error: BaseException) -> str:
    """Return the user's innermost line from which the error was raised, on a line of its own."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_of_user(frame.filename):
            return f"\n    at {frame.filename}:{frame.lineno}: {frame.line}"
    return ""
