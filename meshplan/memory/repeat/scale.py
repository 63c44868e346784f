"""Extrapolate the trace of a microbatch to more samples, from two traces with few samples."""

from __future__ import annotations

import itertools
from dataclasses import replace

from meshplan.memory.log.events import Event
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.memory.repeat.segments import NotComposableError


def scaled(one: MicrobatchTrace, two: MicrobatchTrace, extra: int) -> MicrobatchTrace:
    """Return the trace of a microbatch with `extra` more samples than `one`.

    The bytes of each storage are assumed to be a linear function of the number of samples.

    Args:
        one: A microbatch of some samples.
        two: The same microbatch with one sample more.
        extra: Number of samples to add to those of `one`.

    Raises:
        NotComposableError: The two microbatches differ in more than the sizes of their tensors.
    """
    if (
        one.hook_points != two.hook_points
        or one.log.phases != two.log.phases
        or one.taken.keys() != (two.taken.keys())
    ):
        raise NotComposableError("different numbers of samples allocate in different ways")
    names: dict[int, int] = {}
    events = []
    for first, second in itertools.zip_longest(one.log.events, two.log.events):
        if first is None or second is None or first.phase != second.phase:
            raise NotComposableError("different numbers of samples allocate in different ways")
        if first.storage not in names:
            names[first.storage] = second.storage
            ops = one.log.storages[first.storage].op, two.log.storages[second.storage].op
            if ops[0] != ops[1]:
                raise NotComposableError("different numbers of samples run different operators")
        delta = first.delta + extra * (second.delta - first.delta)
        if names[first.storage] != second.storage or (delta > 0) != (first.delta > 0) or not delta:
            raise NotComposableError("different numbers of samples allocate in different ways")
        events.append(Event(delta, first.storage, first.phase))
    for fqn, storage in one.gradients.items():
        if names.get(storage) != two.gradients.get(fqn) or one.ready.get(fqn) != two.ready.get(fqn):
            raise NotComposableError("different numbers of samples give different gradients")
    return replace(one, log=replace(one.log, changes=tuple(events)))
