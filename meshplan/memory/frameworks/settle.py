"""From one step to a job: what the allocator holds once training runs.

torch's caching allocator keeps the shape of its past: optimizer states are made after the first
backward, in holes that activations left, and the second step finds these holes taken. So the
first step is played without states, then they are made, then a step like the composed one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from meshplan.memory.log import Event, EventLog, Storage, Term


def settled(
    log: EventLog, streams: Mapping[tuple[Term, int], int], states: Collection[int] = ()
) -> EventLog:
    """Two steps, states made between them.

    Args:
        log: Of one step from the second one on.
        streams: By (term, bytes), the stream that a storage of a wrapper is made on.
        states: Bytes of the optimizer's tensors as it makes them; those of the log, if not said.
    """
    num = len(log.storages)
    storages = [_on_stream(log, n, streams) for n in range(num)]
    before = [e for e in log.events if not e.phase]
    own = {e.storage for e in before}
    is_state = {n for n in own if log.storages[n].term == Term.OPTIMIZER}
    step = [e for e in log.events if e.phase]
    start = next((n for n, e in enumerate(step) if log.phases[e.phase] == "step"), len(step))
    events = [e for e in before if e.storage not in is_state]
    events += step[:start]
    phase = len(log.phases) - 1
    sizes = list(states) or [e.delta for e in before if e.storage in is_state]
    for size in sizes:
        events.append(Event(size, len(storages), phase))
        storages.append(Storage(Term.OPTIMIZER))
    events += step[start:]
    shift = len(storages)
    storages += storages[:num]
    for delta, storage, when in step:
        events.append(Event(delta, storage if storage in own else storage + shift, when))
    return EventLog(tuple(storages), tuple(events), log.phases)


def _on_stream(log: EventLog, number: int, streams: Mapping[tuple[Term, int], int]) -> Storage:
    storage = log.storages[number]
    if storage.op:
        return storage
    born = _born(log)
    return storage._replace(stream=streams.get((storage.term, born.get(number, 0)), 0))


_BORN: dict[int, dict[int, int]] = {}


def _born(log: EventLog) -> dict[int, int]:
    known = _BORN.get(id(log))
    if known is None:
        known = {}
        for delta, storage, _ in log.events:
            known.setdefault(storage, delta)
        _BORN.clear()
        _BORN[id(log)] = known
    return known
