"""The grid of global configurations: each row states how a model is laid out on a machine."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshplan.layout.schedules import SCHEDULES

Array = NDArray[Any]

GRID: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep",
            "virtual", "micro", "microbatches", "mode", "schedule", "offload", "loss_chunks",
            "gathers_kv",
        )
    ]
)  # fmt: skip
"""Fields of a configuration. `pp` to `ep`: sizes of the mesh axes. `virtual`: stages of one
pipeline rank. `micro`: samples of one microbatch of one data rank. `microbatches`: microbatches in
one step of one data rank, run by a pipeline or accumulated by the loop. `mode`, `schedule`: indices
into MODES and SCHEDULE_WORDS. `offload`: the bits below. `loss_chunks`: number of chunks of a
microbatch's tokens for which head and loss are computed one by one. `gathers_kv`: index into
CONTEXT_WORDS."""

CONTEXT_WORDS: Final[tuple[Literal["all_to_all", "all_gather"], ...]] = ("all_to_all", "all_gather")
"""Values of `context.attention`: cp exchanges heads, or gathers keys and values. 0 without cp."""

PARAMS_ON_HOST: Final = 1
"""Bit of `offload`: parameters, their gradients and the optimizer states are on the host."""
ACTIVATIONS_ON_HOST: Final = 2
"""Bit of `offload`: all blocks are fully recomputed, and their saved inputs are on the host."""

MODES: Final = ("ddp", "zero1", "shard")
"""Layouts of a model over data ranks. "shard" covers full_shard, zero2 and their hybrids, which
differ in `dp_replicate` and in the resharding of `OPTIONS`. "ddp" uses only `dp_replicate`."""
DDP, ZERO1, SHARD = range(len(MODES))

SCHEDULE_WORDS: Final = ("", *SCHEDULES)
"""Names of the pipeline schedules; "" stands for no pipeline."""

_IN_HALVES: Final = np.array(
    [word in SCHEDULES and SCHEDULES[word].splits_backward for word in SCHEDULE_WORDS]
)


def in_halves(grid: NDArray[Any] | np.void) -> NDArray[np.bool_]:
    """Return True for each configuration that splits each backward into two halves (zero bubble).

    Then parameters stay gathered, nothing is recomputed, and gradients are reduced once, at the end
    of the step.
    """
    return np.asarray(_IN_HALVES[grid["schedule"]])


RECOMPUTE: Final = ("none", "selective", "full")
"""The kinds of recomputation of a block."""

OPTIONS: Final = tuple(
    (recompute, reshard) for recompute in range(len(RECOMPUTE)) for reshard in (0, 1)
)
"""The options of a block: (index into RECOMPUTE, 1 if its parameters are resharded after forward).
If data ranks do not shard parameters, only options without resharding exist."""

OPTION_RECOMPUTE: Final = np.array([recompute for recompute, _ in OPTIONS])
"""For each option, the index into RECOMPUTE, [options]."""
OPTION_RESHARD: Final = np.array([reshard for _, reshard in OPTIONS], dtype=bool)
"""For each option, True if parameters are resharded after forward, [options]."""


class ProgramKey(NamedTuple):
    """The choices of a configuration that determine the ops of a rank, and so its chain.

    Attributes:
        tp, ep, loss_chunks: Fields of the configuration.
        stage_samples: Samples of a pipeline's microbatch: 1, or 2 for any number above 1; 0 without
            a pipeline.
    """

    tp: int
    ep: int
    loss_chunks: int
    stage_samples: int = 0

    def rows(self, grid: NDArray[Any]) -> NDArray[np.int64]:
        """Return the indices of the configurations of a grid that have this key."""
        pairs = zip(_columns(grid), self, strict=True)
        return np.flatnonzero(np.all([column == value for column, value in pairs], axis=0))


def _columns(grid: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the [configs] values of each field of `ProgramKey`."""
    stage_samples = np.where(grid["pp"] > 1, np.minimum(grid["micro"], 2), 0)
    return [grid["tp"], grid["ep"], grid["loss_chunks"], stage_samples]


def cuts_of(grid: NDArray[Any]) -> list[ProgramKey]:
    """Return the distinct program keys of a grid, sorted."""
    columns = [column.tolist() for column in _columns(grid)]
    return [ProgramKey(*each) for each in sorted(set(zip(*columns, strict=True)))]
