"""A board of messages between the ranks, for work that goes on while they train.

A background thread must not use collectives: they would mix with those of the training step. Its
messages go through the store of the process group, over a connection of their own.
"""

from __future__ import annotations

import time
from typing import Final

import torch.distributed as dist

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.watch.guard import current_job, dead_rank
from meshplan.runtime.watch.job import RESTART, Job
from meshplan.runtime.watch.server import Server
from meshplan.runtime.watch.watchdog import STOPPED_S

_POLL_S: Final = 0.01
"""Seconds between two looks into the store."""
_LOOK_S: Final = 0.5
"""Seconds between two looks at the processes of the other ranks."""


class Board:
    """The messages of one piece of work. Every rank makes its boards in the same order.

    Args:
        name: The kind of work, for the keys in the store.
        number: The number of this piece of work on every rank.
    """

    def __init__(self, name: str, number: int) -> None:
        self._job: Job | None = current_job()
        self.rank = 0 if self._job is None else self._job.rank
        self.size = 1 if self._job is None else self._job.size
        self._own = ""
        if self._job is not None:
            self._store: dist.Store = Server().connect(1, STOPPED_S)[0]
            self._key = self._job.group_key(f"board/{name}/{number}")

    def post(self, text: str, topic: str) -> None:
        """Post this rank's message on a topic."""
        if self._job is None:
            self._own = text
        else:
            self._store.set(f"{self._key}/{topic}/{self.rank}", text)

    def take(self, topic: str, rank: int) -> str:
        """Wait for the message of a rank on a topic, and return it.

        Raises:
            ApplyError: The process group has ended, or the process of a rank has.
        """
        if self._job is None:
            return self._own
        key = f"{self._key}/{topic}/{rank}"
        looked = time.monotonic()
        while not self._store.check([key]):
            if self._job.cause:
                raise ApplyError(self._job.failed())
            if time.monotonic() - looked >= _LOOK_S:
                looked, dead = time.monotonic(), dead_rank()
                # A rank may end as soon as it has what this rank still waits for.
                if dead is not None and not self._store.check([key]):
                    what = f"rank {self.rank} waits for rank {rank}, but rank {dead} "
                    fix = f"see the log of rank {dead}; then {RESTART}"
                    raise ApplyError(Problem(f"{what}died or was killed", fix=fix))
            time.sleep(_POLL_S)
        return self._store.get(key).decode()

    def clear(self, topic: str, rank: int) -> None:
        """Remove the message of a rank, which no other rank will take any more."""
        if self._job is not None:
            self._store.delete_key(f"{self._key}/{topic}/{rank}")
