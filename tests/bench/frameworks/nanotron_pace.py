"""How far nanotron's process runs ahead of its device, and which of its jobs stood still.

torch frees what a collective used once the device has done it, so a process that is ahead holds
more. It gets ahead as it launches faster than the device computes, or than the slowest process of
its tp group launches, until the stream's queue is full; a pipeline makes it wait before that.

Source: CUDA forum, thread 68937: the driver takes about 1000 launches of one stream, then the
process waits; nanotron, parallel/pipeline_parallel/p2p.py (`_send_meta`, `_recv_meta`: shapes are
read back, so the process waits) and engine.py (how many forwards come before the first gradient is
awaited). Numbers are [Empirical], medians over the published grid of this profile.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from meshplan.memory.decoder.sizes import Shape
    from tests.bench.frameworks.nanotron_job import Job

QUEUE: Final = 450
"""Tensors made, at most, since the one that the device makes: 2.2 launches for each."""
PAIR: Final = 100
"""Likewise, of two ranks of tp, which wait for each other at every collective."""
IN_PIPELINE: Final = 0.75
"""Share of the queue that is left where messages between stages are in it."""
STALLED: Final = 10
"""Where the network stands still the device has time to catch up."""

LAUNCH_S: Final = 6e-5
"""Seconds in which the process makes a tensor."""
LAUNCH_IN_PIPELINE_S: Final = {"pair": 6e-5, "node": 1.3e-4, "nodes": 2.3e-4}
"""Likewise, where collectives come between messages of a pipeline: with tp 2, in a node, beyond."""
FLOPS_PER_S: Final = 5.4e14
"""That the device does: 55 % of the 989e12 of H100's datasheet."""
WAITING: Final = 0.8
"""Share of its time that a device waits whose collectives leave the node."""
DRIFT: Final = 0.025
"""By which processes of one group differ in speed."""
RANKS_IN_NODE: Final = 8

STALLED_TP: Final = 32
STALLED_RANKS: Final = 256
ALL_STALLED_RANKS: Final = 512
STALLED_DP: Final = 32
"""Jobs of the grid that stood still: every pipeline with tp 32 (88), on 64 nodes 109 of 110. On 32
nodes those with ZeRO-1, or a single data rank, that have 32 data ranks (20 of 23) or more than one
sequence in a microbatch (43 of 66; with one, 2 of 26), and without ZeRO only 1 of 10. On 64 nodes
jobs without a pipeline, too (16 of 21), but with tp 32 (2 of 18). On fewer nodes 59 of 432
pipelines do, which no field tells: one plan ran twice, in 19 and in 89 seconds a step."""


def stalls(*, dp: int, tp: int, pp: int, zero: int, batch: int) -> bool:
    """Whether a job waits for its network, as most of such jobs did."""
    ranks = dp * tp * pp
    if pp == 1:
        return ranks >= ALL_STALLED_RANKS and 1 < tp < STALLED_TP
    if tp >= STALLED_TP or ranks >= ALL_STALLED_RANKS:
        return True
    if ranks < STALLED_RANKS or not (zero or dp == 1):
        return False
    return dp >= STALLED_DP or batch > 1


def lag_of(shape: Shape, job: Job, made: tuple[int, int]) -> int:
    """How many tensors the process has made since the one that the device makes.

    Args:
        made: Tensors of a microbatch's forward and backward.
    """
    if job.tp == 1:
        return 0
    if stalls(dp=job.dp, tp=job.tp, pp=job.pp, zero=job.zero, batch=job.batch):
        return STALLED
    forward, both = made[0], sum(made)
    # The wider tp, the more of the queue are collectives, each of which makes few tensors.
    queue = PAIR if job.tp == 2 and job.pp == 1 else QUEUE - 50 * (5 - log2(job.tp))
    behind = max(0.0, 1 - _launch_s(job) / _tensor_s(shape, job, both))
    if job.pp > 1:
        # Forwards before the first gradient comes back, but for two that stages hand over; then a
        # forward follows a backward at once, if any are left, and a slow device falls behind.
        ahead: float = max(0, min(job.pp, job.accumulate) - 2) * forward
        ahead += behind * (both if job.accumulate > job.pp else forward)
        return round(min(IN_PIPELINE * queue, ahead))
    behind = max(behind, WAITING if job.tp > RANKS_IN_NODE else DRIFT)
    # A step begins level with its device, and holds most when the last forward ends.
    return round(min(queue, behind * ((job.accumulate - 1) * both + forward)))


def _launch_s(job: Job) -> float:
    if job.pp == 1:
        return LAUNCH_S
    where = "pair" if job.tp == 2 else "node" if job.tp <= RANKS_IN_NODE else "nodes"
    return LAUNCH_IN_PIPELINE_S[where]


def _tensor_s(shape: Shape, job: Job, num: int) -> float:
    """Seconds that the device computes for each of a microbatch's tensors."""
    tokens = job.batch * job.seq_len
    block = (2 * (shape.q_width + shape.kv_width) + 3 * shape.mlp) * shape.hidden
    attention = 7 * tokens * job.seq_len * shape.q_width
    # A stage may hold nothing but the head.
    blocks = max(1, job.stage.layers)
    return blocks * (6 * tokens * block + attention) / job.tp / FLOPS_PER_S / num
