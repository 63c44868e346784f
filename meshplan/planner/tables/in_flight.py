"""Count the microbatches in flight, whose activations a stage keeps, under each schedule.

The memory bounds use the counts at one point of the schedule, the *high point*: the end of the
warm-up, before the first backward. With a split backward (zero bubble) it is the point at which the
most second halves are postponed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import SCHEDULE_WORDS, in_halves
from meshplan.layout.schedules import round_size
from meshplan.planner.knapsack.knapsack import Floats


def in_flight_of(row: np.void, rank: int) -> tuple[float, ...]:
    """Return the microbatches in flight on each stage of a pipeline rank at the high point.

    Args:
        row: One configuration of the grid.
        rank: Rank along pp.

    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2. `tests/planner/test_flights.py`
    compares with the order of actions in `schedules.SCHEDULES`.
    """
    p, m, v = int(row["pp"]), int(row["microbatches"]), int(row["virtual"])
    if p == 1:
        return (1.0,)
    word = SCHEDULE_WORDS[row["schedule"]]
    if word == "GPipe":
        return (float(m),) * v
    if v == 1:
        return (float(min(m, p - rank)),)
    size = round_size(p, m)
    if in_halves(row):
        return (float(size),) * (v - 1) + (float(p),)
    forwards = min((v - 1) * size + 2 * (p - 1 - rank) + 1, m * v)
    rounds, rest = divmod(forwards, size * v)
    return tuple(float(rounds * size + min(max(rest - c * size, 0), size)) for c in range(v))


def had_backward(row: np.void, rank: int) -> bool:
    """Return True if a rank's last stage has had a backward when most microbatches are in flight.

    The number in flight first peaks before the first backward. If a forward follows that backward,
    the peak is reached again, now after a backward of the last stage; the rank's other stages may
    not have had one.
    """
    p, m, v = int(row["pp"]), int(row["microbatches"]), int(row["virtual"])
    if p == 1 or in_halves(row) or SCHEDULE_WORDS[row["schedule"]] == "GPipe":
        return False
    if v == 1:
        return m > p - rank
    size = round_size(p, m)
    forwards = (v - 1) * size + 2 * (p - 1 - rank) + 1
    return forwards < m * v and forwards % (size * v) >= (v - 1) * size


def outputs_in_flight(row: np.void, rank: int) -> tuple[float, ...]:
    """Return the number of microbatches whose output each stage of a rank keeps at the high point.

    With a split backward, an output is kept until the first half of its backward.
    """
    each = in_flight_of(row, rank)
    return (*each[:-1], each[-1] - rank) if in_halves(row) else each


def in_flight(row: np.void, rank: int) -> float:
    """Return the microbatches in flight on a rank at the high point: the mean over its stages."""
    each = in_flight_of(row, rank)
    return sum(each) / len(each)


def fewest_in_flight(grid: NDArray[np.void]) -> Floats:
    """Return [configs] microbatches in flight on the last stage, which keeps the fewest."""
    p, m = grid["pp"].astype(float), grid["microbatches"].astype(float)
    is_gpipe = grid["schedule"] == SCHEDULE_WORDS.index("GPipe")
    few = np.where((p > 1) & is_gpipe, m, 1.0)
    return np.asarray(np.where(in_halves(grid), p, few), dtype=np.float64)


def sent_in_flight(grid: NDArray[np.void]) -> Floats:
    """Return [configs] sums of `outputs_in_flight` over all stages but the model's first and last.

    The last stage sends no output to another stage. The output of the first stage is not counted
    here, because `cost.chain` counts as much for the input of the first block.
    """
    p, m, v = (grid[name].astype(np.int64) for name in ("pp", "microbatches", "virtual"))
    round_size = m // np.maximum(1, m // p)
    few = np.minimum(m, p)
    alone = few * (few + 1) // 2 + (p - few) * few - 1
    # Before its first backward, a rank runs a round of all its stages but the last, and further
    # forwards: 1 on the last rank, 3 on the rank before, then 5, ... With a single round, the
    # further forwards cannot exceed its microbatches.
    within = np.minimum((round_size + 1) // 2, p)
    beyond = np.where(m > round_size, p * p, within * within + (p - within) * round_size)
    several = p * (v - 1) * round_size + beyond - 1
    is_gpipe = grid["schedule"] == SCHEDULE_WORDS.index("GPipe")
    warm = np.minimum((v - 1) * round_size + 2 * p - 1, m * v)
    first = warm // (round_size * v) * round_size + np.minimum(warm % (round_size * v), round_size)
    own = np.where(v > 1, several - first, alone - few)
    halved = p * (v - 1) * round_size + p * (p + 1) // 2 - round_size - 1
    many = np.where(is_gpipe, m * (p - 2), np.where(in_halves(grid), halved, own))
    return np.asarray(np.where(p > 1, many, 0), dtype=np.float64)


def usual_in_flight(grid: NDArray[np.void]) -> Floats:
    """Return [configs] fewest microbatches in flight on a stage that is not the last of its rank.

    The result equals `fewest_in_flight` if ranks have one stage.
    """
    p, m = grid["pp"], grid["microbatches"]
    round_size = m // np.maximum(1, m // p)
    return np.asarray(
        np.where(grid["virtual"] > 1, round_size, fewest_in_flight(grid)),
        dtype=np.float64,
    )


def usual_blocks(grid: NDArray[np.void], blocks: int) -> Floats:
    """Return [configs] fewest blocks on stages that are not the last of their rank.

    A rank's last stage has at most one block more than an even share of the rank's blocks. On the
    last rank it has no more than the even share.

    Args:
        grid: The configurations.
        blocks: Number of blocks of the model.
    """
    p, v = grid["pp"].astype(float), grid["virtual"].astype(float)
    last = np.minimum(blocks, np.floor((blocks + (p - 1) * (v - 1)) / v))
    return np.asarray(np.where(grid["virtual"] > 1, blocks - last, 0.0), dtype=np.float64)


def has_gradients(grid: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return a [configs] mask: True if all gradients exist at some point with as much in flight.

    At the high point no block has had a backward yet: a pipeline has run up to pp forwards, or,
    with several stages per rank, a round of all stages and more. One round later the same number of
    microbatches is in flight again, and every block has had a backward. With exactly two rounds
    this holds at the last forward, too, since the cool-down has as many backwards left as the
    warm-up ran forwards ahead.
    """
    p, m, v = (grid[name].astype(np.int64) for name in ("pp", "microbatches", "virtual"))
    round_size = m // np.maximum(1, m // p)
    halved = in_halves(grid)
    warm = (v - 1) * round_size + np.where(halved, p, 2 * (p - 1) + 1)
    several = (m * v >= warm + round_size * v) | ((m == 2 * round_size) & ~halved)
    return np.asarray(np.where(v > 1, several, m > p))
