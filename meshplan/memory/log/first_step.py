"""Prepend the first step to the log of a later one: the allocator keeps what it reserved then.

The optimizer allocates its states at the end of the first step, and cuBLAS its workspaces with the
first matrix product of each thread, in blocks that the step has freed. Which blocks later steps can
reuse, and so how much is reserved, depends on where these tensors lie.

Source: torch 2.13, torch/optim/adamw.py, `_init_group`, and ATen/cuda/CublasHandlePool.cpp,
`setWorkspaceForHandle`. `python -m tests.gpu` compares the reserved bytes with those of a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import itemgetter

from meshplan.memory.log.events import Change, EventLog, Term

_LATE = frozenset({Term.OPTIMIZER, Term.WORKSPACES})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
"""Names of the operators that call cuBLAS, as logs computed from sizes have them. Traces write
"aten.mm.default"."""
_PHASE = itemgetter(2)


def with_first_step(log: EventLog) -> EventLog:
    """Return the events of the first step, followed by those of the given one.

    The first step has the events of the given one, except that the states of the optimizer and the
    workspaces of cuBLAS are born in it.

    Args:
        log: A step at the end of which as many bytes exist as at its beginning, with the workspaces
            of `driver.with_workspaces`.
    """
    begin = bisect_left(log.changes, 1, key=_PHASE)
    before, step = log.changes[:begin], log.changes[begin:]
    late = [event for event in before if log.storages[event[1]].term in _LATE]
    if not late or not step:
        return log
    is_late = {number for _, number, _ in late}
    first = [event for event in before if event[1] not in is_late]
    done = 0
    for at, births in sorted(_births(log, step, late).items()):
        first += step[done:at]
        first += births
        done = at
    first += step[done:]
    # A storage that is born in a step and outlives it takes the place of one from before. Put the
    # old one back, so that the next step can begin.
    change = _change_of_sizes(step)
    last = step[-1][2]
    first += sorted((-delta, number, last) for number, delta in change.items() if delta)
    return EventLog(log.storages, (*first, *step), log.phases, log.host_bytes)


def _births(
    log: EventLog, step: Sequence[Change], late: Sequence[Change]
) -> Mapping[int, list[Change]]:
    """Return the births of states and workspaces by the number of events that come before them."""
    found: dict[int, list[Change]] = {}
    is_product = {op: _is_product(op) for op in {storage.op for storage in log.storages}}
    makes = [is_product[storage.op] for storage in log.storages]
    threads = [_first_product(log, step, makes, in_backward) for in_backward in (False, True)]
    is_last = log.phases[-1] == "step"
    optimizer = bisect_left(step, len(log.phases) - 1, key=_PHASE) if is_last else len(step)
    for event in late:
        is_state = log.storages[event[1]].term is Term.OPTIMIZER
        found.setdefault(optimizer if is_state else threads.pop(0), []).append(event)
    return found


def _is_product(op: str) -> bool:
    return op.removeprefix("aten.").partition(".")[0] in _PRODUCTS


def _first_product(
    log: EventLog, step: Sequence[Change], makes: Sequence[bool], in_backward: bool
) -> int:
    """Return the number of events up to the first product of a thread; 0 if there is none.

    Args:
        log: The log of the step.
        step: Its events, without those before the step.
        makes: For each storage, True if an operator that calls cuBLAS makes it.
        in_backward: True for the thread that runs backward.
    """
    for phase, name in enumerate(log.phases):
        if (name == "backward") is not in_backward:
            continue
        begin, end = (bisect_left(step, at, key=_PHASE) for at in (phase, phase + 1))
        for at in range(begin, end):
            delta, number, _ = step[at]
            if delta > 0 and makes[number]:
                return at + 1  # cuBLAS allocates after the operator has allocated its result.
    return 0


def _change_of_sizes(events: Sequence[Change]) -> Mapping[int, int]:
    """Return by how many bytes each storage is larger after the events than before."""
    sizes: dict[int, int] = {}
    for delta, number, _ in events:
        sizes[number] = sizes.get(number, 0) + delta
    return sizes
