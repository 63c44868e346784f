"""Processes of the ranks on this machine. /proc has their state even if they do not answer."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Final

import torch.distributed as dist

from meshplan.runtime.watch.job import Job
from meshplan.runtime.watch.sockets import own_ends, spell
from meshplan.runtime.watch.stack import process_state

_LOOKS: Final = 20
"""Calls of `meet` after which every rank on this machine is assumed to have introduced itself."""


class Beside:
    """The processes of the ranks on this machine, which each rank publishes in the store.

    Iterating yields the ranks whose process is known.

    Args:
        job: The job of this rank.
        store: A connection to the store of the group.
    """

    def __init__(self, job: Job, store: dist.Store) -> None:
        self._job, self._store = job, store
        self._key = job.group_key(f"machine/{_machine()}")
        self._processes: dict[int, tuple[int, int]] = {}
        """(Id, start tick) of the process of each rank. A reused id has another start tick."""
        self._num_looks = 0
        self._stopped_since: dict[int, float] = {}

    def introduce(self) -> None:
        """Publish the process of this rank to the other ranks on this machine."""
        number = self._store.add(self._key, 1)
        began = process_state(self._job.process)[1]
        entry = [self._job.rank, self._job.process, began]
        self._store.set(f"{self._key}/{number}", json.dumps(entry))

    def meet(self) -> None:
        """Read the processes that ranks have published since the last call."""
        if self._num_looks > _LOOKS:
            return
        self._num_looks += 1
        number = self._store.add(self._key, 0)
        while (known := len(self._processes)) < number:
            key = f"{self._key}/{known + 1}"
            if not self._store.check([key]):
                return  # The rank has taken its number but not written its entry yet.
            rank, process, began = json.loads(self._store.get(key))
            # A new dict, because another thread may be reading the old one.
            self._processes = {**self._processes, rank: (process, began)}

    def __iter__(self) -> Iterator[int]:
        return iter(self._processes)

    def __contains__(self, rank: int) -> bool:
        return rank in self._processes

    def process(self, rank: int) -> int:
        """Return the id of a rank's process."""
        return self._processes[rank][0]

    def is_stopped(self, rank: int) -> bool:
        """Return True if a rank's process is stopped (SIGSTOP), but not by a debugger."""
        process, began = self._processes[rank]
        return process_state(process) == ("T", began)

    def stopped_since(self, rank: int, now: float) -> float | None:
        """Return the time of the first call that found a rank stopped; None if the rank runs."""
        if not self.is_stopped(rank):
            self._stopped_since.pop(rank, None)
            return None
        return self._stopped_since.setdefault(rank, now)

    def forget_stops(self) -> None:
        """Forget since when ranks are stopped; called if this process was not running itself."""
        self._stopped_since.clear()

    def is_gone(self, rank: int) -> bool:
        """Return True if a rank's process has ended."""
        process, began = self._processes[rank]
        state, begun = process_state(process)
        return begun != began or state in "ZX"

    def tables(self) -> list[str]:
        """Return the connections of each other rank on this machine, from /proc, not the store."""
        others = [rank for rank in self if rank != self._job.rank]
        return [spell(own_ends(self.process(rank)).values()) for rank in others]


def _machine() -> str:
    """Return a name that is equal exactly for processes that can see each other's ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()
