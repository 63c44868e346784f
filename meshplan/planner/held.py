"""Bytes that a rank holds, from below: what rules a row out before anything is replayed.

States and what is saved for backward, all of which is there in the loss. What comes and goes
(prefetched parameters, buffers of reductions, temporaries of the optimizer) is left out, so that no
figure is above the real one; the replay has them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import MODES, OPTION_RECOMPUTE, OPTION_RESHARD
from meshplan.cost.types import Kind
from meshplan.graph import DTYPE_BYTES
from meshplan.plan import Plan
from meshplan.planner.knapsack import Floats
from meshplan.spec import OPTIMIZER_STATES

_DDP, _ZERO1, _SHARD = range(len(MODES))


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes of one element.

    Attributes:
        stored: Of a parameter as the optimizer has it; its gradient has as many.
        computed: Of a parameter as forward has it.
        states: Of all that the optimizer keeps.
    """

    stored: int
    computed: int
    states: int


def element_bytes_of(plan: Plan) -> ElementBytes:
    """The least of all parameters of a plan."""
    placed = [p for p in plan.assignment.tensors.values() if not p.info.is_buffer]
    stored = min(DTYPE_BYTES[p.dtype] for p in placed)
    computed = min(DTYPE_BYTES[p.compute_dtype] for p in placed)
    return ElementBytes(stored, computed, stored * OPTIMIZER_STATES.get(plan.spec.optimizer, 0))


def resident_bytes(grid: NDArray[np.void], kind: Kind, sizes: ElementBytes) -> Floats:
    """[rows, options] what one block holds in the loss, whatever the microbatch."""
    numel = float(sum(kind.numels))
    shard = (numel / grid["dp_shard"])[:, None]
    mode, replicas = grid["mode"][:, None], grid["dp_replicate"][:, None]
    has_gradients = grid["microbatches"][:, None] > 1
    gathered = np.where(kind.has_options & OPTION_RESHARD[None, :], 0.0, numel * sizes.computed)
    parameters = np.where(mode == _SHARD, shard, numel) * sizes.stored
    states = np.where(mode == _DDP, numel, shard) * sizes.states
    # ddp's buckets are there all the time; else gradients wait for the step from one microbatch on.
    waits = has_gradients | ((mode == _DDP) & (replicas > 1))
    gradients = np.where(waits, np.where(mode == _SHARD, shard, numel) * sizes.stored, 0.0)
    whole = np.where(mode == _SHARD, gathered, 0.0)
    return np.asarray(parameters + states + gradients + whole, dtype=np.float64)


def step_bytes(grid: NDArray[np.void], kind: Kind, sizes: ElementBytes) -> Floats:
    """[rows] what one block holds when the optimizer begins: states and gradients."""
    numel = float(sum(kind.numels))
    shard, mode = numel / grid["dp_shard"], grid["mode"]
    own = np.where(mode == _SHARD, shard, numel) * 2 * sizes.stored
    return np.asarray(own + np.where(mode == _DDP, numel, shard) * sizes.states, dtype=np.float64)


def saved_bytes(grid: NDArray[np.void], kind: Kind) -> Floats:
    """[rows, options] what one block keeps of one microbatch."""
    per_sample = np.array(kind.saved_bytes)[OPTION_RECOMPUTE]
    return np.asarray(grid["micro"][:, None] * per_sample[None, :], dtype=np.float64)
