"""Microbatches whose activations are kept at once, by schedule: the basis of the memory bounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import SCHEDULE_WORDS, in_halves
from meshplan.planner.knapsack.knapsack import Floats


def in_flight_of(row: np.void, rank: int) -> tuple[float, ...]:
    """Return how many microbatches each stage of a pipeline rank keeps when memory is high.

    With several stages per rank, this is the end of the warm-up, before the first backward. With a
    split backward, it is when as many second halves are postponed as ever are.

    Source: Narayanan et al. 2021 (Megatron-LM), section 2.2; `schedules.SCHEDULES`, whose order it
    counts (`tests/planner/test_flights.py`).
    """
    p, m, v = int(row["pp"]), int(row["microbatches"]), int(row["virtual"])
    if p == 1:
        return (1.0,)
    word = SCHEDULE_WORDS[row["schedule"]]
    if word == "GPipe":
        return (float(m),) * v
    if v == 1:
        return (float(min(m, p - rank)),)
    size = _round(p, m)
    if in_halves(row):
        return (float(size),) * (v - 1) + (float(p),)
    forwards = min((v - 1) * size + 2 * (p - 1 - rank) + 1, m * v)
    rounds, rest = divmod(forwards, size * v)
    return tuple(float(rounds * size + min(max(rest - c * size, 0), size)) for c in range(v))


def had_backward(row: np.void, rank: int) -> bool:
    """Return True if the last stage of a rank has had a backward at such a moment.

    The rank's other stages need not have had one. The moment is then the next forward, which brings
    as much in flight as there was before the first backward.
    """
    p, m, v = int(row["pp"]), int(row["microbatches"]), int(row["virtual"])
    if p == 1 or in_halves(row) or SCHEDULE_WORDS[row["schedule"]] == "GPipe":
        return False
    if v == 1:
        return m > p - rank
    size = _round(p, m)
    forwards = (v - 1) * size + 2 * (p - 1 - rank) + 1
    return forwards < m * v and forwards % (size * v) >= (v - 1) * size


def handed_on(row: np.void, rank: int) -> tuple[float, ...]:
    """Return of how many microbatches each stage of a rank keeps the output at that moment.

    With a split backward, outputs are kept until its first half.
    """
    each = in_flight_of(row, rank)
    return (*each[:-1], each[-1] - rank) if in_halves(row) else each


def _round(ranks: int, count: int) -> int:
    """Return the number of microbatches of one round of the ranks."""
    return count // max(1, count // ranks)


def in_flight(row: np.void, rank: int) -> float:
    """Return the microbatches in flight on a rank: the mean over its stages."""
    each = in_flight_of(row, rank)
    return sum(each) / len(each)


def fewest_in_flight(grid: NDArray[np.void]) -> Floats:
    """[configs] microbatches in flight on the stage that keeps the fewest: the last one."""
    p, m = grid["pp"].astype(float), grid["microbatches"].astype(float)
    is_gpipe = grid["schedule"] == SCHEDULE_WORDS.index("GPipe")
    few = np.where((p > 1) & is_gpipe, m, 1.0)
    return np.asarray(np.where(in_halves(grid), p, few), dtype=np.float64)


def sent_in_flight(grid: NDArray[np.void]) -> Floats:
    """[configs] sum of `handed_on` over all stages but the first and the last of the model.

    The last stage hands on nothing. The output of the first stage is charged as the first block's
    input (`cost.chain`).
    """
    p, m, v = (grid[name].astype(np.int64) for name in ("pp", "microbatches", "virtual"))
    round_size = m // np.maximum(1, m // p)
    few = np.minimum(m, p)
    alone = few * (few + 1) // 2 + (p - few) * few - 1
    # From the last rank to the first, ranks run 1, 3, 5 ... forwards beyond those of all stages but
    # the last. With a single round they cannot be more than its microbatches.
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
    """[configs] fewest microbatches in flight on any stage that is not the last of its rank.

    Equal to `fewest_in_flight` if ranks have one stage.
    """
    p, m = grid["pp"], grid["microbatches"]
    round_size = m // np.maximum(1, m // p)
    return np.asarray(
        np.where(grid["virtual"] > 1, round_size, fewest_in_flight(grid)),
        dtype=np.float64,
    )


def usual_blocks(grid: NDArray[np.void], blocks: int) -> Floats:
    """[configs] fewest blocks, of so many, that lie in stages that are not the last of their rank.

    A rank's last stage has at most one block more than its even share, on the last rank none.
    """
    p, v = grid["pp"].astype(float), grid["virtual"].astype(float)
    last = np.minimum(blocks, np.floor((blocks + (p - 1) * (v - 1)) / v))
    return np.asarray(np.where(grid["virtual"] > 1, blocks - last, 0.0), dtype=np.float64)


def has_gradients(grid: NDArray[np.void]) -> NDArray[np.bool_]:
    """[configs] mask: True if every block had its gradients before such a moment, or an equal one.

    A pipeline runs up to pp forwards before the first backward, or with several stages per rank a
    round of all stages and more. One round later as much is in flight. With two rounds this also
    holds at the last forward, since what the warm-up ran ahead is what the cool-down has left.
    """
    p, m, v = (grid[name].astype(np.int64) for name in ("pp", "microbatches", "virtual"))
    round_size = m // np.maximum(1, m // p)
    halved = in_halves(grid)
    warm = (v - 1) * round_size + np.where(halved, p, 2 * (p - 1) + 1)
    several = (m * v >= warm + round_size * v) | ((m == 2 * round_size) & ~halved)
    return np.asarray(np.where(v > 1, several, m > p))
