"""Map a function over a sequence on two cores.

One Python process computes on one core. Where a second core is available, the process forks; the
copy has everything that was loaded so far, and works from the end of the sequence while the
original works from the beginning. The copy's results are pickled and sent back, so they should be
small. Side effects in the copy, such as filled caches, are lost.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn, TypeVar

A = TypeVar("A")
B = TypeVar("B")

_SECOND: Final = threading.Lock()
"""Locked while a copy is at work, also inside the copy: two processes are enough for two cores."""
_MOST: Final = 4096
"""Maximum number of items: one byte for each is written to a pipe before anybody reads from it."""


def has_another() -> bool:
    """Return True if a second core may be used now.

    A process with other threads is not forked, because locks that they hold would never be released
    in the copy. A process that has imported torch is not forked either: torch's own threads do not
    work in a copy; numpy's do.
    """
    return (
        sys.platform == "linux"
        and not _SECOND.locked()
        and "torch" not in sys.modules
        and threading.active_count() == 1
        and len(os.sched_getaffinity(0)) > 1
    )


def each(work: Callable[[A], B], pieces: Sequence[A]) -> list[B]:
    """Return `work(piece)` for each piece, in order, as a serial loop would.

    Args:
        work: A function whose calls do not depend on each other and whose results can be pickled.
        pieces: The items to work on.

    Raises:
        Exception: The error of the first piece, in order, that raises one.
    """
    if not 2 <= len(pieces) <= _MOST or not has_another():
        return [work(piece) for piece in pieces]
    with _SECOND:
        return _from_both_ends(work, pieces)


def _from_both_ends(work: Callable[[A], B], pieces: Sequence[A]) -> list[B]:
    """Work from both ends of `pieces`, in two processes.

    A pipe contains one token per piece. The process that takes a token does the next piece at its
    own end.
    """
    with _pipe() as (tokens, filler), _pipe() as (here, there):
        filler.write(bytes(len(pieces)))
        filler.close()  # So that readers see the end of the pipe.
        own, copy = os.getpid(), 0
        done: list[B] = []
        try:
            copy = _fork()
            if not copy:
                here.close()
                _do_the_last(work, pieces, lambda: os.getppid() == own and _takes(tokens), there)
            there.close()
            while _takes(tokens):
                done.append(work(pieces[len(done)]))
            found = _received(here)
        finally:
            if copy > 0:
                os.kill(copy, signal.SIGKILL)
                with suppress(ChildProcessError):  # Other code may have reaped it.
                    os.waitpid(copy, 0)
    # Pieces on which the copy failed are done again here, so that errors are raised here.
    done += [work(piece) for piece in pieces[len(done) : len(pieces) - len(found)]]
    return done + found


@contextmanager
def _pipe() -> Iterator[tuple[io.FileIO, io.FileIO]]:
    """Open a pipe, and yield its (read end, write end)."""
    ends = [io.FileIO(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True)]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


def _fork() -> int:
    """Return what `os.fork` returns, or a negative number if the system cannot start a process.

    SIGINT is blocked in the copy: Ctrl-C reaches the parent too, and the parent ends the copy.
    """
    copy, before = -1, signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with suppress(OSError), warnings.catch_warnings():
            # Python 3.12 and later warn of threads, even those of BLAS, which it stops for a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            copy = os.fork()
    finally:
        if copy:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return copy


def _takes(tokens: io.FileIO) -> bool:
    return bool(tokens.read(1))


def _do_the_last(
    work: Callable[[A], B], pieces: Sequence[A], takes: Callable[[], bool], there: io.FileIO
) -> NoReturn:
    """Do pieces in the copy, last one first, until one raises; send the results and exit."""
    done: list[B] = []
    try:
        with suppress(Exception):  # The parent does the piece again, and raises there.
            while takes():
                done.insert(0, work(pieces[-1 - len(done)]))
        with open(there.fileno(), "wb", closefd=False) as file:
            pickle.dump(done, file)
    finally:
        os._exit(0)  # Skip the cleanup of the process that was copied.


def _received(here: io.FileIO) -> list[Any]:
    """Return what the copy sent; [] if it was killed before, for example for lack of memory."""
    with suppress(EOFError, pickle.UnpicklingError):
        found: list[Any] = pickle.loads(here.readall())
        return found
    return []
