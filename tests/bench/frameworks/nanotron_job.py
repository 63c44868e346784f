"""nanotron's training loop on one rank: three steps, as torch's allocator sees them.

What the allocator ends up holding depends on what came first: Adam's states are made after the
first backward, in holes that activations left; ZeRO-1 gathers updated parameters through one flat
buffer; each thread that calls cuBLAS takes a workspace where it finds one.

Source: as `nanotron`; distributed.py (`all_gather_coalesced`) and torch's ProcessGroupNCCL, which
flattens lists of outputs and records tensors on its stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.log.events import Event, EventLog, Storage, Term
from meshplan.memory.tape.tape import play
from tests.bench.frameworks.nanotron import Stage, tape_of

_BF16: Final = 2
_FP32: Final = 4
_BUCKET: Final = 25 << 20
_WORKSPACE: Final = 32 << 20
"""cuBLAS on Hopper. Source: torch 2.5, aten/cuda/CublasHandlePool.cpp."""
_SENT: Final = frozenset({"row", "column", "reduce_scatter"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """How a rank trains; `zero` is 0 or 1."""

    stage: Stage
    rank: int
    batch: int
    seq_len: int
    accumulate: int
    dp: int
    tp: int
    pp: int
    zero: int


class LogWriter:
    """Writes storages and events of a single phase."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[Event] = []

    def make(self, size: int, term: Term) -> int:
        self.storages.append(Storage(term))
        self.events.append(Event(size, len(self.storages) - 1, 0))
        return len(self.storages) - 1


def order(accumulate: int, following: int, most: int) -> Iterator[tuple[bool, int]]:
    """(is it forward, which microbatch) by one-forward-one-backward.

    Args:
        accumulate: Microbatches of a step.
        following: Pipeline ranks after this one.
        most: Microbatches that are played at the most.
    """
    count = min(accumulate, most)
    ahead = min(following, count)
    for number in range(count + ahead):
        if number < count:
            yield True, number
        if number >= ahead:
            yield False, number - ahead


def made_of(shape: Shape, job: Job) -> tuple[int, int]:
    """Tensors that forward and backward of one microbatch make."""
    work = _work(shape, job.stage, job.batch, job.seq_len, job.tp)
    last = len(work.phases) - 1
    made = [event.phase == last for event in work.events if event.delta > 0]
    return len(made) - sum(made), sum(made)


def log_of(shape: Shape, job: Job, lag: int = 0, steps: int = 3) -> EventLog:
    """All that happens in the first steps.

    Args:
        lag: How many tensors the process has made since the one that the device makes. What a
            collective used is free again when the device has done with it, not before
            (`nanotron_pace`). Nothing lags in the first microbatch: kernels are loaded and
            communicators opened.
    """
    work = _work(shape, job.stage, job.batch, job.seq_len, job.tp)
    params = job.stage.parameters(shape, job.tp)
    w, cut, whole = LogWriter(), job.dp if job.zero else 1, sum(params)
    for numel in params:
        w.make(_BF16 * numel, Term.PARAMETERS)
    for bucket in buckets_of(params) if job.dp > 1 and not job.zero else ():
        w.make(bucket, Term.COMMUNICATION)
    w.make(_FP32 * whole, Term.GRADIENTS)
    w.make(sum(_FP32 * -(-numel // cut) for numel in params), Term.OPTIMIZER)
    forward = [e for e in work.events if e.phase < len(work.phases) - 1]
    backward = [e for e in work.events if e.phase == len(work.phases) - 1]
    left = work.live_after(len(work.events))
    sent = _sent(work) if job.tp > 1 and lag else frozenset()
    gathered = job.batch * job.seq_len * shape.hidden * _BF16 if job.tp > 1 else 0
    seen: set[bool] = set()
    first: dict[int, int] = {}
    late: deque[tuple[int, Event]] = deque()
    made = 0
    for step in range(steps):
        for is_forward, number in order(job.accumulate, job.pp - job.rank - 1, job.pp + 4):
            if is_forward:
                first[number] = len(w.storages)
                w.storages.extend(work.storages)
            shift, is_calm = first[number], not step and not number
            for delta, storage, _ in forward if is_forward else backward:
                event = Event(delta, storage + shift, 0)
                if delta < 0 and storage in sent and not is_calm:
                    late.append((made + lag, event))
                    continue
                if delta > 0:
                    made += 1
                    while late and late[0][0] <= made:
                        w.events.append(late.popleft()[1])
                w.events.append(event)
                if is_forward not in seen and work.storages[storage].op in ("row", "column"):
                    seen.add(is_forward)
                    w.make(_WORKSPACE, Term.TEMPORARIES)
                    if gathered:
                        w.make(gathered, Term.COMMUNICATION)
            if not is_forward:
                w.events += [Event(-size, s + shift, 0) for s, size in left.items()]
        # The norm of the gradients is read: the process waits.
        w.events += [event for _, event in late]
        late.clear()
        if not step:
            for numel in params:
                w.make(_FP32 * -(-numel // cut), Term.OPTIMIZER)
                w.make(_FP32 * -(-numel // cut), Term.OPTIMIZER)
        if job.zero and job.dp > 1:
            part = _BF16 * whole // job.dp
            sizes = [*[part] * (job.dp + 1), _BF16 * whole]
            for storage, size in [(w.make(s, Term.COMMUNICATION), s) for s in sizes]:
                w.events.append(Event(-size, storage, 0))
    return EventLog(tuple(w.storages), tuple(w.events), ("steps",))


@lru_cache(8)
def _work(shape: Shape, stage: Stage, batch: int, seq_len: int, tp: int) -> EventLog:
    return play(tape_of(shape, stage, batch, seq_len, tp), sums_in_place=True).log


def buckets_of(params: Sequence[int]) -> Iterator[int]:
    """DDP's, from the last parameter on."""
    size = 0
    for numel in reversed(params):
        size += _BF16 * numel
        if size >= _BUCKET:
            yield size
            size = 0
    if size:
        yield size


def _sent(work: EventLog) -> frozenset[int]:
    """What collectives read or write."""
    return frozenset(n for n, s in enumerate(work.storages) if s.op in _SENT)
