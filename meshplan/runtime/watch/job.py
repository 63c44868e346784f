"""State of this rank in its process group, and its messages to the other ranks.

All messages go through the store of the group, which answers even while collectives hang. A verb is
a guarded function such as `train_step`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist

from meshplan.errors import Problem
from meshplan.runtime.torch_private.private import abort_groups, num_groups, store_port
from meshplan.runtime.watch.sockets import close_between_ranks, own_ends, spell

NEEDS_ALL: Final = "train_step"
"""The verb that, under any plan, no rank can finish unless all ranks run it equally often."""

ALIVE: Final = "alive"
"""Entry in the store: all ranks failed together, and the process group stays usable."""
DEAD: Final = "dead"
"""Entry in the store: the process group has ended."""
RESTART: Final = "start the job again"
"""Advice in messages after the process group has ended."""
_TEXT_LIMIT: Final = 4000
"""Characters of a message in the store; the rest is cut off."""
_POLL_S: Final = 0.02
"""Seconds between two looks into the store."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A synchronization point in the store, at which ranks wait for each other.

    Attributes:
        key: Key in the store.
        name: The activity that begins when all ranks have arrived.
        ranks: The ranks that must arrive.
        where: The line of the user's code that led this rank to the meeting.
    """

    key: str
    name: str
    ranks: tuple[int, ...]
    where: str


@dataclass(slots=True)
class Forwards:
    """The forwards that a set of ranks must run together.

    Attributes:
        num: Number of forwards begun.
        is_training: True if the last of these forwards was part of training.
        switches: Number of switches between training and evaluation.
    """

    num: int = 0
    is_training: bool = True
    switches: int = 0


@dataclass(slots=True)
class Progress:
    """The progress of this rank's program.

    Attributes:
        thread: The thread that runs the verbs: its Python identifier and its native (kernel) id.
        verb: The outermost verb that is running; "" outside all verbs.
        counts: For each verb, the number of times that it has begun.
        last: The last verb that ended or forward that began, with its number ("train_step 3").
        num_forwards: Number of forwards of parallelized models begun.
        forwards: Forwards by the set of ranks that must run them together.
        meeting: The meeting at which this rank waits; None if it waits at none.
    """

    thread: tuple[int, int]
    verb: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    last: str = ""
    num_forwards: int = 0
    forwards: defaultdict[tuple[int, ...], Forwards] = field(
        default_factory=lambda: defaultdict(Forwards)
    )
    meeting: Meeting | None = None

    @property
    def running(self) -> str:
        """The running verb with its number, and the activity it waits to begin; "" without verb."""
        if not self.verb:
            return ""
        number = f"{self.verb} {self.counts[self.verb]}"
        at = self.meeting.name if self.meeting is not None else self.verb
        # Names without a space are verbs or kinds of forwards, which messages name anyway.
        return number if " " not in at else f"{number}, before {at}"

    def facts(self) -> dict[str, Any]:
        """Return the progress as JSON-serializable facts for the other ranks."""
        return {
            "running": self.running,
            "counts": dict(self.counts),
            "last": self.last,
            "num_forwards": self.num_forwards,
        }


@dataclass(slots=True)
class Job:
    """The state of this rank in one default process group.

    Attributes:
        world: The default process group. A new process group gets a new `Job`.
        store: A connection to the store of the group, for the thread that runs the verbs.
        number: Number of groups that this process was in before.
        epoch: Number of times that all ranks failed together and went on.
        cause: The reason why the group has ended; "" while it is usable.
        fix: Advice on the cause.
        groups: Number of process groups when this rank last published its connections.
        joint_failures: Number of calls of `guard.fails_together`, by the ranks given to it.
        meetings: Number of meetings that this rank has arrived at, by name and ranks.
        progress: The progress of this rank's program.
        rank: This rank.
        size: Number of ranks.
        process: Id of this process.
        has_read: True if this rank has reported to the store that it knows why the group ended.
        publishing: Lock that a thread takes to publish connections.
    """

    world: object
    store: dist.Store
    number: int = 0
    epoch: int = 0
    cause: str = ""
    fix: str = ""
    groups: int = -1
    joint_failures: Counter[str] = field(default_factory=Counter)
    meetings: Counter[str] = field(default_factory=Counter)
    progress: Progress = field(
        default_factory=lambda: Progress((threading.get_ident(), threading.get_native_id()))
    )
    rank: int = field(default_factory=dist.get_rank)
    size: int = field(default_factory=dist.get_world_size)
    process: int = field(default_factory=os.getpid)
    has_read: bool = False
    publishing: threading.Lock = field(default_factory=threading.Lock)

    def key(self, name: str) -> str:
        """Return a key in the store for this group, until all ranks fail together and go on."""
        return f"meshplan/{self.number}/{self.epoch}/{name}"

    def group_key(self, name: str) -> str:
        """Return a key in the store for this group, for as long as it exists."""
        return f"meshplan/{self.number}/{name}"

    def failed(self) -> Problem:
        """Return the problem that ended the group."""
        return Problem(self.cause, fix=self.fix or f"see the log of that rank; then {RESTART}")


def all_arrived_key(meeting: str) -> str:
    """Return the key that is set in the store once all ranks have arrived at a meeting."""
    return f"{meeting}/all"


def post(job: Job, store: dist.Store, kind: str, facts: Mapping[str, Any] | None = None) -> None:
    """Send an event to all ranks. Their watchdogs read it at their next look.

    Args:
        job: The job of this rank.
        store: A connection to the store of the group.
        kind: "dead", "left", "waits", "ask" or "notice".
        facts: Further JSON-serializable contents of the event.
    """
    number = store.add(job.group_key("events"), 1)
    event = {"kind": kind, "rank": job.rank, **(facts or {})}
    store.set(job.group_key(f"event/{number}"), json.dumps(event))


def publish_ends(job: Job, store: dist.Store) -> None:
    """Publish this rank's connections if process groups were added or removed."""
    with job.publishing:  # Otherwise an older list could overwrite a newer list.
        count = num_groups()
        if count != job.groups:
            store.set(job.group_key(f"ends/{job.rank}"), spell(own_ends().values()))
            job.groups = count


def tables(job: Job, store: dist.Store) -> dict[int, str]:
    """Return the connections that each rank has published, by rank, as JSON (`sockets.spell`)."""
    keys = {rank: job.group_key(f"ends/{rank}") for rank in range(job.size)}
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}


def tables_of_others(job: Job, store: dist.Store) -> list[str]:
    """Return the connections that each other rank has published, as JSON (`sockets.spell`)."""
    return [table for rank, table in tables(job, store).items() if rank != job.rank]


def claim(job: Job, store: dist.Store, problem: Problem) -> Problem:
    """Report `problem` as the reason to end the group; return what the first rank has reported."""
    own = json.dumps([problem.what[:_TEXT_LIMIT], problem.fix])
    # `compare_set` succeeds for the first writer only.
    what, fix = json.loads(store.compare_set(job.key("first"), "", own).decode())
    return Problem(what, fix=fix)


def first_cause(job: Job, store: dist.Store) -> Problem:
    """Return the problem that the first rank to fail has reported."""
    what, fix = json.loads(store.get(job.key("first")).decode())
    return Problem(what, fix=fix)


def end_group(job: Job, store: dist.Store, cause: Problem) -> None:
    """End the process group: the running collectives of this rank and of its peers then raise."""
    job.fix = cause.fix or ""
    job.cause = cause.what
    store.compare_set(job.key("verdict"), "", DEAD)
    if not job.has_read:
        job.has_read = True
        store.add(job.group_key("readers"), 1)
        post(job, store, "dead")
    meeting = job.progress.meeting
    if meeting is not None:
        store.set(all_arrived_key(meeting.key), DEAD)
    if dist.get_backend() != "gloo":
        abort_groups()
        return
    close_between_ranks(tables_of_others(job, store), store_port(store))


def is_store_served_elsewhere() -> bool:
    """Return True if torchrun states that its agent serves the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def wait_for_readers(job: Job, seconds: float, num_gone: int = 0) -> None:
    """On rank 0, if it serves the store, wait until the other ranks have read the cause.

    The store ends with the process that serves it: rank 0, unless torchrun does.

    Args:
        job: The job of this rank.
        seconds: Longest time to wait.
        num_gone: Number of other ranks that are known to have ended.
    """
    if job.rank or is_store_served_elsewhere():
        return
    deadline = time.monotonic() + seconds
    while job.store.add(job.group_key("readers"), 0) < job.size - num_gone:
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)
