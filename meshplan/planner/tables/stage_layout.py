"""Distribute the blocks of one configuration over the ranks of its pipeline.

With one stage per rank, each rank has a contiguous range of blocks. With several stages per rank,
the stages go round the ranks (rank r has stages r, r + pp, ...). All blocks are then identical, so
only their number on a rank counts, and a rank divides it evenly among its stages. In both cases a
layout is represented as a cut of the line of blocks into one range per rank. With several stages
per rank, only the length of a range has a meaning.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np

from meshplan.cost.grid import GRID
from meshplan.planner.knapsack.knapsack import Counts, Options
from meshplan.planner.tables.cost_table import CostTable, alike
from meshplan.planner.tables.in_flight import had_backward, in_flight_of, outputs_in_flight

Takes = tuple[tuple[int, ...], ...]
"""[kind][option] number of blocks that take each option."""
_MOST_KNOWN: Final = 256
"""Most entries of each cache below. Many configurations have ranks with equal ranges."""


class BlockRanges(NamedTuple):
    """The ranges of the line of blocks that one rank may have.

    Attributes:
        made_of: [sets, kinds] distinct block counts, with the kinds of the rank's `Options`.
        at: [ranges] index of each range in a flattened [begin, end] table.
        contents: [ranges] index of each range's contents in `made_of`.
    """

    made_of: Counts
    at: Counts
    contents: Counts


class StageLayout:
    """The layout of a configuration with one stage per rank.

    Attributes:
        num: Number of ranks of the pipeline.
        menus: The `Options` of each rank's blocks.
        extra_bytes: Bytes of each rank in addition to those of its blocks.
        places: Number of places where the line may be cut: before each block, and after the last.
    """

    def __init__(self, table: CostTable, row: int) -> None:
        self._cost_table, config = table, table.grid[row]
        self.num = int(config["pp"])
        self._kept, self._had, outputs = _scheduled(
            *(int(config[name]) for name in ("pp", "virtual", "microbatches", "schedule"))
        )
        self.menus = self._menus(row)
        waiting = [sum(each) for each in outputs]
        # The last stage sends no output, and the first stage's output counts as its input already.
        waiting[0] -= outputs[0][0]
        waiting[-1] -= outputs[-1][-1] * (self.num > 1)
        self.extra_bytes = [
            table.extra_bytes(row, rank) + float(table.sent[row]) * many
            for rank, many in enumerate(waiting)
        ]
        self.places = len(table.order) + 1
        self._pinned = tuple(
            (place, stage if stage >= 0 else self.num - 1)
            for place, stage in enumerate(table.stages)
            if stage is not None
        )

    def _menus(self, row: int) -> list[Options]:
        # Ranks with equally many microbatches in flight share one `Options`, and so its caches.
        keys = [(each[0], had) for each, had in zip(self._kept, self._had, strict=True)]
        known = {
            key: self._cost_table.menu(row, key[0], had_backward=key[1])
            for key in dict.fromkeys(keys)
        }
        return [known[key] for key in keys]

    def counts(self, rank: int, i: Counts | int, j: Counts | int) -> Counts:
        """Return the [..., kinds] numbers of blocks in the range from place i up to place j."""
        before = self._cost_table.before
        return np.asarray(before[j] - before[i])

    def stretches(self, rank: int) -> BlockRanges:
        """Return the block ranges that a rank may have."""
        table = self._cost_table
        is_block, kinds = tuple(table.is_block.tolist()), len(table.counts)
        starts = table.starts or is_block
        at, contents = _in_line(self.num, rank, table.order, kinds, is_block, starts, self._pinned)
        return BlockRanges(table.alike[0], at, contents)

    def stages(
        self, ends: Sequence[int], option_counts: Sequence[Takes]
    ) -> tuple[tuple[int, ...], tuple[Takes, ...]]:
        """Return (boundaries of all stages in the order of the model, option counts of each stage).

        Args:
            ends: Boundaries of the ranks' ranges, 0 first.
            option_counts: Option counts of each rank, by kind of its `Options`.
        """
        return tuple(ends), tuple(option_counts)


class Rounds(StageLayout):
    """The layout of identical blocks for a configuration with several stages per rank.

    A rank's stages differ by at most one block. Longer stages come last, where the fewest
    microbatches are in flight. On the last rank they come first, since its last stage has the loss.
    """

    def __init__(self, table: CostTable, row: int) -> None:
        self._virtual = int(table.grid[row]["virtual"])
        super().__init__(table, row)
        self._begin, self._block, self._length = blocks_in(table)
        self.places = self._length + 1
        self._kinds = len(table.counts)
        self._tables: dict[int, Counts] = {}

    @cached_property
    def _groups(self) -> list[list[float]]:
        """For each rank, the distinct microbatches in flight on its stages, most first."""
        return [sorted(set(each), reverse=True) for each in self._kept]

    def _menus(self, row: int) -> list[Options]:
        # Stages with equally many microbatches in flight form a group. A rank's `Options` list
        # every kind once per group: [groups * kinds, options].
        keys = [(tuple(each), self._had_backward(rank)) for rank, each in enumerate(self._groups)]
        known: dict[tuple[tuple[float, ...], float], Options] = {}
        for groups, began in keys:
            if (groups, began) not in known:
                menus = [
                    self._cost_table.menu(row, each, had_backward=each == began) for each in groups
                ]
                known[groups, began] = menus[0] if len(menus) == 1 else Options(
                    np.concatenate([m.seconds for m in menus]),
                    np.concatenate([m.memory for m in menus]),
                )  # fmt: skip
        return [known[key] for key in keys]

    def _had_backward(self, rank: int) -> float:
        """Return the microbatches in flight of the group that has had a backward; -1 if none."""
        *others, last = self._kept[rank]
        return last if self._had[rank] and last not in others else -1.0

    def sizes(self, rank: int, blocks: Counts) -> Counts:
        """Return [..., virtual] numbers of blocks of each stage of a rank.

        Args:
            rank: Rank along pp.
            blocks: [...] numbers of blocks that the rank may have.
        """
        each, more = np.divmod(blocks[..., None], self._virtual)
        turns = np.arange(self._virtual)
        is_long = turns < more if rank == self.num - 1 else turns >= self._virtual - more
        return np.asarray(each + is_long)

    def counts(self, rank: int, i: Counts | int, j: Counts | int) -> Counts:
        """Return the [..., groups * kinds] numbers of blocks in a rank's range from i up to j."""
        if rank not in self._tables:
            self._tables[rank] = self._table(rank)
        return np.asarray(self._tables[rank][np.asarray(j) - np.asarray(i)])

    def _table(self, rank: int) -> Counts:
        """Return [length + 1, groups * kinds] counts of a rank, by its number of blocks.

        The first and the last rank also count the places before and after the blocks.
        """
        groups, kept = self._groups[rank], self._kept[rank]
        group_of = [groups.index(microbatches) for microbatches in kept]
        lengths = np.arange(self._length + 1)
        sizes = self.sizes(rank, lengths)
        out = np.zeros((len(lengths), len(groups), self._kinds), dtype=np.int64)
        for chunk, group in enumerate(group_of):
            out[:, group, self._block] += sizes[:, chunk]
        order = self._cost_table.order
        if rank == 0:
            for kind in order[: self._begin]:
                out[:, group_of[0], kind] += 1
        if rank == self.num - 1:
            for kind in order[self._begin + self._length :]:
                out[:, group_of[-1], kind] += 1
        return out.reshape(len(lengths), -1)

    def stretches(self, rank: int) -> BlockRanges:
        """Return the block ranges that a rank may have; equal lengths mean equal blocks."""
        at, lengths, contents = _in_rounds(self.num, rank, self._virtual, self._length)
        return BlockRanges(self.counts(rank, 0 * lengths, lengths), at, contents)

    def stages(
        self, ends: Sequence[int], option_counts: Sequence[Takes]
    ) -> tuple[tuple[int, ...], tuple[Takes, ...]]:
        """Return (boundaries of all stages in the order of the model, option counts of each stage).

        A group's option counts are divided among its stages: the earlier ones get the later entries
        of `cost.grid.OPTIONS`, which recompute more.
        """
        blocks = np.diff(ends)
        sizes = [self.sizes(rank, np.asarray(each)).tolist() for rank, each in enumerate(blocks)]
        lengths = [rank[chunk] for chunk in range(self._virtual) for rank in sizes]
        all_ends = [0, *itertools.accumulate(lengths, initial=self._begin)]
        del all_ends[1]
        all_ends[-1] = len(self._cost_table.order)
        left = [np.array(each).reshape(len(g), self._kinds, -1)
                for each, g in zip(option_counts, self._groups, strict=True)]  # fmt: skip
        out: list[Takes] = []
        last = self._virtual - 1, self.num - 1
        for place in itertools.product(range(self._virtual), range(self.num)):
            chunk, rank = place
            group = left[rank][self._groups[rank].index(self._kept[rank][chunk])]
            own = np.zeros_like(group)
            for kind in range(self._kinds):
                many = sizes[rank][chunk] if kind == self._block else 0
                many += self._ends_of(kind, place == (0, 0), place == last)
                for option in reversed(range(group.shape[1])):
                    own[kind, option] = taken = min(many, int(group[kind, option]))
                    many -= taken
            group -= own
            out.append(tuple(tuple(map(int, options)) for options in own))
        return tuple(all_ends), tuple(out)

    def _ends_of(self, kind: int, is_first: bool, is_last: bool) -> int:
        """Return the number of places of a kind before or after the blocks that a stage has.

        Args:
            kind: Index of the kind.
            is_first: If True, the stage has the places before the blocks.
            is_last: If True, the stage has the places after the blocks.
        """
        order = self._cost_table.order
        before = order[: self._begin].count(kind) if is_first else 0
        return before + (order[self._begin + self._length :].count(kind) if is_last else 0)


@lru_cache(maxsize=_MOST_KNOWN)
def _scheduled(
    ranks: int, virtual: int, microbatches: int, schedule: int
) -> tuple[tuple[tuple[float, ...], ...], tuple[bool, ...], tuple[tuple[float, ...], ...]]:
    """Return (`in_flight_of`, `had_backward`, `outputs_in_flight`), each with a value per rank."""
    config = np.zeros(1, GRID)[0]
    config["pp"], config["virtual"] = ranks, virtual
    config["microbatches"], config["schedule"] = microbatches, schedule
    every = range(ranks)
    return (
        tuple(in_flight_of(config, rank) for rank in every),
        tuple(had_backward(config, rank) for rank in every),
        tuple(outputs_in_flight(config, rank) for rank in every),
    )


@lru_cache(maxsize=_MOST_KNOWN)
def _in_line(
    num: int,
    rank: int,
    order: tuple[int, ...],
    kinds: int,
    is_block: tuple[bool, ...],
    starts: tuple[bool, ...],
    pinned: tuple[tuple[int, int], ...],
) -> tuple[Counts, Counts]:
    """Return the block ranges that a rank may have, with one stage per rank.

    Every range contains a block, and every range but the first begins with one of `starts`. Places
    outside the blocks go with the block before them, or with the first rank. At least one place is
    left for each rank before and after.

    Args:
        num: Number of ranks.
        rank: Rank along pp.
        order: Kind of each place.
        kinds: Number of kinds.
        is_block: True for each place that is a block.
        starts: True for each block that a range may begin with.
        pinned: (place, rank) of the places whose rank is fixed.

    Returns:
        ([ranges] indices in a flattened [begin, end] table, [ranges] indices of their contents in
        `alike`).
    """
    last = len(is_block)
    # Mask the places where a range may begin or end: at a block, and at the very first place. Then
    # test all pairs i < j: [pairs].
    can_begin = np.append(np.logical_and(is_block, starts), False)
    can_begin[0] = True
    can_end = np.append(False, np.logical_or.accumulate(is_block))
    i, j = np.triu_indices(last + 1, 1)
    is_open = (i >= rank) & (j <= last + 1 - num + rank)
    is_open &= (i == 0) == (rank == 0)
    is_open &= (j == last) == (rank == num - 1)
    for place, own in pinned:
        if rank == own:
            is_open &= (i <= place) & (place < j)
    is_open &= can_begin[i] & can_end[j]
    at, contents = (i * (last + 1) + j)[is_open], alike(order, kinds)[1][i, j][is_open]
    return _kept(at), _kept(contents)


@lru_cache(maxsize=_MOST_KNOWN)
def _in_rounds(num: int, rank: int, virtual: int, length: int) -> tuple[Counts, Counts, Counts]:
    """Return the block ranges that a rank may have so that every stage of the pipeline has a block.

    Returns:
        ([ranges] indices in a flattened [begin, end] table, [lengths] distinct lengths of ranges,
        [ranges] indices of each range's length among these).
    """
    i, j = np.triu_indices(length + 1, 1)
    is_open = (j - i >= virtual) & (i >= rank * virtual)
    is_open &= length - j >= (num - 1 - rank) * virtual
    is_open &= ((i == 0) == (rank == 0)) & ((j == length) == (rank == num - 1))
    lengths, contents = np.unique((j - i)[is_open], return_inverse=True)
    at = (i * (length + 1) + j)[is_open]
    return _kept(at), _kept(lengths), _kept(contents)


def _kept(values: Counts) -> Counts:
    """Make an array read-only, since a cache shares it, and return it."""
    values.setflags(write=False)
    return values


def stage_layout_of(table: CostTable, row: int) -> StageLayout:
    """Return the stage layout of one configuration, which the table caches."""
    if row not in table.stage_layouts:
        kind = Rounds if int(table.grid[row]["virtual"]) > 1 else StageLayout
        table.stage_layouts[row] = kind(table, row)
    layout: StageLayout = table.stage_layouts[row]
    return layout


NOT_ALIKE: Final = "its blocks are not all alike, and only alike ones are shared out over rounds"


def are_alike(table: CostTable) -> bool:
    """Return True if all blocks are identical, as several stages per rank require."""
    return len({table.order[n] for n, name in enumerate(table.names) if name}) == 1


def blocks_in(table: CostTable) -> tuple[int, int, int]:
    """Return (place of the first block in `order`, kind of the blocks, number of blocks).

    The blocks must be identical and contiguous.
    """
    named = np.flatnonzero(table.is_block).tolist()
    kinds = {table.order[n] for n in named}
    assert len(kinds) == 1, NOT_ALIKE
    assert named == [*range(named[0], named[-1] + 1)], NOT_ALIKE
    return named[0], kinds.pop(), len(named)
