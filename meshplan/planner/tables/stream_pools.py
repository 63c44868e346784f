"""Lower bounds on the allocator pools of FSDP2's communication streams.

The allocator keeps a pool for each stream, and a pool never shrinks. All-gathers allocate on one
stream, gradient reductions on another. The peak sizes of these two pools are therefore reserved in
addition to the peak of the compute stream, even if the peaks come at different times.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py; `memory.replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import DDP, SHARD, in_halves
from meshplan.cost.host import has_params_on_host
from meshplan.cost.types import BlockKind
from meshplan.planner.knapsack.knapsack import Floats
from meshplan.planner.tables.memory_bounds import HeldElementBytes, trained_share


class StreamPools(NamedTuple):
    """Bytes of both pools together, without the reduced gradients that stay until the update.

    Attributes:
        every: [configs] bytes on every rank.
        first: [configs] bytes that the first rank of a pipeline has in addition.
        last: [configs] bytes that the last rank of a pipeline has in addition.
    """

    every: Floats
    first: Floats
    last: Floats


def stream_pools_of(
    grid: NDArray[np.void],
    block: BlockKind,
    ends: tuple[Sequence[BlockKind], Sequence[BlockKind]],
    sizes: HeldElementBytes,
    reduce_bytes: int,
) -> StreamPools:
    """Return lower bounds on the pools, from one block and the units around the blocks.

    Args:
        grid: The configurations.
        block: A kind of block; every rank is assumed to have one.
        ends: (kinds before the blocks, kinds after the blocks). Together they are the root unit; in
            a pipeline, the units around the first and the last stage.
        sizes: Bytes of one element by role.
        reduce_bytes: Bytes of one element of a gradient as it is reduced.

    Assumes: a block is one FSDP unit, and experts that ep shards are a separate unit.
    """
    ranks = grid["dp_shard"].astype(np.float64) * grid["cp"]
    is_spread, is_piped = grid["ep"] > 1, grid["pp"] > 1
    numel = float(sum(block.numels))
    unit = np.where(is_spread, numel - block.expert_numel, numel)
    # An all-gather buffer is kept until the next unit's parameters are copied out of the next
    # buffer. If dtypes differ, a cast copy of the shard is the input of the all-gather.
    gathers = (grid["mode"] != DDP) & (ranks > 1)
    is_cast = sizes.computed != sizes.stored
    gathered = np.where(gathers, (unit * (1 + is_cast / ranks)) * sizes.computed, 0.0)
    ahead = np.where(gathers, sizes.computed, 0.0)
    # From the second microbatch on, a reduced gradient exists beside the sum that it is added to.
    adds = (grid["mode"] == SHARD) & (grid["microbatches"] > 1) & ~in_halves(grid)
    gradient_copies = np.where(adds & ~has_params_on_host(grid), reduce_bytes / ranks, 0.0)
    own = unit * trained_share(block)
    first, last = (float(sum(sum(kind.numels) for kind in part)) for part in ends)
    trains, trains_last = (
        float(sum(sum(kind.numels) - kind.frozen for kind in part)) for part in ends
    )
    root = np.where(is_piped, 0.0, first + last)
    roots = np.where(is_piped, 0.0, trains + trains_last)
    every = gathered + root * ahead + np.maximum(own, roots) * gradient_copies

    def more(around: float, trained: float) -> Floats:
        found = around * ahead + np.maximum(trained - own, 0.0) * gradient_copies
        return np.asarray(np.where(is_piped, found, 0.0), dtype=np.float64)

    return StreamPools(every, more(first, trains), more(last, trains_last))
