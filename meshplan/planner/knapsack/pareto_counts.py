"""The undominated combinations of options that many identical blocks can take together."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_NEAR: Final = 1e-6
"""Fraction of one block up to which a difference between block counts is a rounding error."""


class ParetoCounts(NamedTuple):
    """The undominated combinations of options of all blocks of one kind.

    Attributes:
        seconds: [combinations] seconds of all blocks.
        memory: [combinations] bytes of all blocks.
        option_counts: [combinations, options] number of blocks that take each option.
    """

    seconds: Floats
    memory: Floats
    option_counts: Counts


def pareto_counts_of(
    seconds: Floats, memory: Floats, count: int, price: float, slack: float,
    bytes_range: tuple[float, float],
) -> ParetoCounts:  # fmt: skip
    """Return the undominated combinations of options that `count` identical blocks can take.

    An option costs its seconds plus `price` for each byte. A combination raises the LP bound by its
    cost minus the cost of taking the cheapest option everywhere. Combinations that raise it by more
    than `slack` are left out.

    Args:
        seconds: [options] seconds of one block.
        memory: [options] bytes of one block.
        count: Number of blocks.
        price: Seconds charged for a byte; any value gives a correct result.
        slack: Seconds that a solution may cost above the LP bound.
        bytes_range: (fewest, most) bytes that all blocks together may have.
    """
    paid = seconds + price * memory
    extra = paid - paid.min()
    # `extra` is the reduced cost of each option. Options with a high reduced cost come first, since
    # only few blocks can take them. Options without extra cost are limited by memory alone.
    order = np.argsort(-extra, kind="stable")
    option_counts = np.zeros((1, 0), dtype=np.int64)
    # Partial combinations, one array each: cost above the cheapest option (`spent`), blocks without
    # an option (`left`), seconds (`t`), bytes (`m`).
    spent, left, t, m = np.zeros(1), np.array([count]), np.zeros(1), np.zeros(1)
    low, high = bytes_range
    for at, option in enumerate(order):
        each, own, rest = extra[option], memory[option], memory[order[at + 1 :]]
        if not len(rest):  # The last option takes all blocks that are left.
            all_bytes = m + left * own
            is_open = (spent + left * each <= slack) & (low <= all_bytes) & (all_bytes <= high)
            option_counts = np.column_stack((option_counts, left))[is_open]
            break
        within = np.floor((slack - spent) / each) if each > 0 else np.inf
        most = np.where(each * left + spent <= slack, left, np.minimum(left, within))
        fewest = np.zeros(len(left))
        # The blocks left over need at least the smallest and at most the largest of the remaining
        # options. This bounds from both sides how many blocks can take the current option.
        for room, more in (
            (high - m - left * rest.min(), own - rest.min()),
            (m + left * rest.max() - low, rest.max() - own),
        ):
            if more > 0:
                most = np.minimum(most, np.floor(room / more + _NEAR))
            elif more < 0:
                fewest = np.maximum(fewest, np.ceil(room / more - _NEAR))
            else:
                most = np.where(room < 0, -1, most)
        # Extend each partial combination by every number of blocks from `fewest` to `most`.
        repeats = np.maximum(most - fewest, -1).astype(np.int64) + 1
        which = np.repeat(np.arange(len(left)), repeats)
        many = np.arange(len(which)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        many += fewest.astype(np.int64)[which]
        option_counts = np.column_stack((option_counts[which], many))
        spent, left = spent[which] + many * each, left[which] - many
        t, m = (option_counts @ part[order[: at + 1]] for part in (seconds, memory))
        kept = _undominated_each(left, t, m)
        option_counts, spent, left, t, m = (
            option_counts[kept],
            spent[kept],
            left[kept],
            t[kept],
            m[kept],
        )
    option_counts = option_counts[:, np.argsort(order)]
    t, m = option_counts @ seconds, option_counts @ memory
    kept = undominated(t, m)
    return ParetoCounts(t[kept], m[kept], option_counts[kept])


def _undominated_each(groups: Counts, seconds: Floats, memory: Floats) -> Counts:
    """Return the indices of the entries not dominated within their group.

    An entry is dominated if another has no more seconds and no more bytes. Partial combinations
    with equally many blocks left form a group, because the same options can complete each of them.
    """
    _, rank = np.unique(memory, return_inverse=True)
    order = np.lexsort((rank, seconds, groups))
    # Shift the ranks of the bytes so that each group lies below the one before: the running minimum
    # over all entries then starts anew with each group.
    own = rank[order] - groups[order] * (len(rank) + 1)
    least = np.minimum.accumulate(own)
    is_better = np.ones(len(order), dtype=bool)
    is_better[1:] = own[1:] < least[:-1]
    return np.asarray(order[is_better])


def undominated(seconds: Floats, memory: Floats) -> Counts:
    """Return the indices of the entries undominated in seconds and bytes, fastest first."""
    order = np.lexsort((memory, seconds))
    least = np.minimum.accumulate(memory[order])
    is_better = np.ones(len(order), dtype=bool)
    is_better[1:] = memory[order][1:] < least[:-1]
    return order[is_better]
