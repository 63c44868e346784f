"""Meetings: synchronization points in the store, at which a rank that comes alone waits safely.

A rank that waits in a collective may run into a different collective of another rank, which gives
wrong numbers or aborts the process. So activities that are rare, and that a program may run on some
ranks only by mistake, begin with a meeting in the store. A rank that has waited for a while reports
to the others what it waits for, and they can judge whether they will ever come.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.watch.job import NEEDS_ALL, RESTART, Job, Meeting, door
from meshplan.runtime.watch.stack import user_line

_LONG: Final = timedelta(days=30)
"""Time-out of the store. The watchdog ends a wait that is in vain, so the store need not."""
TRAINING: Final = "training"
EVALUATION: Final = "evaluation"
_KINDS: Final = (TRAINING, EVALUATION)
_FEW: Final = 8
"""Switches between training and evaluation that all meet; later ones meet less and less often."""


def meet(job: Job, name: str, ranks: tuple[int, ...]) -> None:
    """Wait until all of `ranks` have come here, in the store and not in a collective.

    Args:
        job: The job of this rank.
        name: The activity that begins when all have come.
        ranks: The ranks that must come, this one among them.

    Raises:
        ApplyError: The group is dead: another rank failed, or some ranks will not come.
    """
    label = f"{name}/{','.join(map(str, ranks))}"
    job.meetings[label] += 1
    key = job.key(f"meeting/{label}/{job.meetings[label]}")
    if job.store.add(key, 1) == len(ranks):
        job.store.set(door(key), "")
        return
    job.progress.meeting = Meeting(key, name, ranks, user_line())
    try:
        if not job.cause:  # Otherwise no rank will open the door any more.
            job.store.wait([door(key)], _LONG)
    finally:
        job.progress.meeting = None
    if job.cause:
        raise ApplyError(job.failed())


def enter_forward(job: Job, is_training: bool, ranks: tuple[int, ...]) -> None:
    """Record that a forward begins; `ranks` are the ranks that must take part in it."""
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
            # All ranks count equal switches, so all of them skip the same meetings.
            if number <= _FEW or number & (number - 1) == 0:
                meet(job, TRAINING if is_training else EVALUATION, ranks)
    if not progress.verb:
        progress.last = f"forward {progress.num_forwards}"


def says_of_meeting(job: Job, at: Meeting) -> dict[str, Any]:
    """Return what a rank that waits in a meeting reports to the others."""
    forwards = job.progress.forwards[at.ranks]
    return {
        **job.progress.facts(),
        "name": at.name,
        "meeting": at.key,
        "ranks": at.ranks,
        "where": at.where,
        "forwards": [forwards.num, forwards.switches],
    }


def will_not_come(job: Job, told: Mapping[str, Any]) -> str:
    """Return where this rank is if it will certainly not come to a meeting; else "".

    Args:
        job: The job of this rank.
        told: The report of a rank that waits in the meeting, or that has left the group.
    """
    own, at = job.progress, job.progress.meeting
    if told["kind"] == "waits":
        if job.rank not in told["ranks"] or (at is not None and at.key == told["meeting"]):
            return ""
        forwards = own.forwards[tuple(told["ranks"])]
        num, switches = told["forwards"]
        # This rank has already begun that forward without the switch between the two kinds.
        if told["name"] in _KINDS and forwards.num >= num and forwards.switches < switches:
            return own.running or own.last
    if at is not None and told["rank"] in at.ranks:
        return own.running or at.name
    if own.verb == NEEDS_ALL and own.counts[NEEDS_ALL] > told["counts"].get(NEEDS_ALL, 0):
        return own.running
    return ""


def missed(job: Job, told: Mapping[str, Any], own_where: str) -> Problem:
    """Return the problem of a meeting to which this rank will not come, or which a rank has left.

    Args:
        job: The job of this rank.
        told: The report of a rank that waits in the meeting, or that has left the group.
        own_where: Description of where this rank is.
    """
    rank = told["rank"]
    here = f"rank {job.rank} is in {own_where}"
    if told["kind"] == "left":
        what = f"rank {rank} has ended{_after(told['last'])}, but {here}"
        return Problem(what, fix=f"give every rank the same number of batches; then {RESTART}")
    name = told["name"]
    at = f" ({told['where']})" if told["where"] else ""
    where = f"to begin a forward in {name}" if name in _KINDS else f"in {name}"
    what = f"rank {rank} waits {where}{at}{_after(told['last'])}, but {here}"
    doing = "run evaluation" if name in _KINDS else f"call {name}"
    fix = f"{doing} on every rank, and give every rank the same number of batches; then {RESTART}"
    return Problem(what, fix=fix)


def _after(last: str) -> str:
    return f" after {last}" if last else ""
