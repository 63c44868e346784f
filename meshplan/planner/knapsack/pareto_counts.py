"""What so many alike blocks may take together, without what others beat."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_NEAR: Final = 1e-6
"""Of a block: less than that is rounding."""


class ParetoCounts(NamedTuple):
    """What the blocks of one kind may take together.

    Attributes:
        seconds, memory: Of each mix.
        takes: [mixes, options] how many blocks take each option.
    """

    seconds: Floats
    memory: Floats
    takes: Counts


def pareto_counts_of(
    seconds: Floats, memory: Floats, count: int, price: float, slack: float,
    held: tuple[float, float],
) -> ParetoCounts:  # fmt: skip
    """What so many alike blocks may take, without what others beat.

    With memory at any price, the choice of each block costs at least what its cheapest option does.
    All that is paid beyond comes on top of the relaxation's bound, so it is at most `slack`.

    Args:
        held: Bytes at the least and at the most.
    """
    paid = seconds + price * memory
    extra = paid - paid.min()
    # Few take what costs much. How many take those that cost nothing, the memory says.
    order = np.argsort(-extra, kind="stable")
    takes = np.zeros((1, 0), dtype=np.int64)
    spent, left, t, m = np.zeros(1), np.array([count]), np.zeros(1), np.zeros(1)
    low, high = held
    for at, option in enumerate(order):
        each, own, rest = extra[option], memory[option], memory[order[at + 1 :]]
        if not len(rest):
            all_held = m + left * own
            is_open = (spent + left * each <= slack) & (low <= all_held) & (all_held <= high)
            takes = np.column_stack((takes, left))[is_open]
            break
        within = np.floor((slack - spent) / each) if each > 0 else np.inf
        most = np.where(each * left + spent <= slack, left, np.minimum(left, within))
        fewest = np.zeros(len(left))
        # All that follow hold together no more than the most of them, no less than the least.
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
        repeats = np.maximum(most - fewest, -1).astype(np.int64) + 1
        which = np.repeat(np.arange(len(left)), repeats)
        many = np.arange(len(which)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        many += fewest.astype(np.int64)[which]
        takes = np.column_stack((takes[which], many))
        spent, left = spent[which] + many * each, left[which] - many
        t, m = (takes @ part[order[: at + 1]] for part in (seconds, memory))
        kept = _undominated_each(left, t, m)
        takes, spent, left, t, m = takes[kept], spent[kept], left[kept], t[kept], m[kept]
    takes = takes[:, np.argsort(order)]
    t, m = takes @ seconds, takes @ memory
    kept = undominated(t, m)
    return ParetoCounts(t[kept], m[kept], takes[kept])


def _undominated_each(groups: Counts, seconds: Floats, memory: Floats) -> Counts:
    """Those of each group that no other of the same group beats: what is left to add is alike."""
    _, rank = np.unique(memory, return_inverse=True)
    order = np.lexsort((rank, seconds, groups))
    # Ranks of later groups lie below those of earlier ones, so that each begins anew.
    own = rank[order] - groups[order] * (len(rank) + 1)
    least = np.minimum.accumulate(own)
    is_better = np.ones(len(order), dtype=bool)
    is_better[1:] = own[1:] < least[:-1]
    return np.asarray(order[is_better])


def undominated(seconds: Floats, memory: Floats) -> Counts:
    """Those that no other beats in both, by increasing time."""
    order = np.lexsort((memory, seconds))
    least = np.minimum.accumulate(memory[order])
    is_better = np.ones(len(order), dtype=bool)
    is_better[1:] = memory[order][1:] < least[:-1]
    return order[is_better]
