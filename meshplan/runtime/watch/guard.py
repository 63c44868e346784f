"""Nothing hangs: an exception on one rank becomes an error on every rank, which names that rank.

torch leaves the other ranks waiting in a collective until its time-out. Here a rank that fails
writes its cause into the store of the process group and closes its connections to other ranks.
The collectives of the other ranks then raise, and these ranks read the cause from the store. If
every rank fails at the same place, as with a mistake in the model's code, no connection is closed,
and each rank raises its own error.
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
    claim,
    end_group,
    publish_ends,
    tables,
    wait_for_readers,
)
from meshplan.runtime.watch.meeting import enter_forward, meet, missed
from meshplan.runtime.watch.server import Server
from meshplan.runtime.watch.uncaught import show_uncaught

GRACE_S: Final = 3.0
"""Seconds that a failed rank waits for the others to fail too, before it ends the group."""
_POLL_S: Final = 0.02
"""Seconds between two looks into the store."""
LEAVE_S: Final = 0.7
"""Seconds that a rank waits, after losing a connection, for a report that the peer has left."""
_LOST: Final = ("connection", "socket", "broken pipe", "timed out")
"""Words of which gloo's error has one if another rank is gone."""

_job: Job | None = None
_watchdog: watchdog.Watchdog | None = None


@contextlib.contextmanager
def guarded(verb: str = "") -> Iterator[None]:
    """Guard a block that every rank runs: if one rank fails in it, no other rank waits for it.

    `train_step` and the other functions that communicate are guarded already. A guard around a
    whole loop also covers what happens between the steps, such as reading data.

    Args:
        verb: Name of the block in messages to other ranks; "" for a block without a name.

    Raises:
        ApplyError: Another rank failed, or the ranks wait for each other in a deadlock; the message
            names the rank and the cause. The rank that failed raises its own exception. Afterwards
            the process group is unusable, and every later guard raises this error.
    """
    job = current_job()
    if job is None:
        yield
        return
    if job.cause:
        what = f"the process group is unusable, because {job.cause}"
        raise ApplyError(Problem(what, fix=job.fix or RESTART))
    before = group_sequences()
    is_outermost = bool(verb) and _enter(job, verb)
    try:
        publish_ends(job, job.store)
        yield
    except BaseException as error:
        if hasattr(error, _HANDLED):
            raise
        replacement = _handle_failure(job, error, before)
        setattr(replacement or error, _HANDLED, True)
        if replacement is None:
            raise
        raise replacement from error
    finally:
        if is_outermost:
            job.progress.last, job.progress.verb = job.progress.running, ""
    if job.cause:  # The watchdog aborted a collective, which returned garbage.
        raise ApplyError(job.failed())
    publish_ends(job, job.store)


def come_together(name: str) -> None:
    """Wait until every rank has made this call. The wait is in the store, not a collective.

    Therefore a rank that makes the call alone cannot run into another rank's collective.

    Args:
        name: Name of the activity that follows, for messages.
    """
    job = current_job()
    if job is not None:
        meet(job, name, tuple(range(job.size)))


def _enter(job: Job, verb: str) -> bool:
    """Record that a verb begins, and return True; return False inside another verb."""
    progress = job.progress
    if progress.verb:
        return False
    progress.thread = threading.get_ident(), threading.get_native_id()
    progress.counts[verb] += 1
    progress.verb = verb
    return True


_HANDLED: Final = "_meshplan_handled"
"""Attribute of an exception that a guard has handled, so that outer guards let it pass."""
_ALONE: Final = "_meshplan_alone"
"""Attribute of an exception that is known to be raised on some ranks only."""


def was_reported(error: BaseException) -> bool:
    """Return True if a guard has reported this exception to the other ranks already."""
    return hasattr(error, _HANDLED)


def _failed(cause: str) -> Problem:
    """Return the problem of a rank that failed, with the advice to see its log."""
    return Problem(cause, fix=f"see the log of that rank; then {RESTART}")


def current_job() -> Job | None:
    """Return the job of the current process group (made if new); None without other ranks."""
    global _job, _watchdog
    if is_fake_execution() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    if _job is not None and _job.process != os.getpid():  # A forked process is not a rank.
        return None
    if _job is None or _job.world is not world:
        server = Server()
        own_store, watchdog_store = server.connect(2, watchdog.STOPPED_S)
        _job = Job(world, own_store, number=0 if _job is None else _job.number + 1)
        report_uncaught()
        _watchdog = watchdog.Watchdog(_job, watchdog_store, server)
        _watchdog.start()
    return _job


def ranks_of_forward(plan: Plan) -> tuple[int, ...]:
    """Return the ranks, this one included, that must run a forward together with this rank."""
    axes = [axis for axis in plan.mesh.names if axis not in DATA_AXES]
    if plan.assignment.wrapper != "ddp":
        axes += ["dp_shard"]
    others = [axis for axis in plan.mesh.names if axis not in axes]
    own = plan.mesh.index(dist.get_rank(), others)
    return tuple(rank for rank, at in enumerate(plan.mesh.indices(others)) if at == own)


def note_forward(ranks: tuple[int, ...], is_training: bool) -> None:
    """Count a forward of a parallelized model; synchronize ranks that switch to evaluation or back.

    If a forward needs other ranks, all of them begin an evaluation together, and go back to
    training together. A rank that evaluates alone would run into the training collectives of the
    others.

    Args:
        ranks: The ranks that must take part in the forward.
        is_training: True if the forward is part of training.
    """
    if torch.compiler.is_compiling():
        return
    job = current_job()
    if job is not None and not job.cause:
        enter_forward(job, is_training, ranks)


def note_forwards(model: nn.Module, plan: Plan) -> None:
    """Register a hook that calls `note_forward` before every forward of a parallelized model."""
    ranks = ranks_of_forward(plan)

    def note(module: nn.Module, *unused: Any) -> None:
        note_forward(ranks, module.training and torch.is_grad_enabled())

    # Prepend it, because the wrappers' hooks already communicate to gather parameters.
    model.register_forward_pre_hook(note, prepend=True)


def publish() -> None:
    """Publish this rank's connections in the store; called after process groups were made."""
    job = current_job()
    if job is not None:
        publish_ends(job, job.store)


def fails_together(error: Exception, ranks: Sequence[int]) -> bool:
    """Return True if all of `ranks`, this one included, make this call within `GRACE_S` seconds.

    Then no rank waits for another. If it returns False, the caller must raise `error`, and the
    guard around the caller ends the process group at once.
    """
    job = current_job()
    if job is None or len(ranks) == 1:
        return True
    name = ",".join(map(str, ranks))
    key = job.key(f"together/{name}/{job.joint_failures[name]}")
    job.joint_failures[name] += 1
    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(RuntimeError, OSError):  # The store may be gone.
        count = job.store.add(key, 1)
        while count < len(ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            count = job.store.add(key, 0)
        if count == len(ranks):
            return True
    setattr(error, _ALONE, True)
    return False


_Sequences: TypeAlias = dict[str, int] | None
"""Collectives begun on this rank, by name of the group; None if a backend does not count them."""


def _handle_failure(job: Job, error: BaseException, before: _Sequences) -> ApplyError | None:
    """Report a failure of this rank, and end the group unless all ranks failed at the same place.

    Args:
        job: The job of this rank.
        error: The exception raised inside a guard.
        before: The collectives begun before that guard.

    Returns:
        The error to raise instead, with the cause on another rank; None to raise `error` itself.
    """
    is_lost = is_lost_connection(error)
    while _watchdog is not None and _watchdog.is_store_silent() and not job.cause:
        _watchdog.is_asked = True
        time.sleep(_POLL_S)
    if job.cause:  # The watchdog has found the cause.
        return ApplyError(job.failed()) if is_lost else None
    own = _failed(f"rank {job.rank} failed: {_spell(error)}")
    if is_lost:
        own = _lost(job, "the process that serves the store (rank 0, unless a launcher does)")
    try:
        if is_lost:
            own = _why_lost(job, str(error))
        cause = _claim(job, own, before)
        is_alone = is_lost or not isinstance(error, Exception) or hasattr(error, _ALONE)
        if is_alone or not _all_failed_alike(job):
            end_group(job, job.store, cause)
            wait_for_readers(job, GRACE_S, num_gone=int(is_lost))
        else:
            job.epoch += 1
    except (RuntimeError, OSError):  # The process that served the store is gone.
        if not job.cause:
            job.cause, job.fix = own.what, own.fix or ""
    return ApplyError(job.failed()) if is_lost else None


def dead_rank() -> int | None:
    """Return a rank on this machine whose process has ended; None if there is none."""
    return None if _watchdog is None else _watchdog.dead_rank()


def _lost(job: Job, peer: str) -> Problem:
    """Return the problem that this rank lost its connection to `peer`, such as "rank 3"."""
    at = f" (in {job.progress.running})" if job.progress.running else ""
    return _failed(f"rank {job.rank} lost its connection to {peer}, which died or was killed{at}")


def _why_lost(job: Job, text: str) -> Problem:
    """Return the problem behind gloo's error `text`: the peer of a connection left or died."""
    rank = _peer(job, text)
    if rank is None:
        return _lost(job, "another rank")
    deadline = time.monotonic() + LEAVE_S
    key = job.group_key(f"left/{rank}")
    while not job.store.check([key]) and time.monotonic() < deadline:
        if job.store.check([job.key("first")]) or (
            _watchdog is not None and _watchdog.has_died(rank)
        ):
            break  # A rank has reported the cause, or the peer cannot report any more.
        time.sleep(_POLL_S)
    if job.store.check([key]):
        return missed(
            job, json.loads(job.store.get(key)), job.progress.running or job.progress.last
        )
    return _lost(job, f"rank {rank}")


def _spell(error: BaseException) -> str:
    """Return an exception as one line of text."""
    if isinstance(error, MeshplanError):
        return "; ".join(problem.what for problem in error.problems)
    return f"{type(error).__name__}: {error}"


def is_lost_connection(error: BaseException) -> bool:
    """Return True if torch raised this error because another rank closed a connection or died."""
    if isinstance(error, ApplyError) or not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or ("gloo" in text and any(w in text for w in _LOST))


def _peer(job: Job, text: str) -> int | None:
    """Return the rank at the far end of the connection that gloo's error names; None if unknown."""
    found = re.search(r"\]:(\d+)", text)
    port = int(found[1]) if found else 0
    # gloo prints the port in network byte order, with its bytes swapped on most machines.
    ports = tuple(f":{number:04X}" for number in (port, port >> 8 | (port & 255) << 8))
    published = tables(job, job.store)
    mine = json.loads(published.get(job.rank, "[]"))
    remote = {end for _, end in mine if port and end.endswith(ports)}
    for rank, table in published.items():
        if remote & {end for end, _ in json.loads(table)}:
            return rank
    return None


def _claim(job: Job, own: Problem, before: _Sequences = None) -> Problem:
    """Report that this rank failed with problem `own`; return that of the rank that failed first.

    The report has the number of collectives since `before`, the beginning of the guard. Totals
    would differ between pipeline ranks, because torch also counts point-to-point sends.
    """
    now = group_sequences()
    since = None
    if now is not None and before is not None:
        since = {name: number - before.get(name, 0) for name, number in now.items()}
    job.store.set(job.key(f"failed/{job.rank}"), json.dumps(since))
    job.store.add(job.key("count"), 1)
    return claim(job, job.store, own)


def _all_failed_alike(job: Job) -> bool:
    """Return True if all ranks failed after the same collectives, so that the group stays usable.

    All ranks get the same answer, because the first rank to find the answer writes it into the
    store.
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
    """Return True if each process group has begun equally many collectives on all its ranks."""
    first: dict[str, int] = {}
    for each in sequences:
        if each is None:
            return False
        if any(first.setdefault(name, number) != number for name, number in each.items()):
            return False
    return True


def report_uncaught() -> None:
    """Install hooks that report the end of this process to other ranks, even outside guards."""
    before = sys.excepthook
    if getattr(before, "_is_meshplan", False):
        return

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if is_lost_connection(error):  # Another rank failed: get its cause first.
            show_uncaught(_report(error) or error, before)
        else:
            show_uncaught(error, before)
            _report(error)

    report._is_meshplan = True  # type: ignore[attr-defined]
    sys.excepthook = report
    atexit.register(_end)
    # In a process that multiprocessing started, atexit does not run, only finalizers do.
    Finalize(None, _end, exitpriority=100)


def _report(error: BaseException) -> ApplyError | None:
    """Report an exception that ends this process; return the error to show instead, if any."""
    job = _job
    if job is None or hasattr(error, _HANDLED) or not dist.is_initialized():
        return None
    if job.process != os.getpid():  # The end of a forked process is not the end of the rank.
        return None
    setattr(error, _ALONE, True)
    replacement = _handle_failure(job, error, None)
    setattr(error, _HANDLED, True)
    if replacement is not None:
        replacement.__cause__ = error
    return replacement


def _end() -> None:
    """Report to the other ranks that this process ends, with the exception that ends it if any."""
    global _watchdog
    job, thread = _job, _watchdog
    if job is None or thread is None or job.process != os.getpid():
        return
    _watchdog = None
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit):
        _report(error)
    thread.end()
    if job.cause:
        with contextlib.suppress(RuntimeError, OSError):  # The store may be gone.
            wait_for_readers(job, GRACE_S)
