"""States that are written while the model trains: one thread, at most one state at a time."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Final

from meshplan.errors import StateError
from meshplan.runtime.watch.board import Board


class _Background:
    """The thread that writes a state, if any, and its error.

    Attributes:
        number: Number of boards that were made.
        thread: The thread; None if no state is being written.
        error: The error of the last state, until it is raised.
        process: The process that waits for the thread when it ends; 0 if none does yet.
    """

    def __init__(self) -> None:
        self.number = 0
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.process = 0


_BACKGROUND: Final = _Background()


def next_board() -> Board:
    """Return a new board; every rank makes its boards in the same order."""
    _BACKGROUND.number += 1
    return Board("state", _BACKGROUND.number)


def in_background(work: Callable[[], None]) -> None:
    """Do work in a thread; `finish_background` raises its error.

    The interpreter waits for the thread before it exits.
    """

    def run() -> None:
        try:
            work()
        except Exception as error:
            _BACKGROUND.error = error
            # The job may end before anything else is saved or loaded.
            print(f"meshplan: a state was not saved: {error}", file=sys.stderr, flush=True)

    if _BACKGROUND.process != os.getpid():
        # In a process that multiprocessing started, finalizers run before threads are waited for,
        # and one of them leaves the process group, which the board needs.
        _BACKGROUND.process = os.getpid()
        Finalize(None, _wait, exitpriority=200)
    _BACKGROUND.thread = threading.Thread(target=run, name="meshplan-save")
    _BACKGROUND.thread.start()


def _wait() -> None:
    if _BACKGROUND.thread is not None and _BACKGROUND.process == os.getpid():
        _BACKGROUND.thread.join()


def finish_background() -> None:
    """Wait for the state that is being written, if any.

    Raises:
        StateError: It could not be written.
    """
    if _BACKGROUND.thread is not None:
        _BACKGROUND.thread.join()
        _BACKGROUND.thread = None
    error, _BACKGROUND.error = _BACKGROUND.error, None
    if error is not None:
        problems = getattr(error, "problems", None) or f"{type(error).__name__}: {error}"
        raise StateError(problems) from error
