"""Cut a chain of blocks into stages so that a * (slowest stage) + b * (sum of stages) is least.

The seconds of the stages are lower bounds at first. The bounds on the best path are replaced by
exact values until the whole path is exact. Any contiguous cut is allowed.

Source: Zheng et al., Alpa (2022), section 5.2, which enumerates the slowest stage's values, too.
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
    """Return the cost of the best cut of the blocks into stages, and the cut.

    Args:
        bounds: [stages, length + 1, length + 1] lower bounds on the seconds of stage s with the
            blocks from i up to j; infinite where i >= j or the stage cannot have them. Changed in
            place: entries on the best paths become exact.
        exact: Returns the exact seconds of (stage, i, j), which are never less than the bound.
        weights: The factors (a, b) of the slowest stage and of the sum of stages in the cost.
        below: Cost that the cut must beat.

    Returns:
        (cost, boundaries of the stages from 0 to length); (infinity, ()) if no cut costs less than
        `below`.
    """
    stages = len(bounds)
    is_exact = np.zeros(bounds.shape, dtype=bool)
    while True:
        # If all entries of the best cut under lower bounds are exact, no other cut is better.
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
    """Return a lower bound on the cost of any cut; infinite if there is no cut.

    Args:
        table: [stages, length + 1, length + 1] seconds, as `bounds` of `cut_into_stages`.
        weights: The factors (a, b).
    """
    least_sum, _ = _shortest(table)
    if least_sum == float("inf"):  # A weight may be 0.
        return least_sum
    return weights[0] * _slowest(table) + weights[1] * least_sum


def _best(
    table: Floats, weights: tuple[float, float], below: float
) -> tuple[float, tuple[int, ...]]:
    """Return (cost, boundaries of the stages) of the best cut that costs less than `below`.

    The result is (infinity, ()) if there is none.
    """
    a, b = weights
    best = below
    ends: tuple[int, ...] = ()
    least_sum, _ = _shortest(table)
    least_slowest = _slowest(table)
    if least_sum == float("inf") or a * least_slowest + b * least_sum >= best:
        return float("inf"), ()
    values = table[(table >= least_slowest) & (table < np.inf)]
    # With `return_counts`, `np.unique` does not import `numpy.ma`, which takes long.
    values, _ = np.unique(values[a * values + b * least_sum < best], return_counts=True)
    # Try each value as the limit of the slowest stage. The cut with the least sum of stages under
    # that limit is a shortest path.
    for slowest in values:
        if a * slowest + b * least_sum >= best:
            break
        total, found = _shortest(np.where(table <= slowest, table, np.inf))
        if found and a * slowest + b * total < best:
            best, ends = a * float(slowest) + b * total, found
    return (best, ends) if ends else (float("inf"), ())


def _slowest(table: Floats) -> float:
    """Return the seconds of the slowest stage, minimised over cuts; infinite if there is no cut."""
    slowest = np.full(table.shape[1], np.inf)
    slowest[0] = 0.0
    for stage in table:
        slowest = np.maximum(slowest[:, None], stage).min(axis=0)
    return float(slowest[-1])


def _shortest(table: Floats) -> tuple[float, tuple[int, ...]]:
    """Return the least sum of the stages' seconds, and the boundaries of the stages of that cut.

    The result is (infinity, ()) if there is no cut.
    """
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
