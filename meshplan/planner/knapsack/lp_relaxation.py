"""Solve the LP relaxation of many multiple-choice knapsacks at once, each with its own options.

The ranks of a pipeline keep different numbers of microbatches in flight, so each has its own
`Options`. If their knapsacks were solved one by one, numpy calls would cost more than arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshplan.planner.knapsack.knapsack import Counts, Floats, Options, seconds_to_free


def solve_relaxations(queries: Sequence[tuple[Options, Counts, float]]) -> list[Floats]:
    """Solve the LP relaxation of many multiple-choice knapsacks in one vectorised pass.

    Args:
        queries: Problems, each (options, [queries, kinds] blocks of each kind, capacity in bytes).

    Returns:
        Lower bounds on the seconds, as `Options.relaxed` computes them: one [queries] array for
        each problem; infinite where nothing fits.
    """
    if len(queries) == 1:
        ((menu, counts, room),) = queries
        return [menu.relaxed(counts, np.array([room]))]
    menus, rooms = [menu for menu, _, _ in queries], np.array([room for _, _, room in queries])
    sizes = [len(counts) for _, counts, _ in queries]
    # Concatenate the queries of all problems; `of` is the index of each query's problem: [queries].
    of = np.repeat(np.arange(len(menus)), sizes)
    num_kinds = max(len(menu.seconds) for menu in menus)
    num_steps = max(len(menu.steps[0]) for menu in menus)
    # Problems differ in their numbers of kinds and hull steps. Pad with zeros: a padded kind has no
    # blocks, a padded step frees nothing and costs nothing.
    table = np.zeros((3, len(menus), num_kinds))  # seconds, bytes (fastest), bytes (smallest)
    steps = np.zeros((2, len(menus), num_steps))  # seconds lost, bytes freed, of one block
    kinds = np.zeros((len(menus), num_steps), dtype=np.int64)
    blocks = np.zeros((len(of), num_kinds))
    for n, (menu, (end, size)) in enumerate(zip(menus, _ends(sizes), strict=True)):
        seconds, memory, _ = menu.there
        own, (lost, won, kind) = len(seconds), menu.steps
        table[0, n, :own], table[1, n, :own], table[2, n, :own] = seconds, memory, menu.smallest
        steps[0, n, : len(lost)], steps[1, n, : len(won)] = lost, won
        kinds[n, : len(kind)] = kind
        blocks[end - size : end, :own] = queries[n][1]
    # Start from every block's fastest option: [queries] seconds and bytes of all blocks.
    capacity = rooms[of]
    seconds, memory, smallest = (np.einsum("qk,qk->q", blocks, each[of]) for each in table)
    # The relaxation then frees memory greedily along the convex hulls, fewest seconds per byte
    # first. `prices` and `ends` are the seconds lost and the bytes freed after each step.
    many = np.take_along_axis(blocks, kinds[of], axis=1)  # blocks moved: [queries, steps]
    prices, ends = np.zeros((2, len(of), num_steps + 1))
    np.cumsum(many * steps[0][of], axis=1, out=prices[:, 1:])
    np.cumsum(many * steps[1][of], axis=1, out=ends[:, 1:])
    freeing_s = seconds_to_free(ends, prices, memory - capacity)
    bound = np.where(smallest <= capacity, seconds + freeing_s, np.inf)
    # Queries with a block of a kind without any option are infeasible. Such blocks counted as 0
    # seconds so far.
    for n, (menu, (end, size)) in enumerate(zip(menus, _ends(sizes), strict=True)):
        there = menu.there[2]
        if not there.all():
            bound[end - size : end][(queries[n][1][:, ~there] > 0).any(axis=1)] = np.inf
    return np.split(bound, np.cumsum(sizes)[:-1])


def _ends(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (end, size) of each problem's slice of the queries."""
    return list(zip(np.cumsum(sizes).tolist(), sizes, strict=True))
