"""Two steps of a rank whose 16-bit parameters have copies in fp32, as torch's allocator sees them.

Megatron-LM, alone or under DeepSpeed, and InternEvo. Nothing here is fitted to a run.

Source: NVIDIA/Megatron-LM v2.6 to v3.0, megatron/optimizer/optimizer.py (fp32 copies of parameters
and gradients); microsoft/DeepSpeed 0.3 to 0.6, runtime/zero/stage1.py and stage_1_and_2.py (what
data ranks shard), runtime/bf16_optimizer.py (gradients added up in fp32, whole),
runtime/pipe/module.py (how stages are cut); bigscience-workshop/Megatron-DeepSpeed,
megatron/model/gpt_model.py (`float16_to_fp32` is a layer, whose output the engine holds);
InternLM/InternEvo, solver/optimizer/hybrid_zero_optim.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.log.device_overheads import Band, generation_of
from meshplan.memory.log.events import Event, EventLog, Term
from meshplan.memory.tape.tape import play
from tests.bench.frameworks import torchtitan
from tests.bench.frameworks.megatron import stage_tape
from tests.bench.frameworks.nanotron import Stage
from tests.bench.frameworks.nanotron_job import LogWriter, order
from tests.bench.frameworks.torchtitan import Training

_HALF: Final = 2
_FP32: Final = 4
_STEPS: Final = 2


class States(StrEnum):
    """Whose optimizer keeps the states."""

    MEGATRON = "megatron"
    DEEPSPEED_FP16 = "deepspeed, fp16"
    DEEPSPEED_BF16 = "deepspeed, bf16"
    INTERNEVO = "internevo"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronJob:
    """How all ranks train.

    Args:
        stages: What each pipeline rank holds.
        batch: Samples of a microbatch.
        seq_len: Tokens of a sample.
        accumulate: Microbatches of a step.
        dp, tp: Ranks of each axis; pp is the number of stages.
        shards: Data ranks that shard the fp32 copies and states, 1 for none.
        states: Whose optimizer keeps them; InternEvo's model is Llama's.
        is_sequence: Sequence parallelism over tp.
        recompute: "none", "full" or "core".
    """

    stages: tuple[Stage, ...]
    batch: int
    seq_len: int
    accumulate: int
    dp: int
    tp: int
    shards: int
    states: States
    is_sequence: bool
    recompute: str

    def distinct(self) -> tuple[int, ...]:
        """Pipeline ranks of which no other one, of as many blocks, holds more microbatches."""
        last, seen = len(self.stages) - 1, dict[Stage, int]()
        for number, stage in enumerate(self.stages):
            seen.setdefault(stage, number)
        return tuple(sorted({*seen.values(), last}))

    def on_first_node(self, per_node: int) -> range:
        """Pipeline ranks on the first node: ranks of tp, then of dp, are next to each other."""
        return range(min(len(self.stages), -(-per_node // (self.tp * self.dp))))


def even_stages(layers: int, pp: int, *, counts_ends: bool = False) -> tuple[Stage, ...]:
    """Return stages with equally many blocks, the first ones with one more if they must.

    Args:
        counts_ends: The embedding counts as a block on the first and on the last stage.
    """
    each, more = divmod(layers + 2 * counts_ends, pp)
    held = [each + (number < more) for number in range(pp)]
    held[0] -= counts_ends
    held[-1] -= counts_ends
    return tuple(
        Stage(layers=many, first=number == 0, last=number == pp - 1)
        for number, many in enumerate(held)
    )


def outside_bytes(device: str, *sizes: int) -> Band:
    """Return the bytes that a process has beside torch's allocator.

    Until CUDA 11.7 all kernels were loaded with the context, which is the most that is known of it.

    Args:
        device: Name of the GPU.
        sizes: Ranks of each of the job's groups.
    """
    known = generation_of(device)
    total = Band(known.context.expected, known.context.high, known.context.high)
    for size in sizes:
        if size > 1:
            total = total.plus(known.pair if size == 2 else known.group)
    return total


@lru_cache(32)
def log_of(shape: Shape, job: MegatronJob, rank: int) -> EventLog:
    """The first two steps of a rank of this pipeline rank."""
    stage, pp = job.stages[rank], len(job.stages)
    work = _work(shape, job, stage)
    is_llama = job.states is States.INTERNEVO
    params = stage.parameters(shape, 1) if is_llama else _parameters(shape, stage, job)
    whole = sum(params)
    own = -(-whole // job.shards)
    w = LogWriter()
    for numel in params:
        w.make(_HALF * numel, Term.PARAMETERS)
    w.make(_FP32 * own, Term.OPTIMIZER)
    w.make(_HALF * whole, Term.GRADIENTS)
    if job.states is States.DEEPSPEED_BF16:
        w.make(_FP32 * whole, Term.GRADIENTS)
    backward = len(work.phases) - 1
    left = work.live_after(len(work.events))
    first: dict[int, int] = {}
    for step in range(_STEPS):
        for is_forward, number in order(job.accumulate, pp - rank - 1, pp + 4):
            if is_forward:
                first[number] = len(w.storages)
                w.storages.extend(work.storages)
            shift = first[number]
            w.events += [
                Event(delta, storage + shift, 0)
                for delta, storage, phase in work.events
                if (phase < backward) is is_forward
            ]
            if not is_forward:
                w.events += [Event(-size, s + shift, 0) for s, size in left.items()]
        copied = w.make(_FP32 * own, Term.GRADIENTS)
        for _ in range(0 if step else 2):
            w.make(_FP32 * own, Term.OPTIMIZER)
        w.events.append(Event(-_FP32 * own, copied, 0))
    return EventLog(tuple(w.storages), tuple(w.events), ("steps",))


@lru_cache(32)
def _work(shape: Shape, job: MegatronJob, stage: Stage) -> EventLog:
    if job.states is States.INTERNEVO:
        how = Training(batch=job.batch, tokens=job.seq_len, recompute=job.recompute)
        return play(torchtitan.tape_of(shape, how), sums_in_place=True).log
    tape = stage_tape(
        shape, stage, batch=job.batch, seq_len=job.seq_len, tp=job.tp,
        is_sequence=job.is_sequence, recompute=job.recompute,
        holds_logits=job.states is not States.MEGATRON,
    )  # fmt: skip
    return play(tape, sums_in_place=True).log


def _parameters(shape: Shape, stage: Stage, job: MegatronJob) -> list[int]:
    """Elements of each parameter; every rank of tp has the norms and the biases of sums."""
    hidden, tp = shape.hidden, job.tp
    table = shape.vocab * hidden // tp
    block = [
        2 * hidden,
        3 * shape.q_width * (hidden + 1) // tp,
        shape.q_width * hidden // tp,
        hidden,
        2 * hidden,
        shape.mlp * (hidden + 1) // tp,
        shape.mlp * hidden // tp,
        hidden,
    ]
    ends = [table, job.seq_len * hidden] * stage.first + [2 * hidden] * stage.last
    # The last stage has the embedding a second time.
    return ends + [table] * (stage.last and not stage.first) + block * stage.layers
