"""Nothing hangs: what raises on one rank becomes an error on every rank, naming that rank.

torch leaves the others waiting in a collective until its time-out. Here a rank that fails writes
its cause into the store of the process group and ends its connections to the other ranks; their
collectives then raise, and they find the cause in the store. Where every rank fails at the same
place, as in a mistake of the model's own code, nothing is ended and each raises its own error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, TypeAlias

import torch.distributed as dist

from meshplan.errors import ApplyError, MeshplanError, Problem
from meshplan.runtime.pretend import is_pretending
from meshplan.runtime.private import (
    abort_groups,
    group_sequences,
    group_store,
    num_groups,
    store_port,
)
from meshplan.runtime.sockets import close_between_ranks, own_ends, spell

GRACE_S: Final = 3.0
"""How long a rank that failed waits for the others to fail alike before it ends the group."""
_POLL_S: Final = 0.02
_WATCH_S: Final = 0.5
_LOST: Final = ("connection", "socket", "broken pipe", "timed out")
"""Words in the errors of gloo when another rank has gone."""
_TEXT_LIMIT: Final = 2000
_ALIVE, _DEAD = "alive", "dead"


@dataclass(slots=True)
class _Job:
    """What this rank knows about the process group it is in.

    Attributes:
        world: The group; another one is another job.
        epoch: How many times all ranks failed together, and went on.
        cause: Why the group is dead; "" while it lives.
        groups: How many groups there were when the connections were last published.
        partings: By ranks, how often they were asked whether they fail together.
        store: A connection to the store of the group.
    """

    world: object
    store: dist.Store
    epoch: int = 0
    cause: str = ""
    groups: int = -1
    partings: Counter[str] = field(default_factory=Counter)

    def key(self, name: str) -> str:
        return f"meshplan/{self.epoch}/{name}"


_job: _Job | None = None


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """A block that every rank runs, and in which no rank is left waiting for one that failed.

    `train_step` and the other verbs that talk to other ranks run inside one already. Around a
    whole loop it also covers what happens between the steps, such as reading data.

    Raises:
        ApplyError: Another rank failed; the message names it and its cause. On the rank that
            failed its own exception goes on as it is. Afterwards the process group cannot be
            used any more, and every later guard says so.
    """
    job = _current()
    if job is None:
        yield
        return
    if job.cause:
        raise ApplyError(Problem(f"the process group is dead since {job.cause}", fix=_RESTART))
    _publish(job)
    before = group_sequences()
    try:
        yield
    except BaseException as error:
        if hasattr(error, _SETTLED):
            raise
        told = _settle(job, error, before)
        setattr(told or error, _SETTLED, True)
        if told is None:
            raise
        raise told from error
    if job.cause:  # A watcher gave up a collective, which returned without a result.
        raise ApplyError(_failed(job.cause))
    _publish(job)


_RESTART: Final = "start the job again"
_SETTLED: Final = "_meshplan_settled"
"""Marks an exception that a guard has dealt with, so that those around it let it pass."""
_ALONE: Final = "_meshplan_alone"
"""Marks an exception that is known not to be raised on all ranks."""


def _failed(cause: str) -> Problem:
    return Problem(cause, fix=f"see the log of that rank; then {_RESTART}")


def _current() -> _Job | None:
    """The job of the present process group; None where there is nobody else."""
    global _job
    if is_pretending() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    if _job is None or _job.world is not world:
        _job = _Job(world, group_store())
        _report_uncaught()
        if dist.get_backend() != "gloo":
            watch(_job)
    return _job


def publish() -> None:
    """Tell the others this rank's connections now, after groups were made."""
    job = _current()
    if job is not None:
        _publish(job)


def _publish(job: _Job) -> None:
    """Tell the others this rank's connections, when there are new groups."""
    count = num_groups()
    if count != job.groups:
        job.groups = count
        ends = own_ends()
        job.store.set(f"meshplan/ends/{dist.get_rank()}", spell(ends.values()))


def fails_together(error: Exception, ranks: Sequence[int]) -> bool:
    """Whether these ranks, of which this is one, all fail here, so that none waits for another.

    Where it is False the error must be raised: the guard around then ends the group at once.
    """
    job = _current()
    if job is None or len(ranks) == 1:
        return True
    name = ",".join(map(str, ranks))
    key = job.key(f"together/{name}/{job.partings[name]}")
    job.partings[name] += 1
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(RuntimeError, OSError):  # Where the store has gone already.
        count = job.store.add(key, 1)
        while count < len(ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            count = job.store.add(key, 0)
        if count == len(ranks):
            return True
    setattr(error, _ALONE, True)
    return False


_Sequences: TypeAlias = dict[str, int] | None
"""How many collectives each group has begun on this rank, by the names of the groups."""


def _settle(job: _Job, error: BaseException, before: _Sequences) -> ApplyError | None:
    """Agree with the others on what the failure of this rank means.

    Args:
        job: The job of the group.
        error: What was raised inside of a guard.
        before: The collectives that had begun where that guard did.

    Returns:
        What to raise instead; None where the error is this rank's own.
    """
    is_lost = is_lost_connection(error)
    own = f"rank {dist.get_rank()} failed: {_spell(error)}"
    if is_lost:
        own = _lost("another rank")
    try:
        if is_lost:
            own = _lost(_peer(job, str(error)))
        cause = _claim(job, own, before)
        is_alone = is_lost or not isinstance(error, Exception) or hasattr(error, _ALONE)
        if is_alone or not _all_failed_alike(job):
            _bury(job, cause)
            _wait_for_readers(job, num_gone=int(is_lost))
        else:
            job.epoch += 1
    except (RuntimeError, OSError):  # The store has gone with the process that held it.
        job.cause = job.cause or own
    return ApplyError(_failed(job.cause)) if is_lost else None


def _lost(peer: str) -> str:
    return f"rank {dist.get_rank()} lost its connection to {peer}, which died or was ended"


def _wait_for_readers(job: _Job, num_gone: int = 0) -> None:
    """Stay until the others have read the cause, if the store goes with this process.

    Rank 0 holds it, unless torchrun does.

    Args:
        num_gone: How many others are known to read no more.
    """
    key = "meshplan/readers"
    job.store.add(key, 1)
    if dist.get_rank() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    deadline = time.monotonic() + GRACE_S
    wanted = dist.get_world_size() - num_gone
    while job.store.add(key, 0) < wanted and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _spell(error: BaseException) -> str:
    if isinstance(error, MeshplanError):
        return "; ".join(problem.what for problem in error.problems)
    return f"{type(error).__name__}: {error}"


def is_lost_connection(error: BaseException) -> bool:
    """Whether torch raised this because another rank went away."""
    if isinstance(error, ApplyError) or not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or ("gloo" in text and any(w in text for w in _LOST))


def _peer(job: _Job, text: str) -> str:
    """The rank at the other end of the connection that an error of gloo names."""
    found = re.search(r"\]:(\d+)", text)
    port = int(found[1]) if found else 0
    # gloo prints the port as it lies in memory, with its two bytes swapped on most machines.
    ports = tuple(f":{number:04X}" for number in (port, port >> 8 | (port & 255) << 8))
    tables = _tables(job)
    mine = json.loads(tables.get(dist.get_rank(), "[]"))
    remote = {end for _, end in mine if port and end.endswith(ports)}
    for rank, table in tables.items():
        if remote & {end for end, _ in json.loads(table)}:
            return f"rank {rank}"
    return "another rank"


def _tables(job: _Job) -> dict[int, str]:
    """The connections that each rank has published."""
    keys = {rank: f"meshplan/ends/{rank}" for rank in range(dist.get_world_size())}
    return {r: job.store.get(key).decode() for r, key in keys.items() if job.store.check([key])}


def _claim(job: _Job, own: str, before: _Sequences = None) -> str:
    """Write this rank's failure; returns that of the rank that was first.

    The collectives are counted from the guard's beginning: a pipeline leaves other totals on
    each rank, since torch counts what is sent from one to another in the same place.
    """
    now = group_sequences()
    since = None
    if now is not None and before is not None:
        since = {name: number - before.get(name, 0) for name, number in now.items()}
    job.store.set(job.key(f"failed/{dist.get_rank()}"), json.dumps(since))
    job.store.add(job.key("count"), 1)
    # Only the first writer finds the key empty.
    first = job.store.compare_set(job.key("first"), "", own[:_TEXT_LIMIT])
    return str(first.decode())


def _all_failed_alike(job: _Job) -> bool:
    """Whether every rank failed, all after the same collectives, so that the group lives on.

    All ranks come to the same answer: the first to know it writes it down.
    """
    world = dist.get_world_size()
    deadline = time.monotonic() + GRACE_S
    verdict = _DEAD
    while time.monotonic() < deadline and not job.store.check([job.key("verdict")]):
        if job.store.add(job.key("count"), 0) == world:
            keys = [job.key(f"failed/{rank}") for rank in range(world)]
            if _same([json.loads(text) for text in job.store.multi_get(keys)]):
                verdict = _ALIVE
            break
        time.sleep(_POLL_S)
    return bool(job.store.compare_set(job.key("verdict"), "", verdict).decode() == _ALIVE)


def _same(sequences: list[_Sequences]) -> bool:
    """Whether no group has seen more collectives on one rank than on another."""
    first: dict[str, int] = {}
    for each in sequences:
        if each is None:
            return False
        if any(first.setdefault(name, number) != number for name, number in each.items()):
            return False
    return True


def _bury(job: _Job, cause: str) -> None:
    """The group is dead: make the collectives of the others raise."""
    job.cause = cause
    job.store.compare_set(job.key("verdict"), "", _DEAD)
    if dist.get_backend() != "gloo":
        abort_groups()
        return
    others = {rank: table for rank, table in _tables(job).items() if rank != dist.get_rank()}
    close_between_ranks(others.values(), store_port(job.store))


def watch(job: _Job) -> threading.Thread:
    """Give up this rank's collectives when another rank has failed.

    For backends whose collectives do not notice that the other end has gone, such as NCCL.
    """

    def look() -> None:
        while _job is job and not job.cause:
            try:
                told = job.store.check([job.key("verdict")])
                if told and job.store.get(job.key("verdict")).decode() == _DEAD:
                    _bury(job, job.store.get(job.key("first")).decode())
            except (RuntimeError, OSError):
                return  # The store has gone, and with it the job.
            time.sleep(_WATCH_S)

    thread = threading.Thread(target=look, name="meshplan-guard", daemon=True)
    thread.start()
    return thread


def _report_uncaught() -> None:
    """Tell the others what ends this process, also when it happens outside of every guard."""
    before = sys.excepthook
    if getattr(before, "_is_meshplan", False):
        return

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        job = _job
        if job is None or job.cause or hasattr(error, _SETTLED) or not dist.is_initialized():
            return
        with contextlib.suppress(RuntimeError, OSError):  # Where the store has gone already.
            _bury(job, _claim(job, f"rank {dist.get_rank()} failed: {_spell(error)}"))
            _wait_for_readers(job)

    report._is_meshplan = True  # type: ignore[attr-defined]
    sys.excepthook = report
