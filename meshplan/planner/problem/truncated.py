"""What a rank holds at the least, from a model with few of the blocks: seconds become a blink.

Alike blocks that do the same hold the same. So of many in a row five are replayed, and what the one
in the middle holds beyond its own time counts for all that were left out; of a pipeline's other
stages, one block each. The figure is what the streams' pools would hold of what the whole replay
requests, and never more: moments in which blocks that were left out would run are left out too. So
it may rule out, and nothing else. Beside it stands a guess of what is really reserved, which tells
where to look first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshplan.memory.answer.reserved import ReplayCache
from meshplan.memory.log.events import EventLog
from meshplan.model.graph import ModelGraph, around
from meshplan.planner.problem.overrides import BlockChoice
from meshplan.spec.spec import Spec

Numbers = NDArray[np.int64]
Blocks = int | tuple[int, ...]
"""How many there are, or which of a model's own."""

_KEPT: Final = 5
"""Of a row of alike blocks: those at its ends have other neighbours, and those beside them touch
what they hold."""
_FEW: Final = 0.8
"""Share of the blocks above which a model is hardly shorter: what is measured tells more, and ends
as soon as a rank is over."""


@dataclass(frozen=True, slots=True)
class Short:
    """A model with few blocks that stands for one with many.

    Args:
        graph: With as many blocks as `stages` have.
        stages: What each does.
        times: By the fqn of a block, how many blocks it stands for.
    """

    graph: ModelGraph
    stages: tuple[tuple[BlockChoice, ...], ...]
    times: Mapping[str, int]


def shorten(
    stages: Sequence[Sequence[BlockChoice]],
    place: int,
    graph_of: Callable[[Blocks], ModelGraph],
    *,
    num_ranks: int | None = None,
    looks: Mapping[str, int] = MappingProxyType({}),
) -> Short | None:
    """What one rank along the pipeline does, with few blocks; None where that is hardly shorter.

    Args:
        stages: What each block does.
        place: Of the rank.
        graph_of: The model with so many blocks, or with these of its own.
        num_ranks: Of the pipeline, which stages go around; None for one stage each.
        looks: By the fqn of a block, its kind; empty where all are alike.
    """
    num_ranks = len(stages) if num_ranks is None else num_ranks
    kept: list[list[tuple[BlockChoice, int]]] = []
    for number, blocks in enumerate(stages):
        if number % num_ranks != place:
            kept.append([(blocks[0], 1)])
            continue
        kept.append([])
        for _, same in itertools.groupby(
            blocks, key=lambda b: (b.recompute, b.reshard, looks.get(b.name))
        ):
            run = list(same)
            left_out = max(0, len(run) - _KEPT)
            middle = _KEPT // 2
            few = run[: middle + 1] + run[middle + 1 + left_out :]
            kept[-1] += [(b, 1 + left_out * (at == middle)) for at, b in enumerate(few)]
    count = sum(map(len, kept))
    if count > _FEW * sum(map(len, stages)):
        return None
    container = stages[0][0].name.rpartition(".")[0]
    names = (f"{container}.{number}" if container else str(number) for number in range(count))
    own = tuple(int(b.name.rpartition(".")[2]) for stage in kept for b, _ in stage if looks)
    times: dict[str, int] = {}
    short = []
    for stage in kept:
        named = []
        for block, many in stage:
            named.append(replace(block, name=next(names)))
            if many > 1:
                times[named[-1].name] = many
        short.append(tuple(named))
    return Short(graph_of(own or count), tuple(short), times)


class TruncatedBound:
    """What a short model's log tells of the rank of the whole one.

    Args:
        log: Of a rank of the short model.
    """

    def __init__(self, log: EventLog, short: Short) -> None:
        self._log, self._times = log, short.times
        order = [block.name for stage in short.stages for block in stage]
        # Whatever is of no block has the number 0.
        self._numbers = {name: number for number, name in enumerate(("", *order))}
        self._near = {
            self._numbers[name]: tuple(
                self._numbers[each] for each in order[max(at - 1, 0) : at + 2]
            )
            for at, name in enumerate(order)
            if name in short.times
        }

    @cached_property
    def least_bytes(self) -> int:
        """What is reserved at the least."""
        if not self._times:
            return self._log.pooled_bytes
        is_near = np.zeros(len(self._numbers), bool)
        is_near[list(self._near)] = True
        before, after = self._running
        counts = ~(is_near[before] | is_near[after])
        deltas = self._delta * (1 + self._left_out)[self._storage]
        streams = [each.stream for each in self._log.storages]
        stream = np.array(streams, np.int64)[self._storage]
        most = 0
        for own in (stream == number for number in set(streams)):
            most += int(np.cumsum(deltas[own])[counts[own]].max(initial=0))
        return most

    def likely_bytes(self, device: str, spec: Spec) -> int:
        """What may be reserved: a guess, above the truth or below it.

        What blocks that were left out hold when the most is there, beside what the allocator makes
        of the short log. How memory falls to pieces over many blocks, few do not tell.
        """
        reserved = ReplayCache(device, spec).of(self._log).reserve.reserved_bytes
        if not self._times:
            return reserved
        left_out = np.cumsum(self._delta * self._left_out[self._storage])
        held = np.cumsum(self._delta) + left_out
        fullest = int(np.argmax(held)) if held.size else 0
        then = int(left_out[fullest]) if held.size and held[fullest] > 0 else 0
        return reserved + then

    @cached_property
    def _columns(self) -> tuple[Numbers, Numbers, Numbers]:
        """Of each event its delta, its storage and its phase."""
        columns = np.array([*zip(*self._log.changes, strict=True)], np.int64).reshape(3, -1)
        return columns[0], columns[1], columns[2]

    @property
    def _delta(self) -> Numbers:
        return self._columns[0]

    @property
    def _storage(self) -> Numbers:
        return self._columns[1]

    @cached_property
    def _left_out(self) -> Numbers:
        """By storage, how many more blocks hold one like it while it lasts."""
        many = np.ones(len(self._numbers), np.int64)
        for name, times in self._times.items():
            many[self._numbers[name]] = times
        return np.where(self._lasting, many[self._block] - 1, 0)

    @cached_property
    def _lasting(self) -> NDArray[np.bool_]:
        """By storage, whether it is of a block that stands for many, and there when none near runs.

        What a unit gathers before its turn, or reduces after it, is there once, however many there
        are.
        """
        out = np.zeros(len(self._log.storages), bool)
        if not self._near:
            return out
        # By storage, and of each in order: from one event to the next it is there, or not.
        order = np.argsort(self._storage, kind="stable")
        storage, total = self._storage[order], np.cumsum(self._delta[order])
        is_last = np.append(storage[1:] != storage[:-1], True)
        others = np.append(0, total[:-1])[np.searchsorted(storage, storage)]
        until = np.where(is_last, len(order), np.append(order[1:], 0))
        of, is_there = self._block[storage], total != others
        before, after = self._running
        for block, near in self._near.items():
            own = is_there & (of == block)
            is_apart = ~(np.isin(before, near) | np.isin(after, near))
            so_far = np.append(0, np.cumsum(is_apart))
            out[storage[own][so_far[until[own]] > so_far[order[own]]]] = True
        return out

    @cached_property
    def _block(self) -> Numbers:
        """By storage, the number of the block that it is of."""
        modules = [each.module for each in self._log.storages]
        known = {
            module: next((self._numbers[m] for m in around(module) if m in self._numbers), 0)
            for module in set(modules)
        }
        return np.array([known[module] for module in modules], np.int64)

    @cached_property
    def _running(self) -> tuple[Numbers, Numbers]:
        """By event, the blocks whose operators made something last, and will next; 0 for none."""
        has_op = np.array([bool(each.op) for each in self._log.storages], bool)
        makes = (self._delta > 0) & has_op[self._storage]
        block, phase = self._block[self._storage], self._columns[2]
        before = _last(makes, block, phase)
        return before, _last(makes[::-1], block[::-1], phase[::-1])[::-1]


def _last(makes: NDArray[np.bool_], block: Numbers, phase: Numbers) -> Numbers:
    """By event, the block whose operator was the last of its phase to make something."""
    if not block.size:
        return block
    places = np.arange(len(block))
    begun = np.maximum.accumulate(np.where(np.append(True, phase[1:] != phase[:-1]), places, 0))
    made = np.maximum.accumulate(np.where(makes, places, -1))
    return np.where(made >= begun, block[made], 0)
