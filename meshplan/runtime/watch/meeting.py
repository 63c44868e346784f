"""Meetings: synchronization points in the store, at which a rank that arrives alone waits safely.

A rank that waits in a collective may run into a different collective of another rank, which gives
wrong numbers or aborts the process. So activities that are rare, and that a program may by mistake
run on some ranks only, begin with a meeting in the store. A rank that has waited for a while
reports the meeting to the other ranks, and each of them can decide if it will ever arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.watch.job import NEEDS_ALL, RESTART, Job, Meeting, all_arrived_key
from meshplan.runtime.watch.stack import user_line

_LONG: Final = timedelta(days=30)
"""Time-out of a wait in the store; in practice, the watchdog ends a wait that is in vain."""
TRAINING: Final = "training"
EVALUATION: Final = "evaluation"
_KINDS: Final = (TRAINING, EVALUATION)
_FEW: Final = 8
"""Switches between training and evaluation that each begin with a meeting. Later, only those whose
number is a power of 2 do."""


def meet(job: Job, name: str, ranks: tuple[int, ...]) -> None:
    """Wait until all of `ranks` have made this call. The wait is in the store, not a collective.

    Args:
        job: The job of this rank.
        name: The activity that begins when all ranks have arrived.
        ranks: The ranks that must arrive, this one included.

    Raises:
        ApplyError: The group has ended: another rank failed, or some ranks will not arrive.
    """
    label = f"{name}/{','.join(map(str, ranks))}"
    job.meetings[label] += 1
    key = job.key(f"meeting/{label}/{job.meetings[label]}")
    if job.store.add(key, 1) == len(ranks):
        job.store.set(all_arrived_key(key), "")
        return
    job.progress.meeting = Meeting(key, name, ranks, user_line())
    try:
        if not job.cause:  # Otherwise no rank will set this key any more.
            job.store.wait([all_arrived_key(key)], _LONG)
    finally:
        job.progress.meeting = None
    if job.cause:
        raise ApplyError(job.failed())


def enter_forward(job: Job, is_training: bool, ranks: tuple[int, ...]) -> None:
    """Record that a forward begins; meet the other ranks if it switches to evaluation or back.

    Args:
        job: The job of this rank.
        is_training: True if the forward is part of training.
        ranks: The ranks that must take part in the forward.
    """
    progress = job.progress
    progress.num_forwards += 1
    if not progress.verb:
        progress.thread = threading.get_ident(), threading.get_native_id()
    if len(ranks) > 1:
        forwards = progress.forwards[ranks]
        forwards.num += 1
        if is_training != forwards.is_training:
            forwards.is_training = is_training
            forwards.switches += 1
            number = forwards.switches
            # All ranks count the same switches, so all of them skip the same meetings.
            if number <= _FEW or number & (number - 1) == 0:
                meet(job, TRAINING if is_training else EVALUATION, ranks)
    if not progress.verb:
        progress.last = f"forward {progress.num_forwards}"


def meeting_report(job: Job, meeting: Meeting) -> dict[str, Any]:
    """Return what this rank tells the other ranks while it waits at a meeting."""
    forwards = job.progress.forwards[meeting.ranks]
    return {
        **job.progress.facts(),
        "name": meeting.name,
        "meeting": meeting.key,
        "ranks": meeting.ranks,
        "where": meeting.where,
        "forwards": [forwards.num, forwards.switches],
    }


def will_not_come(job: Job, report: Mapping[str, Any]) -> str:
    """Return where this rank is, in words, if it and a reporting rank will never meet; else "".

    Args:
        job: The job of this rank.
        report: The report of another rank, which waits at a meeting ("waits") or has left the group
            ("left").
    """
    own, meeting = job.progress, job.progress.meeting
    if report["kind"] == "waits":
        if job.rank not in report["ranks"] or (
            meeting is not None and meeting.key == report["meeting"]
        ):
            return ""
        forwards = own.forwards[tuple(report["ranks"])]
        num, switches = report["forwards"]
        # This rank has begun that forward already, but without switching between training and eval.
        if report["name"] in _KINDS and forwards.num >= num and forwards.switches < switches:
            return own.running or own.last
    if meeting is not None and report["rank"] in meeting.ranks:
        return own.running or meeting.name
    if own.verb == NEEDS_ALL and own.counts[NEEDS_ALL] > report["counts"].get(NEEDS_ALL, 0):
        return own.running
    return ""


def missed(job: Job, report: Mapping[str, Any], own_place: str) -> Problem:
    """Return the problem of a rank that waits for this one in vain, or that has left the group.

    Args:
        job: The job of this rank.
        report: The report of the other rank, which waits at a meeting ("waits") or has left the
            group ("left").
        own_place: Where this rank is, in words.
    """
    rank = report["rank"]
    here = f"rank {job.rank} is in {own_place}"
    if report["kind"] == "left":
        what = f"rank {rank} has ended{_after(report['last'])}, but {here}"
        return Problem(what, fix=f"give every rank the same number of batches; then {RESTART}")
    name = report["name"]
    at = f" ({report['where']})" if report["where"] else ""
    where = f"to begin a forward in {name}" if name in _KINDS else f"in {name}"
    what = f"rank {rank} waits {where}{at}{_after(report['last'])}, but {here}"
    doing = "run evaluation" if name in _KINDS else f"call {name}"
    fix = f"{doing} on every rank, and give every rank the same number of batches; then {RESTART}"
    return Problem(what, fix=fix)


def _after(last: str) -> str:
    return f" after {last}" if last else ""
