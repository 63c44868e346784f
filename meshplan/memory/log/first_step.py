"""Prepend the first step to the log of a later one: the allocator keeps what it reserved then.

The optimizer allocates its states at the end of the first step, and cuBLAS its workspaces with the
first matrix product of each thread, in blocks that the step has freed. Which blocks later steps can
reuse, and so how much is reserved, depends on where these tensors lie.

Source: torch 2.13, torch/optim/adamw.py, `_init_group`, and ATen/cuda/CublasHandlePool.cpp,
`setWorkspaceForHandle`. `python -m tests.gpu` compares the reserved bytes with those of a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from meshplan.memory.log.events import Change, EventLog, Term

_LATE = frozenset({Term.OPTIMIZER, Term.WORKSPACES})
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
"""Beginnings of the names of the operators that call cuBLAS."""


def with_first_step(log: EventLog) -> EventLog:
    """Return the events of the first step, followed by those of the given one.

    The first step has the events of the given one, except that the states of the optimizer and the
    workspaces of cuBLAS are born in it. What else is born in it are other storages than in the
    given step.

    Args:
        log: A step at the end of which the same storages exist as at its beginning, with the
            workspaces of `driver.with_workspaces`.
    """
    begin = next((at for at, (_, _, phase) in enumerate(log.changes) if phase), len(log.changes))
    before, step = log.changes[:begin], log.changes[begin:]
    late = [event for event in before if log.storages[event[1]].term in _LATE]
    if not late or not step:
        return log
    is_late = {number for _, number, _ in late}
    there, others = {number for _, number, _ in before}, len(log.storages)
    first = [event for event in before if event[1] not in is_late]
    moved = [
        (delta, number if number in there else number + others, phase)
        for delta, number, phase in step
    ]
    done = 0
    for at, births in sorted(_births(log, step, late).items()):
        first += moved[done:at]
        first += births
        done = at
    first += moved[done:]
    return EventLog(
        log.storages * 2,
        (*first, *_difference(before, first), *step),
        log.phases,
        log.host_bytes,
    )


def _births(
    log: EventLog, step: Sequence[Change], late: Sequence[Change]
) -> Mapping[int, list[Change]]:
    """Return the births of states and workspaces by the number of events that come before them."""
    found: dict[int, list[Change]] = defaultdict(list)
    threads = [_first_product(log, step, in_backward) for in_backward in (False, True)]
    optimizer = next(
        (at for at, (_, _, phase) in enumerate(step) if log.phases[phase] == "step"), len(step)
    )
    for event in late:
        is_state = log.storages[event[1]].term is Term.OPTIMIZER
        found[optimizer if is_state else threads.pop(0)].append(event)
    return found


def _first_product(log: EventLog, step: Sequence[Change], in_backward: bool) -> int:
    """Return the number of events up to the first product of a thread; 0 if there is none."""
    phases = {at for at, name in enumerate(log.phases) if (name == "backward") is in_backward}
    for at, (delta, number, phase) in enumerate(step):
        if phase in phases and delta > 0 and log.storages[number].op.startswith(_PRODUCTS):
            return at + 1  # cuBLAS allocates after the operator has allocated its result.
    return 0


def _difference(wanted: Sequence[Change], events: Sequence[Change]) -> list[Change]:
    """Return the events that bring the sizes after `events` to those after `wanted`.

    Frees come first. There are none if every storage that exists before a step survives it.
    """
    sizes: dict[int, int] = {}
    for delta, number, _ in events:
        sizes[number] = sizes.get(number, 0) - delta
    for delta, number, _ in wanted:
        sizes[number] = sizes.get(number, 0) + delta
    last = events[-1][2]
    return sorted((delta, number, last) for number, delta in sizes.items() if delta)
