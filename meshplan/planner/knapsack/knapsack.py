"""Solve a multiple-choice knapsack exactly: one option per block, least time, limited memory.

Identical blocks form one kind with a count, so that permutations of them are not enumerated. The LP
relaxation gives a lower bound. A greedy filling, improved by exchanges, gives a first solution.
Options whose reduced cost exceeds the gap between the two are dropped, and label setting with
dominance decides between the others.

Source: Kellerer, Pferschy, Pisinger, Knapsack Problems (2004), chapter 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.knapsack.pareto_counts import Counts as Counts
from meshplan.planner.knapsack.pareto_counts import Floats as Floats
from meshplan.planner.knapsack.pareto_counts import ParetoCounts, pareto_counts_of, undominated

_EPS: Final = 1e-12
"""Relative tolerance for comparing seconds or bytes: smaller differences are rounding errors."""
_NEAR: Final = 1e-6
"""Share of the capacity by which rounding may change the bytes of a solution."""


@dataclass(frozen=True, slots=True)
class KnapsackSolution:
    """The solution of a knapsack.

    Attributes:
        seconds: Seconds of all blocks; infinite if nothing fits.
        option_counts: [kind][option] number of blocks that take each option; () if nothing fits.
    """

    seconds: float
    option_counts: tuple[tuple[int, ...], ...] = ()


NONE: Final = KnapsackSolution(float("inf"))


class _Trade(NamedTuple):
    """A step along the convex hull of a kind, from one option to another that needs less memory.

    Attributes:
        slope: Seconds lost per byte freed.
        lost: Seconds that one block loses.
        won: Bytes that one block frees.
        kind: Index of the kind.
        source: Index of the option that a block has before the step.
        target: Index of the option that it has after the step.
    """

    slope: float
    lost: float
    won: float
    kind: int
    source: int
    target: int


class Options:
    """The seconds and bytes of each option of each kind of block.

    Args:
        seconds: [kinds, options] seconds of one block; infinite where a kind does not have an
            option.
        memory: [kinds, options] bytes of one block.
    """

    def __init__(self, seconds: Floats, memory: Floats) -> None:
        self.seconds, self.memory = seconds, memory

    @cached_property
    def fronts(self) -> list[list[int]]:
        """The indices of each kind's undominated options, fastest first."""
        # Each instance has few options, and there are many instances: lists are ten times faster
        # than arrays here.
        return [
            _front(t, m) for t, m in zip(self.seconds.tolist(), self.memory.tolist(), strict=True)
        ]

    @cached_property
    def _hulls(self) -> list[_Trade]:
        """The steps along the convex hulls of all kinds, fewest seconds per byte first."""
        rows = []
        for kind, front in enumerate(self.fronts):
            t, m, at = self.seconds[kind].tolist(), self.memory[kind].tolist(), 0
            while at < len(front) - 1:
                source = front[at]
                slopes = [(t[o] - t[source]) / (m[source] - m[o]) for o in front[at + 1 :]]
                slope = min(slopes)
                at += 1 + slopes.index(slope)
                target = front[at]
                lost, won = t[target] - t[source], m[source] - m[target]
                rows.append(_Trade(slope, lost, won, kind, source, target))
        return sorted(rows)

    @cached_property
    def steps(self) -> tuple[Floats, Floats, Counts]:
        """Seconds lost, bytes freed and kind of each step of `_hulls`: three arrays [steps]."""
        lost, won = (np.array([step[n] for step in self._hulls]) for n in (1, 2))
        return lost, won, np.array([step.kind for step in self._hulls], dtype=np.int64)

    @cached_property
    def fastest(self) -> tuple[Floats, Floats]:
        """Seconds and bytes of one block of each kind with its fastest option: two arrays [kinds].

        Seconds are infinite for kinds without any option.
        """
        first = [front[0] if len(front) else 0 for front in self.fronts]
        kinds = np.arange(len(first))
        return self.seconds[kinds, first], self.memory[kinds, first]

    @cached_property
    def there(self) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Three [kinds] arrays: the two of `fastest`, and a mask of the kinds with an option.

        Kinds without any option have 0 seconds and 0 bytes.
        """
        there = np.isfinite(self.fastest[0])
        seconds, memory = (np.where(there, each, 0.0) for each in self.fastest)
        return seconds, memory, there

    @cached_property
    def smallest(self) -> Floats:
        """[kinds] bytes of one block with its smallest option."""
        last = [front[-1] if len(front) else 0 for front in self.fronts]
        return self.memory[np.arange(len(last)), last]

    def price(self, counts: Counts, capacity: float) -> float:
        """Return the seconds per byte of the last hull step that the LP relaxation takes.

        `pareto_counts_of` is correct at any price, and returns the fewest combinations at this
        price.

        Args:
            counts: [kinds] blocks of each kind.
            capacity: Bytes for all blocks together.
        """
        used = counts > 0
        over = float(counts[used] @ self.fastest[1][used]) - capacity
        lost, won, kinds = self.steps
        at = int(np.searchsorted(np.cumsum(counts[kinds] * won), over))
        at = min(at, len(lost) - 1)
        return float(lost[at] / won[at])

    def relaxed(self, counts: Counts, capacity: Floats) -> Floats:
        """Return lower bounds on the seconds by LP relaxation; infinite where nothing fits.

        Args:
            counts: [queries, kinds] blocks of each kind, or [kinds] if all queries have the same.
            capacity: [queries] bytes for all blocks together, or [1] if all queries have the same.

        Returns:
            [queries] seconds.
        """
        counts = counts.reshape(-1, len(self.seconds))
        seconds, memory, there = self.there
        lost, won, kinds = self.steps
        # Start from every block's fastest option. The relaxation then frees memory greedily along
        # the convex hulls, fewest seconds per byte first, until the blocks fit. `ends` and `prices`
        # are the bytes freed and the seconds lost after each step: [queries, steps + 1].
        many = counts[:, kinds]
        ends, prices = np.zeros((2, len(counts), len(kinds) + 1))
        np.cumsum(many * won, axis=1, out=ends[:, 1:])
        np.cumsum(many * lost, axis=1, out=prices[:, 1:])
        bound = counts @ seconds + seconds_to_free(ends, prices, counts @ memory - capacity)
        fits = counts @ self.smallest <= capacity
        if not there.all():
            fits &= ~(counts[:, ~there] > 0).any(axis=1)
        return np.where(fits, bound, np.inf)


def seconds_to_free(ends: Floats, prices: Floats, over: Floats) -> Floats:
    """Return [queries] the fewest seconds lost to free bytes, part of a step included.

    Args:
        ends: [queries, or 1, steps + 1] bytes freed after each step.
        prices: The seconds lost after each step.
        over: [queries] bytes to free; 0 seconds if not positive.
    """
    # `to` is the step in which enough memory is freed. Only a `share` of this step is taken.
    to = np.minimum((ends < over[:, None]).sum(axis=1), ends.shape[1] - 1)
    at = np.maximum(to - 1, 0)
    row = np.arange(len(over)) if len(ends) > 1 else np.zeros(len(over), dtype=np.int64)
    width = ends[row, to] - ends[row, at]
    share = np.where(width > 0, (over - ends[row, at]) / np.where(width > 0, width, 1.0), 1.0)
    price = prices[row, at] + share * (prices[row, to] - prices[row, at])
    return np.where(over > 0, price, 0.0)


def solve(
    menu: Options, counts: Counts, capacity: float, below: float = float("inf")
) -> KnapsackSolution:
    """Return the fastest choice of one option per block that fits into the capacity.

    Args:
        menu: The options.
        counts: [kinds] blocks of each kind.
        capacity: Bytes for all blocks together.
        below: Seconds of all blocks that the solution must beat.

    Returns:
        The solution; `NONE` if nothing fits or nothing is faster than `below`.
    """
    if menu.relaxed(counts, np.array([capacity]))[0] >= below:
        return NONE
    used = counts > 0
    if counts[used] @ menu.fastest[1][used] <= capacity:
        return _choice(menu, [(k, f[0], int(c)) for k, f, c in _used(menu, counts)])
    return _Labels(menu, counts, capacity, below).best()


def bytes_of(menu: Options, choice: KnapsackSolution) -> float:
    """Return the bytes of all blocks together with the options that a solution chooses."""
    counts = np.array(choice.option_counts)
    return float(np.where(counts > 0, counts * menu.memory, 0.0).sum())


def _used(menu: Options, counts: Counts) -> list[tuple[int, list[int], int]]:
    """Return (kind, undominated options, number of blocks) of each kind with at least one block."""
    return [(k, f, int(counts[k])) for k, f in enumerate(menu.fronts) if counts[k]]


def _choice(menu: Options, option_counts: Sequence[tuple[int, int, int]]) -> KnapsackSolution:
    """Build a solution from (kind, option, number of blocks) entries."""
    table = np.zeros(menu.seconds.shape, dtype=np.int64)
    for kind, option, count in option_counts:
        table[kind, option] += count
    chosen = table > 0
    seconds = float((table[chosen] * menu.seconds[chosen]).sum())
    return KnapsackSolution(seconds, tuple(tuple(map(int, row)) for row in table))


def _front(seconds: list[float], memory: list[float]) -> list[int]:
    """Return the indices of the undominated options of a kind, fastest first."""
    front, least = [], float("inf")
    for time_s, num_bytes, option in sorted(zip(seconds, memory, range(len(seconds)), strict=True)):
        if num_bytes < least and time_s < float("inf"):
            front.append(option)
            least = num_bytes
    return front


class _Labels:
    """Solve a knapsack by label setting, kind by kind.

    A label is a choice for the kinds decided so far, with its seconds and bytes.
    """

    def __init__(self, menu: Options, counts: Counts, capacity: float, below: float) -> None:
        self._menu, self._capacity = menu, capacity * (1 + _EPS)
        used = _used(menu, counts)
        self._kinds = sorted((k for k in used if len(k[1]) > 1), key=lambda kind: -len(kind[1]))
        self._alone = [k for k in used if len(k[1]) < 2]
        """Kinds with a single option, which leave nothing to decide."""
        self._below = below
        self._suffixes = self._rest(counts)

    def _rest(self, counts: Counts) -> list[Counts]:
        """Return one [kinds] array of undecided blocks for each number of decided kinds, from 0."""
        left, out = counts.copy(), [counts]
        for kind, _, _ in self._kinds:
            left[kind] = 0
            out.append(left.copy())
        return out

    def best(self) -> KnapsackSolution:
        """Return the fastest solution that fits; `NONE` if none is faster than the limit."""
        menu, counts = self._menu, self._suffixes[0]
        # A solution may exceed the LP bound by at most the gap between it and the first solution.
        limit = min(self._below, self._first()) * (1 + _EPS)
        slack = limit - float(menu.relaxed(counts, np.array([self._capacity]))[0])
        price = menu.price(counts, self._capacity)
        bytes_ranges = self._bytes_ranges(slack / price if price > 0 else np.inf)
        seconds, memory = np.zeros(1), np.zeros(1)
        layers: list[tuple[Counts, ParetoCounts]] = []
        for number, (kind, front, count) in enumerate(self._kinds):
            t, m = menu.seconds[kind, front], menu.memory[kind, front]
            mixes = pareto_counts_of(t, m, count, price, slack, bytes_ranges[number])
            # Combine every label with every combination of this kind: [labels * combinations].
            seconds = np.add.outer(seconds, mixes.seconds).ravel()
            memory = np.add.outer(memory, mixes.memory).ravel()
            # Keep labels whose LP completion is within the limit and that no other label beats.
            bounds = seconds + menu.relaxed(self._suffixes[number + 1], self._capacity - memory)
            within = np.flatnonzero(bounds <= limit)
            kept = within[undominated(seconds[within], memory[within])]
            if not len(kept):
                return NONE
            seconds, memory = seconds[kept], memory[kept]
            layers.append((kept, mixes))
        for kind, front, count in self._alone:
            seconds = seconds + count * menu.seconds[kind, front[0]]
            memory = memory + count * menu.memory[kind, front[0]]
        within = np.flatnonzero((seconds <= limit) & (memory <= self._capacity))
        if not len(within):
            return NONE
        first = int(within[np.lexsort((memory[within], seconds[within]))[0]])
        chosen = _choice(menu, self._trace(layers, first))
        return chosen if chosen.seconds < self._below else NONE

    def _bytes_ranges(self, unused: float) -> list[tuple[float, float]]:
        """Return (fewest, most) bytes that each kind's blocks may have in a better solution.

        Args:
            unused: Bytes of the capacity that such a solution may leave free: at the LP price,
                free bytes cost seconds, and more of them would exceed the slack.
        """
        kinds = [*self._kinds, *self._alone]
        memory = [(self._menu.memory[kind, front], count) for kind, front, count in kinds]
        least = [float(m.min()) * count for m, count in memory]
        most = [float(m.max()) * count for m, count in memory]
        low, high = (1 - _NEAR) * self._capacity - unused, (1 + _NEAR) * self._capacity
        return [
            (low - sum(most) + own_most, high - sum(least) + own_least)
            for own_least, own_most in zip(least, most, strict=True)
        ]

    def _trace(
        self, layers: list[tuple[Counts, ParetoCounts]], at: int
    ) -> list[tuple[int, int, int]]:
        """Return the choices behind a final label as (kind, option, number of blocks) entries.

        Args:
            layers: For each decided kind, the indices of the labels kept and the combinations of
                the kind.
            at: Index of the final label in the last layer.
        """
        out = [(kind, front[0], count) for kind, front, count in self._alone]
        for (kind, front, _), (kept, mixes) in reversed(
            list(zip(self._kinds, layers, strict=True))
        ):
            at, mix = divmod(int(kept[at]), len(mixes.option_counts))
            option_counts = mixes.option_counts[mix].tolist()
            out += [(kind, o, n) for o, n in zip(front, option_counts, strict=True) if n]
        return out

    def _first(self) -> float:
        """Return the seconds of a first solution; infinite if nothing fits.

        The solution is found greedily along the convex hulls and then improved by exchanges.
        """
        menu, counts = self._menu, self._suffixes[0]
        option_counts = np.zeros(menu.seconds.shape, dtype=np.int64)
        for kind, front, count in (*self._kinds, *self._alone):
            option_counts[kind, front[0]] = count
        used = counts > 0
        over = float(counts[used] @ menu.fastest[1][used]) - self._capacity
        for _, _, won, kind, source, target in menu._hulls:
            if over <= 0:
                break
            # The steps of a kind follow its hull, so its blocks have reached option `source`.
            many = min(int(counts[kind]), int(np.ceil(over / won)))
            option_counts[kind, source] -= many
            option_counts[kind, target] += many
            over -= many * won
        if over > 0:
            return float("inf")
        while self._exchange(option_counts):
            pass
        chosen = option_counts > 0
        return float((option_counts[chosen] * menu.seconds[chosen]).sum())

    def _exchange(self, option_counts: Counts) -> bool:
        """Change the option of one block, or of two, in place, if that is faster and fits.

        Returns:
            True if an option was changed.
        """
        menu, chosen = self._menu, option_counts > 0
        room = self._capacity - float((option_counts[chosen] * menu.memory[chosen]).sum())
        moves = [
            (kind, source, target)
            for kind, front, _ in self._kinds
            for source in front
            if option_counts[kind, source]
            for target in front
            if target != source
        ]
        kinds, sources, targets = np.array(moves).T
        lost = menu.seconds[kinds, targets] - menu.seconds[kinds, sources]
        more = menu.memory[kinds, targets] - menu.memory[kinds, sources]
        # Append a move that changes nothing, so that pairs of moves include single moves.
        lost, more = np.append(lost, 0.0), np.append(more, 0.0)
        number = np.append(kinds * menu.seconds.shape[1] + sources, -1)
        is_last = np.append(option_counts[kinds, sources] == 1, False)
        both = np.add.outer(lost, lost)
        is_open = np.add.outer(more, more) <= room
        # A block cannot move twice, so two moves from one option need two blocks with that option.
        is_open &= ~((number[:, None] == number) & is_last)
        both = np.where(is_open, both, np.inf)
        at = int(both.argmin())
        if not both.ravel()[at] < -_EPS * float(menu.seconds[chosen].max()):
            return False
        for move in divmod(at, len(lost)):
            if move < len(moves):
                kind, source, target = moves[move]
                option_counts[kind, source] -= 1
                option_counts[kind, target] += 1
        return True
