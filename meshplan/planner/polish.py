"""Answers for blocks of many kinds, by what each block's backward holds.

The worst moment of a step is in the backward of some block, where what blocks before it keep is
there, and all that its own backward takes. Which block's that is follows from what all of them do,
so that no one linear figure rules; but as blocks come one after the other, a label for what the
blocks so far keep decides for all of them. What stays unproved the search tells as its gap.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from meshplan.cost.grid import OPTIONS
from meshplan.planner.job import Job
from meshplan.planner.knapsack import Counts
from meshplan.planner.numbers import Numbers, time_bounds
from meshplan.planner.row import Candidate
from meshplan.planner.search import TOLERANCE, Found

_MOST_ROWS: Final = 12
_MOST_TRIES: Final = 6
"""Answers of a row that are measured."""
_MOST_LABELS: Final = 4000


class _Label(NamedTuple):
    """What the blocks so far take together.

    Attributes:
        kept: Bytes for backward.
        most: Bytes at the worst of their moments.
    """

    seconds: float
    kept: float
    most: float
    options: tuple[int, ...]


def polish(job: Job, numbers: Numbers, found: Found, deadline: float | None = None) -> None:
    """Look for faster answers of the rows that may have one."""
    kinds = job.chain.kinds
    is_told = all(kind.turn_bytes for kind in kinds if kind.has_options)
    is_proved = found.best is not None and found.gap <= TOLERANCE
    if sum(kind.has_options for kind in kinds) < 2 or not is_told or not found.is_whole:
        return
    if is_proved or (found.measured is not None and found.measured.is_of_row):
        return
    times = time_bounds(numbers)
    rows = [int(row) for row in np.argsort(times, kind="stable") if np.isfinite(times[row])]
    for row in rows[:_MOST_ROWS]:
        if found.best is not None and times[row] >= found.best.seconds * (1 - TOLERANCE):
            return
        if row not in found.refused and numbers.grid["pp"][row] == 1:
            _improve(job, numbers, found, row, deadline)


def _improve(job: Job, numbers: Numbers, found: Found, row: int, deadline: float | None) -> None:
    """The fastest answer of one row that fits, and is faster than what there is."""
    excess = {0: 0.0, 1: 0.0}
    """By whether parameters are given back, what answers held above these figures."""
    for _ in range(_MOST_TRIES):
        below = found.best.seconds * (1 - TOLERANCE) if found.best else float("inf")
        answers = [
            (back, *answer)
            for back in (0, 1)
            if (answer := _solve(job, numbers, row, back, job.capacity - excess[back], below))
        ]
        if not answers or (deadline is not None and time.monotonic() > deadline):
            return
        back, candidate, held = min(answers, key=lambda answer: answer[1].seconds)
        found.num_measured += 1
        measured = job.measure(numbers, candidate)
        if measured.why:
            return
        if measured.fits:
            found.best, found.measured = candidate, measured
            return
        over = measured.excess_bytes + candidate.linear_bytes[0] - held
        excess[back] = max(over, excess[back] + 1)


def _solve(
    job: Job, numbers: Numbers, row: int, back: int, room: float, below: float
) -> tuple[Candidate, float] | None:
    """The fastest options of all blocks that keep every moment within so many bytes; the most."""
    config = numbers.grid[row]
    micro, microbatches = float(config["micro"]), float(config["microbatches"])
    seconds, saved, resident = (a[row] for a in (numbers.seconds, numbers.saved, numbers.resident))
    fixed, base = float(numbers.top[row]), 0.0
    labels = [_Label(0.0, 0.0, 0.0, ())]
    for place, kind in enumerate(numbers.order):
        turns = job.chain.kinds[job.chain.order[place]].turn_bytes
        offered = [o for o in map(int, np.flatnonzero(np.isfinite(seconds[kind])))
                   if not turns or OPTIONS[o][1] == back]  # fmt: skip
        if not offered:
            return None
        fixed += min(float(resident[kind, option]) for option in offered)
        if not turns:
            base += float(saved[kind, offered[0]])
        labels = _best(
            [
                _Label(
                    label.seconds + float(seconds[kind, option]),
                    label.kept + (float(saved[kind, option]) if turns else 0.0),
                    max(label.most, label.kept + micro * turns[OPTIONS[option][0]])
                    if turns
                    else label.most,
                    (*label.options, option),
                )
                for label in labels
                for option in offered
            ],
            room,
        )
    fit = [each for each in labels if fixed + max(each.most, each.kept + base) <= room]
    if not fit:
        return None
    best = min(fit, key=lambda each: each.seconds)
    step = microbatches * best.seconds + float(numbers.once_s[row])
    if step >= below:
        return None
    takes = np.zeros(seconds.shape, dtype=np.int64)
    for kind, option in zip(numbers.order, best.options, strict=True):
        takes[kind, option] += 1
    held = fixed + max(best.most, best.kept + base)
    chosen = takes > 0
    linear = float((takes[chosen] * numbers.menu(row, 1.0).memory[chosen]).sum()) + numbers.top[row]
    ends = (0, len(numbers.order))
    return Candidate(row, step, ends, (_rows(takes),), (float(linear),)), held


def _rows(takes: Counts) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, counts)) for counts in takes)


def _best(labels: Sequence[_Label], room: float) -> list[_Label]:
    """Those that no other beats in time and in what is kept, as long as they may fit."""
    out: list[_Label] = []
    least = float("inf")
    for label in sorted(each for each in labels if each.most <= room):
        if label.kept < least:
            least = label.kept
            out.append(label)
    if len(out) > _MOST_LABELS:
        out = [out[n] for n in np.linspace(0, len(out) - 1, _MOST_LABELS).astype(int)]
    return out
