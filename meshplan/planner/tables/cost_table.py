"""What the search reads, for every row of a grid, and nothing else of model and machine.

Seconds are the cost room's. Bytes are figures that are never above what a step really takes at its
worst moment (states, all that was saved for backward, the loss on top), so that a row which they
rule out is out; what a plan really takes, `settle` asks of the memory room.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.pipeline import waiting_share
from meshplan.planner.knapsack.knapsack import Counts, Floats, Options
from meshplan.planner.tables.in_flight import (
    fewest_in_flight,
    sent_in_flight,
    usual_blocks,
    usual_in_flight,
)

_BATCH: Final = 256
"""Rows whose bounds are priced together."""


@dataclass(frozen=True, slots=False, kw_only=True)
class CostTable:
    """Arrays by row of the grid, kind of block, and option (`cost.grid.OPTIONS`).

    Args:
        grid: The configurations.
        order: The kind of each block, in the order of forward.
        names: The fqn of each block; "" for what is of no block, and has no choice.
        seconds: [rows, kinds, options] of a block for one microbatch, forward and backward;
            infinite where it does not have the option.
        saved: Bytes that it keeps for the backward of one microbatch.
        resident: Bytes that it has all the time.
        later: [rows, kinds] bytes of the whole gradients of a block that `resident` leaves out:
            they are there once its stage has had a backward.
        top: [rows] bytes that the last stage holds at its worst moment, beside what is saved.
        turn: [rows] bytes that every other rank holds more than saved in its last block's pass.
        sent: [rows] bytes of what a stage hands on of one microbatch, and keeps until its backward
            is done, beside what its blocks keep.
        beside: [rows] bytes that every rank holds whatever its blocks do.
        first, last: [rows] bytes that the first, the last rank of a pipeline holds more than that.
        floor: [rows] bytes of all blocks together that the optimizer's step takes at least.
        reducing: [rows] bytes that some rank holds at least while a block's gradients are reduced.
        once_s: [rows] seconds of a step beside what blocks take: what stages hand on.
        stages: By place in `order`, the stage that the plan states, `cutting.LAST` for the last
            one; None where it is free. () where all are.
        compute_s: [rows, kinds], of `seconds` what the model's own operations take.
        tensor_s: [rows, kinds], of `seconds` what tp sends.
        again_s: [rows, kinds, options], of `seconds` what runs again takes.
        host_s: [rows, kinds], of `seconds` what the host takes.
    """

    grid: NDArray[np.void]
    order: tuple[int, ...]
    names: tuple[str, ...] = ()
    seconds: Floats
    saved: Floats
    resident: Floats
    later: Floats
    top: Floats
    turn: Floats
    sent: Floats
    beside: Floats
    first: Floats
    last: Floats
    floor: Floats
    reducing: Floats
    once_s: Floats
    stages: tuple[int | None, ...] = ()
    compute_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    tensor_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    again_s: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))
    host_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))

    @cached_property
    def counts(self) -> Counts:
        """Blocks of each kind."""
        return np.bincount(self.order, minlength=self.seconds.shape[1]).astype(np.int64)

    @cached_property
    def before(self) -> Counts:
        """[place, kinds]: blocks of each kind before each place, and all of them last."""
        return _before(self.order, self.seconds.shape[1])

    @cached_property
    def alike(self) -> tuple[Counts, Counts]:
        """As of `alike`."""
        return alike(self.order, self.seconds.shape[1])

    @cached_property
    def lanes(self) -> dict[int, Any]:
        """By row, what `lanes_of` made of it: rows are solved again and again."""
        return {}

    @cached_property
    def answers(self) -> dict[tuple[int, float], Any]:
        """By row and bytes, what `solve_row` knows: a search asks again as its limit moves."""
        return {}

    @cached_property
    def is_block(self) -> NDArray[np.bool_]:
        """By place in `order`; of a model without blocks, all of it."""
        named = [bool(name) for name in self.names]
        return np.array(named if any(named) else [True] * len(self.order))

    @property
    def block(self) -> int:
        """The kind of the blocks, where they are all alike: rows with several stages a rank."""
        return self.order[int(np.flatnonzero(self.is_block)[0])]

    def only(self, row: int, options: Sequence[bool]) -> CostTable:
        """One row, with these options and no others for blocks that have a choice."""
        at = slice(row, row + 1)
        seconds = self.seconds[at]
        has_choice = np.isfinite(seconds).sum(axis=2, keepdims=True) > 1
        offered = np.asarray(options)[None, None] | ~has_choice
        return CostTable(
            grid=self.grid[at],
            order=self.order,
            names=self.names,
            seconds=np.where(offered, seconds, np.inf),
            saved=self.saved[at],
            resident=self.resident[at],
            later=self.later[at],
            top=self.top[at],
            turn=self.turn[at],
            sent=self.sent[at],
            beside=self.beside[at],
            first=self.first[at],
            last=self.last[at],
            floor=self.floor[at],
            reducing=self.reducing[at],
            once_s=self.once_s[at],
            stages=self.stages,
        )

    def on_top(self, row: int, rank: int) -> float:
        """Bytes of a rank at its worst moment beside what its blocks hold and what it sent."""
        own = float(self.beside[row])
        if rank == 0:
            own += float(self.first[row])
        if rank < int(self.grid[row]["pp"]) - 1:
            return own + float(self.turn[row])
        return own + float(self.last[row]) + float(self.top[row])

    def menu(self, row: int, in_flight: float, *, had_backward: bool = False) -> Options:
        """What blocks may choose on a stage that keeps so many microbatches.

        Args:
            had_backward: Whether it has had one by then.
        """
        held = self.resident[row] + in_flight * self.saved[row]
        return Options(self.seconds[row], held + had_backward * self.later[row][:, None])


@lru_cache(maxsize=8)
def _before(order: tuple[int, ...], kinds: int) -> Counts:
    table = np.zeros((len(order) + 1, kinds), dtype=np.int64)
    for place, kind in enumerate(order):
        table[place + 1] = table[place]
        table[place + 1, kind] += 1
    table.setflags(write=False)
    return table


@lru_cache(maxsize=8)
def alike(order: tuple[int, ...], kinds: int) -> tuple[Counts, Counts]:
    """The stretches of blocks by what they are made of.

    Returns:
        ([stretches, kinds] blocks of each kind, no two alike, and by the places where a stretch
        begins and ends, which of them it is: [place, place]).
    """
    before = _before(order, kinds)
    i, j = np.triu_indices(len(before), 1)
    which = np.zeros((len(before),) * 2, dtype=np.int64)
    made_of, which[i, j] = np.unique(before[j] - before[i], axis=0, return_inverse=True)
    which.setflags(write=False)
    return made_of, which


def weights(grid: NDArray[np.void]) -> tuple[Floats, Floats]:
    """(a, b) by row: a step takes a * (the slowest stage) + b * (the sum of the stages).

    The same as `cost.pipeline.pipeline_seconds` says, as factors.
    """
    b = waiting_share(grid)
    return grid["microbatches"] - b, b


def time_bounds(numbers: CostTable) -> Floats:
    """Seconds a step from below by row, whatever memory there is."""
    fastest = numbers.seconds.min(axis=2)
    there = numbers.counts > 0
    return step_seconds(
        numbers, fastest[:, there] @ numbers.counts[there], fastest[:, there].max(axis=1)
    )


def memory_bounds(numbers: CostTable) -> Floats:
    """Bytes from below by row of the rank that holds the most, whatever time it takes."""
    stages = numbers.grid["pp"].astype(float)
    held = _HeldBytes(numbers, np.arange(len(numbers.grid)))
    kept = held.total(lambda each: each.min(axis=2)) + numbers.sent * sent_in_flight(numbers.grid)
    kept += numbers.first + numbers.last + numbers.top + (stages - 1) * numbers.turn
    mean = np.maximum(kept / stages + numbers.beside, numbers.floor / stages)
    most = np.maximum(mean, held.least.min(axis=2).max(axis=1))
    return np.asarray(np.maximum(most, numbers.reducing), dtype=np.float64)


def priced_bounds(numbers: CostTable, rows: Counts, capacity: float, tries: int = 14) -> Floats:
    """Seconds a step from below for these rows, with memory at a price: weak duality.

    Whatever the price of a byte, the least of seconds + price * bytes, less price * capacity, is no
    more than the answer; the best of several prices is taken.
    """
    held = _HeldBytes(numbers, rows)
    stages = numbers.grid[rows]["pp"].astype(float)
    whole = stages * (capacity - numbers.beside[rows]) - (stages - 1) * numbers.turn[rows]
    whole -= numbers.top[rows]
    whole -= numbers.sent[rows] * sent_in_flight(numbers.grid[rows])
    whole -= numbers.first[rows] + numbers.last[rows]
    best = held.seconds.min(axis=2) @ held.count
    slowest = held.seconds.min(axis=2).max(axis=1)
    for number in range(tries if np.isfinite(capacity) else 0):
        price = best / np.maximum(whole, 1.0) * 2.0 ** (number - tries // 2)
        best = np.maximum(best, held.priced(price) - price * whole)
    return step_seconds(numbers, best, slowest, rows)


def by_bound(
    numbers: CostTable, capacity: float, times: Floats, held: Floats
) -> Iterator[tuple[float, int]]:
    """(seconds a step from below, row) of every row that may fit, least first.

    Args:
        times, held: `time_bounds` and `memory_bounds`.
    """
    order = np.argsort(times, kind="stable")
    order = order[(held[order] <= capacity) & np.isfinite(times[order])]
    heap: list[tuple[float, int]] = []
    at = 0
    while at < len(order) or heap:
        if at < len(order) and (not heap or times[order[at]] <= heap[0][0]):
            rows = order[at : at + _BATCH]
            at += len(rows)
            bounds = np.maximum(priced_bounds(numbers, rows, capacity), times[rows])
            for bound, row in zip(bounds, rows, strict=True):
                heapq.heappush(heap, (float(bound), int(row)))
            continue
        yield heapq.heappop(heap)


class _HeldBytes:
    """What one block of each kind holds on some rows, and all blocks of a model.

    Attributes:
        count: By kind that the model has, how many.
        seconds: [rows, kinds, options].
        least: Bytes of a block where the fewest microbatches wait; infinite without the option.
        more: Of one whose stage is not the last of its rank; None where every stage is.
    """

    def __init__(self, numbers: CostTable, rows: Counts) -> None:
        grid, there = numbers.grid[rows], np.flatnonzero(numbers.counts > 0)
        at = np.ix_(rows, there)
        self.count = numbers.counts[there]
        self.seconds, resident, saved = numbers.seconds[at], numbers.resident[at], numbers.saved[at]
        is_open = np.isfinite(self.seconds)

        def held(keeps: Floats) -> Floats:
            return np.where(is_open, resident + keeps[:, None, None] * saved, np.inf)

        self.least, self.more = held(fewest_in_flight(grid)), None
        if (grid["virtual"] > 1).any():
            self.more = held(usual_in_flight(grid))
            block = numbers.block
            self._block = int(np.flatnonzero(there == block)[0])
            self._usual = usual_blocks(grid, int(numbers.counts[block]))

    def total(self, value: Callable[[Floats], Floats]) -> Floats:
        """By row, the sum over all blocks of what follows from the bytes of one: [rows, kinds]."""
        least = value(self.least)
        total: Floats = least @ self.count
        if self.more is not None:
            few = least[:, self._block]
            with np.errstate(invalid="ignore"):  # Where there is no option, neither is finite.
                more = np.where(np.isfinite(few), value(self.more)[:, self._block] - few, 0.0)
            total = total + self._usual * more
        return total

    def priced(self, price: Floats) -> Floats:
        """By row, the least of all blocks' seconds and of their bytes at a price, together."""
        seconds, each = self.seconds, price[:, None, None]
        is_open = np.isfinite(seconds)

        def paid(held: Floats) -> Floats:
            cost = seconds + each * np.where(is_open, held, 0.0)
            return np.asarray(cost.min(axis=2))

        return self.total(paid)


def step_seconds(
    numbers: CostTable, total: Floats, block: Floats, rows: Counts | None = None
) -> Floats:
    """Seconds of a step from the sum over all blocks and the slowest block, per microbatch."""
    rows = np.arange(len(numbers.grid)) if rows is None else rows
    grid = numbers.grid[rows]
    a, b = weights(grid)
    # Of the others a weight of 0 would make no number.
    exists = np.isfinite(total) & np.isfinite(block)
    total, block = np.where(exists, total, 0.0), np.where(exists, block, 0.0)
    slowest = np.maximum(total / grid["pp"], block)
    seconds: Floats = np.where(exists, a * slowest + b * total + numbers.once_s[rows], np.inf)
    return seconds
