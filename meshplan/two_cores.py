"""Map a function over a sequence on two cores.

One Python process computes on one core. If a second core is available, the process forks. The copy
starts with all objects that are in memory, and works from the end of the sequence while the
original works from the beginning. The copy's results are pickled and sent to the original, so they
should be small. Side effects in the copy, such as filled caches, are lost.
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
"""Locked while a copy runs, and also inside the copy, so that there are at most two processes."""
_MOST: Final = 4096
"""Maximum number of items. One byte per item is written to a pipe before any process reads from it;
with more bytes than a pipe can buffer, the writer would wait forever.
"""


def has_another() -> bool:
    """Return True if a second core may be used now.

    A process with other Python threads is not forked, because the locks of these threads would
    never be released in the copy. A process that has imported torch is not forked either, because
    torch's thread pools do not work in a copy; those of numpy do.
    """
    return (
        sys.platform == "linux"
        and not _SECOND.locked()
        and "torch" not in sys.modules
        and threading.active_count() == 1
        and len(os.sched_getaffinity(0)) > 1
    )


def is_interrupted() -> bool:
    """Return True if Ctrl-C was pressed since this process was forked as a copy.

    A copy blocks SIGINT, so the signal stays pending. False in the original.
    """
    return signal.SIGINT in signal.sigpending()


def each(work: Callable[[A], B], pieces: Sequence[A]) -> list[B]:
    """Return the list of `work(piece)` for each piece, in the order of `pieces`.

    Args:
        work: A function whose calls do not depend on each other and whose results can be pickled.
        pieces: The items to work on.

    Raises:
        Exception: The error that a serial loop over `pieces` would raise.
    """
    if not 2 <= len(pieces) <= _MOST or not has_another():
        return [work(piece) for piece in pieces]
    with _SECOND:
        return _from_both_ends(work, pieces)


def _from_both_ends(work: Callable[[A], B], pieces: Sequence[A]) -> list[B]:
    """Return the results of `each`, computed by two processes that begin at either end of `pieces`.

    A pipe contains one token per piece. A process takes a token before each piece that it works on,
    so that the two processes meet without working on any piece twice.
    """
    with _pipe() as (tokens, filler), _pipe() as (read_end, write_end):
        filler.write(bytes(len(pieces)))
        filler.close()  # Otherwise a reader would wait for more tokens after the last one.
        own, copy = os.getpid(), 0
        done: list[B] = []
        try:
            copy = _fork()
            if not copy:
                read_end.close()
                _do_the_last(
                    work, pieces, lambda: os.getppid() == own and _takes(tokens), write_end
                )
            write_end.close()
            while _takes(tokens):
                done.append(work(pieces[len(done)]))
            found = _received(read_end)
        finally:
            if copy > 0:
                os.kill(copy, signal.SIGKILL)
                with suppress(ChildProcessError):  # Other code may have reaped the child already.
                    os.waitpid(copy, 0)
    # Repeat the pieces on which the copy failed, so that their error is raised in this process.
    done += [work(piece) for piece in pieces[len(done) : len(pieces) - len(found)]]
    return done + found


@contextmanager
def _pipe() -> Iterator[tuple[io.FileIO, io.FileIO]]:
    """Open a pipe, yield (read end, write end), and close both at the end."""
    ends = [io.FileIO(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True)]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


def _fork() -> int:
    """Fork, and return the copy's process id, 0 in the copy, or -1 if no process can be started.

    SIGINT is blocked in the copy: Ctrl-C also reaches the parent, which then kills the copy.
    """
    copy, before = -1, signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with suppress(OSError), warnings.catch_warnings():
            # Python 3.12 and later warn if a process with threads forks. The only threads here are
            # those of BLAS, which stops them before a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            copy = os.fork()
    finally:
        if copy:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return copy


def _takes(tokens: io.FileIO) -> bool:
    return bool(tokens.read(1))


def _do_the_last(
    work: Callable[[A], B], pieces: Sequence[A], takes: Callable[[], bool], write_end: io.FileIO
) -> NoReturn:
    """Work on pieces in the copy, from the last one backwards; write the results and exit.

    Args:
        work: The function to call with each piece.
        pieces: All pieces.
        takes: Takes a token and returns True; returns False if no token is left or the parent died.
        write_end: The write end of the pipe for the results.
    """
    done: list[B] = []
    try:
        with suppress(Exception):  # The parent repeats the piece that raised, and raises its error.
            while takes():
                done.insert(0, work(pieces[-1 - len(done)]))
        with open(write_end.fileno(), "wb", closefd=False) as file:
            pickle.dump(done, file)
    finally:
        os._exit(0)  # Skip exit handlers, which belong to the parent.


def _received(read_end: io.FileIO) -> list[Any]:
    """Return the copy's results; [] if the copy was killed before, for example out of memory."""
    with suppress(EOFError, pickle.UnpicklingError):
        found: list[Any] = pickle.loads(read_end.readall())
        return found
    return []
