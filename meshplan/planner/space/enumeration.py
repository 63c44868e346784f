"""Enumerate every configuration of a space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import DDP, GRID, SCHEDULE_WORDS, SHARD, ZERO1
from meshplan.layout.schedules import SCHEDULES
from meshplan.planner.space.cp import EXCHANGE
from meshplan.planner.space.ep import go_together
from meshplan.planner.space.offload import may_offload
from meshplan.planner.space.space import Freedom, divisors

_MOST_MICRO: Final = 64
_FEW_STAGES: Final = (2, 3, 4)
_HALVED: Final = frozenset(
    place for place, word in enumerate(SCHEDULE_WORDS) if word and SCHEDULES[word].splits_backward
)
"""Indices of the schedules with a split backward. The cost model has no figures for offload with
them."""


def enumerate_grid(free: Freedom) -> NDArray[np.void]:
    """Return every configuration of a space as a grid (`cost.grid.GRID`)."""
    rows: list[tuple[int, ...]] = []
    offloads = (0,) if 0 in free.offload else free.offload
    for tp in free.axes["tp"]:
        for cp in free.axes["cp"]:
            ways = [*context_ways(free, tp, cp)]
            for pp in free.axes["pp"]:
                inner = tp * cp * pp
                if free.world % inner == 0 and ways:
                    for data in _data(free, free.world // inner):
                        for ep in _ep_sizes(free, data[1], {"pp": pp, "cp": cp, "tp": tp}):
                            steps = [*_steps(free, (pp, *data[:2], cp, tp, ep), data[2])]
                            # Several loss chunks need all logits of a token, and the whole model,
                            # on one rank: only the first number is tried with tp, cp or pp.
                            chunks = free.loss_chunks[: None if inner == 1 else 1]
                            for what in offloads:
                                if may_offload(free, (pp, *data[:2], cp), data[2], what):
                                    rows += [(*step, what, parts, way) for step in steps
                                             for parts in chunks for way in ways
                                             if not (what and step[-1] in _HALVED)]  # fmt: skip
    return np.array(rows, GRID)


def context_ways(free: Freedom, tp: int, cp: int) -> Iterator[int]:
    """Yield the indices into `CONTEXT_WORDS` that tp and cp allow; 0 if there is no cp.

    To exchange heads, tp * cp must divide all numbers of heads.
    """
    for way in free.contexts.get(cp, (0,)):
        if way != EXCHANGE or cp == 1 or not any(heads % (tp * cp) for heads in free.heads):
            yield way


def _ep_sizes(free: Freedom, shard: int, sizes: Mapping[str, int]) -> Iterator[int]:
    """Yield the sizes of ep that divide dp_shard and are compatible with the other axes.

    Args:
        free: The space.
        shard: Size of dp_shard.
        sizes: Sizes of pp, cp and tp.
    """
    is_sequence = free.sequence_parallel.get(sizes["tp"], False)
    for ep in free.axes["ep"]:
        if shard % ep == 0 and go_together({**sizes, "ep": ep}, is_sequence=is_sequence):
            yield ep


def _data(free: Freedom, ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yield (dp_replicate, dp_shard, mode) for each allowed layout of the data ranks.

    Args:
        free: The space.
        ranks: Number of data ranks.
    """
    is_stated = DDP not in free.modes
    for shard in divisors(ranks):
        replicate = ranks // shard
        if shard not in free.axes["dp_shard"] or replicate not in free.axes["dp_replicate"]:
            continue
        if DDP in free.modes and shard == 1:
            yield replicate, shard, DDP
        # On a single device, FSDP2 may reshard to free the cast copy of the parameters. With more
        # devices, sharding over one data rank has no use.
        least = 1 if free.world == 1 else 2
        if ZERO1 in free.modes and replicate == 1 and shard >= (least if is_stated else 2):
            yield replicate, shard, ZERO1
        # The exceptions are offloaded parameters, which FSDP2 may shard over one rank.
        least = least if 0 in free.offload or replicate > 1 else 1
        if SHARD in free.modes and shard >= least and free.hybrid in (None, replicate > 1):
            yield replicate, shard, SHARD


def _steps(free: Freedom, sizes: tuple[int, ...], mode: int) -> Iterator[tuple[int, ...]]:
    """Yield grid rows up to `schedule`: each choice of microbatches and schedule on one mesh.

    Args:
        free: The space.
        sizes: Sizes of pp, dp_replicate, dp_shard, cp, tp and ep.
        mode: Index into `cost.grid.MODES`.
    """
    pp, replicate, shard = sizes[0], sizes[1], sizes[2]
    ranks = replicate * shard
    for micro, microbatches in _microbatches(free, ranks, pp > 1):
        if pp == 1:
            yield (*sizes, 1, micro, microbatches, mode, 0)
            continue
        for schedule in free.schedules:
            for virtual in _virtual(free, SCHEDULE_WORDS[schedule], pp, microbatches):
                yield (*sizes, virtual, micro, microbatches, mode, schedule)


def _virtual(free: Freedom, schedule: str, pp: int, microbatches: int) -> Iterator[int]:
    """Yield the numbers of stages per rank: a few, and more that divide a rank's blocks evenly.

    A few are worth their while without dividing the blocks, because the first and the last stage
    have fewer blocks anyway. With fewer microbatches than ranks, schedules with several stages per
    rank yield nothing: some ranks would only wait.

    Args:
        free: The space.
        schedule: Name of the schedule.
        pp: Size of pp.
        microbatches: Microbatches of a step.
    """
    row = SCHEDULES[schedule]
    if row.virtual is not None:
        yield row.virtual
    elif microbatches >= pp and not row.problem(pp, microbatches):
        few, more = free.num_blocks // pp, -(-free.num_blocks // pp)
        all_ = {*_FEW_STAGES, *divisors(few), *divisors(more)}
        every = all_ if free.virtual is None else {free.virtual}
        yield from (v for v in sorted(every) if v > 1 and v * pp <= free.num_blocks)


def _microbatches(free: Freedom, ranks: int, is_pipeline: bool) -> Iterator[tuple[int, int]]:
    """Yield (samples of a microbatch, number of microbatches) of a step of one data rank.

    A pipeline is given all samples of a rank's step at once and splits them: `batch.micro` then
    states all of them.

    Args:
        free: The space.
        ranks: Number of data ranks.
        is_pipeline: If True, a pipeline splits the samples of a step; if False, the loop
            accumulates.
    """
    if free.global_ is None:
        own = free.of_data_rank
    elif free.global_ % ranks:
        return
    else:
        own = free.global_ // ranks
    if is_pipeline:
        if free.accumulate in (None, 1) and (not free.micro or own in free.micro):
            for micro in divisors(own):
                if micro <= _MOST_MICRO and free.pipelined in (None, own // micro):
                    yield micro, own // micro
        return
    for micro in free.micro or tuple(d for d in divisors(own) if d <= _MOST_MICRO):
        if own % micro == 0 and free.accumulate in (None, own // micro):
            yield micro, own // micro
