"""Improve plans of models with several kinds of blocks, by the memory of each block's backward.

Memory peaks in the backward of some block: everything that earlier blocks saved is live, and so is
what the block's backward needs in addition. The block of the peak depends on the choices of all
blocks, so a single linear bound is not exact. Label setting (dynamic programming) along the blocks
is: a label is a choice for all blocks so far, with its seconds and the bytes that they save. What
cannot be proved this way is added to the gap that the search reports.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from meshplan.cost.grid import OPTIONS
from meshplan.planner.knapsack.knapsack import Counts
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import Candidate
from meshplan.planner.solve.result import SearchResult
from meshplan.planner.solve.search import TOLERANCE
from meshplan.planner.tables.cost_table import CostTable, time_bounds

_MOST_ROWS: Final = 6
"""Most configurations that are tried, lowest time bound first."""
_MOST_TRIES: Final = 4
"""Most candidates of a configuration whose memory is estimated."""
_MOST_LABELS: Final = 2000
"""Most labels kept after each block."""


def refine(
    problem: PlanningProblem, table: CostTable, found: SearchResult, deadline: float | None = None
) -> None:
    """Look for a faster plan among the configurations with the lowest time bounds.

    Nothing is done if the best plan is proved to be the fastest, or if all blocks with options are
    of one kind. Configurations with pp are skipped.

    Args:
        problem: The problem.
        table: The cost table that was searched.
        found: The result of the search. A faster plan replaces its `best` and `measured`.
        deadline: Value of `time.monotonic()` at which to stop; None for no limit.
    """
    chain = problem.chain_at(1)
    kinds, backward_bytes = chain.kinds, chain.backward_bytes
    is_recorded = any(backward_bytes)
    is_proved = found.best is not None and found.gap <= TOLERANCE
    if sum(kind.has_options for kind in kinds) < 2 or not is_recorded or not found.is_whole:
        return
    if is_proved or (found.measured is not None and found.measured.is_of_row):
        return
    times = time_bounds(table)
    rows = [int(row) for row in np.argsort(times, kind="stable") if np.isfinite(times[row])]
    for row in rows[:_MOST_ROWS]:
        if found.best is not None and times[row] >= found.best.seconds * (1 - TOLERANCE):
            return
        if row not in found.refused and table.grid["pp"][row] == 1:
            _improve(problem, table, found, row, deadline)


def _improve(
    problem: PlanningProblem,
    table: CostTable,
    found: SearchResult,
    row: int,
    deadline: float | None,
) -> None:
    """Replace the best plan by one of this configuration, if it is faster and fits."""
    excess = {0: 0.0, 1: 0.0}
    """{`reshard`: bytes that a memory estimate reported above the peak computed by `_solve`}."""
    for _ in range(_MOST_TRIES):
        below = found.best.seconds * (1 - TOLERANCE) if found.best else float("inf")
        answers = [
            (reshard, *answer)
            for reshard in (0, 1)
            if (
                answer := _solve(
                    problem, table, row, reshard, problem.capacity - excess[reshard], below
                )
            )
        ]
        if not answers or (deadline is not None and time.monotonic() > deadline):
            return
        reshard, candidate, peak = min(answers, key=lambda answer: answer[1].seconds)
        found.num_measured += 1
        measured = problem.measure(table, candidate)
        if measured.why:
            return
        if measured.fits:
            found.best, found.measured = candidate, measured
            return
        over = measured.most_excess + candidate.linear_bytes[0] - peak
        excess[reshard] = max(over, excess[reshard] + 1)


def _solve(
    problem: PlanningProblem,
    table: CostTable,
    row: int,
    reshard: int,
    capacity: float,
    below: float,
) -> tuple[Candidate, float] | None:
    """Choose the fastest options of all blocks whose peak memory stays within some bytes.

    Args:
        problem: The problem.
        table: The cost table.
        row: Index of a configuration without pp.
        reshard: 1 if the blocks' parameters are freed after forward, 0 if they stay gathered.
        capacity: Bytes that the rank may use at any time.
        below: Seconds that the step must beat.

    Returns:
        (the candidate, its peak bytes); None if there is no such choice.
    """
    config, backward_bytes = table.grid[row], problem.chain_at(1).backward_bytes
    micro, microbatches = float(config["micro"]), float(config["microbatches"])
    seconds, saved, resident = (a[row] for a in (table.seconds, table.saved, table.resident))
    offered = []
    fixed = float(table.last_stage_extra_bytes[row])
    for place, kind in enumerate(table.order):
        may = [o for o in map(int, np.flatnonzero(np.isfinite(seconds[kind])))
               if not backward_bytes[place] or OPTIONS[o][1] == reshard]  # fmt: skip
        if not may:
            return None
        offered.append(may)
        fixed += float(resident[kind, may].min())
        fixed += 0.0 if backward_bytes[place] else float(saved[kind, may[0]])
    taken, kept, most = np.zeros(1), np.zeros(1), np.zeros(1)
    layers: list[tuple[Counts, Counts]] = []
    """For each place, the index of each label's predecessor and the option that it added."""
    for place, kind in enumerate(table.order):
        options = np.array(offered[place], dtype=np.int64)
        own = (
            np.array(
                [
                    backward_bytes[place][OPTIONS[o][0]] if backward_bytes[place] else 0.0
                    for o in options
                ]
            )
            * micro
        )
        more = saved[kind, options] if backward_bytes[place] else np.zeros(len(options))
        worst = np.maximum(most[:, None], kept[:, None] + own[None])
        at = np.flatnonzero((fixed + worst <= capacity).ravel())
        time_s = (taken[:, None] + seconds[kind, options][None]).ravel()[at]
        saved_so_far = (kept[:, None] + more[None]).ravel()[at]
        # Keep labels that save fewer bytes than all faster labels; thin them out if too many.
        order = np.lexsort((saved_so_far, time_s))
        least = np.minimum.accumulate(saved_so_far[order]) if len(order) else saved_so_far
        order = (
            order[np.append(True, saved_so_far[order][1:] < least[:-1])] if len(order) else order
        )
        if len(order) > _MOST_LABELS:
            order = order[np.linspace(0, len(order) - 1, _MOST_LABELS).astype(np.int64)]
        if not len(order):
            return None
        at = at[order]
        taken, kept, most = time_s[order], saved_so_far[order], worst.ravel()[at]
        parents: Counts = (at // len(options)).astype(np.int64)
        layers.append((parents, options[at % len(options)]))
    fit = np.flatnonzero(fixed + np.maximum(most, kept) <= capacity)
    if not len(fit):
        return None
    # Labels are sorted by time, so the first one that fits is the fastest.
    label = int(fit[0])
    step = microbatches * float(taken[label]) + float(table.once_s[row])
    if step >= below:
        return None
    peak = fixed + float(max(most[label], kept[label]))
    option_counts = np.zeros(seconds.shape, dtype=np.int64)
    for kind, (before, took) in reversed([*zip(table.order, layers, strict=True)]):
        option_counts[kind, took[label]] += 1
        label = int(before[label])
    chosen = option_counts > 0
    linear = float((option_counts[chosen] * table.menu(row, 1.0).memory[chosen]).sum())
    linear += table.extra_bytes(row, 0)
    rows = tuple(tuple(map(int, counts)) for counts in option_counts)
    return Candidate(row, step, (0, len(table.order)), (rows,), (float(linear),)), peak
