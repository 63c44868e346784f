"""Define the grid of global configurations: each entry is one layout of a model on a machine."""

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
"""Fields of a configuration. `micro`: samples of one microbatch of one data rank. `microbatches`:
microbatches in one step of one data rank, run by a pipeline or accumulated by the loop. `mode`,
`schedule`: indices into MODES and SCHEDULE_WORDS. `virtual`: stages of one pipeline rank.
`offload`: bits for what the whole model keeps on the host. `loss_chunks`: number of token chunks
of a microbatch for which head and loss are computed one after the other."""

PARAMS_THERE: Final = 1
"""Bit of `offload`: parameters, their gradients and the optimizer states are on the host."""
ACTIVATIONS_THERE: Final = 2
"""Bit of `offload`: what blocks save for backward is on the host, and all blocks are recomputed in
full."""

MODES: Final = ("ddp", "zero1", "shard")
"""Layouts of a model over data ranks. "shard" covers full_shard, zero2 and their hybrids, which
differ in `dp_replicate` and in the reshard of the options below. ddp uses dp_replicate alone."""

SCHEDULE_WORDS: Final = ("", "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
"""The schedules that the planner searches and prices, of `layout.schedules.SCHEDULES`; "" if there
is no pipeline."""

_IN_HALVES: Final = SCHEDULE_WORDS.index("InterleavedZeroBubble")


def in_halves(grid: NDArray[Any] | np.void) -> NDArray[np.bool_]:
    """Return, for each configuration, True if each backward is split into two halves (zero bubble).

    If so, parameters stay gathered, nothing is recomputed, and gradients are reduced once, at the
    end.
    """
    return np.asarray(grid["schedule"] == _IN_HALVES)


RECOMPUTE: Final = ("none", "selective", "full")

OPTIONS: Final = tuple((again, reshard) for again in range(len(RECOMPUTE)) for reshard in (0, 1))
"""The options of a block: (index into RECOMPUTE, 1 if its parameters are resharded after forward).
If data ranks do not shard parameters, only reshard 0 exists."""

OPTION_RECOMPUTE: Final = np.array([again for again, _ in OPTIONS])
OPTION_RESHARD: Final = np.array([reshard for _, reshard in OPTIONS], dtype=bool)


class ProgramKey(NamedTuple):
    """The fields of a configuration that a rank's program depends on: equal keys, equal chains."""

    tp: int
    ep: int
    loss_chunks: int

    def rows(self, grid: NDArray[Any]) -> NDArray[np.int64]:
        """Indices of the configurations of a grid that have this key."""
        return np.flatnonzero(np.all([grid[name] == self[at] for at, name in _FIELDS], axis=0))


_FIELDS: Final = tuple(enumerate(ProgramKey._fields))


def cuts_of(grid: NDArray[Any]) -> list[ProgramKey]:
    """The distinct program keys of a grid, sorted."""
    columns = [grid[name].tolist() for _, name in _FIELDS]
    return [ProgramKey(*each) for each in sorted(set(zip(*columns, strict=True)))]
