"""One option for each block, the least time, within a memory: a multiple-choice knapsack, exactly.

Alike blocks are one kind with a count, so that their symmetry costs nothing. The linear relaxation
bounds, a greedy filling that single exchanges make better gives a first answer, options whose
reduced cost exceeds the gap are dropped, and what is left is decided label by label with dominance.

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
"""Of seconds and bytes relative to their size: less than that is rounding."""
_NEAR: Final = 1e-6
"""Of the capacity: what rounding may take of an answer."""


@dataclass(frozen=True, slots=True)
class KnapsackSolution:
    """An answer.

    Attributes:
        seconds: Of all blocks; infinite where nothing fits.
        takes: By kind, how many blocks take each of the kind's options.
    """

    seconds: float
    takes: tuple[tuple[int, ...], ...] = ()


NONE: Final = KnapsackSolution(float("inf"))


class _Trade(NamedTuple):
    """From one option of a kind to another that holds less.

    Attributes:
        slope: Seconds that a byte costs.
    """

    slope: float
    lost: float
    won: float
    kind: int
    source: int
    target: int


class Options:
    """What the blocks of each kind may choose.

    Args:
        seconds: [kinds, options]; infinite where a kind does not have an option.
        memory: [kinds, options] bytes.
    """

    def __init__(self, seconds: Floats, memory: Floats) -> None:
        self.seconds, self.memory = seconds, memory

    @cached_property
    def fronts(self) -> list[list[int]]:
        """By kind, the options that no other one beats, fastest first."""
        # There are few options, and many menus: lists take a tenth of what arrays do.
        return [
            _front(t, m) for t, m in zip(self.seconds.tolist(), self.memory.tolist(), strict=True)
        ]

    @cached_property
    def _hulls(self) -> list[_Trade]:
        """The steps along the convex hulls, cheapest first."""
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
        """(seconds lost, bytes won, kind) of each."""
        lost, won = (np.array([step[n] for step in self._hulls]) for n in (1, 2))
        return lost, won, np.array([step.kind for step in self._hulls], dtype=np.int64)

    @cached_property
    def fastest(self) -> tuple[Floats, Floats]:
        """(seconds, bytes) of one block of each kind at its fastest; infinite without an option."""
        first = [front[0] if len(front) else 0 for front in self.fronts]
        kinds = np.arange(len(first))
        return self.seconds[kinds, first], self.memory[kinds, first]

    @cached_property
    def there(self) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """`fastest` with nothing where a kind has no option, and whether it has one."""
        there = np.isfinite(self.fastest[0])
        seconds, memory = (np.where(there, each, 0.0) for each in self.fastest)
        return seconds, memory, there

    @cached_property
    def smallest(self) -> Floats:
        """Bytes of one block of each kind at its smallest."""
        last = [front[-1] if len(front) else 0 for front in self.fronts]
        return self.memory[np.arange(len(last)), last]

    def price(self, counts: Counts, capacity: float) -> float:
        """Seconds that a byte is worth where the relaxation ends.

        Any number would do for `pareto_counts_of`; this one leaves the least to decide.
        """
        used = counts > 0
        over = float(counts[used] @ self.fastest[1][used]) - capacity
        lost, won, kinds = self.steps
        at = int(np.searchsorted(np.cumsum(counts[kinds] * won), over))
        at = min(at, len(lost) - 1)
        return float(lost[at] / won[at])

    def relaxed(self, counts: Counts, capacity: Floats) -> Floats:
        """Bounds from below on the seconds; infinite where nothing fits.

        Args:
            counts: [kinds] or [questions, kinds].
            capacity: [questions], or [1] for all.
        """
        counts = counts.reshape(-1, len(self.seconds))
        seconds, memory, there = self.there
        lost, won, kinds = self.steps
        many = counts[:, kinds]
        ends, prices = np.zeros((2, len(counts), len(kinds) + 1))
        np.cumsum(many * won, axis=1, out=ends[:, 1:])
        np.cumsum(many * lost, axis=1, out=prices[:, 1:])
        over = counts @ memory - capacity
        # The step that the memory is won in, and how far into it.
        to = np.minimum((ends < over[:, None]).sum(axis=1), ends.shape[1] - 1)
        at = np.maximum(to - 1, 0)
        row = np.arange(len(over)) if len(counts) > 1 else np.zeros(len(over), dtype=np.int64)
        width = ends[row, to] - ends[row, at]
        share = np.where(width > 0, (over - ends[row, at]) / np.where(width > 0, width, 1.0), 1.0)
        price = prices[row, at] + share * (prices[row, to] - prices[row, at])
        bound = counts @ seconds + np.where(over > 0, price, 0.0)
        fits = counts @ self.smallest <= capacity
        if not there.all():
            fits &= ~(counts[:, ~there] > 0).any(axis=1)
        return np.where(fits, bound, np.inf)


def solve(
    menu: Options, counts: Counts, capacity: float, below: float = float("inf")
) -> KnapsackSolution:
    """The fastest choice for so many blocks of each kind.

    Args:
        capacity: Bytes for all blocks together.
        below: Only choices faster than this are of interest.

    Returns:
        NONE where nothing fits, or nothing is fast enough.
    """
    if menu.relaxed(counts, np.array([capacity]))[0] >= below:
        return NONE
    used = counts > 0
    if counts[used] @ menu.fastest[1][used] <= capacity:
        return _choice(menu, [(k, f[0], int(c)) for k, f, c in _used(menu, counts)])
    return _Labels(menu, counts, capacity, below).best()


def _used(menu: Options, counts: Counts) -> list[tuple[int, list[int], int]]:
    return [(k, f, int(counts[k])) for k, f in enumerate(menu.fronts) if counts[k]]


def _choice(menu: Options, takes: Sequence[tuple[int, int, int]]) -> KnapsackSolution:
    """Of (kind, option, how many)."""
    table = np.zeros(menu.seconds.shape, dtype=np.int64)
    for kind, option, count in takes:
        table[kind, option] += count
    chosen = table > 0
    seconds = float((table[chosen] * menu.seconds[chosen]).sum())
    return KnapsackSolution(seconds, tuple(tuple(map(int, row)) for row in table))


def _front(seconds: list[float], memory: list[float]) -> list[int]:
    """The options that are there and that no other beats, by increasing time."""
    front, least = [], float("inf")
    for time_s, held, option in sorted(zip(seconds, memory, range(len(seconds)), strict=True)):
        if held < least and time_s < float("inf"):
            front.append(option)
            least = held
    return front


class _Labels:
    """Decides kind by kind; a label is what the kinds so far take together."""

    def __init__(self, menu: Options, counts: Counts, capacity: float, below: float) -> None:
        self._menu, self._capacity = menu, capacity * (1 + _EPS)
        used = _used(menu, counts)
        self._kinds = sorted((k for k in used if len(k[1]) > 1), key=lambda kind: -len(kind[1]))
        self._alone = [k for k in used if len(k[1]) < 2]
        """Those that have nothing to decide."""
        self._below = below
        self._suffixes = self._rest(counts)

    def _rest(self, counts: Counts) -> list[Counts]:
        """By number of decided kinds, the counts of those that are left; all of them at first."""
        left, out = counts.copy(), [counts]
        for kind, _, _ in self._kinds:
            left[kind] = 0
            out.append(left.copy())
        return out

    def best(self) -> KnapsackSolution:
        """The fastest choice that fits; NONE where none is fast enough."""
        menu, counts = self._menu, self._suffixes[0]
        limit = min(self._below, self._first()) * (1 + _EPS)
        slack = limit - float(menu.relaxed(counts, np.array([self._capacity]))[0])
        price = menu.price(counts, self._capacity)
        held = self._held(slack / price if price > 0 else np.inf)
        seconds, memory = np.zeros(1), np.zeros(1)
        layers: list[tuple[Counts, ParetoCounts]] = []
        for number, (kind, front, count) in enumerate(self._kinds):
            t, m = menu.seconds[kind, front], menu.memory[kind, front]
            mixes = pareto_counts_of(t, m, count, price, slack, held[number])
            seconds = np.add.outer(seconds, mixes.seconds).ravel()
            memory = np.add.outer(memory, mixes.memory).ravel()
            bounds = seconds + menu.relaxed(self._suffixes[number + 1], self._capacity - memory)
            hopeful = np.flatnonzero(bounds <= limit)
            kept = hopeful[undominated(seconds[hopeful], memory[hopeful])]
            if not len(kept):
                return NONE
            seconds, memory = seconds[kept], memory[kept]
            layers.append((kept, mixes))
        for kind, front, count in self._alone:
            seconds = seconds + count * menu.seconds[kind, front[0]]
            memory = memory + count * menu.memory[kind, front[0]]
        hopeful = np.flatnonzero((seconds <= limit) & (memory <= self._capacity))
        if not len(hopeful):
            return NONE
        first = int(hopeful[np.lexsort((memory[hopeful], seconds[hopeful]))[0]])
        chosen = _choice(menu, self._trace(layers, first))
        return chosen if chosen.seconds < self._below else NONE

    def _held(self, unused: float) -> list[tuple[float, float]]:
        """By kind, bytes of its blocks at the least and at the most in an answer.

        Args:
            unused: Bytes of the capacity that may be left: at their price they cost the slack.
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
        """(kind, option, how many) that a last label is made of."""
        out = [(kind, front[0], count) for kind, front, count in self._alone]
        for (kind, front, _), (kept, mixes) in reversed(
            list(zip(self._kinds, layers, strict=True))
        ):
            at, mix = divmod(int(kept[at]), len(mixes.takes))
            takes = mixes.takes[mix].tolist()
            out += [(kind, o, n) for o, n in zip(front, takes, strict=True) if n]
        return out

    def _first(self) -> float:
        """Seconds of a choice that fits, found greedily along the hulls, then made better."""
        menu, counts = self._menu, self._suffixes[0]
        takes = np.zeros(menu.seconds.shape, dtype=np.int64)
        for kind, front, count in (*self._kinds, *self._alone):
            takes[kind, front[0]] = count
        used = counts > 0
        over = float(counts[used] @ menu.fastest[1][used]) - self._capacity
        for _, _, won, kind, source, target in menu._hulls:
            if over <= 0:
                break
            # Steps of one kind come in the order of its hull, so whole steps stay options.
            many = min(int(counts[kind]), int(np.ceil(over / won)))
            takes[kind, source] -= many
            takes[kind, target] += many
            over -= many * won
        if over > 0:
            return float("inf")
        while self._exchange(takes):
            pass
        chosen = takes > 0
        return float((takes[chosen] * menu.seconds[chosen]).sum())

    def _exchange(self, takes: Counts) -> bool:
        """Let one block, or two, choose otherwise, if that is faster and fits."""
        menu, chosen = self._menu, takes > 0
        room = self._capacity - float((takes[chosen] * menu.memory[chosen]).sum())
        moves = [
            (kind, source, target)
            for kind, front, _ in self._kinds
            for source in front
            if takes[kind, source]
            for target in front
            if target != source
        ]
        kinds, sources, targets = np.array(moves).T
        lost = menu.seconds[kinds, targets] - menu.seconds[kinds, sources]
        more = menu.memory[kinds, targets] - menu.memory[kinds, sources]
        # The last one is to leave all as it is.
        lost, more = np.append(lost, 0.0), np.append(more, 0.0)
        number = np.append(kinds * menu.seconds.shape[1] + sources, -1)
        is_last = np.append(takes[kinds, sources] == 1, False)
        both = np.add.outer(lost, lost)
        is_open = np.add.outer(more, more) <= room
        is_open &= ~((number[:, None] == number) & is_last)
        both = np.where(is_open, both, np.inf)
        at = int(both.argmin())
        if not both.ravel()[at] < -_EPS * float(menu.seconds[chosen].max()):
            return False
        for move in divmod(at, len(lost)):
            if move < len(moves):
                kind, source, target = moves[move]
                takes[kind, source] -= 1
                takes[kind, target] += 1
        return True
