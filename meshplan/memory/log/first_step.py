"""Prepend the first step to a later one: the allocator keeps what it reserved then.

The optimizer allocates its states at the end of the first step, and cuBLAS its workspaces with the
first matrix product of each thread, in blocks that the step has freed. Which blocks later steps can
reuse, and so how much is reserved, depends on where these tensors lie.

Source: torch 2.13, torch/optim/adamw.py, `_init_group`, and ATen/cuda/CublasHandlePool.cpp,
`setWorkspaceForHandle`. `python -m tests.gpu` compares the reserved bytes with those of a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

import numpy as np

from meshplan.memory.log.columns import Columns
from meshplan.memory.log.events import EventLog, Term

_LATE: Final = frozenset({Term.OPTIMIZER, Term.WORKSPACES})
_PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm"})
"""Names of the operators that call cuBLAS, as logs computed from sizes have them. Traces write
"aten.mm.default"."""


def with_first_step(log: EventLog) -> Columns:
    """Return the events of the first step, followed by those of the given one.

    The first step has the events of the given one, except that the states of the optimizer and the
    workspaces of cuBLAS are born in it.

    Args:
        log: A step at the end of which as many bytes exist as at its beginning, with the workspaces
            of `driver.with_workspaces`.
    """
    columns = log.columns
    before, step = np.split(columns, [np.searchsorted(columns[2], 1)], axis=1)
    is_late = np.array([log.storages[number].term in _LATE for number in before[1]], np.bool_)
    if not is_late.any() or not step.size:
        return columns
    first, done = [before[:, ~is_late]], 0
    for at, births in sorted(_births(log, step, before[:, is_late]).items()):
        first += step[:, done:at], before[:, is_late][:, births]
        done = at
    return np.concatenate([*first, step[:, done:], _undone(step), step], axis=1)


def _undone(step: Columns) -> Columns:
    """Return the events after which every storage has the size that it had before the step.

    A storage that is born in a step and outlives it takes the place of one from before. The old one
    is put back, so that the next step can begin.
    """
    change = np.bincount(step[1], weights=step[0]).astype(np.int64)
    numbers = np.flatnonzero(change)
    events = np.stack([-change[numbers], numbers, np.full_like(numbers, step[2, -1])])
    return events[:, np.lexsort(events[1::-1])]  # By change in bytes, and then by number.


def _births(log: EventLog, step: Columns, late: Columns) -> Mapping[int, list[int]]:
    """Return which events of `late` come after how many events of the step."""
    found: dict[int, list[int]] = {}
    threads = [_first_product(log, step, in_backward) for in_backward in (False, True)]
    is_last = log.phases[-1] == "step"
    optimizer = int(np.searchsorted(step[2], len(log.phases) - 1)) if is_last else step.shape[1]
    for event, number in enumerate(late[1]):
        is_state = log.storages[number].term is Term.OPTIMIZER
        found.setdefault(optimizer if is_state else threads.pop(0), []).append(event)
    return found


@cache
def _is_product(op: str) -> bool:
    return op.removeprefix("aten.").partition(".")[0] in _PRODUCTS


def _first_product(log: EventLog, step: Columns, in_backward: bool) -> int:
    """Return the number of events up to the first product of a thread; 0 if there is none.

    Args:
        log: The log of the step.
        step: Its events, without those before the step.
        in_backward: True for the thread that runs backward.
    """
    for phase, name in enumerate(log.phases):
        if (name == "backward") is not in_backward:
            continue
        begin, end = np.searchsorted(step[2], (phase, phase + 1))
        for at in range(begin, end):
            if step[0, at] > 0 and _is_product(log.storages[step[1, at]].op):
                return at + 1  # cuBLAS allocates after the operator has allocated its result.
    return 0
