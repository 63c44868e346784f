"""The process that serves the store, found and checked without a request to the store.

That process may be stopped at any time, even before the ranks have exchanged anything, and a
request to the store would then hang for ever.
"""

from __future__ import annotations

import threading
import time
from functools import cached_property
from typing import Final

import torch.distributed as dist

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.torch_private.private import group_store, store_port
from meshplan.runtime.watch.job import RESTART, is_store_served_elsewhere
from meshplan.runtime.watch.sockets import own_ends, processes_at, spell
from meshplan.runtime.watch.stack import process_state, user_line

_POLL_S: Final = 0.02
_PATIENCE_S: Final = 1.0
"""Seconds at the start in which the process is not looked for: it has just answered, and the search
takes time."""


class Server:
    """The process at the other end of this process's connection to the store of the group."""

    def __init__(self) -> None:
        # The store itself is not kept: on the rank that serves it, it would outlive its group.
        self._port = store_port(group_store())
        self._looks_from = time.monotonic() + _PATIENCE_S

    @cached_property
    def _found(self) -> tuple[int | None, int]:
        """Id and start tick of the process, searched among all processes of this machine."""
        found = processes_at(self._port) if self._port else []
        began = {process: process_state(process)[1] for process in found}
        # Children of the process may have inherited the connection, so take the oldest one.
        first = min(began, key=lambda process: (began[process], process), default=None)
        return first, began.get(first or 0, 0)

    @property
    def process(self) -> int | None:
        """Id of the process; None if it is this process or runs on another machine."""
        return self._found[0]

    def is_stopped(self) -> bool:
        """Return True if the process is a rank and stopped, except by a debugger, which resumes it.

        In the first second the answer is False without a search, which takes each rank tens of
        milliseconds.
        """
        if time.monotonic() < self._looks_from or is_store_served_elsewhere():
            return False
        process, began = self._found
        return process is not None and process_state(process) == ("T", began)

    def connect(self, num: int, patience_s: float) -> list[dist.Store]:
        """Make new connections to the store, because torch's own may be taken by a waiting thread.

        Args:
            num: Number of connections.
            patience_s: Seconds that the process may be stopped in the meantime.

        Raises:
            ApplyError: The process was stopped for longer; connecting has no time-out of its own.
        """
        made: list[dist.Store] = []
        failed: list[Exception] = []
        store = group_store()

        def connect() -> None:
            try:
                made.extend(store.clone() for _ in range(num))
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=connect, name="meshplan-connect", daemon=True)
        thread.start()
        stopped_s = 0.0  # Counted in polls, so that a stop of this process does not count.
        while thread.is_alive():
            thread.join(_POLL_S)
            stopped_s = stopped_s + _POLL_S if self.is_stopped() else 0.0
            if stopped_s > patience_s:
                raise ApplyError(stopped(0, self.process, dist.get_rank(), user_line()))
        if failed:
            raise failed[0]
        return made

    def table(self) -> list[str]:
        """Return the connections of the process as one table, or no table if it is unknown."""
        return [] if self.process is None else [spell(own_ends(self.process).values())]


def stopped(rank: int, process: int | None, own_rank: int, where: str) -> Problem:
    """Return the problem of a rank that is stopped while this one waits for it."""
    what = (
        f"rank {rank} is stopped (process {process}, by SIGSTOP or a similar signal) and does not "
        f"answer, while rank {own_rank} waits for it in {where}"
    )
    fix = f"find out what stopped the process, and resume or kill it; then {RESTART}"
    return Problem(what, fix=fix)
