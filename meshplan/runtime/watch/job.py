"""This rank's part in the process group: where it stands, and what it tells the others.

All of it goes through the store of the group, which answers while collectives stand still.
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
"""The verb that no rank can finish, under any plan, unless every rank runs it equally often."""

ALIVE: Final = "alive"
DEAD: Final = "dead"
RESTART: Final = "start the job again"
_TEXT_LIMIT: Final = 4000
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Meeting:
    """A place in the store where ranks wait for each other.

    Attributes:
        key: Its key.
        name: What begins when all have come.
        ranks: Those that must come.
        where: The line of the user's code that this rank came from.
    """

    key: str
    name: str
    ranks: tuple[int, ...]
    where: str


@dataclass(slots=True)
class Forwards:
    """The forwards that some ranks can only run together.

    Attributes:
        num: How many have begun.
        is_training: Whether the last of them was one of training.
        switches: How often training and evaluation have taken turns.
    """

    num: int = 0
    is_training: bool = True
    switches: int = 0


@dataclass(slots=True)
class Progress:
    """How far this rank's program has come.

    Attributes:
        thread: The thread that runs the verbs: its identifier, and the kernel's.
        verb: The outermost verb that runs now, "" outside of all.
        counts: How often each verb has begun.
        last: The last verb that ended or forward that began, with its number.
        num_forwards: How many forwards of parallelized models have begun.
        forwards: The same by the ranks that run them together.
        meeting: The meeting in which this rank waits.
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
        """The verb that runs, with its number, and what it waits to begin; "" outside of all."""
        if not self.verb:
            return ""
        number = f"{self.verb} {self.counts[self.verb]}"
        at = self.meeting.name if self.meeting is not None else self.verb
        # A verb of its own, and a forward of either kind, are named already.
        return number if " " not in at else f"{number}, before {at}"

    def facts(self) -> dict[str, Any]:
        """The same for other ranks to read."""
        return {
            "running": self.running,
            "counts": dict(self.counts),
            "last": self.last,
            "num_forwards": self.num_forwards,
        }


@dataclass(slots=True)
class Job:
    """What this rank knows about the process group it is in.

    Attributes:
        world: The group; another one is another job.
        store: A connection to the store of the group, for the thread that runs the verbs.
        number: How many groups this process was in before.
        epoch: How many times all ranks failed together, and went on.
        cause: Why the group is dead; "" while it lives.
        fix: What to do about it.
        groups: How many groups there were when the connections were last published.
        partings: By ranks, how often they were asked whether they fail together.
        meetings: By name, how many meetings this rank has come to.
        progress: How far this rank has come.
        rank: This rank.
        size: How many ranks there are.
        process: The number of this process.
        has_read: Whether this rank has told that it knows why the group is dead.
        publishing: Held while connections are published.
    """

    world: object
    store: dist.Store
    number: int = 0
    epoch: int = 0
    cause: str = ""
    fix: str = ""
    groups: int = -1
    partings: Counter[str] = field(default_factory=Counter)
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
        return f"meshplan/{self.number}/{self.epoch}/{name}"

    def lasting(self, name: str) -> str:
        """A key that outlives failures of all ranks together."""
        return f"meshplan/{self.number}/{name}"

    def failed(self) -> Problem:
        """The problem of which the group died."""
        return Problem(self.cause, fix=self.fix or f"see the log of that rank; then {RESTART}")


def door(meeting: str) -> str:
    """The key that appears when all ranks have come to a meeting."""
    return f"{meeting}/all"


def post(job: Job, store: dist.Store, kind: str, facts: Mapping[str, Any] | None = None) -> None:
    """Tell all ranks of an event; their watchdogs read it soon."""
    number = store.add(job.lasting("events"), 1)
    told = {"kind": kind, "rank": job.rank, **(facts or {})}
    store.set(job.lasting(f"event/{number}"), json.dumps(told))


def publish_ends(job: Job, store: dist.Store) -> None:
    """Tell the others this rank's connections, when there are new groups."""
    with job.publishing:  # An older list must not come after a newer one.
        count = num_groups()
        if count != job.groups:
            store.set(job.lasting(f"ends/{job.rank}"), spell(own_ends().values()))
            job.groups = count


def tables(job: Job, store: dist.Store) -> dict[int, str]:
    """The connections that each rank has published."""
    keys = {rank: job.lasting(f"ends/{rank}") for rank in range(job.size)}
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}


def tables_of_others(job: Job, store: dist.Store) -> list[str]:
    """The connections that the other ranks have published."""
    return [table for rank, table in tables(job, store).items() if rank != job.rank]


def claim(job: Job, store: dist.Store, problem: Problem) -> Problem:
    """Say why the group died; returns the problem of the rank that was first to."""
    own = json.dumps([problem.what[:_TEXT_LIMIT], problem.fix])
    # Only the first writer finds the key empty.
    what, fix = json.loads(store.compare_set(job.key("first"), "", own).decode())
    return Problem(what, fix=fix)


def first_cause(job: Job, store: dist.Store) -> Problem:
    """The problem that the first rank to fail has told."""
    what, fix = json.loads(store.get(job.key("first")).decode())
    return Problem(what, fix=fix)


def bury(job: Job, store: dist.Store, cause: Problem) -> None:
    """The group is dead: make the collectives of this rank and of its peers raise."""
    job.fix = cause.fix or ""
    job.cause = cause.what
    store.compare_set(job.key("verdict"), "", DEAD)
    if not job.has_read:
        job.has_read = True
        store.add(job.lasting("readers"), 1)
        post(job, store, "dead")
    meeting = job.progress.meeting
    if meeting is not None:
        store.set(door(meeting.key), DEAD)
    if dist.get_backend() != "gloo":
        abort_groups()
        return
    close_between_ranks(tables_of_others(job, store), store_port(store))


def is_store_served_elsewhere() -> bool:
    """Whether torchrun serves the store, and not rank 0, as far as this process can know."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def wait_for_readers(job: Job, seconds: float, num_gone: int = 0) -> None:
    """Stay until the others have read the cause, if the store goes with this process.

    Rank 0 holds it, unless torchrun does.

    Args:
        seconds: How long to stay at most.
        num_gone: How many others are known to read no more.
    """
    if job.rank or is_store_served_elsewhere():
        return
    deadline = time.monotonic() + seconds
    while job.store.add(job.lasting("readers"), 0) < job.size - num_gone:
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)
