"""A request to stop, by SIGTERM or SIGUSR1, on which all ranks agree.

Schedulers and torchrun send a signal before they end a job, to each process at another moment and
to some of them never. A rank that stopped by itself would leave the others in a collective.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.base.mesh import device
from meshplan.runtime.watch.guard import guarded

_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
_asked: Final = threading.Event()
_installed: Final[set[int]] = set()


def stop_requested() -> bool:
    """Return True, on every rank alike, once any rank has got SIGTERM or SIGUSR1.

    All ranks call it equally often, such as after each step: it is one small all-reduce.

        if meshplan.stop_requested():
            meshplan.save("states", model, optimizer, step=step, data=loader)
            break

    From the first call on, these signals no longer end the process. Handlers of the program's own
    for them are called too.

    Raises:
        ApplyError: The first call is not in the main thread, or another rank has failed.
    """
    if not _installed:
        _install()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return _asked.is_set()
    with guarded("stop_requested"):
        is_asked = torch.tensor(int(_asked.is_set()), device=device())
        dist.all_reduce(is_asked, op=dist.ReduceOp.MAX)
        agreed = bool(is_asked.item())
    if agreed:
        _asked.set()
    # A signal that came during the all-reduce counts at the next call, which all ranks make.
    return agreed


def _install() -> None:
    """Note the signals from now on."""
    if threading.current_thread() is not threading.main_thread():
        what = "stop_requested was first called outside the main thread, which gets the signals"
        fix = "call it once in the main thread, before the loop; in a worker of Ray, which has no "
        fix += "such moment, save every so many steps instead"
        raise ApplyError(Problem(what, fix=fix))
    for number in _SIGNALS:
        signal.signal(number, _noting(signal.getsignal(number)))
        _installed.add(number)


def _noting(before: Any) -> Callable[[int, FrameType | None], None]:
    """Return a handler that notes the request and calls the handler that was there before."""
    installed_by = os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() != installed_by:  # A worker that was forked ends by the signal, as before.
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        _asked.set()
        if callable(before):  # Else it is the default, which would end the process, or nothing.
            before(number, frame)

    return note
