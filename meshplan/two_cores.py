"""One piece of work after another, at both ends at once where there are two cores.

Python itself computes on one. So a copy of this process, which knows all that was read so far and
loads nothing, begins with the last piece. What its pieces come to is sent back, so let that be
small; what it learns beside it is lost.
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
"""Held while a copy is at work, and inside of it: two processes are enough for two cores."""
_MOST: Final = 4096
"""Pieces, for each of which a byte lies in a pipe that nobody reads yet."""


def has_another() -> bool:
    """Whether a second core may be used now.

    A process with other threads is not copied: locks that they hold would never be given back. Nor
    is one with torch, whose own threads do not know what to do in a copy; numpy's do.
    """
    return (
        sys.platform == "linux"
        and not _SECOND.locked()
        and "torch" not in sys.modules
        and threading.active_count() == 1
        and len(os.sched_getaffinity(0)) > 1
    )


def each(work: Callable[[A], B], pieces: Sequence[A]) -> list[B]:
    """What pieces of work come to, as if one was done after the other.

    Args:
        work: Asks no other piece for anything, and comes to something that can be pickled.

    Raises:
        Exception: What the first piece raises that raises anything.
    """
    if not 2 <= len(pieces) <= _MOST or not has_another():
        return [work(piece) for piece in pieces]
    with _SECOND:
        return _from_both_ends(work, pieces)


def _from_both_ends(work: Callable[[A], B], pieces: Sequence[A]) -> list[B]:
    """A token for each piece lies in a pipe: whoever takes one does the next at its own end."""
    with _pipe() as (tokens, filler), _pipe() as (here, there):
        filler.write(bytes(len(pieces)))
        filler.close()  # So that it is read to its end.
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
                with suppress(ChildProcessError):  # Somebody else waits for all children.
                    os.waitpid(copy, 0)
    # What the copy could not do is done here, and raises here.
    done += [work(piece) for piece in pieces[len(done) : len(pieces) - len(found)]]
    return done + found


@contextmanager
def _pipe() -> Iterator[tuple[io.FileIO, io.FileIO]]:
    """Its two ends, (to read from, to write to)."""
    ends = [io.FileIO(end, mode) for end, mode in zip(os.pipe(), "rw", strict=True)]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


def _fork() -> int:
    """As `os.fork`; negative where the system has no room for another process.

    Ctrl-C does not reach the copy: whoever waits for it hears it too, and ends it.
    """
    copy, before = -1, signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with suppress(OSError), warnings.catch_warnings():
            # Since 3.12 Python warns of threads, those of BLAS too, which it stops for a fork.
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
    """Do pieces in a copy, the last one first, until one raises; send what they came to."""
    done: list[B] = []
    try:
        with suppress(Exception):  # It is raised where the piece is done again.
            while takes():
                done.insert(0, work(pieces[-1 - len(done)]))
        with open(there.fileno(), "wb", closefd=False) as file:
            pickle.dump(done, file)
    finally:
        os._exit(0)  # Nothing of the process that was copied is to be tidied up here.


def _received(here: io.FileIO) -> list[Any]:
    """What a copy sent; nothing if it was ended before, as the system does if memory is short."""
    with suppress(EOFError, pickle.UnpicklingError):
        found: list[Any] = pickle.loads(here.readall())
        return found
    return []
