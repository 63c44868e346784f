"""The figures that the search reads: seconds and lower bounds on bytes of every configuration.

Seconds come from the cost package. Bytes never exceed what a step needs at its peak (model and
optimizer states, everything saved for backward, and the loss), so a configuration whose bytes
exceed the limit cannot fit. The memory package's replay decides if a plan does fit.
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

_NUM_PRICES: Final = 14
"""Prices of a byte that `priced_bounds` tries."""
_BATCH: Final = 256
"""Number of configurations whose bounds are priced together."""


@dataclass(frozen=True, slots=False, kw_only=True)
class CostTable:
    """Seconds and bytes by configuration, kind of block, and option (`cost.grid.OPTIONS`).

    Args:
        grid: [configs] configurations (`cost.grid.GRID`).
        order: Kind of each place of the model, in the order of forward. A place is a block, or the
            modules before or after the blocks.
        names: Fqn of the block at each place; "" for places outside the blocks, which have a single
            option.
        seconds: [configs, kinds, options] seconds of a block for one microbatch, forward and
            backward; infinite where the kind does not have the option.
        saved: [configs, kinds, options] bytes that a block saves for the backward of one
            microbatch.
        resident: [configs, kinds, options] bytes that a block keeps all the time.
        unreduced_grad_bytes: [configs, kinds] bytes of a block's unsharded gradients that
            `resident` leaves out: they exist once the block's stage has had a backward.
        last_stage_extra_bytes: [configs] bytes that the last rank of the pipeline needs at its
            peak, in addition to what is saved.
        backward_extra_bytes: [configs] bytes that every other rank needs while its last block runs,
            in addition to what is saved.
        sent: [configs] bytes of one microbatch's output that a stage keeps until the backward, in
            addition to what its blocks save.
        all_ranks_extra_bytes: [configs] bytes that every rank needs, whatever its blocks choose.
        first_rank_extra_bytes: [configs] bytes that the first rank of a pipeline needs in addition
            to `all_ranks_extra_bytes`.
        last_rank_extra_bytes: [configs] bytes that the last rank of a pipeline needs in addition to
            `all_ranks_extra_bytes`.
        step_floor_bytes: [configs] bytes that the whole model needs at least in the optimizer's
            step, summed over pipeline ranks.
        reduction_floor_bytes: [configs] bytes that some rank needs at least while a block's
            gradients are reduced.
        once_s: [configs] seconds of a step in addition to those of the blocks: sends between
            stages.
        stages: Stage that the plan fixes for each place in `order`: its number,
            `fixed_stages.LAST` for the last stage, or None if the plan fixes none; () if it fixes
            no stage at all.
        starts: For each place in `order`, True if a pipeline stage may begin with it; () if a stage
            may begin with any block.
        compute_s: [configs, kinds] part of `seconds` for the model's operations, without
            communication and recomputation.
        traffic_s: [configs, kinds] part of `compute_s` that is not spent on products.
        tensor_s: [configs, kinds] part of `seconds` for communication of tp, ep and cp.
        recompute_s: [configs, kinds, options] part of `seconds` for recomputation.
        host_s: [configs, kinds] part of `seconds` for an optimizer on the host, and for waiting for
            copies to and from the host.
        launch_s: [configs, kinds] part of `seconds` for waiting until the host has launched a
            kernel.
        update_s: [configs, kinds] part of `seconds` for an optimizer on the device.
    """

    grid: NDArray[np.void]
    order: tuple[int, ...]
    names: tuple[str, ...] = ()
    seconds: Floats
    saved: Floats
    resident: Floats
    unreduced_grad_bytes: Floats
    last_stage_extra_bytes: Floats
    backward_extra_bytes: Floats
    sent: Floats
    all_ranks_extra_bytes: Floats
    first_rank_extra_bytes: Floats
    last_rank_extra_bytes: Floats
    step_floor_bytes: Floats
    reduction_floor_bytes: Floats
    once_s: Floats
    stages: tuple[int | None, ...] = ()
    starts: tuple[bool, ...] = ()
    compute_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    traffic_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    tensor_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    recompute_s: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))
    host_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    launch_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    update_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))

    @cached_property
    def counts(self) -> Counts:
        """[kinds] number of blocks of each kind."""
        return np.bincount(self.order, minlength=self.seconds.shape[1]).astype(np.int64)

    @cached_property
    def before(self) -> Counts:
        """[places + 1, kinds] number of blocks of each kind before each place.

        The last row counts all blocks.
        """
        return _before(self.order, self.seconds.shape[1])

    @cached_property
    def alike(self) -> tuple[Counts, Counts]:
        """The distinct contents of all block ranges, as the function `alike` returns them."""
        return alike(self.order, self.seconds.shape[1])

    @cached_property
    def stage_layouts(self) -> dict[int, Any]:
        """Cache of `stage_layout_of` by configuration, which a search solves many times."""
        return {}

    @cached_property
    def answers(self) -> dict[tuple[int, float | tuple[float, ...]], Any]:
        """Cache of `solve_config` by (configuration, capacity); a search varies the capacity."""
        return {}

    @cached_property
    def range_solutions(self) -> dict[tuple[int, int, int, int], Any]:
        """Cache of solutions found by replays (`solve.stage_ranges`).

        Its keys are (configuration, rank along pp, first place of the range, place after the last).
        """
        return {}

    @property
    def first_blocks(self) -> tuple[str, ...]:
        """The first block, and all others that a pipeline stage may begin with, by fqn."""
        starts = self.starts or (True,) * len(self.names)
        blocks = [(name, may) for name, may in zip(self.names, starts, strict=True) if name]
        return tuple(name for number, (name, may) in enumerate(blocks) if may or not number)

    @cached_property
    def is_block(self) -> NDArray[np.bool_]:
        """[places] mask of the places in `order` that are blocks; all True if none is a block."""
        named = [bool(name) for name in self.names]
        return np.array(named if any(named) else [True] * len(self.order))

    @property
    def block(self) -> int:
        """The kind of all blocks. Configurations with several stages per rank have only one."""
        return self.order[int(np.flatnonzero(self.is_block)[0])]

    def only(self, row: int, options: Sequence[bool]) -> CostTable:
        """Return the table of one configuration with fewer options for the blocks.

        Places with a single option keep it.

        Args:
            row: Index of the configuration in the grid.
            options: True for each entry of `cost.grid.OPTIONS` that blocks may take.
        """
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
            unreduced_grad_bytes=self.unreduced_grad_bytes[at],
            last_stage_extra_bytes=self.last_stage_extra_bytes[at],
            backward_extra_bytes=self.backward_extra_bytes[at],
            sent=self.sent[at],
            all_ranks_extra_bytes=self.all_ranks_extra_bytes[at],
            first_rank_extra_bytes=self.first_rank_extra_bytes[at],
            last_rank_extra_bytes=self.last_rank_extra_bytes[at],
            step_floor_bytes=self.step_floor_bytes[at],
            reduction_floor_bytes=self.reduction_floor_bytes[at],
            once_s=self.once_s[at],
            stages=self.stages,
            starts=self.starts,
        )

    def extra_bytes(self, row: int, rank: int) -> float:
        """Return the bytes that a rank needs besides those of its blocks and of sent outputs.

        Args:
            row: Index of the configuration in the grid.
            rank: Rank along pp.
        """
        own = float(self.all_ranks_extra_bytes[row])
        if rank == 0:
            own += float(self.first_rank_extra_bytes[row])
        if rank < int(self.grid[row]["pp"]) - 1:
            return own + float(self.backward_extra_bytes[row])
        return (
            own + float(self.last_rank_extra_bytes[row]) + float(self.last_stage_extra_bytes[row])
        )

    def menu(self, row: int, in_flight: float, *, had_backward: bool = False) -> Options:
        """Return the seconds and bytes of each option of the blocks on one stage.

        Args:
            row: Index of the configuration in the grid.
            in_flight: Number of microbatches whose activations the stage keeps.
            had_backward: If True, the stage has had a backward at its peak, so its unsharded
                gradients exist.
        """
        num_bytes = self.resident[row] + in_flight * self.saved[row]
        return Options(
            self.seconds[row], num_bytes + had_backward * self.unreduced_grad_bytes[row][:, None]
        )


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
    """Find the distinct contents of all contiguous ranges of blocks.

    Args:
        order: Kind of each place of the model.
        kinds: Number of kinds.

    Returns:
        ([sets, kinds] distinct block counts, [places + 1, places + 1] index of the set that the
        range from place i up to place j contains).
    """
    before = _before(order, kinds)
    i, j = np.triu_indices(len(before), 1)
    which = np.zeros((len(before),) * 2, dtype=np.int64)
    made_of, which[i, j] = np.unique(before[j] - before[i], axis=0, return_inverse=True)
    which.setflags(write=False)
    return made_of, which


def weights(grid: NDArray[np.void]) -> tuple[Floats, Floats]:
    """Return the factors (a, b), each [configs], of the stages' seconds in a step.

    All microbatches together take a * (slowest stage) + b * (sum of stages) seconds, as
    `cost.pipeline.pipeline_seconds` estimates.
    """
    b = waiting_share(grid)
    return grid["microbatches"] - b, b


def seconds_of(
    table: CostTable, row: int, option_counts: Sequence[Sequence[Sequence[int]]]
) -> float:
    """Return the seconds of a step of one candidate.

    Args:
        table: The cost table.
        row: Index of the candidate's configuration in the grid.
        option_counts: [stage][kind][option] number of blocks that take each option.
    """
    counts, config = np.array(option_counts), table.grid[row : row + 1]
    stages = (counts * np.where(counts > 0, table.seconds[row], 0.0)).sum(axis=(1, 2))
    # Stage s runs on rank s % pp.
    ranks = np.bincount(np.arange(len(stages)) % int(config["pp"][0]), stages)
    (a,), (b,) = weights(config)
    return float(a * ranks.max() + b * ranks.sum() + table.once_s[row])


def time_bounds(table: CostTable) -> Floats:
    """Return [configs] lower bounds on the seconds of a step with unlimited memory."""
    fastest = table.seconds.min(axis=2)
    there = table.counts > 0
    return step_seconds(
        table, fastest[:, there] @ table.counts[there], fastest[:, there].max(axis=1)
    )


def memory_bounds(table: CostTable) -> Floats:
    """Return [configs] lower bounds on the bytes of the fullest rank, with unlimited time."""
    stages = table.grid["pp"].astype(float)
    # The fullest rank needs at least the mean over all ranks, and at least the model's largest
    # block. `kept` sums over the ranks, with every block at its smallest option.
    block_bytes = _BlockBytes(table, np.arange(len(table.grid)))
    kept = block_bytes.total(lambda each: each.min(axis=2)) + table.sent * sent_in_flight(
        table.grid
    )
    kept += (
        table.first_rank_extra_bytes
        + table.last_rank_extra_bytes
        + table.last_stage_extra_bytes
        + (stages - 1) * table.backward_extra_bytes
    )
    mean = np.maximum(kept / stages + table.all_ranks_extra_bytes, table.step_floor_bytes / stages)
    most = np.maximum(mean, block_bytes.least.min(axis=2).max(axis=1))
    return np.asarray(np.maximum(most, table.reduction_floor_bytes), dtype=np.float64)


def priced_bounds(table: CostTable, rows: Counts, capacity: float) -> Floats:
    """Return lower bounds on the seconds of a step within a memory limit, by weak duality.

    For any price of a byte, the minimum of seconds + price * bytes, less price * capacity, is at
    most the optimum. The highest bound of several prices is taken.

    Args:
        table: The cost table.
        rows: [queries] indices of configurations in the grid.
        capacity: Linear bytes that one rank may use.

    Returns:
        [queries] seconds.
    """
    block_bytes = _BlockBytes(table, rows)
    stages = table.grid[rows]["pp"].astype(float)
    # `whole` is what the blocks of all ranks together may use: every rank's capacity less what it
    # needs on top of its blocks.
    whole = (
        stages * (capacity - table.all_ranks_extra_bytes[rows])
        - (stages - 1) * table.backward_extra_bytes[rows]
    )
    whole -= table.last_stage_extra_bytes[rows]
    whole -= table.sent[rows] * sent_in_flight(table.grid[rows])
    whole -= table.first_rank_extra_bytes[rows] + table.last_rank_extra_bytes[rows]
    # At price 0 every block takes its fastest option. The other prices are the bound so far divided
    # by all memory, times powers of two around 1.
    best = block_bytes.seconds.min(axis=2) @ block_bytes.count
    slowest = block_bytes.seconds.min(axis=2).max(axis=1)
    for number in range(_NUM_PRICES if np.isfinite(capacity) else 0):
        price = best / np.maximum(whole, 1.0) * 2.0 ** (number - _NUM_PRICES // 2)
        best = np.maximum(best, block_bytes.priced(price) - price * whole)
    return step_seconds(table, best, slowest, rows)


def by_bound(
    table: CostTable, capacity: float, times: Floats, least_bytes: Floats
) -> Iterator[tuple[float, int]]:
    """Yield (lower bound on the seconds, index) of the configurations that may fit, lowest first.

    Args:
        table: The cost table.
        capacity: Linear bytes that one rank may use.
        times: [configs] bounds of `time_bounds`.
        least_bytes: [configs] bounds of `memory_bounds`.
    """
    order = np.argsort(times, kind="stable")
    order = order[(least_bytes[order] <= capacity) & np.isfinite(times[order])]
    # Compute priced bounds only as far as needed: a configuration whose time bound is above the
    # lowest priced bound in the heap cannot come before that one.
    heap: list[tuple[float, int]] = []
    at = 0
    while at < len(order) or heap:
        if at < len(order) and (not heap or times[order[at]] <= heap[0][0]):
            rows = order[at : at + _BATCH]
            at += len(rows)
            bounds = np.maximum(priced_bounds(table, rows, capacity), times[rows])
            for bound, row in zip(bounds, rows, strict=True):
                heapq.heappush(heap, (float(bound), int(row)))
            continue
        yield heapq.heappop(heap)


class _BlockBytes:
    """Linear bytes of one block of each kind, and sums over all blocks, in some configurations.

    Attributes:
        count: [kinds] number of blocks of each kind that the model has.
        seconds: [configs, kinds, options] as in `CostTable`.
        least: [configs, kinds, options] bytes of a block on the stage with the fewest microbatches
            in flight; infinite where the kind does not have the option.
        more: [configs, kinds, options] bytes of a block on a stage that is not its rank's last;
            None if every rank has one stage.
    """

    def __init__(self, table: CostTable, rows: Counts) -> None:
        grid, there = table.grid[rows], np.flatnonzero(table.counts > 0)
        at = np.ix_(rows, there)
        self.count = table.counts[there]
        self.seconds, resident, saved = table.seconds[at], table.resident[at], table.saved[at]
        is_open = np.isfinite(self.seconds)

        def bytes_with(in_flight: Floats) -> Floats:
            return np.where(is_open, resident + in_flight[:, None, None] * saved, np.inf)

        self.least, self.more = bytes_with(fewest_in_flight(grid)), None
        if (grid["virtual"] > 1).any():
            self.more = bytes_with(usual_in_flight(grid))
            block = table.block
            self._block = int(np.flatnonzero(there == block)[0])
            self._usual = usual_blocks(grid, int(table.counts[block]))

    def total(self, value: Callable[[Floats], Floats]) -> Floats:
        """Return [configs] sums, over all blocks, of a value that depends on a block's bytes.

        Args:
            value: Maps [configs, kinds, options] bytes to [configs, kinds] values.
        """
        least = value(self.least)
        total: Floats = least @ self.count
        if self.more is not None:
            few = least[:, self._block]
            with np.errstate(invalid="ignore"):  # Infinity minus infinity.
                more = np.where(np.isfinite(few), value(self.more)[:, self._block] - few, 0.0)
            total = total + self._usual * more
        return total

    def priced(self, price: Floats) -> Floats:
        """Return [configs] sums, over all blocks, of an option's least seconds + price * bytes.

        Args:
            price: [configs] seconds charged for a byte.
        """
        seconds, each = self.seconds, price[:, None, None]
        is_open = np.isfinite(seconds)

        def least_price(num_bytes: Floats) -> Floats:
            cost = seconds + each * np.where(is_open, num_bytes, 0.0)
            return np.asarray(cost.min(axis=2))

        return self.total(least_price)


def step_seconds(
    table: CostTable, total: Floats, block: Floats, rows: Counts | None = None
) -> Floats:
    """Return lower bounds on the seconds of a step from the blocks' seconds for one microbatch.

    Args:
        table: The cost table.
        total: [queries] seconds of all blocks together.
        block: [queries] seconds of the slowest block.
        rows: [queries] indices of configurations in the grid; None for all of them.

    Returns:
        [queries] seconds, with stages as equal as possible; infinite where `total` or `block` is.
    """
    rows = np.arange(len(table.grid)) if rows is None else rows
    grid = table.grid[rows]
    a, b = weights(grid)
    # Infinite seconds times a weight of 0 would be NaN.
    exists = np.isfinite(total) & np.isfinite(block)
    total, block = np.where(exists, total, 0.0), np.where(exists, block, 0.0)
    # The slowest stage takes at least the mean of all stages, and at least its slowest block.
    slowest = np.maximum(total / grid["pp"], block)
    seconds: Floats = np.where(exists, a * slowest + b * total + table.once_s[rows], np.inf)
    return seconds
