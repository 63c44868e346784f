"""One piece of work after another, at both ends at once where there are two cores.

Python itself computes on one. So a copy of this process, which knows all that was read so far and
loads nothing, begins with the last piece. What its pieces come to is sent back, so let that be
small; what it learns beside it is lost.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

A = TypeVar("A")
B = TypeVar("B")

_SECOND: Final = threading.Lock()
"""Held while a copy is at work, and inside of it: two processes are enough for two cores."""

_MOST: Final = 4096
"""Pieces, for each of which a byte lies in a pipe that nobody reads yet."""


def has_another() -> bool:
    """Whether a second core may be used now.

    A process with other threads is not copied: locks that they hold would never be given back. Nor
    is one with torch, which has threads that Python knows nothing of.
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
        work: Asks no other piece for anything. What it comes to, or raises, can be pickled.

    Raises:
        Exception: What the first piece raises that raises anything.
    """
    if not 2 <= len(pieces) <= _MOST or not has_another():
        return [work(piece) for piece in pieces]
    with _SECOND:
        return _from_both_ends(work, pieces)


def _from_both_ends(work: Callable[[A], B], pieces: Sequence[A]) -> list[B]:
    """A token for each piece lies in a pipe: whoever takes one does the next at its own end."""
    import multiprocessing  # 20 ms, which small questions do not pay

    context = multiprocessing.get_context("fork")
    tokens, filler = os.pipe()
    here, there = context.Pipe(duplex=False)
    os.write(filler, bytes(len(pieces)))
    os.close(filler)  # So that it is read to an end.
    copy = context.Process(target=_from_the_end, args=(work, pieces, tokens, there), daemon=True)
    copy.start()
    there.close()
    done: list[B] = []
    try:
        while os.read(tokens, 1):
            done.append(work(pieces[len(done)]))
        while len(done) < len(pieces):
            try:
                found, error = here.recv()
            except EOFError:  # Somebody ended it, as the system does where memory is short.
                found, error = [work(piece) for piece in pieces[len(done) :]], None
            if error is not None:
                raise error
            done += found
    finally:
        copy.kill()
        copy.join()
        here.close()
        os.close(tokens)
    return done


def _from_the_end(
    work: Callable[[A], B], pieces: Sequence[A], tokens: int, there: Connection
) -> None:
    """Do pieces in a copy, the last one first, and say what they came to, or what was raised."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Whoever waits for it hears it too, and ends it.
    done: list[B] = []
    error: Exception | None = None
    try:
        while os.read(tokens, 1):
            done.insert(0, work(pieces[-1 - len(done)]))
    except Exception as raised:
        error = raised
    with suppress(BrokenPipeError):  # Nobody waits any longer.
        there.send((done, error))
