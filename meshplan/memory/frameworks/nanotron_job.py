"""nanotron's training loop on one rank: two steps, as torch's allocator sees them.

What the allocator ends up holding depends on what came first: Adam's states are made after the
first backward, in holes that activations left; ZeRO-1 gathers updated parameters through one flat
buffer; each thread that calls cuBLAS takes a workspace where it finds one.

Source: as `nanotron`; distributed.py (`all_gather_coalesced`) and torch's ProcessGroupNCCL, which
flattens lists of outputs and records tensors on its stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from meshplan.memory.frameworks.nanotron import Stage, tape_of
from meshplan.memory.log import Event, EventLog, Storage, Term
from meshplan.memory.shape import Shape
from meshplan.memory.tape import play

_BF16: Final = 2
_FP32: Final = 4
_BUCKET: Final = 25 << 20
_WORKSPACE: Final = 32 << 20
"""cuBLAS on Hopper. Source: torch 2.5, aten/cuda/CublasHandlePool.cpp."""
_SENT: Final = frozenset({"row", "column", "reduce_scatter"})


class Late(Enum):
    """How long memory that a collective used stays taken once it is freed.

    torch frees it when the device has done the collective. If the process runs ahead of the device,
    that is late.
    """

    NEVER = "the device keeps up"
    PHASE = "until forward, or backward, is done"
    NEXT = "until the next microbatch's forward, or backward, is done"


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


class _Writer:
    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[Event] = []

    def make(self, size: int, term: Term) -> int:
        self.storages.append(Storage(term))
        self.events.append(Event(size, len(self.storages) - 1, 0))
        return len(self.storages) - 1


def order(job: Job, most: int) -> Iterator[tuple[bool, int]]:
    """(is it forward, which microbatch) by one-forward-one-backward."""
    count = min(job.accumulate, most)
    ahead = min(job.pp - job.rank - 1, count)
    for number in range(count + ahead):
        if number < count:
            yield True, number
        if number >= ahead:
            yield False, number - ahead


def log_of(shape: Shape, job: Job, late: Late = Late.NEVER, steps: int = 2) -> EventLog:
    """All that happens in the first steps."""
    work = play(tape_of(shape, job.stage, job.batch, job.seq_len, job.tp), sums_in_place=True).log
    params = job.stage.parameters(shape, job.tp)
    w, cut, whole = _Writer(), job.dp if job.zero else 1, sum(params)
    for numel in params:
        w.make(_BF16 * numel, Term.PARAMETERS)
    for bucket in _buckets(params) if job.dp > 1 and not job.zero else ():
        w.make(bucket, Term.COMMUNICATION)
    w.make(_FP32 * whole, Term.GRADIENTS)
    w.make(sum(_FP32 * -(-numel // cut) for numel in params), Term.OPTIMIZER)
    forward = [e for e in work.events if e.phase < len(work.phases) - 1]
    backward = [e for e in work.events if e.phase == len(work.phases) - 1]
    left = work.live_after(len(work.events))
    sent = _sent(work) if job.tp > 1 and late is not Late.NEVER else frozenset()
    gathered = job.batch * job.seq_len * shape.hidden * _BF16 if job.tp > 1 else 0
    seen: set[bool] = set()
    waiting: list[Event] = []
    first: dict[int, int] = {}
    for step in range(steps):
        for is_forward, number in order(job, job.pp + 4):
            if is_forward:
                first[number] = len(w.storages)
                w.storages.extend(work.storages)
            shift, pending = first[number], []
            for delta, storage, _ in forward if is_forward else backward:
                event = Event(delta, storage + shift, 0)
                if delta < 0 and storage in sent:
                    pending.append(event)
                    continue
                w.events.append(event)
                if is_forward not in seen and work.storages[storage].op in ("row", "column"):
                    seen.add(is_forward)
                    w.make(_WORKSPACE, Term.TEMPORARIES)
                    if gathered:
                        w.make(gathered, Term.COMMUNICATION)
            if not is_forward:
                w.events += [Event(-size, s + shift, 0) for s, size in left.items()]
            w.events += waiting if late is Late.NEXT else pending
            waiting = pending if late is Late.NEXT else []
        w.events += waiting
        waiting = []
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


def _buckets(params: Sequence[int]) -> Iterator[int]:
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
