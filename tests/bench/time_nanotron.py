"""What nanotron computes and sends, and what jobs wait for whose network stands still.

Source: huggingface/nanotron, models/llama.py, trainer.py, parallel/pipeline_parallel/p2p.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from meshplan.cost.collectives import all_reduce
from meshplan.cost.grid import Array
from meshplan.cost.rows import Rows, UnitPart
from meshplan.cost.types import BlockKind
from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.tape.tape import Tape
from meshplan.memory.tape.tape import TapeOp as TapeRow
from tests.bench.frameworks import nanotron
from tests.bench.frameworks.nanotron_job import Job, buckets_of
from tests.bench.time_case import Write


def _is_kept(row: TapeRow) -> bool:
    return row.is_kept


def write_nanotron(shape: Shape, tp: int, seq_len: int) -> tuple[Write, Callable[[TapeRow], bool]]:
    def write(layers: int, batch: int) -> Tape:
        stage = nanotron.Stage(layers, True, True)
        tape = nanotron.tape_of(replace(shape, layers=layers), stage, batch, seq_len, tp)
        for number in range(layers):
            name = f"model.decoder.{number}"
            rows = [n for n, row in enumerate(tape.rows) if f"{row.module}.".startswith(f"{name}.")]
            tape.units.append((name, rows[0], rows[-1] + 1))
        return tape

    return write, _is_kept


STALL_S: Final = 0.275
"""Seconds that each hand-over between two stages takes in a job whose network stands still,
whatever is sent: three messages, for shape and strides first, and the process waits for each.
[Empirical]: of 285 such pipelines of the published grid, from 1 to 64 nodes and 2 to 32 stages,
half lie between 0.26 and 0.28. Source: nanotron, parallel/pipeline_parallel/p2p.py."""


STALLED_RANK_S: Final = 4.5e-4
"""And without a pipeline, of each collective for each of its ranks. [Empirical]: 0.3 to 0.5 ms with
tp 4 to 32; half of it for DDP's buckets, which one of tp may hide."""
_OF_A_BLOCK: Final = 8
"""Collectives of tp, forward and backward."""


def stall_seconds(job: Job, shape: Shape) -> float:
    """What waiting for the network adds to a step of a job that stalls.

    Which jobs do is a fact of that cluster, which no field states: those that did leave the score.
    """
    dp, tp, pp, count = job.dp, job.tp, job.pp, job.accumulate
    if dp * tp * pp == 1:
        return math.inf
    if pp == 1:
        waits = count * shape.layers * _OF_A_BLOCK * tp
        buckets = list(buckets_of(job.stage.parameters(shape, tp))) if not job.zero else []
        return STALLED_RANK_S * (waits + len(buckets) * dp / 2)
    # A rank does its own one after the other; one in the middle receives and sends both ways, all
    # the while that the pipeline is full.
    return STALL_S * (2 * count + 1 if pp == 2 else 4 * count + 2 * (pp - 3))


class SummedRows(Rows):
    """Of ZeRO-1, whose gradients are summed whole once backward is done, not scattered.

    Source: nanotron, trainer.py (`sync_gradients_across_dp`).
    """

    def data(
        self, kind: BlockKind, parts: tuple[UnitPart, ...]
    ) -> tuple[Array, Array, Array, Array | None]:
        gathered, _, summed, whole = super().data(kind, parts)
        num_bytes = self._unit_numel(kind)[0] * self.widths.reduce
        return gathered, all_reduce(num_bytes, self.along_shards, self.profile), summed, whole
