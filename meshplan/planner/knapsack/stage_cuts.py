"""Where to cut a chain of blocks into stages: a * (the slowest stage) + b * (their sum), least.

The seconds of a stage are known from below first; those on the best path are made exact until the
whole path is. Any contiguous cut is allowed.

Source: Zheng et al., Alpa (2022), section 5.2, for going through the slowest stage's values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshplan.planner.knapsack.knapsack import Floats


def cut_into_stages(
    bounds: Floats,
    exact: Callable[[int, int, int], float],
    weights: tuple[float, float],
    below: float = float("inf"),
) -> tuple[float, tuple[int, ...]]:
    """The best cut and what it costs.

    Args:
        bounds: [stages, length + 1, length + 1] seconds from below of stage s with the blocks
            from i up to j; infinite where i >= j or it cannot be. Is made exact in place.
        exact: The same of one stage, as it really is; never less than its bound.
        weights: (a, b).
        below: Only cuts that cost less are of interest.

    Returns:
        (cost, the ends of the stages, 0 first); (infinity, ()) where no cut will do.
    """
    stages = len(bounds)
    is_exact = np.zeros(bounds.shape, dtype=bool)
    while True:
        cost, ends = _best(bounds, weights, below)
        if not ends:
            return float("inf"), ()
        path = list(zip(range(stages), ends[:-1], ends[1:], strict=True))
        open_ = [at for at in path if not is_exact[at]]
        if not open_:
            return cost, ends
        for at in open_:
            bounds[at] = exact(*at)
            is_exact[at] = True


def least_cut_cost(table: Floats, weights: tuple[float, float]) -> float:
    """What any cut of a table of seconds costs at the least; infinite where there is none."""
    return weights[0] * _slowest(table) + weights[1] * _shortest(table)[0]


def _best(
    table: Floats, weights: tuple[float, float], below: float
) -> tuple[float, tuple[int, ...]]:
    """The best cut of a table of seconds."""
    a, b = weights
    best = below
    ends: tuple[int, ...] = ()
    least_sum, _ = _shortest(table)
    least_slowest = _slowest(table)
    if least_sum == float("inf") or a * least_slowest + b * least_sum >= best:
        return float("inf"), ()
    values = table[(table >= least_slowest) & (table < np.inf)]
    # Asked for counts too, numpy does without its masked arrays, which take long to import.
    values, _ = np.unique(values[a * values + b * least_sum < best], return_counts=True)
    for slowest in values:
        if a * slowest + b * least_sum >= best:
            break
        total, found = _shortest(np.where(table <= slowest, table, np.inf))
        if found and a * slowest + b * total < best:
            best, ends = a * float(slowest) + b * total, found
    return (best, ends) if ends else (float("inf"), ())


def _slowest(table: Floats) -> float:
    """The least that the slowest stage of a cut can take; infinite where there is no cut."""
    slowest = np.full(table.shape[1], np.inf)
    slowest[0] = 0.0
    for stage in table:
        slowest = np.maximum(slowest[:, None], stage).min(axis=0)
    return float(slowest[-1])


def _shortest(table: Floats) -> tuple[float, tuple[int, ...]]:
    """The least sum over stages, and where it cuts."""
    stages, size, _ = table.shape
    costs = np.full(size, np.inf)
    costs[0] = 0.0
    choices, every = [], np.arange(size)
    for stage in range(stages):
        sums = costs[:, None] + table[stage]
        choices.append(sums.argmin(axis=0))
        costs = sums[choices[-1], every]
    if not np.isfinite(costs[-1]):
        return float("inf"), ()
    ends = [size - 1]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return float(costs[-1]), tuple(reversed(ends))
