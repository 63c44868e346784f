"""Warnings about a rank that keeps others waiting but may be busy, with the line where it is."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from meshplan.runtime.watch.job import Job, post
from meshplan.runtime.watch.verdict import notice

_logger = logging.getLogger("meshplan")


class Notices:
    """The part of this rank in warnings about ranks that keep others waiting.

    One of the waiting ranks asks where every rank is, all ranks answer, and all waiting ranks log
    the same warning.

    Args:
        job: The job of this rank.
        store: A connection to the store of the group.
        own_report: Returns where this rank is, as JSON-serializable facts.
    """

    def __init__(
        self, job: Job, store: dist.Store, own_report: Callable[[], dict[str, Any]]
    ) -> None:
        self._job, self._store, self._own_report = job, store, own_report
        self._asked, self._asked_at = -1, 0.0
        self._is_warned = False
        self._reported: set[str] = set()

    def begin_anew(self) -> None:
        """Record that this rank no longer waits, so that a new wait may be warned about."""
        self._is_warned = False
        if self._asked >= 0:  # This rank needs no answers any more.
            self._asked = -1
            self._store.add(self._job.group_key("notices"), 1)

    def ask(self, waited_s: float, patience_s: float) -> None:
        """Ask once which ranks keep this one waiting; to be called repeatedly while it waits.

        Args:
            waited_s: Seconds that this rank has waited.
            patience_s: Seconds to wait for the answers of the ranks.
        """
        if self._is_warned:
            return
        if self._asked < 0:
            self._begin()
        elif time.monotonic() - self._asked_at >= patience_s:
            self._end(waited_s)

    def _begin(self) -> None:
        """Ask all ranks where they are, unless another rank has already asked."""
        number = self._store.add(self._job.group_key("notices"), 0)
        own = str(self._job.rank)
        won = self._store.compare_set(self._job.group_key(f"asker/{number}"), "", own).decode()
        if won == own:  # Otherwise another rank asked first and will post the notice.
            self._asked, self._asked_at = number, time.monotonic()
            post(self._job, self._store, "ask", {"number": number})

    def _end(self, waited_s: float) -> None:
        """Send the warning made from the answers, unless the same ranks were named before."""
        reports = {}
        for rank in range(self._job.size):
            key = self._job.group_key(f"state/{self._asked}/{rank}")
            if self._store.check([key]):
                reports[rank] = json.loads(self._store.get(key))
        missing = [[rank, *e["lines"][:1]] for rank, e in reports.items() if not e["waits"]]
        site = json.dumps(missing)
        self._asked = -1
        self._store.add(self._job.group_key("notices"), 1)
        if site in self._reported:
            self._is_warned = True
            return
        text = notice(reports, self._job.size, waited_s)
        post(self._job, self._store, "notice", {"site": site, "text": text})

    def answer(self, number: int) -> None:
        """Write into the store where this rank is, as the answer to question `number`."""
        key = self._job.group_key(f"state/{number}/{self._job.rank}")
        self._store.set(key, json.dumps(self._own_report()))

    def take(self, event: dict[str, Any]) -> None:
        """Log the warning in `event` if this rank waits as well."""
        self._reported.add(event["site"])
        if self._own_report()["waits"]:
            self._is_warned = True
            _logger.warning("%s", event["text"])
