"""Seconds of a pipeline: its stages, their bubble, and what crosses between them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.collectives import send
from meshplan.cost.grid import SCHEDULE_WORDS, in_halves
from meshplan.cost.profile import Profile

Array = NDArray[Any]

_1F1B: Final = SCHEDULE_WORDS.index("1F1B")
_INTERLEAVED: Final = SCHEDULE_WORDS.index("Interleaved1F1B")


def crossing_seconds(grid: Array, num_bytes: float, profile: Profile, gpus_per_node: int) -> Array:
    """To hand one microbatch, or its gradient, to the next stage: the mean over all cuts.

    Args:
        num_bytes: `Kind.boundary_bytes` of what lies before the cut.
    """
    pp = grid["pp"].astype(np.float64)
    inner = (grid["dp_replicate"] * grid["dp_shard"] * grid["cp"] * grid["tp"]).astype(np.float64)
    samples = grid["micro"] / grid["cp"]
    cuts = np.maximum(1.0, pp - 1)
    nodes = np.ceil(pp * inner / gpus_per_node)
    far = np.where(inner < gpus_per_node, np.minimum(nodes - 1, cuts), cuts) / cuts
    outside, inside = (send(samples * num_bytes, crosses, profile) for crosses in (True, False))
    each = far * outside + (1 - far) * inside + profile.crossing_s
    return np.where(pp > 1, each, 0.0)


def pipeline_seconds(
    grid: Array, most: Array, total: Array, crossing: Array | float = 0.0
) -> Array:
    """All microbatches through all stages.

    Args:
        most: Seconds of a microbatch on the pipeline rank that takes longest, forward and
            backward, all of its stages together.
        total: On all pipeline ranks together.
        crossing: Seconds to hand a microbatch to the next stage, once.

    Assumes: stages are about equal; 1F1B then is never told too short, and Interleaved1F1B within
    the spread of its stages (`tests/cost/test_pipeline.py` plays both).

    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2: a bubble of (p - 1) / v turns, the
    same for GPipe and 1F1B. What crosses delays GPipe and Interleaved1F1B on the way of one
    microbatch, and 1F1B on the way of each.
    """
    pp, count = grid["pp"].astype(np.float64), grid["microbatches"].astype(np.float64)
    virtual, halved = grid["virtual"].astype(np.float64), in_halves(grid)
    once = 2 * (pp * virtual - 1)
    rounds = np.maximum(1, grid["microbatches"] // np.maximum(1, grid["pp"]))
    once = np.where(halved, pp * (virtual + 3) - np.where(rounds > 1, 4, 6), once)
    # Of p microbatches under way each waits for one more way there and back.
    every = 2 * (pp - 1) / pp * count + 2 * (pp - 2)
    ways = np.where(grid["schedule"] == _1F1B, np.maximum(once, every), once)
    return np.asarray(count * most + (total - most) * waiting_share(grid) + ways * crossing)


def waiting_share(grid: Array) -> Array:
    """Of what a microbatch takes on the other ranks, how much a rank waits in a step.

    Of a backward in two halves no other rank waits for the second, and none waits while its own
    second halves last: a forward is left of a forward and a backward.

    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2; Qi et al. 2023 (zero bubble), table 1,
    ZB-H1, with a backward of two forwards.
    """
    several = (grid["schedule"] == _INTERLEAVED) | in_halves(grid)
    turns = np.where(several, grid["virtual"], 1).astype(np.float64)
    return np.asarray(1.0 / (turns * np.where(in_halves(grid), 3.0, 1.0)))
