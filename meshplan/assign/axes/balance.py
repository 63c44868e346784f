"""Split a list of weights into contiguous parts whose heaviest is as light as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balance(weights: Sequence[int], allowed: Sequence[bool], parts: int) -> list[int] | None:
    """Return the index of the part of each weight; None if `parts` non-empty parts are impossible.

    The heaviest part is as light as possible. Among such splits, the one with the smallest sum of
    squared part weights is chosen.

    Args:
        weights: The weights, in order.
        allowed: For each place between two weights, True if a split is allowed there.
        parts: Number of parts.

    >>> balance([1, 1, 1, 3], [True, True, True], 2)
    [0, 0, 0, 1]
    """
    count = len(weights)
    sums = [0, *accumulate(weights)]
    ends = [end for end in range(1, count) if allowed[end - 1]] + [count]
    # best[end] describes the best split of the weights before `end` into the number of parts that
    # the loop has reached: (weight of the heaviest part, sum of squares).
    best: dict[int, tuple[int, int]] = {end: (sums[end], sums[end] ** 2) for end in ends}
    choices: list[dict[int, int]] = []
    for _ in range(parts - 1):
        now: dict[int, tuple[int, int]] = {}
        cuts: dict[int, int] = {}
        for end in ends:
            options = [
                (max(heavy, sums[end] - sums[cut]), squares + (sums[end] - sums[cut]) ** 2, cut)
                for cut, (heavy, squares) in best.items()
                if cut < end
            ]
            if options:
                *score, cut = min(options)
                now[end], cuts[end] = (score[0], score[1]), cut
        best = now
        choices.append(cuts)
    if count not in best:
        return None
    out: list[int] = [0] * count
    end = count
    for part in range(parts - 1, 0, -1):
        cut = choices[part - 1][end]
        out[cut:end] = [part] * (end - cut)
        end = cut
    return out
