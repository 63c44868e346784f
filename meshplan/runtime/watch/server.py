"""The process that serves the store, found and looked at without asking the store.

It may be stopped at any time, also before the ranks have told each other anything; whoever asks
the store then waits for ever.
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
"""How long nobody asks where the process is: it answers, and to find it takes time."""


class Server:
    """The process at the other end of this process's connection to the store of the group."""

    def __init__(self) -> None:
        # The store itself is not kept: on the rank that serves it, it would outlive its group.
        self._port = store_port(group_store())
        self._looks_from = time.monotonic() + _PATIENCE_S

    @cached_property
    def _found(self) -> tuple[int | None, int]:
        """(the number of the process, when it began), looked for among all of this machine."""
        found = processes_at(self._port) if self._port else []
        began = {process: process_state(process)[1] for process in found}
        # Its own children may have inherited the connection.
        first = min(began, key=lambda process: (began[process], process), default=None)
        return first, began.get(first or 0, 0)

    @property
    def process(self) -> int | None:
        """Its number; None where it is this process, or runs on another machine."""
        return self._found[0]

    def is_stopped(self) -> bool:
        """Whether it is a rank and stopped; not by a debugger, which will let it go on.

        Nobody looks in the first second: to find it takes tens of milliseconds of each rank.
        """
        if time.monotonic() < self._looks_from or is_store_served_elsewhere():
            return False
        process, began = self._found
        return process is not None and process_state(process) == ("T", began)

    def connect(self, num: int, patience_s: float) -> list[dist.Store]:
        """Make connections to the store: torch's own may be taken by a thread that waits.

        Args:
            num: How many.
            patience_s: How long the process may be stopped meanwhile.

        Raises:
            ApplyError: It was stopped for longer, and connecting has no time-out of its own.
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
        """The connections that it holds, as one table or none."""
        return [] if self.process is None else [spell(own_ends(self.process).values())]


def stopped(rank: int, process: int | None, own_rank: int, where: str) -> Problem:
    """What to say of a rank that is stopped while this one waits for it."""
    what = (
        f"rank {rank} is stopped (process {process}, by SIGSTOP or the like) and does not "
        f"answer, while rank {own_rank} waits for it in {where}"
    )
    fix = f"find out who stopped it, and let it go on or end it; then {RESTART}"
    return Problem(what, fix=fix)
