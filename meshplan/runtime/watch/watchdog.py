"""A thread of each rank that finds out why the rank stands still.

It hears what other ranks tell. While its own rank waits it asks the store whether all others wait
as well: each rank is sure of itself only (`stack`), and what is under way between ranks is read
from their connections. When all have waited at one moment, and nothing was under way, no rank
can go on, and the group is ended with what the ranks say of where they are. A rank that may be
computing, reading or saving is never taken for one that waits: it is named in a warning.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any, Final

import torch.distributed as dist

from meshplan.errors import Problem
from meshplan.runtime.torch_private.private import (
    group_facts,
    group_sequences,
    has_groups_of_program,
    num_groups,
    store_port,
)
from meshplan.runtime.watch.beside import Beside
from meshplan.runtime.watch.job import (
    DEAD,
    NEEDS_ALL,
    RESTART,
    Job,
    bury,
    claim,
    door,
    first_cause,
    post,
    publish_ends,
    tables,
    tables_of_others,
)
from meshplan.runtime.watch.meeting import missed, says_of_meeting, will_not_come
from meshplan.runtime.watch.notices import Notices
from meshplan.runtime.watch.server import Server, stopped
from meshplan.runtime.watch.sockets import Connections, close_between_ranks, is_cut_off, traffic
from meshplan.runtime.watch.stack import Look, look_at
from meshplan.runtime.watch.verdict import verdict

TICK_S = 0.5
"""Time between two looks; longer with very many ranks, which share one store."""
RANKS_PER_TICK: Final = 256
STILL_S = 2.0
"""How long a rank must stand still before it counts as waiting."""
STOPPED_S = 3.5
"""How long a process must be stopped before the ranks that wait for it give up."""
WARN_S = 30.0
"""How long a rank waits for one that may be busy before it says so."""
_FIRST_LOOKS: Final = 10
_LATE_S: Final = 1.0
"""A look that comes so much too late says that this process did not run itself."""
_QUIET_LOOKS: Final = 1
"""Looks at the connections between which nothing may move."""
_OWN_TICKS: Final = 2
"""Processor time that a waiting thread may use between two looks, in the kernel's ticks."""


class Watchdog(threading.Thread):
    """Looks after one rank until its group ends.

    Args:
        job: The job of this rank.
        store: A connection to the store of the group for this thread alone.
        server: The process that serves that store.
    """

    def __init__(self, job: Job, store: dist.Store, server: Server) -> None:
        super().__init__(name="meshplan-watchdog", daemon=True)
        self._job, self._server = job, server
        self._store = store
        self._ended = threading.Event()
        self._interval_s = TICK_S * max(1.0, job.size / RANKS_PER_TICK)
        self._heard = 0
        self._absent: dict[int, dict[str, Any]] = {}
        """By rank, what was told by those that wait in a meeting, or have left."""
        self._met = self._told = ""
        """The meeting in which this rank was at the last look, and the last that it told."""
        self._in_vain: tuple[int, str] | None = None
        self._look: tuple[Look, Any] | None = None
        self._looked = self._still_since = self._steady_since = time.monotonic()
        self._is_counted = self._is_shared = False
        self._quiet: tuple[int, Connections, int] | None = None
        self._voted = -1
        self._beside = Beside(job, self._store)
        self._store_watch = threading.Thread(
            target=self._watch_store, name="meshplan-store-watch", daemon=True
        )
        self._num_looks = 0
        self.is_asked = False
        """Whether the rank lost a connection, and waits to be told why."""
        self._notices = Notices(job, self._store, self._says)

    def start(self) -> None:
        """Begin to watch, once the others can know this process, whenever it may be stopped."""
        self._store_watch.start()
        with contextlib.suppress(RuntimeError, OSError):  # The guard says why the store has gone.
            self._beside.introduce()
        super().start()

    def end(self) -> None:
        """Stop watching, and tell the others that this rank has left; it may have ended well."""
        self._ended.set()
        if threading.current_thread() is not self and self.is_alive():
            # Where the interpreter goes, a thread that comes back from C++ would end the process.
            self.join(timeout=2.0)
        if self._store_watch.is_alive():
            self._store_watch.join(timeout=2.0)
        if not self._job.cause:
            with contextlib.suppress(RuntimeError, OSError):
                self._leave()

    def run(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # Where the store has gone.
            while not self._ended.wait(self._pause_s()) and not self._job.cause:
                if self._is_over():
                    self._leave()
                    return
                try:
                    self._tick()
                except (RuntimeError, OSError):  # Groups come and go while they are looked at.
                    self._store.check([self._job.key("verdict")])

    def _pause_s(self) -> float:
        """Time to the next look: short at first, when the ranks of a machine meet."""
        self._num_looks += 1
        return self._interval_s / (5 if self._num_looks < _FIRST_LOOKS else 1)

    def _is_over(self) -> bool:
        """Whether the group was destroyed, or another one took its place."""
        return dist.group.WORLD is not self._job.world

    def _leave(self) -> None:
        told = {"kind": "left", "rank": self._job.rank, **self._job.progress.facts()}
        self._store.set(self._job.lasting(f"left/{self._job.rank}"), json.dumps(told))
        post(self._job, self._store, "left", told)

    def _tick(self) -> None:
        now = time.monotonic()
        was_late = now - self._looked > self._interval_s + _LATE_S
        self._looked = now
        if self.is_store_silent():
            return
        if num_groups() != self._job.groups:
            publish_ends(self._job, self._store)
        self._beside.meet()
        self._hear()
        if self._job.cause:
            return
        self._judge_meetings()
        look = self._look_here()
        self._follow(look, now, was_late)
        is_certain = self._can_be_certain()
        is_still = look[0].wait and now - self._still_since >= STILL_S
        if is_certain and is_still and not self._is_counted:
            self._is_counted = True
            self._store.add(self._job.key("waiting"), 1)
        if self._is_counted:
            self._look_around()
        steady_s = now - self._steady_since
        # Where devices compute, a verb that stands still may be waiting in any line.
        waits = look[0].wait or (not is_certain and self._job.progress.verb)
        if waits and not self._job.cause:
            self._look_beside(now)
            if steady_s >= WARN_S:
                self._notices.ask(steady_s, patience_s=4 * self._interval_s)

    # What this rank does.

    def _look_here(self) -> tuple[Look, Any]:
        progress = self._job.progress
        return look_at(*progress.thread), (group_sequences(), progress.facts(), progress.meeting)

    def _can_be_certain(self) -> bool:
        """Whether a wait shows in the stack: where the processor waits, and not a device.

        Nor may another thread bring about what the ranks wait for. One that reads batches and sends
        them is seen in a collective only once it has read; it needs a group of its own.
        """
        has_company = self._look is not None and self._look[0].has_company
        if self._is_shared or (has_company and has_groups_of_program()):
            return False
        return all(backend == "gloo" for _, _, backend in group_facts())

    def _follow(self, look: tuple[Look, Any], now: float, was_late: bool) -> None:
        before, self._look = self._look, look
        self._is_shared |= look[0].is_shared
        if was_late or before is None or (before[0].lines, before[1]) != (look[0].lines, look[1]):
            self._steady_since = self._still_since = now
            self._beside.forget_stops()
            self._notices.begin_anew()
        elif look[0].state != "S" or look[0].ticks - before[0].ticks > _OWN_TICKS:
            self._still_since = now
        if self._is_counted and (self._still_since == now or not look[0].wait):
            self._is_counted, self._quiet = False, None
            self._store.add(self._job.key("moves"), 1)
            self._store.add(self._job.key("waiting"), -1)

    def _says(self) -> dict[str, Any]:
        """What this rank tells the others of where it is."""
        if self._look is None:
            self._look = self._look_here()
        look = self._look[0]
        wait = look.wait or ("" if self._can_be_certain() else self._job.progress.verb)
        is_waiting = time.monotonic() - self._steady_since >= STILL_S
        return {
            **self._job.progress.facts(),
            "waits": wait if is_waiting else "",
            "size": self._job.size,
            "where": look.where,
            "lines": look.user_lines,
            "groups": sorted((ranks, count) for ranks, count, _ in group_facts()),
        }

    # What all ranks do.

    def _look_around(self) -> None:
        """Vote that no rank can go on, once all wait and nothing is under way between them."""
        present = [r for r in range(self._job.size) if not self._has_left(r)]
        if self._store.add(self._job.key("waiting"), 0) < len(present):
            self._quiet = None
            return
        moves = self._store.add(self._job.key("moves"), 0)
        others = tables_of_others(self._job, self._store)
        moved = traffic(others, store_port(self._store))
        if moved is None or moved.waiting_bytes:
            self._quiet = None
            return
        before = self._quiet
        looks = before[2] + 1 if before is not None and before[:2] == (moves, moved) else 0
        self._quiet = (moves, moved, looks)
        if looks < _QUIET_LOOKS or self._voted == moves:
            return
        self._voted = moves
        name = self._job.key(f"votes/{moves}")
        self._store.set(f"{name}/{self._job.rank}", json.dumps(self._says()))
        if self._store.add(name, 1) == len(present):
            texts = self._store.multi_get([f"{name}/{rank}" for rank in present])
            told = {rank: json.loads(text) for rank, text in zip(present, texts, strict=True)}
            problem = verdict(told)
            if problem is not None:
                self._give_up(problem)

    def _has_left(self, rank: int) -> bool:
        return self._absent.get(rank, {}).get("kind") == "left"

    def _give_up(self, problem: Problem) -> None:
        bury(self._job, self._store, claim(self._job, self._store, problem))

    # What other ranks tell.

    def _hear(self) -> None:
        newest = self._store.add(self._job.lasting("events"), 0)
        while self._heard < newest:
            key = self._job.lasting(f"event/{self._heard + 1}")
            if not self._store.check([key]):
                return  # It is being written.
            self._heard += 1
            self._take(json.loads(self._store.get(key)))

    def _take(self, event: dict[str, Any]) -> None:
        kind, rank = event["kind"], event["rank"]
        if kind == "dead":
            self._stop_if_dead()
        elif kind in ("waits", "left") and rank != self._job.rank:
            self._absent[rank] = event
        elif kind == "ask":
            self._notices.answer(event["number"])
        elif kind == "notice":
            self._notices.take(event)

    def _stop_if_dead(self) -> None:
        key = self._job.key("verdict")
        if self._store.check([key]) and self._store.get(key).decode() == DEAD:
            bury(self._job, self._store, first_cause(self._job, self._store))

    def _judge_meetings(self) -> None:
        """Give up where another rank waits for this one, which will not come, or has left."""
        at = self._job.progress.meeting
        if at is None:
            self._met = ""
        elif at.key != self._met:
            self._met = at.key  # The others are told if it is still there at the next look.
        elif at.key != self._told:
            self._told = at.key
            post(self._job, self._store, "waits", says_of_meeting(self._job, at))
        found = None
        if at is not None and self._store.check([door(at.key)]):
            return  # All have come, and this rank goes on as soon as it wakes.
        for rank, told in list(self._absent.items()):
            if told["kind"] == "waits" and self._store.check([door(str(told["meeting"]))]):
                del self._absent[rank]
            elif where := will_not_come(self._job, told):
                found = rank, where
                break
        if found is not None and found == self._in_vain:
            self._give_up(missed(self._job, self._absent[found[0]], found[1]))
        self._in_vain = found

    # The processes beside this one.

    def has_died(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended."""
        return rank in self._beside and self._beside.is_gone(rank)

    def is_store_silent(self) -> bool:
        """Whether the rank that serves the store is stopped, so that this must not be asked."""
        return self._server.is_stopped()

    def _watch_store(self) -> None:
        """Give up where the store is silent, without asking it: another thread may hang there."""
        since = looked = time.monotonic()
        while not (self._ended.wait(self._interval_s) or self._job.cause or self._is_over()):
            now = time.monotonic()
            was_late = now - looked > self._interval_s + _LATE_S
            looked = now
            if was_late or not self.is_store_silent():
                since = now
            elif now - since >= STOPPED_S and (self.is_asked or self._look_here()[0].needs_store):
                told = self._stopped(0, self._server.process)
                self._job.fix, self._job.cause = told.fix or "", told.what
                # The store's connections are ended as well: this rank may be waiting there.
                close_between_ranks(self._beside.tables() + self._server.table())

    def _look_beside(self, now: float) -> None:
        """Give up where another rank is stopped or dead, and nothing else would tell."""
        verb, at = self._job.progress.verb, self._job.progress.meeting
        is_still = now - self._steady_since >= STILL_S
        is_long = now - self._steady_since >= STOPPED_S
        # Connections of gloo break by themselves, but who waits in the store does not see it.
        awaited = at.ranks if at is not None else ()
        if at is None and verb == NEEDS_ALL and not self._can_be_certain():
            awaited = tuple(self._beside)
        for rank in self._beside:
            since = self._beside.stopped_since(rank, now)
            if since is not None and now - since >= STOPPED_S:
                return self._give_up(self._stopped(rank, self._beside.process(rank)))
            if rank in awaited and is_long and self._beside.is_gone(rank):
                return self._give_up(self._died(rank))
        if at is not None and is_still and self._can_be_certain():
            published = tables(self._job, self._store)
            own, port = published.pop(self._job.rank, "[]"), store_port(self._store)
            for rank in awaited:
                if is_cut_off(own, published.get(rank, "[]"), port):
                    return self._give_up(self._died(rank))

    def _died(self, rank: int) -> Problem:
        where = self._job.progress.running or "a forward"
        what = f"rank {self._job.rank} waits in {where} for rank {rank}, which died or was ended"
        return Problem(what, fix=f"see the log of that rank; then {RESTART}")

    def _stopped(self, rank: int, process: int | None) -> Problem:
        own = self._says()
        where = own["running"] or own["waits"] or own["where"]
        return stopped(rank, process, self._job.rank, where)
