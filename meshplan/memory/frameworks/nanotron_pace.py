"""How far nanotron's process runs ahead of its device, and where its network stands still.

torch frees what a collective used once the device has done it, so a process that is ahead holds
more. It is ahead by what a stream's queue takes, unless something makes it wait.

Source: CUDA forum, thread 68937: the driver takes about 1000 launches of one stream, then the
process waits; nanotron, parallel/pipeline_parallel/p2p.py (`_send_meta` reads a number back) and
trainer.py. Numbers are [Empirical], medians over the published grid of this profile.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from meshplan.memory.frameworks.nanotron_job import Job

QUEUE: Final = 450
"""Tensors made, at most, since the one that the device makes: 2.2 launches for each."""
FIRST_BATCH: Final = 100
"""Where a step has a single microbatch: it begins level with its device."""
PAIR: Final = 50
"""Two ranks of tp beside each other are done about as fast as the process launches."""
HANDED_OVER: Final = {"pair": 150, "two": 10, "more": 250}
"""In a pipeline: two stages with tp 2, two stages, three and more. Each hand-over makes the process
wait, and with more microbatches under way than one the next forward follows at once."""
STALLED: Final = 25
"""Where the network stands still the device has time to catch up."""

STALLED_RANKS: Final = 256
STALLED_TP: Final = 32
"""From where on most pipelines of the grid stall: 196 of 259 from 32 nodes on, 31 of 34 with tp 32
on fewer. Elsewhere 57 of 432 do, which no field tells: one plan ran twice, in 19 and in 89 seconds
a step."""


def stalls(dp: int, tp: int, pp: int) -> bool:
    """Whether hand-overs between stages wait for the network, as most of such jobs did."""
    return pp > 1 and (dp * tp * pp >= STALLED_RANKS or tp >= STALLED_TP)


def lag_of(job: Job) -> int:
    """How many tensors the process has made since the one that the device makes."""
    if job.tp == 1:
        return 0
    if stalls(job.dp, job.tp, job.pp):
        return STALLED
    if job.pp > 1:
        of_two = "pair" if job.tp == 2 else "two"
        return HANDED_OVER[of_two if job.pp == 2 else "more"]
    if job.tp == 2:
        return PAIR
    # The wider tp, the more of the queue are collectives, each of which makes few tensors.
    queue = min(QUEUE, round(QUEUE - 50 * (5 - log2(job.tp))))
    return min(queue, FIRST_BATCH) if job.accumulate == 1 else queue
