"""Bytes in the pools of FSDP2's own streams, from below: they never shrink, so they add up.

The allocator keeps a pool for each stream. What is gathered comes to be on one, what gradients are
reduced to on another; whatever a rank holds at its worst moment on the stream that computes, the
most of these pools is reserved beside it.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py; `memory.replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import MODES, in_halves
from meshplan.cost.host import is_there
from meshplan.cost.types import BlockKind
from meshplan.planner.knapsack.knapsack import Floats
from meshplan.planner.tables.memory_bounds import HeldElementBytes, trained_share

_DDP: Final = MODES.index("ddp")
_SHARD: Final = MODES.index("shard")


class StreamPools(NamedTuple):
    """Bytes of both pools beside the gradients themselves, by row.

    Attributes:
        every: Of every rank.
        first, last: More on the first and the last rank of a pipeline.
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
    """What one block, and the unit around all of them, take at the least.

    Args:
        block: What every rank has one of.
        ends: What lies before and after the blocks: together the unit around them, or, in a
            pipeline, those around the first and the last stage.
        reduce_bytes: Of an element that is summed.

    Assumes: a block is one unit, and spread experts one of their own.
    """
    ranks = grid["dp_shard"].astype(np.float64) * grid["cp"]
    is_spread, is_piped = grid["ep"] > 1, grid["pp"] > 1
    numel = float(sum(block.numels))
    unit = np.where(is_spread, numel - block.expert_numel, numel)
    # The buffer before is held until the next one's parameters are copied out; shards are cast.
    gathers = (grid["mode"] != _DDP) & (ranks > 1)
    is_cast = sizes.computed != sizes.stored
    gathered = np.where(gathers, (unit * (1 + is_cast / ranks)) * sizes.computed, 0.0)
    ahead = np.where(gathers, sizes.computed, 0.0)
    # What comes of a later microbatch is there beside what it is added to.
    adds = (grid["mode"] == _SHARD) & (grid["microbatches"] > 1) & ~in_halves(grid)
    again = np.where(adds & ~is_there(grid), reduce_bytes / ranks, 0.0)
    own = unit * trained_share(block)
    first, last = (float(sum(sum(kind.numels) for kind in part)) for part in ends)
    trains, trains_last = (
        float(sum(sum(kind.numels) - kind.frozen for kind in part)) for part in ends
    )
    root = np.where(is_piped, 0.0, first + last)
    roots = np.where(is_piped, 0.0, trains + trains_last)
    every = gathered + root * ahead + np.maximum(own, roots) * again

    def more(around: float, trained: float) -> Floats:
        found = around * ahead + np.maximum(trained - own, 0.0) * again
        return np.asarray(np.where(is_piped, found, 0.0), dtype=np.float64)

    return StreamPools(every, more(first, trains), more(last, trains_last))
