"""From one step to a job: what the allocator holds once training runs.

torch's caching allocator keeps the shape of its past: optimizer states are made after the first
backward, in holes that activations left, and the second step finds these holes taken. So the
first step is played without states, then they are made, then a step like the composed one.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshplan.memory.log.events import Event, EventLog, Term, on_streams


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
