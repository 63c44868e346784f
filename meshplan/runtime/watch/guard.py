"""Nothing hangs: what raises on one rank becomes an error on every rank, naming that rank.

torch leaves the others waiting in a collective until its time-out. Here a rank that fails writes
its cause into the store of the process group and ends its connections to the other ranks; their
collectives then raise, and they find the cause in the store. Where every rank fails at the same
place, as in a mistake of the model's own code, nothing is ended and each raises its own error.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from meshplan.errors import ApplyError, MeshplanError, Problem
from meshplan.layout.mesh import DATA_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.torch_private.private import group_sequences
from meshplan.runtime.watch import watchdog
from meshplan.runtime.watch.job import (
    ALIVE,
    DEAD,
    RESTART,
    Job,
    bury,
    claim,
    publish_ends,
    tables,
    wait_for_readers,
)
from meshplan.runtime.watch.meeting import enter_forward, meet, missed
from meshplan.runtime.watch.server import Server

GRACE_S: Final = 3.0
"""How long a rank that failed waits for the others to fail alike before it ends the group."""
_POLL_S: Final = 0.02
LEAVE_S: Final = 0.7
"""How long a rank that lost its connection to another waits to be told that it has left."""
_LOST: Final = ("connection", "socket", "broken pipe", "timed out")
"""Words in the errors of gloo when another rank has gone."""

_job: Job | None = None
_dog: watchdog.Watchdog | None = None


@contextlib.contextmanager
def guarded(verb: str = "") -> Iterator[None]:
    """A block that every rank runs, and in which no rank is left waiting for one that failed.

    `train_step` and the other verbs that talk to other ranks run inside one already. Around a
    whole loop it also covers what happens between the steps, such as reading data.

    Args:
        verb: The name under which other ranks are told of the block.

    Raises:
        ApplyError: Another rank failed, or the ranks wait for each other in vain; the message
            names it and its cause. On the rank that failed its own exception goes on as it is.
            Afterwards the process group cannot be used any more, and every later guard says so.
    """
    job = _current()
    if job is None:
        yield
        return
    if job.cause:
        what = f"the process group is dead since {job.cause}"
        raise ApplyError(Problem(what, fix=job.fix or RESTART))
    before = group_sequences()
    is_outermost = bool(verb) and _enter(job, verb)
    try:
        publish_ends(job, job.store)
        yield
    except BaseException as error:
        if hasattr(error, _SETTLED):
            raise
        told = _settle(job, error, before)
        setattr(told or error, _SETTLED, True)
        if told is None:
            raise
        raise told from error
    finally:
        if is_outermost:
            job.progress.last, job.progress.verb = job.progress.running, ""
    if job.cause:  # A watchdog gave up a collective, which returned without a result.
        raise ApplyError(job.failed())
    publish_ends(job, job.store)


def come_together(name: str) -> None:
    """Wait until every rank is here, where a rank that comes alone meets no other's collective."""
    job = _current()
    if job is not None:
        meet(job, name, tuple(range(job.size)))


def _enter(job: Job, verb: str) -> bool:
    """Note that a verb begins; returns whether it is not part of another one."""
    progress = job.progress
    if progress.verb:
        return False
    progress.thread = threading.get_ident(), threading.get_native_id()
    progress.counts[verb] += 1
    progress.verb = verb
    return True


_SETTLED: Final = "_meshplan_settled"
"""Marks an exception that a guard has dealt with, so that those around it let it pass."""
_ALONE: Final = "_meshplan_alone"
"""Marks an exception that is known not to be raised on all ranks."""


def _failed(cause: str) -> Problem:
    return Problem(cause, fix=f"see the log of that rank; then {RESTART}")


def _current() -> Job | None:
    """The job of the present process group; None where there is nobody else."""
    global _job, _dog
    if is_fake_execution() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    if _job is not None and _job.process != os.getpid():  # A fork is none of the ranks.
        return None
    if _job is None or _job.world is not world:
        server = Server()
        own_store, dog_store = server.connect(2, watchdog.STOPPED_S)
        _job = Job(world, own_store, number=0 if _job is None else _job.number + 1)
        _report_uncaught()
        _dog = watchdog.Watchdog(_job, dog_store, server)
        _dog.start()
    return _job


def ranks_of_forward(plan: Plan) -> tuple[int, ...]:
    """The ranks that a forward on this rank cannot do without."""
    axes = [axis for axis in plan.mesh.names if axis not in DATA_AXES]
    if plan.assignment.wrapper != "ddp":
        axes += ["dp_shard"]
    others = [axis for axis in plan.mesh.names if axis not in axes]
    own = plan.mesh.index(dist.get_rank(), others)
    return tuple(rank for rank, at in enumerate(plan.mesh.indices(others)) if at == own)


def note_forward(ranks: tuple[int, ...], is_training: bool) -> None:
    """Count a forward of a parallelized model, and let ranks evaluate together.

    Where a forward needs other ranks, they begin an evaluation together, and go back to training
    together: a rank that evaluates alone would meet the training of the others.
    """
    if torch.compiler.is_compiling():
        return
    job = _current()
    if job is not None and not job.cause:
        enter_forward(job, is_training, ranks)


def note_forwards(model: nn.Module, plan: Plan) -> None:
    """Note every forward of a parallelized model that begins."""
    ranks = ranks_of_forward(plan)

    def note(module: nn.Module, *unused: Any) -> None:
        note_forward(ranks, module.training and torch.is_grad_enabled())

    # Before the hooks of the wrappers, which gather.
    model.register_forward_pre_hook(note, prepend=True)


def publish() -> None:
    """Tell the others this rank's connections now, after groups were made."""
    job = _current()
    if job is not None:
        publish_ends(job, job.store)


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


def _settle(job: Job, error: BaseException, before: _Sequences) -> ApplyError | None:
    """Agree with the others on what the failure of this rank means.

    Args:
        job: The job of the group.
        error: What was raised inside of a guard.
        before: The collectives that had begun where that guard did.

    Returns:
        What to raise instead; None where the error is this rank's own.
    """
    is_lost = is_lost_connection(error)
    while _dog is not None and _dog.is_store_silent() and not job.cause:
        _dog.is_asked = True
        time.sleep(_POLL_S)
    if job.cause:  # Found out by the watchdog.
        return ApplyError(job.failed()) if is_lost else None
    own = _failed(f"rank {job.rank} failed: {_spell(error)}")
    if is_lost:
        own = _lost(job, "the process that serves the store (rank 0, where no launcher does)")
    try:
        if is_lost:
            own = _why_lost(job, str(error))
        cause = _claim(job, own, before)
        is_alone = is_lost or not isinstance(error, Exception) or hasattr(error, _ALONE)
        if is_alone or not _all_failed_alike(job):
            bury(job, job.store, cause)
            wait_for_readers(job, GRACE_S, num_gone=int(is_lost))
        else:
            job.epoch += 1
    except (RuntimeError, OSError):  # The store has gone with the process that held it.
        if not job.cause:
            job.cause, job.fix = own.what, own.fix or ""
    return ApplyError(job.failed()) if is_lost else None


def _lost(job: Job, peer: str) -> Problem:
    at = f" (in {job.progress.running})" if job.progress.running else ""
    return _failed(f"rank {job.rank} lost its connection to {peer}, which died or was ended{at}")


def _why_lost(job: Job, text: str) -> Problem:
    """What became of the rank at the other end of a connection, by an error of gloo."""
    rank = _peer(job, text)
    if rank is None:
        return _lost(job, "another rank")
    deadline = time.monotonic() + LEAVE_S
    key = job.lasting(f"left/{rank}")
    while not job.store.check([key]) and time.monotonic() < deadline:
        if job.store.check([job.key("first")]) or (_dog is not None and _dog.has_died(rank)):
            break  # Another rank knows already, or it can say no more.
        time.sleep(_POLL_S)
    if job.store.check([key]):
        return missed(
            job, json.loads(job.store.get(key)), job.progress.running or job.progress.last
        )
    return _lost(job, f"rank {rank}")


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


def _peer(job: Job, text: str) -> int | None:
    """The rank at the other end of the connection that an error of gloo names."""
    found = re.search(r"\]:(\d+)", text)
    port = int(found[1]) if found else 0
    # gloo prints the port as it lies in memory, with its two bytes swapped on most machines.
    ports = tuple(f":{number:04X}" for number in (port, port >> 8 | (port & 255) << 8))
    published = tables(job, job.store)
    mine = json.loads(published.get(job.rank, "[]"))
    remote = {end for _, end in mine if port and end.endswith(ports)}
    for rank, table in published.items():
        if remote & {end for end, _ in json.loads(table)}:
            return rank
    return None


def _claim(job: Job, own: Problem, before: _Sequences = None) -> Problem:
    """Write this rank's failure; returns that of the rank that was first.

    The collectives are counted from the guard's beginning: a pipeline leaves other totals on
    each rank, since torch counts what is sent from one to another in the same place.
    """
    now = group_sequences()
    since = None
    if now is not None and before is not None:
        since = {name: number - before.get(name, 0) for name, number in now.items()}
    job.store.set(job.key(f"failed/{job.rank}"), json.dumps(since))
    job.store.add(job.key("count"), 1)
    return claim(job, job.store, own)


def _all_failed_alike(job: Job) -> bool:
    """Whether every rank failed, all after the same collectives, so that the group lives on.

    All ranks come to the same answer: the first to know it writes it down.
    """
    world = dist.get_world_size()
    deadline = time.monotonic() + GRACE_S
    verdict = DEAD
    while time.monotonic() < deadline and not job.store.check([job.key("verdict")]):
        if job.store.add(job.key("count"), 0) == world:
            keys = [job.key(f"failed/{rank}") for rank in range(world)]
            if _same([json.loads(text) for text in job.store.multi_get(keys)]):
                verdict = ALIVE
            break
        time.sleep(_POLL_S)
    return bool(job.store.compare_set(job.key("verdict"), "", verdict).decode() == ALIVE)


def _same(sequences: list[_Sequences]) -> bool:
    """Whether no group has seen more collectives on one rank than on another."""
    first: dict[str, int] = {}
    for each in sequences:
        if each is None:
            return False
        if any(first.setdefault(name, number) != number for name, number in each.items()):
            return False
    return True


def _report_uncaught() -> None:
    """Tell the others what ends this process, also when it happens outside of every guard."""
    before = sys.excepthook
    if getattr(before, "_is_meshplan", False):
        return

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if is_lost_connection(error):  # Another rank's failure, which is found out first.
            error = _report(error) or error
            before(type(error), error, error.__traceback__)
        else:
            before(kind, error, trace)
            _report(error)

    report._is_meshplan = True  # type: ignore[attr-defined]
    sys.excepthook = report
    atexit.register(_end)
    # A process that multiprocessing started goes by this way only.
    Finalize(None, _end, exitpriority=100)


def _report(error: BaseException) -> ApplyError | None:
    """Tell the others of an exception that ends this process; returns what to show in its place."""
    job = _job
    if job is None or hasattr(error, _SETTLED) or not dist.is_initialized():
        return None
    if job.process != os.getpid():  # What ends a fork does not end the rank.
        return None
    setattr(error, _ALONE, True)
    told = _settle(job, error, None)
    setattr(error, _SETTLED, True)
    if told is not None:
        told.__cause__ = error
    return told


def _end() -> None:
    """Tell the others that this process ends; what ends it, where that is an exception."""
    global _dog
    job, dog = _job, _dog
    if job is None or dog is None or job.process != os.getpid():
        return
    _dog = None
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit):
        _report(error)
    dog.end()
    if job.cause:
        with contextlib.suppress(RuntimeError, OSError):  # Where the store has gone already.
            wait_for_readers(job, GRACE_S)
