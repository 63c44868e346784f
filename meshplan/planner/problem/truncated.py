"""A lower bound on a rank's reserved memory, from a model with most of its blocks left out.

Identical blocks with identical choices save the same activations. We therefore replay five blocks
of a run of identical ones, and multiply what the middle block keeps beyond its own forward and
backward by the number of blocks left out. The bound sums the peaks of the CUDA streams' memory
pools, and never exceeds what a full replay would reserve: events at which left-out blocks would run
are not counted. The bound can therefore exclude a plan, but never accept one. A guess of the bytes
really reserved decides which plans to examine first.

Models that are cut into pipeline stages are not truncated: a stage is replayed as fast as it would
be bounded.
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

Ints = NDArray[np.int64]
Blocks = int | tuple[int, ...]
"""A number of blocks, or the indices of the model's blocks to keep."""

_KEPT: Final = 5
"""Number of blocks kept of a run of identical blocks. The first and the last have other neighbours,
and the second and the last but one share storages with them, so only the middle one is typical."""
_FEW: Final = 0.8
"""Share of blocks kept above which truncation does not pay off: the full estimate takes hardly
longer, and stops as soon as one rank exceeds the limit."""


@dataclass(frozen=True, slots=True)
class Short:
    """A truncated model that stands for one with more blocks.

    Args:
        graph: The truncated model; its blocks are those of `blocks`.
        blocks: Choices of the truncated model's blocks.
        times: {fqn of a block: number of blocks of the full model that it stands for}, without
            blocks that stand only for themselves.
    """

    graph: ModelGraph
    blocks: tuple[BlockChoice, ...]
    times: Mapping[str, int]


def shorten(
    blocks: Sequence[BlockChoice],
    graph_of: Callable[[Blocks], ModelGraph],
    kind_of_block: Mapping[str, int] = MappingProxyType({}),
) -> Short | None:
    """Truncate a model.

    Args:
        blocks: Choices of the blocks, in order.
        graph_of: Builds the model with a given number of blocks, or with only the blocks of the
            given indices.
        kind_of_block: Kind of each block by its fqn; empty if all blocks are identical.

    Returns:
        The truncated model; None if it would keep more than the share `_FEW` of the blocks.
    """
    kept: list[tuple[BlockChoice, int]] = []
    for _, same in itertools.groupby(
        blocks, key=lambda b: (b.recompute, b.reshard, kind_of_block.get(b.name))
    ):
        run = list(same)
        # The middle block stands for itself and for all that are left out.
        left_out = max(0, len(run) - _KEPT)
        middle = _KEPT // 2
        few = run[: middle + 1] + run[middle + 1 + left_out :]
        kept += [(b, 1 + left_out * (at == middle)) for at, b in enumerate(few)]
    if len(kept) > _FEW * len(blocks):
        return None
    container = blocks[0].name.rpartition(".")[0]
    own = tuple(int(b.name.rpartition(".")[2]) for b, _ in kept if kind_of_block)
    named = tuple(
        replace(block, name=f"{container}.{number}" if container else str(number))
        for number, (block, _) in enumerate(kept)
    )
    times = {block.name: many for block, (_, many) in zip(named, kept, strict=True) if many > 1}
    return Short(graph_of(own or len(kept)), named, times)


class TruncatedBound:
    """Lower bound and guess of a rank's reserved memory, from that rank's log of a truncated model.

    Args:
        log: Memory events of the rank in the truncated model.
        short: The truncated model.
    """

    def __init__(self, log: EventLog, short: Short) -> None:
        self._log, self._times = log, short.times
        order = [block.name for block in short.blocks]
        # Blocks are numbered from 1; 0 stands for everything outside of blocks.
        self._index_of_block = {name: number for number, name in enumerate(("", *order))}
        self._near = {
            self._index_of_block[name]: tuple(
                self._index_of_block[each] for each in order[max(at - 1, 0) : at + 2]
            )
            for at, name in enumerate(order)
            if name in short.times
        }

    @cached_property
    def least_bytes(self) -> int:
        """Lower bound on the bytes reserved by the rank of the full model."""
        if not self._times:
            return self._log.pooled_bytes
        # Do not count events while a block that stands for several is running: in the full model
        # the blocks left out would run at that time, and would not all keep their storages.
        is_near = np.zeros(len(self._index_of_block), bool)
        is_near[list(self._near)] = True
        before, after = self._running
        counts = ~(is_near[before] | is_near[after])
        deltas = self._delta * (1 + self._left_out)[self._storage]
        streams = [each.stream for each in self._log.storages]
        stream = np.array(streams, np.int64)[self._storage]
        # Each stream has its own pool, and a pool never shrinks: the pools' peaks add up.
        most = 0
        for own in (stream == number for number in set(streams)):
            most += int(np.cumsum(deltas[own])[counts[own]].max(initial=0))
        return most

    def likely_bytes(self, device: str, spec: Spec) -> int:
        """Guess the bytes reserved by the rank of the full model; may be too high or too low.

        The guess is what the allocator reserves for the truncated log, plus the bytes that the
        blocks left out would keep at its peak. Fragmentation over many blocks is not simulated.

        Args:
            device: A device name of `layout.hardware`, or "cuda".
            spec: The spec, which states the allocator setting.
        """
        reserved = ReplayCache(device, spec).of(self._log).reserve.reserved_bytes
        if not self._times:
            return reserved
        left_out = np.cumsum(self._delta * self._left_out[self._storage])
        num_bytes = np.cumsum(self._delta) + left_out
        fullest = int(np.argmax(num_bytes)) if num_bytes.size else 0
        then = int(left_out[fullest]) if num_bytes.size and num_bytes[fullest] > 0 else 0
        return reserved + then

    @property
    def _delta(self) -> Ints:
        deltas: Ints = self._log.columns[0]
        return deltas

    @property
    def _storage(self) -> Ints:
        storages: Ints = self._log.columns[1]
        return storages

    @cached_property
    def _left_out(self) -> Ints:
        """[storages] number of left-out blocks that would have an equal storage at that time."""
        many = np.ones(len(self._index_of_block), np.int64)
        for name, times in self._times.items():
            many[self._index_of_block[name]] = times
        return np.where(self._lasting, many[self._block] - 1, 0)

    @cached_property
    def _lasting(self) -> NDArray[np.bool_]:
        """[storages] mask of storages that every block left out would keep as well.

        They belong to a block that stands for several, and are live at some event at which neither
        this block nor a neighbour is running. The other storages exist once, whatever the number of
        blocks: parameters that FSDP2 gathers just before a block runs, gradients that it reduces
        just after.
        """
        out = np.zeros(len(self._log.storages), bool)
        if not self._near:
            return out
        # Sort events by storage, then by time. Between two events of a storage it is either live
        # (its bytes so far differ from 0) or freed.
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
    def _block(self) -> Ints:
        """[storages] number of the block that the storage belongs to, from 1; 0 for none."""
        modules = [each.module for each in self._log.storages]
        known = {
            module: next(
                (self._index_of_block[m] for m in around(module) if m in self._index_of_block), 0
            )
            for module in set(modules)
        }
        return np.array([known[module] for module in modules], np.int64)

    @cached_property
    def _running(self) -> tuple[Ints, Ints]:
        """Two [events] arrays: the block whose operator last made a storage, and the next to do so.

        Both are block numbers from 1, within the phase of the event; 0 stands for none.
        """
        has_op = np.array([bool(each.op) for each in self._log.storages], bool)
        makes = (self._delta > 0) & has_op[self._storage]
        block, phase = self._block[self._storage], self._log.columns[2]
        before = _last(makes, block, phase)
        return before, _last(makes[::-1], block[::-1], phase[::-1])[::-1]


def _last(makes: NDArray[np.bool_], block: Ints, phase: Ints) -> Ints:
    """Return, for each event, the block whose operator was the last to make a storage.

    Only storages made in the phase of the event count; 0 if there are none.

    Args:
        makes: [events] mask of the events at which an operator makes a storage.
        block: [events] number of the block that the event's storage belongs to; 0 for none.
        phase: [events] index of the phase.
    """
    if not block.size:
        return block
    places = np.arange(len(block))
    begun = np.maximum.accumulate(np.where(np.append(True, phase[1:] != phase[:-1]), places, 0))
    made = np.maximum.accumulate(np.where(makes, places, -1))
    return np.where(made >= begun, block[made], 0)
