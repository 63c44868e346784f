"""The linear relaxation of many knapsacks at once, each with a menu of its own.

The stages of one configuration keep different numbers of microbatches, so each rank has a menu; to
ask them one by one takes longer than what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshplan.planner.knapsack.knapsack import Counts, Floats, Options


def solve_relaxations(asked: Sequence[tuple[Options, Counts, float]]) -> list[Floats]:
    """What `Options.relaxed` says of each menu.

    Args:
        asked: Each with [questions, kinds] blocks of each kind of its menu, and a capacity.
    """
    if len(asked) == 1:
        ((menu, counts, room),) = asked
        return [menu.relaxed(counts, np.array([room]))]
    menus, rooms = [menu for menu, _, _ in asked], np.array([room for _, _, room in asked])
    sizes = [len(counts) for _, counts, _ in asked]
    of = np.repeat(np.arange(len(menus)), sizes)
    num_kinds = max(len(menu.seconds) for menu in menus)
    num_steps = max(len(menu.steps[0]) for menu in menus)
    # Kinds that a menu does not have take nothing, and steps lead nowhere.
    table = np.zeros((3, len(menus), num_kinds))
    steps = np.zeros((2, len(menus), num_steps))
    kinds = np.zeros((len(menus), num_steps), dtype=np.int64)
    blocks = np.zeros((len(of), num_kinds))
    for n, (menu, (end, size)) in enumerate(zip(menus, _ends(sizes), strict=True)):
        seconds, memory, _ = menu.there
        own, (lost, won, kind) = len(seconds), menu.steps
        table[0, n, :own], table[1, n, :own], table[2, n, :own] = seconds, memory, menu.smallest
        steps[0, n, : len(lost)], steps[1, n, : len(won)] = lost, won
        kinds[n, : len(kind)] = kind
        blocks[end - size : end, :own] = asked[n][1]
    capacity = rooms[of]
    seconds, memory, smallest = (np.einsum("qk,qk->q", blocks, each[of]) for each in table)
    many = np.take_along_axis(blocks, kinds[of], axis=1)
    prices, ends = np.zeros((2, len(of), num_steps + 1))
    np.cumsum(many * steps[0][of], axis=1, out=prices[:, 1:])
    np.cumsum(many * steps[1][of], axis=1, out=ends[:, 1:])
    over = memory - capacity
    to = np.minimum((ends < over[:, None]).sum(axis=1), num_steps)
    at, row = np.maximum(to - 1, 0), np.arange(len(of))
    width = ends[row, to] - ends[row, at]
    share = np.where(width > 0, (over - ends[row, at]) / np.where(width > 0, width, 1.0), 1.0)
    price = prices[row, at] + share * (prices[row, to] - prices[row, at])
    bound = np.where(smallest <= capacity, seconds + np.where(over > 0, price, 0.0), np.inf)
    for n, (menu, (end, size)) in enumerate(zip(menus, _ends(sizes), strict=True)):
        there = menu.there[2]
        if not there.all():
            bound[end - size : end][(asked[n][1][:, ~there] > 0).any(axis=1)] = np.inf
    return np.split(bound, np.cumsum(sizes)[:-1])


def _ends(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(np.cumsum(sizes).tolist(), sizes, strict=True))
