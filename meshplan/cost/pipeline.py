"""Estimate the seconds of a pipeline step: computation, bubble, and sends between stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from meshplan.cost.collectives import job_nodes_of, send, stride_of
from meshplan.cost.grid import SCHEDULE_WORDS, Array, in_halves
from meshplan.cost.profile import Profile
from meshplan.layout.mesh import AXES

_1F1B: Final = SCHEDULE_WORDS.index("1F1B")
_INTERLEAVED: Final = SCHEDULE_WORDS.index("Interleaved1F1B")

CLOSED_FORMS: Final = frozenset(("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"))
"""The schedules whose seconds `pipeline_seconds` estimates. `cost.simulate` simulates any."""


def crossing_seconds(
    grid: Array,
    num_bytes: float,
    profile: Profile,
    gpus_per_node: int,
    order: Sequence[str] = AXES,
) -> Array:
    """Return the seconds to send one microbatch to the next stage, a mean over all boundaries.

    The gradient of the microbatch takes as long to come back.

    Args:
        grid: Configurations of `grid.GRID`.
        num_bytes: Bytes per sample that cross the boundary (`BlockKind.boundary_bytes` of the block
            before it).
        profile: Constants of the device and its links.
        gpus_per_node: Devices of one node.
        order: The axes of the mesh, outermost first.
    """
    pp = grid["pp"].astype(np.float64)
    inner = stride_of(grid, "pp", order)
    samples = grid["micro"] / grid["cp"]
    cuts = np.maximum(1.0, pp - 1)
    nodes = np.ceil(pp * inner / gpus_per_node)
    # Fraction of the boundaries between stages that are also boundaries between nodes.
    far = np.where(inner < gpus_per_node, np.minimum(nodes - 1, cuts), cuts) / cuts
    job = job_nodes_of(grid, order, gpus_per_node)
    outside, inside = (
        send(samples * num_bytes, crosses, profile, job) for crosses in (True, False)
    )
    each = far * outside + (1 - far) * inside + profile.crossing_s
    return np.where(pp > 1, each, 0.0)


def pipeline_seconds(
    grid: Array, most: Array, total: Array, crossing: Array | float = 0.0
) -> Array:
    """Return the seconds of forward and backward of all microbatches through all stages.

    Args:
        grid: Configurations of `grid.GRID`, without a pipeline or with one of `CLOSED_FORMS`.
        most: Seconds of a microbatch on the slowest pipeline rank, forward and backward, in all
            stages of this rank.
        total: The sum of these seconds over all pipeline ranks.
        crossing: Seconds to send a microbatch to the next stage once (`crossing_seconds`).

    Assumes: stages take about equally long. 1F1B is then never estimated too short, and
    Interleaved1F1B to within the differences of its stages (`tests/cost/test_pipeline.py` simulates
    both).

    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2: the bubble is (p - 1) / v times a
    microbatch's time on one rank, equal for GPipe and 1F1B. Sends delay GPipe and Interleaved1F1B
    along the path of one microbatch, and 1F1B along the path of every microbatch.
    """
    pp, count = grid["pp"].astype(np.float64), grid["microbatches"].astype(np.float64)
    virtual, halved = grid["virtual"].astype(np.float64), in_halves(grid)
    # One microbatch crosses every boundary between stages, in forward and in backward.
    once = 2 * (pp * virtual - 1)
    rounds = np.maximum(1, grid["microbatches"] // np.maximum(1, grid["pp"]))
    once = np.where(halved, pp * (virtual + 3) - np.where(rounds > 1, 4, 6), once)
    # 1F1B has pp microbatches in flight, and each waits for one more crossing in each direction.
    every = 2 * (pp - 1) / pp * count + 2 * (pp - 2)
    ways = np.where(grid["schedule"] == _1F1B, np.maximum(once, every), once)
    return np.asarray(count * most + (total - most) * waiting_share(grid) + ways * crossing)


def sending_seconds(grid: Array, compute_s: Array, crossing_s: Array) -> Array:
    """Return the seconds of a step that sends between stages add to those of the stages.

    Args:
        grid: Configurations of `grid.GRID`.
        compute_s: [configs] seconds of computation of a microbatch in all blocks together.
        crossing_s: [configs] seconds to send a microbatch to the next stage once
            (`crossing_seconds`).
    """
    zero = np.zeros(len(grid))
    return pipeline_seconds(grid, zero, zero, crossing_s) + unhidden_seconds(
        grid, compute_s, crossing_s
    )


def unhidden_seconds(grid: Array, compute_s: Array, crossing_s: Array) -> Array:
    """Return [configs] seconds of a step by which sends take longer than the computation.

    Zero for one stage per rank. Each stage sends its output in forward and its input's gradient in
    backward for every microbatch, and all stages of a rank share its link. The shorter the stages,
    the less computation hides the sends.

    Args:
        grid: The configurations.
        compute_s: [configs] seconds of computation of a microbatch in all blocks together.
        crossing_s: [configs] seconds to send a microbatch from one stage to the next.
    """
    sends = 2.0 * grid["microbatches"] * grid["virtual"] * crossing_s
    over = np.maximum(0.0, sends - grid["microbatches"] * compute_s / grid["pp"])
    return np.asarray(np.where(grid["virtual"] > 1, over, 0.0))


def waiting_share(grid: Array) -> Array:
    """Return the bubble of a step, as a fraction of the other ranks' time per microbatch.

    With a split backward, no rank waits for the second half of another rank, and ranks compute
    second halves instead of waiting. Of the time of forward and backward, only a forward is left.

    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2; Qi et al. 2023 (zero bubble), table 1,
    ZB-H1, with a backward of two forwards.
    """
    several = (grid["schedule"] == _INTERLEAVED) | in_halves(grid)
    turns = np.where(several, grid["virtual"], 1).astype(np.float64)
    return np.asarray(1.0 / (turns * np.where(in_halves(grid), 3.0, 1.0)))
