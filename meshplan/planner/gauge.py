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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

from meshplan.graph import ModelGraph, around
from meshplan.memory.allocator import reserve
from meshplan.memory.driver import with_workspaces
from meshplan.memory.log import Event, EventLog
from meshplan.planner.settle import Block

Blocks = int | tuple[int, ...]
"""How many there are, or which of a model's own."""

_KEPT: Final = 5
"""Of a row of alike blocks: those at its ends have other neighbours, and those beside them touch
what they hold."""


@dataclass(frozen=True, slots=True)
class Short:
    """A model with few blocks that stands for one with many.

    Args:
        graph: With as many blocks as `stages` have.
        stages: What each does.
        times: By the fqn of a block, how many blocks it stands for.
    """

    graph: ModelGraph
    stages: tuple[tuple[Block, ...], ...]
    times: Mapping[str, int]


def shorten(
    stages: Sequence[Sequence[Block]],
    place: int,
    graph_of: Callable[[Blocks], ModelGraph],
    *,
    num_ranks: int | None = None,
    looks: Mapping[str, int] = MappingProxyType({}),
) -> Short | None:
    """What one rank along the pipeline does, with few blocks; None where that is no shorter.

    Args:
        stages: What each block does.
        place: Of the rank.
        graph_of: The model with so many blocks, or with these of its own.
        num_ranks: Of the pipeline, which stages go around; None for one stage each.
        looks: By the fqn of a block, its kind; empty where all are alike.
    """
    num_ranks = len(stages) if num_ranks is None else num_ranks
    kept: list[list[tuple[Block, int]]] = []
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
    if count == sum(map(len, stages)):
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


class Gauge:
    """What a short model's log tells of the rank of the whole one.

    Args:
        log: Of a rank of the short model.
    """

    def __init__(self, log: EventLog, short: Short) -> None:
        self._log, self._short = log, short
        self._block_of = _Blocks(log, {block.name for stage in short.stages for block in stage})

    @cached_property
    def least_bytes(self) -> int:
        """What is reserved at the least."""
        log, times, block_of = self._log, self._short.times, self._block_of
        if not times:
            return log.pooled_bytes
        live: dict[int, int] = {}
        most: dict[int, int] = {}
        for (delta, storage, _), (before, after) in zip(log.events, block_of.running, strict=True):
            many = times.get(block_of[storage], 1) if storage in self._lasting else 1
            stream = log.storages[storage].stream
            live[stream] = held = live.get(stream, 0) + delta * many
            if before not in times and after not in times and held > most.get(stream, 0):
                most[stream] = held
        return sum(most.values())

    def likely_bytes(self, device: str) -> int:
        """What may be reserved: a guess, above the truth or below it.

        What blocks that were left out hold when the most is there, beside what the allocator makes
        of the short log. How memory falls to pieces over many blocks, few do not tell.
        """
        live = left_out = most = then = 0
        for delta, storage, _ in self._log.events:
            live += delta
            if storage in self._lasting:
                left_out += delta * (self._short.times[self._block_of[storage]] - 1)
            if live + left_out > most:
                most, then = live + left_out, left_out
        return reserve(with_workspaces(self._log, device)).reserved_bytes + then

    @cached_property
    def _lasting(self) -> set[int]:
        """Storages of blocks that stand for many, which are there when none near them runs.

        What a unit gathers before its turn, or reduces after it, is there once, however many there
        are.
        """
        block_of, times = self._block_of, self._short.times
        order = [block.name for stage in self._short.stages for block in stage]
        near = {
            name: {*order[max(at - 1, 0) : at + 2]}
            for at, name in enumerate(order)
            if name in times
        }
        waiting: set[int] = set()
        lasting: set[int] = set()
        sizes: dict[int, int] = {}
        ran: tuple[str, str] | None = None
        for (delta, storage, _), running in zip(self._log.events, block_of.running, strict=True):
            name = block_of[storage]
            looked_at: Iterable[int] = waiting if running != ran else ()
            if name in near:
                sizes[storage] = size = sizes.get(storage, 0) + delta
                if not size:
                    waiting.discard(storage)
                elif storage not in waiting:
                    waiting.add(storage)
                    looked_at = looked_at or (storage,)
            done = [each for each in looked_at if near[block_of[each]].isdisjoint(running)]
            lasting.update(done)
            waiting.difference_update(done)
            ran = running
        return lasting


class _Blocks:
    """Which block each storage is of, and which one runs."""

    def __init__(self, log: EventLog, blocks: set[str]) -> None:
        self._log = log
        known: dict[str, str] = {}
        self._of: list[str] = []
        for each in log.storages:
            if each.module not in known:
                known[each.module] = next((m for m in around(each.module) if m in blocks), "")
            self._of.append(known[each.module])

    def __getitem__(self, storage: int) -> str:
        return self._of[storage]

    @cached_property
    def running(self) -> Sequence[tuple[str, str]]:
        """By event, the blocks whose operators made something last, and will next; "" for none."""
        events = self._log.events
        after = [*self._last(events[::-1])]
        return [*zip(self._last(events), reversed(after), strict=True)]

    def _last(self, events: Sequence[Event]) -> Iterator[str]:
        """By event, the block whose operator was the last of its phase to make something."""
        running, now = "", -1
        for delta, storage, phase in events:
            if phase != now:
                running, now = "", phase
            if delta > 0 and self._log.storages[storage].op:
                running = self._of[storage]
            yield running
