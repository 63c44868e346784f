"""The process that serves the store. It is found and checked without a request to the store.

This process may be stopped (SIGSTOP) at any time, even before the ranks have exchanged anything.
Every request to the store would then hang for ever.
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
"""Seconds between two looks at the process."""
_PATIENCE_S: Final = 1.0
"""Seconds at the start in which the process counts as running: it has just answered, and searching
for it takes time."""


class Server:
    """The process at the other end of this process's connection to the store of the group."""

    def __init__(self) -> None:
        # Do not keep the store: on the rank that serves it, it would outlive its process group.
        self._port = store_port(group_store())
        self._looks_from = time.monotonic() + _PATIENCE_S

    @cached_property
    def _found(self) -> tuple[int | None, int]:
        """(Id, start tick) of the process, searched on this machine; (None, 0) if not found."""
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
        """Return True if the process is a rank that is stopped (SIGSTOP), but not by a debugger.

        In the first second the answer is always False, because the search for the process takes
        each rank tens of milliseconds.
        """
        if time.monotonic() < self._looks_from or is_store_served_elsewhere():
            return False
        process, began = self._found
        return process is not None and process_state(process) == ("T", began)

    def connect(self, num: int, patience_s: float) -> list[dist.Store]:
        """Return new connections to the store, since a waiting thread may occupy torch's own one.

        Args:
            num: Number of connections.
            patience_s: Longest time in seconds that the process may be stopped meanwhile.

        Raises:
            ApplyError: The process was stopped for longer. torch has no time-out for connecting.
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
        stopped_s = 0.0  # Sum of polls, so that stops of this very process do not count.
        while thread.is_alive():
            thread.join(_POLL_S)
            stopped_s = stopped_s + _POLL_S if self.is_stopped() else 0.0
            if stopped_s > patience_s:
                raise ApplyError(stopped(0, self.process, dist.get_rank(), user_line()))
        if failed:
            raise failed[0]
        return made

    def table(self) -> list[str]:
        """Return a list of one text, the process's connections (`sockets.spell`); [] if unknown."""
        return [] if self.process is None else [spell(own_ends(self.process).values())]


def stopped(rank: int, process: int | None, own_rank: int, where: str) -> Problem:
    """Return the problem of a stopped rank.

    Args:
        rank: The stopped rank.
        process: Id of its process, if known.
        own_rank: This rank, which waits for it.
        where: Where this rank waits, in words.
    """
    what = (
        f"rank {rank} is stopped (process {process}, by SIGSTOP or a similar signal) and does not "
        f"answer, while rank {own_rank} waits for it in {where}"
    )
    fix = f"find out what stopped the process, and resume or kill it; then {RESTART}"
    return Problem(what, fix=fix)
