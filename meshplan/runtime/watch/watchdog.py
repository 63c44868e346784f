"""A thread in each rank that finds out why the rank hangs.

The watchdog reads the events of other ranks. While its own rank waits, it looks in the store if all
other ranks wait, too. Each watchdog decides this for its own rank only, from the stack (`stack`).
The kernel's state of the connections shows if data is under way between ranks. If all ranks wait at
the same time and no data is under way, no rank can go on, and the process group is ended with a
report of where each rank is. A rank that may be computing, reading or saving never counts as
waiting: a warning names it instead.
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
    all_arrived_key,
    claim,
    end_group,
    first_cause,
    post,
    publish_ends,
    tables,
    tables_of_others,
)
from meshplan.runtime.watch.meeting import meeting_report, missed, will_not_come
from meshplan.runtime.watch.notices import Notices
from meshplan.runtime.watch.server import Server, stopped
from meshplan.runtime.watch.sockets import Connections, close_between_ranks, is_cut_off, traffic
from meshplan.runtime.watch.stack import Look, look_at
from meshplan.runtime.watch.verdict import verdict

TICK_S = 0.5
"""Seconds between two looks at the rank; more with very many ranks, which share one store."""
RANKS_PER_TICK: Final = 256
"""Number of ranks above which the seconds between two looks grow with the number of ranks."""
STILL_S = 2.0
"""Seconds that the stack of a rank must stay the same before the rank counts as waiting."""
STOPPED_S = 3.5
"""Seconds that a process must be stopped (SIGSTOP) before ranks that wait for it raise."""
WARN_S = 30.0
"""Seconds after which a rank that waits for a busy rank logs a warning."""
_FIRST_LOOKS: Final = 10
"""Number of looks at the beginning that follow each other faster."""
_LATE_S: Final = 1.0
"""Seconds of delay of a look that show that this process itself was not running."""
_QUIET_LOOKS: Final = 1
"""Number of further looks at the connections between which no byte may have moved."""
_OWN_TICKS: Final = 2
"""Processor time that a waiting thread may use between two looks, in ticks of the kernel."""


class Watchdog(threading.Thread):
    """Watches this rank until its process group ends.

    Args:
        job: The job of this rank.
        store: A connection to the store of the group, which only this thread uses.
        server: The process that serves that store.
    """

    def __init__(self, job: Job, store: dist.Store, server: Server) -> None:
        super().__init__(name="meshplan-watchdog", daemon=True)
        self._job, self._server = job, server
        self._store = store
        self._ended = threading.Event()
        self._interval_s = TICK_S * max(1.0, job.size / RANKS_PER_TICK)
        self._last_event = 0
        """Number of the last event that was read."""
        self._absent: dict[int, dict[str, Any]] = {}
        """Last report of each rank that waits at a meeting or has left the group, by rank."""
        self._last_meeting = self._reported_meeting = ""
        """Keys of this rank's meeting at the last look, and of the last one that it reported."""
        self._last_unmet: tuple[int, str] | None = None
        """(Rank that this rank will not meet, where this rank is), as found at the last look."""
        self._look: tuple[Look, Any] | None = None
        """The last look at the thread, and the collectives, facts and meeting at that time."""
        self._looked = self._still_since = self._steady_since = time.monotonic()
        self._is_counted = self._is_shared = False
        self._last_traffic: tuple[int, Connections, int] | None = None
        """(Moves of all ranks, state of the connections, looks since both last changed)."""
        self._voted = -1
        """Number of moves of all ranks at the last vote of this rank."""
        self._beside = Beside(job, self._store)
        self._store_watch = threading.Thread(
            target=self._watch_store, name="meshplan-store-watch", daemon=True
        )
        self._num_looks = 0
        self.is_asked = False
        """True if the verbs' thread has lost a connection and waits for the cause."""
        self._notices = Notices(job, self._store, self._own_report)

    def start(self) -> None:
        """Publish this process, so that other ranks can see if it is stopped; start watching."""
        self._store_watch.start()
        with contextlib.suppress(RuntimeError, OSError):  # The guard reports why the store is gone.
            self._beside.introduce()
        super().start()

    def end(self) -> None:
        """Stop watching, and report to the other ranks that this rank leaves the group."""
        self._ended.set()
        if threading.current_thread() is not self and self.is_alive():
            # A thread that returns from C++ while the interpreter exits would abort the process.
            self.join(timeout=2.0)
        if self._store_watch.is_alive():
            self._store_watch.join(timeout=2.0)
        if not self._job.cause:
            with contextlib.suppress(RuntimeError, OSError):
                self._leave()

    def run(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # The store may be gone.
            while not self._ended.wait(self._pause_s()) and not self._job.cause:
                if self._is_over():
                    self._leave()
                    return
                try:
                    self._tick()
                except (RuntimeError, OSError):  # Process groups may change during a look.
                    self._store.check([self._job.key("verdict")])

    def _pause_s(self) -> float:
        """Return the seconds to the next look; few at first, while ranks publish processes."""
        self._num_looks += 1
        return self._interval_s / (5 if self._num_looks < _FIRST_LOOKS else 1)

    def _is_over(self) -> bool:
        """Return True if the group was destroyed or replaced by another one."""
        return dist.group.WORLD is not self._job.world

    def _leave(self) -> None:
        """Report in the store that this rank has left the group."""
        report = {"kind": "left", "rank": self._job.rank, **self._job.progress.facts()}
        self._store.set(self._job.group_key(f"left/{self._job.rank}"), json.dumps(report))
        post(self._job, self._store, "left", report)

    def _tick(self) -> None:
        """Look at this rank and at the events of others; end the group if the ranks hang."""
        now = time.monotonic()
        was_late = now - self._looked > self._interval_s + _LATE_S
        self._looked = now
        if self.is_store_silent():
            return
        if num_groups() != self._job.groups:
            publish_ends(self._job, self._store)
        self._beside.meet()
        self._read_events()
        if self._job.cause:
            return
        self._judge_meetings()
        look = self._look_at_own_thread()
        self._compare_looks(look, now, was_late)
        is_certain = self._can_be_certain()
        is_still = look[0].wait and now - self._still_since >= STILL_S
        if is_certain and is_still and not self._is_counted:
            self._is_counted = True
            self._store.add(self._job.key("waiting"), 1)
        if self._is_counted:
            self._vote_on_deadlock()
        steady_s = now - self._steady_since
        # On devices, a verb may wait for other ranks at any line that synchronizes with the device.
        waits = look[0].wait or (not is_certain and self._job.progress.verb)
        if waits and not self._job.cause:
            self._look_at_processes(now)
            if steady_s >= WARN_S:
                self._notices.ask(steady_s, patience_s=4 * self._interval_s)

    # The state of this rank.

    def _look_at_own_thread(self) -> tuple[Look, Any]:
        """Return a look at the verbs' thread, and (collectives begun, facts, meeting)."""
        progress = self._job.progress
        return look_at(*progress.thread), (group_sequences(), progress.facts(), progress.meeting)

    def _can_be_certain(self) -> bool:
        """Return True if the stack of the verbs' thread shows for certain that this rank waits.

        All process groups must be gloo's, because with devices the wait is not on the CPU. Also, no
        other thread may begin a collective that the ranks wait for. Such a thread, which for
        example reads batches and sends them, needs a process group made by the program.
        """
        has_company = self._look is not None and self._look[0].has_company
        if self._is_shared or (has_company and has_groups_of_program()):
            return False
        return all(backend == "gloo" for _, _, backend in group_facts())

    def _compare_looks(self, look: tuple[Look, Any], now: float, was_late: bool) -> None:
        """Compare a new look with the last one; if the rank has moved, restart its clocks.

        `was_late` is True if this process was not running for a while.
        """
        before, self._look = self._look, look
        self._is_shared |= look[0].is_shared
        if was_late or before is None or (before[0].lines, before[1]) != (look[0].lines, look[1]):
            self._steady_since = self._still_since = now
            self._beside.forget_stops()
            self._notices.begin_anew()
        elif look[0].state != "S" or look[0].ticks - before[0].ticks > _OWN_TICKS:
            self._still_since = now
        if self._is_counted and (self._still_since == now or not look[0].wait):
            self._is_counted, self._last_traffic = False, None
            self._store.add(self._job.key("moves"), 1)
            self._store.add(self._job.key("waiting"), -1)

    def _own_report(self) -> dict[str, Any]:
        """Return the report of where this rank is, as facts that JSON can express."""
        if self._look is None:
            self._look = self._look_at_own_thread()
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

    # The state of all ranks.

    def _vote_on_deadlock(self) -> None:
        """Vote that no rank can go on, if all wait and no data is under way.

        The rank that votes last ends the group.
        """
        present = [r for r in range(self._job.size) if not self._has_left(r)]
        if self._store.add(self._job.key("waiting"), 0) < len(present):
            self._last_traffic = None
            return
        moves = self._store.add(self._job.key("moves"), 0)
        others = tables_of_others(self._job, self._store)
        moved = traffic(others, store_port(self._store))
        if moved is None or moved.waiting_bytes:
            self._last_traffic = None
            return
        before = self._last_traffic
        looks = before[2] + 1 if before is not None and before[:2] == (moves, moved) else 0
        self._last_traffic = (moves, moved, looks)
        if looks < _QUIET_LOOKS or self._voted == moves:
            return
        self._voted = moves
        # The key contains the number of moves, so votes expire as soon as any rank moves on.
        name = self._job.key(f"votes/{moves}")
        self._store.set(f"{name}/{self._job.rank}", json.dumps(self._own_report()))
        if self._store.add(name, 1) == len(present):
            texts = self._store.multi_get([f"{name}/{rank}" for rank in present])
            reports = {rank: json.loads(text) for rank, text in zip(present, texts, strict=True)}
            problem = verdict(reports)
            if problem is not None:
                self._end_group(problem)

    def _has_left(self, rank: int) -> bool:
        return self._absent.get(rank, {}).get("kind") == "left"

    def _end_group(self, problem: Problem) -> None:
        """End the group with this problem, or with that of a rank that has reported one before."""
        end_group(self._job, self._store, claim(self._job, self._store, problem))

    # Events from other ranks.

    def _read_events(self) -> None:
        """Read and handle all new events in the store."""
        newest = self._store.add(self._job.group_key("events"), 0)
        while self._last_event < newest:
            key = self._job.group_key(f"event/{self._last_event + 1}")
            if not self._store.check([key]):
                return  # The rank has taken this number but not written the event yet.
            self._last_event += 1
            self._handle(json.loads(self._store.get(key)))

    def _handle(self, event: dict[str, Any]) -> None:
        """Handle one event (`job.post`)."""
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
        """End the group on this rank, too, if another rank has ended it."""
        key = self._job.key("verdict")
        if self._store.check([key]) and self._store.get(key).decode() == DEAD:
            end_group(self._job, self._store, first_cause(self._job, self._store))

    def _judge_meetings(self) -> None:
        """End the group if this rank and a rank that waits or has left will certainly never meet.

        Two looks in a row must find this.
        """
        meeting = self._job.progress.meeting
        if meeting is None:
            self._last_meeting = ""
        elif meeting.key != self._last_meeting:
            self._last_meeting = meeting.key  # Report it if this rank still waits at the next look.
        elif meeting.key != self._reported_meeting:
            self._reported_meeting = meeting.key
            post(self._job, self._store, "waits", meeting_report(self._job, meeting))
        found = None
        if meeting is not None and self._store.check([all_arrived_key(meeting.key)]):
            return  # All ranks have arrived; this rank will wake up and go on.
        for rank, report in list(self._absent.items()):
            if report["kind"] == "waits" and self._store.check(
                [all_arrived_key(str(report["meeting"]))]
            ):
                del self._absent[rank]
            elif where := will_not_come(self._job, report):
                found = rank, where
                break
        if found is not None and found == self._last_unmet:
            self._end_group(missed(self._job, self._absent[found[0]], found[1]))
        self._last_unmet = found

    # Processes of other ranks on this machine.

    def has_died(self, rank: int) -> bool:
        """Return True if a rank's process is on this machine and has ended."""
        return rank in self._beside and self._beside.is_gone(rank)

    def dead_rank(self) -> int | None:
        """Return a rank on this machine whose process has ended; None if there is none."""
        return next((rank for rank in self._beside if self._beside.is_gone(rank)), None)

    def is_store_silent(self) -> bool:
        """Return True if the process that serves the store is stopped: requests would hang."""
        return self._server.is_stopped()

    def _watch_store(self) -> None:
        """End the group if the process that serves the store is stopped, without asking the store.

        Runs in a thread of its own, because a request to the store would hang.
        """
        since = looked = time.monotonic()
        while not (self._ended.wait(self._interval_s) or self._job.cause or self._is_over()):
            now = time.monotonic()
            was_late = now - looked > self._interval_s + _LATE_S
            looked = now
            if was_late or not self.is_store_silent():
                since = now
            elif now - since >= STOPPED_S and (
                self.is_asked or self._look_at_own_thread()[0].needs_store
            ):
                problem = self._stopped(0, self._server.process)
                self._job.fix, self._job.cause = problem.fix or "", problem.what
                # Close connections to the store, too, since the verbs' thread may be waiting there.
                close_between_ranks(self._beside.tables() + self._server.table())

    def _look_at_processes(self, now: float) -> None:
        """End the group if another rank's process is stopped, or ended without gloo noticing."""
        verb, meeting = self._job.progress.verb, self._job.progress.meeting
        is_still = now - self._steady_since >= STILL_S
        is_long = now - self._steady_since >= STOPPED_S
        # gloo notices a broken connection by itself, but a rank that waits in the store does not.
        awaited = meeting.ranks if meeting is not None else ()
        if meeting is None and verb == NEEDS_ALL and not self._can_be_certain():
            awaited = tuple(self._beside)
        for rank in self._beside:
            since = self._beside.stopped_since(rank, now)
            if since is not None and now - since >= STOPPED_S:
                return self._end_group(self._stopped(rank, self._beside.process(rank)))
            if rank in awaited and is_long and self._beside.is_gone(rank):
                return self._end_group(self._died(rank))
        if meeting is not None and is_still and self._can_be_certain():
            published = tables(self._job, self._store)
            own, port = published.pop(self._job.rank, "[]"), store_port(self._store)
            for rank in awaited:
                if is_cut_off(own, published.get(rank, "[]"), port):
                    return self._end_group(self._died(rank))

    def _died(self, rank: int) -> Problem:
        """Return the problem of a rank whose process has ended while this rank waits for it."""
        where = self._job.progress.running or "a forward"
        what = f"rank {self._job.rank} waits in {where} for rank {rank}, which died or was killed"
        return Problem(what, fix=f"see the log of that rank; then {RESTART}")

    def _stopped(self, rank: int, process: int | None) -> Problem:
        """Return the problem of a rank whose process is stopped while this rank waits for it."""
        own = self._own_report()
        where = own["running"] or own["waits"] or own["where"]
        return stopped(rank, process, self._job.rank, where)
