"""Extrapolate one microbatch to more samples, from two microbatches with few."""

from __future__ import annotations

import itertools
from dataclasses import replace

from meshplan.memory.log.events import Event
from meshplan.memory.log.microbatch import MicrobatchTrace
from meshplan.memory.repeat.segments import NotComposableError


def scaled(one: MicrobatchTrace, two: MicrobatchTrace, extra: int) -> MicrobatchTrace:
    """Return the microbatch with `extra` more samples than `one`.

    Each storage is taken to grow linearly with the number of samples.

    Args:
        one: A microbatch of some samples.
        two: The same microbatch with one sample more.
        extra: Number of samples to add to those of `one`.

    Raises:
        NotComposableError: The two microbatches differ in more than the sizes of their tensors.
    """
    if (
        one.marks != two.marks
        or one.log.phases != two.log.phases
        or one.taken.keys() != (two.taken.keys())
    ):
        raise NotComposableError("one sample takes another course than two")
    names: dict[int, int] = {}
    events = []
    for first, second in itertools.zip_longest(one.log.events, two.log.events):
        if first is None or second is None or first.phase != second.phase:
            raise NotComposableError("one sample takes another course than two")
        if first.storage not in names:
            names[first.storage] = second.storage
            ops = one.log.storages[first.storage].op, two.log.storages[second.storage].op
            if ops[0] != ops[1]:
                raise NotComposableError("one sample takes other operators than two")
        delta = first.delta + extra * (second.delta - first.delta)
        if names[first.storage] != second.storage or (delta > 0) != (first.delta > 0) or not delta:
            raise NotComposableError("one sample takes another course than two")
        events.append(Event(delta, first.storage, first.phase))
    for fqn, storage in one.gradients.items():
        if names.get(storage) != two.gradients.get(fqn) or one.ready.get(fqn) != two.ready.get(fqn):
            raise NotComposableError("one sample gives other gradients than two")
    return replace(one, log=replace(one.log, changes=tuple(events)))
