"""A table of global configurations: one row is one way to spread a model over a machine."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

GRID: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep",
            "virtual", "micro", "microbatches", "mode", "schedule", "offload", "loss_chunks",
        )
    ]
)  # fmt: skip
"""`micro`: samples of one microbatch of one data rank. `microbatches`: of one step of one data
rank, whether a pipeline runs them or the loop accumulates. `mode`, `schedule`: places in MODES and
SCHEDULE_WORDS. `virtual`: stages of one pipeline rank. `offload`: of the whole model, what lies on
the host, as bits. `loss_chunks`: parts of the tokens of a microbatch over which head and loss are
computed one by one."""

PARAMS_THERE: Final = 1
"""Of `offload`: parameters, their gradients and the optimizer's states."""
ACTIVATIONS_THERE: Final = 2
"""Of `offload`: what blocks keep for backward, all of them recomputed in full."""

MODES: Final = ("ddp", "zero1", "shard")
"""How data ranks hold a model. "shard" covers full_shard, zero2 and their hybrids: they differ in
`dp_replicate` and in the reshard of the options below. ddp uses dp_replicate alone."""

SCHEDULE_WORDS: Final = ("", "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
"""The schedules offered; "" where there is no pipeline."""

_IN_HALVES: Final = SCHEDULE_WORDS.index("InterleavedZeroBubble")


def in_halves(grid: NDArray[Any] | np.void) -> NDArray[np.bool_]:
    """By row, whether backwards are run in two halves.

    Then parameters stay gathered, nothing runs again, and gradients are reduced once, at the end.
    """
    return np.asarray(grid["schedule"] == _IN_HALVES)


RECOMPUTE: Final = ("none", "selective", "full")

OPTIONS: Final = tuple((again, reshard) for again in range(len(RECOMPUTE)) for reshard in (0, 1))
"""What each block chooses for itself: (place in RECOMPUTE, whether parameters are given back after
forward). Where data ranks do not shard parameters, only reshard 0 exists."""

OPTION_RECOMPUTE: Final = np.array([again for again, _ in OPTIONS])
OPTION_RESHARD: Final = np.array([reshard for _, reshard in OPTIONS], dtype=bool)


class ProgramKey(NamedTuple):
    """The part of a row that a rank's program depends on: equal cuts compute the same chain."""

    tp: int
    ep: int
    loss_chunks: int

    def rows(self, grid: NDArray[Any]) -> NDArray[np.int64]:
        """Rows of a grid that have it."""
        return np.flatnonzero(np.all([grid[name] == self[at] for at, name in _FIELDS], axis=0))


_FIELDS: Final = tuple(enumerate(ProgramKey._fields))


def cuts_of(grid: NDArray[Any]) -> list[ProgramKey]:
    """The cuts that there are, in order."""
    columns = [grid[name].tolist() for _, name in _FIELDS]
    return [ProgramKey(*each) for each in sorted(set(zip(*columns, strict=True)))]
