"""From one step to a job: what the allocator holds once training runs.

torch's caching allocator keeps the shape of its past: optimizer states are made after the first
backward, in holes that activations left, and the second step finds these holes taken. So the
first step is played without states, then they are made, then a step like the composed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshplan.memory.log.events import Event, EventLog, Term


def settled(log: EventLog, streams: Mapping[tuple[Term, int], int]) -> EventLog:
    """Two steps, states made between them.

    Args:
        log: Of one step from the second one on.
        streams: By (term, bytes), the stream that a storage of a wrapper is made on.
    """
    num = len(log.storages)
    storages = list(on_streams(log, streams).storages)
    before = [e for e in log.events if not e.phase]
    own = {e.storage for e in before}
    is_state = {n for n in own if log.storages[n].term == Term.OPTIMIZER}
    step = [e for e in log.events if e.phase]
    start = next((n for n, e in enumerate(step) if log.phases[e.phase] == "step"), len(step))
    events = [e for e in before if e.storage not in is_state]
    events += step[:start]
    for delta, storage, _ in before:
        if storage in is_state:
            events.append(Event(delta, storage, len(log.phases) - 1))
    events += step[start:]
    shift = len(storages)
    storages += storages[:num]
    for delta, storage, when in step:
        events.append(Event(delta, storage if storage in own else storage + shift, when))
    return EventLog(tuple(storages), tuple(events), log.phases)


def on_streams(log: EventLog, streams: Mapping[tuple[Term, int], int]) -> EventLog:
    """Return the log with the wrappers' storages moved to the CUDA streams that they use.

    Args:
        log: The log, in which these storages are on stream 0.
        streams: Stream number by (term, bytes at birth). Storages that an operator made, that are
            already on a stream other than 0, or that are not listed, keep their stream.
    """
    sizes: dict[int, int] = {}
    for delta, storage, _ in log.changes:
        sizes.setdefault(storage, delta)
    storages = tuple(
        each
        if each.op or each.stream
        else each._replace(stream=streams.get((each.term, sizes.get(n, 0)), 0))
        for n, each in enumerate(log.storages)
    )
    return replace(log, storages=storages)
