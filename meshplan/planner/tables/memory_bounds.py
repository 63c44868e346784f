"""Lower bounds on the bytes of a rank, which exclude configurations before a replay.

The bounds count the model and optimizer states and what is saved for backward, all of which exist
while the loss is computed. Temporary memory (prefetched parameters, buffers of reductions,
temporaries of the optimizer) is left out unless it is sure to exist at the same time, so that no
bound exceeds the memory really needed. The replay counts all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import (
    ACTIVATIONS_ON_HOST,
    DDP,
    OPTION_RECOMPUTE,
    OPTION_RESHARD,
    SHARD,
    in_halves,
)
from meshplan.cost.host import has_params_on_host
from meshplan.cost.shares import share
from meshplan.cost.types import BlockKind
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.plan.plan import Plan
from meshplan.planner.knapsack.knapsack import Floats
from meshplan.planner.tables.in_flight import has_gradients
from meshplan.spec.spec import OPTIMIZER_STATES

Options = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class HeldElementBytes:
    """Bytes of one element, by role.

    Attributes:
        stored: Bytes of a parameter as the optimizer updates it; its gradient has as many.
        computed: Bytes of a parameter as forward uses it.
        states: Bytes of all optimizer states of a parameter.
    """

    stored: int
    computed: int
    states: int


def element_bytes_of(plan: Plan) -> HeldElementBytes:
    """Return the fewest bytes per element that any parameter of a plan has."""
    placed = [p for p in plan.assignment.tensors.values() if not p.info.is_buffer]
    stored = min(DTYPE_BYTES[p.dtype] for p in placed)
    computed = min(DTYPE_BYTES[p.compute_dtype] for p in placed)
    return HeldElementBytes(stored, computed, stored * OPTIMIZER_STATES.get(plan.spec.optimizer, 0))


def is_late(grid: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return a [configs] mask: several stages per rank, all with a backward before the peak.

    Gradients then exist at the peak, and so do the buffers that they were reduce-scattered from.
    """
    return np.asarray((grid["virtual"] > 1) & has_gradients(grid))


def scattering_bytes(
    grid: NDArray[np.void], block: BlockKind, late: NDArray[np.bool_], reduce_bytes: int
) -> Floats:
    """Return [configs] bytes of the reduce-scatter buffers that a rank keeps for its stages.

    Each stage keeps the buffer of its last unit until its next reduction; all stages of the rank
    but one are counted. If a block's experts are a separate unit, the last unit may be the experts
    or the rest of the block, so the smaller one counts.

    Args:
        grid: The configurations.
        block: A kind of block.
        late: [configs] mask of `is_late`.
        reduce_bytes: Bytes of one element of a gradient as it is reduced.
    """
    trained = float(sum(block.numels) - block.frozen)
    apart = min(float(block.expert_numel), trained - block.expert_numel)
    numel = np.where(grid["ep"] > 1, max(apart, 0.0), trained)
    scatters = late & (grid["mode"] == SHARD) & ~in_halves(grid) & ~has_params_on_host(grid)
    many = np.where(scatters, grid["virtual"] - 1, 0)
    return np.asarray(many * numel * reduce_bytes, dtype=np.float64)


def resident_bytes(
    grid: NDArray[np.void], kind: BlockKind, sizes: HeldElementBytes, late: NDArray[np.bool_]
) -> Floats:
    """Return [configs, options] bytes of one block besides saved activations, during the loss.

    Args:
        grid: The configurations.
        kind: The kind of block.
        sizes: Bytes of one element by role.
        late: [configs] mask of `is_late`.
    """
    numel = float(sum(kind.numels))
    mode = grid["mode"][:, None]
    local_numel = np.where(mode == DDP, numel, share(grid, kind)[:, None])
    trained = local_numel * trained_share(kind)
    own = local_numel * sizes.stored + trained * sizes.states
    # Forward uses a copy of the parameters, unless they are neither sharded nor cast.
    is_copied = (mode != DDP) | (sizes.computed != sizes.stored)
    is_freed = (mode == SHARD) & kind.has_options & OPTION_RESHARD[None, :]
    waits = have_waited(grid, late)[:, None]
    copied = np.where(is_copied & ~is_freed, numel * sizes.computed, 0.0)
    # Without a pipeline, DDP's buckets exist before the first backward.
    is_bucket = (mode == DDP) & (grid["pp"] == 1)[:, None]
    gradients = np.where(waits | is_bucket, whole_bytes(grid, kind, sizes)[:, None], 0.0)
    gradients = gradients + reduced_bytes(grid, kind, sizes)[:, None]
    own = np.where(has_params_on_host(grid)[:, None], 0.0, own + gradients)
    return np.asarray(own + copied, dtype=np.float64)


def have_waited(grid: NDArray[np.void], late: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a [configs] mask: True if every block has had a backward before the peak.

    Args:
        grid: The configurations.
        late: [configs] mask of `is_late`.
    """
    return np.asarray(has_gradients(grid) & ((grid["virtual"] == 1) | late))


def whole_bytes(grid: NDArray[np.void], kind: BlockKind, sizes: HeldElementBytes) -> Floats:
    """Return [configs] bytes of a block's unsharded gradients, if kept to the end of the step.

    Modes "ddp" and "zero1", and a split backward, reduce gradients only after the last backward.
    With a split backward, gradients keep the dtype that they were computed in.
    """
    numel = float(sum(kind.numels)) * trained_share(kind)
    whole = np.where(in_halves(grid), min(sizes.computed, sizes.stored), sizes.stored) * numel
    is_whole = ((grid["mode"] != SHARD) | in_halves(grid)) & ~has_params_on_host(grid)
    return np.asarray(np.where(is_whole, whole, 0.0), dtype=np.float64)


def reduced_bytes(grid: NDArray[np.void], kind: BlockKind, sizes: HeldElementBytes) -> Floats:
    """Return [configs] bytes of a block's reduced gradient shards, kept until the optimizer's step.

    The gradients of FSDP units lie in a separate allocator pool, which never shrinks, so they count
    at the peak even if they come later. DDP's lie in buckets, which `resident_bytes` counts. In a
    pipeline, mode "ddp" has FSDP units too, unless dp and cp have size 1 and parameters are not
    cast.
    """
    is_alone = grid["dp_replicate"] * grid["dp_shard"] * grid["cp"] == 1
    is_piped = (grid["pp"] > 1) & ~(is_alone & (sizes.computed == sizes.stored))
    are_units = ((grid["mode"] != DDP) | is_piped) & ~has_params_on_host(grid)
    local_numel = np.where(grid["mode"] == DDP, float(sum(kind.numels)), share(grid, kind))
    reduced = local_numel * trained_share(kind) * sizes.stored
    return np.asarray(np.where(are_units, reduced, 0.0), dtype=np.float64)


def step_bytes(grid: NDArray[np.void], kind: BlockKind, sizes: HeldElementBytes) -> Floats:
    """Return [configs] bytes of one block before the optimizer's step.

    They are those of its parameters, gradients and optimizer states.
    """
    numel = float(sum(kind.numels))
    local_numel = np.where(grid["mode"] == DDP, numel, share(grid, kind))
    trained = local_numel * trained_share(kind)
    num_bytes = local_numel * sizes.stored + trained * (sizes.stored + sizes.states)
    return np.asarray(np.where(has_params_on_host(grid), 0.0, num_bytes), dtype=np.float64)


def reducing_bytes(
    grid: NDArray[np.void], kind: BlockKind, sizes: HeldElementBytes, reduce_bytes: int
) -> Floats:
    """Return [configs] bytes of a block's unsharded gradients and of their reduce-scatter buffer.

    The block's unsharded parameters are freed just before the reduction, and do not count.

    Assumes: a block is one FSDP unit, and experts that ep shards are a separate unit.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `post_backward`.
    """
    each = sizes.computed + max(sizes.computed, reduce_bytes)
    is_cut = (grid["mode"] == SHARD) & (grid["dp_shard"] * grid["cp"] > 1) & ~in_halves(grid)
    made = _unit(grid, kind) * each * trained_share(kind)
    return np.asarray(np.where(is_cut, made, 0.0), dtype=np.float64)


def passing_bytes(grid: NDArray[np.void], kind: BlockKind, offered: Options) -> Floats:
    """Return [configs] least bytes that a rank's last block needs while it runs.

    They come on top of everything saved. The backward of a rank's last block directly follows its
    forward, so everything saved exists.

    Args:
        grid: The configurations.
        kind: The kind of block.
        offered: [configs, options] mask of the options that the block may take.
    """
    samples = (grid["micro"] / grid["cp"])[:, None]
    within = samples * np.array(kind.transient_bytes)[OPTION_RECOMPUTE][None, :]
    passing = np.where(offered, within, np.inf).min(axis=1)
    return np.asarray(np.where(in_halves(grid), 0.0, passing), dtype=np.float64)


def backward_growth_bytes(
    made: Floats, grid: NDArray[np.void], kind: BlockKind, offered: Options
) -> Floats:
    """Return [configs] least bytes by which memory grows during a block's backward.

    At its end, the block's unsharded gradients and their buffer exist, and what the block saved is
    freed.

    Args:
        made: [configs] bytes of `reducing_bytes`.
        grid: The configurations.
        kind: The kind of block.
        offered: [configs, options] mask of the options that the block may take.
    """
    kept = np.where(offered, saved_bytes(grid, kind), 0.0).max(axis=1)
    return np.asarray(np.maximum(made - kept, 0.0), dtype=np.float64)


def always_bytes(grid: NDArray[np.void], kind: BlockKind, sizes: HeldElementBytes) -> Floats:
    """Return [configs] bytes that one block always has: parameter shards and optimizer states."""
    local_numel = np.where(grid["mode"] == DDP, float(sum(kind.numels)), share(grid, kind))
    own = local_numel * sizes.stored + local_numel * trained_share(kind) * sizes.states
    return np.asarray(np.where(has_params_on_host(grid), 0.0, own), dtype=np.float64)


def prefetched_bytes(
    made: Floats, grid: NDArray[np.void], kind: BlockKind, count: int, sizes: HeldElementBytes
) -> Floats:
    """Return [configs] bytes of prefetched parameters while another block's gradients are reduced.

    Zero unless some rank has two blocks of the kind, which is sure if there are more blocks of it
    than ranks along pp.

    Args:
        made: [configs] bytes of `reducing_bytes`.
        grid: The configurations.
        kind: The kind of block.
        count: Number of blocks of this kind.
        sizes: Bytes of one element by role.
    """
    prefetches = (made > 0) & (count > grid["pp"])
    return np.asarray(np.where(prefetches, _unit(grid, kind) * sizes.computed, 0.0))


def _unit(grid: NDArray[np.void], kind: BlockKind) -> Floats:
    """Return [configs] elements of the largest FSDP unit of a block."""
    numel = float(sum(kind.numels))
    spread = max(float(kind.expert_numel), numel - kind.expert_numel)
    return np.asarray(np.where(grid["ep"] > 1, spread, numel), dtype=np.float64)


def trained_share(kind: BlockKind) -> float:
    """Return the share of a block's elements that get a gradient."""
    numel = sum(kind.numels)
    return 1 - kind.frozen / numel if numel else 1.0


def waiting_bytes(
    grid: NDArray[np.void], first: BlockKind, last: BlockKind, reduce_bytes: int
) -> Floats:
    """Return [configs] bytes of the root unit's reduce-scatter input of the previous microbatch.

    FSDP2 frees a reduce-scatter input when the next one is created. The root unit's input is the
    last of a backward, so it exists until the next backward.

    Args:
        grid: The configurations.
        first: The kind before the blocks: in the root unit or, in a pipeline, in the unit around
            the first stage.
        last: The kind after the blocks: in the root unit or, in a pipeline, in the unit around the
            last stage.
        reduce_bytes: Bytes of one element of a gradient as it is reduced.
    """
    at_first, at_last = (float(sum(kind.numels) - kind.frozen) for kind in (first, last))
    numel = at_last + np.where(grid["pp"] == 1, at_first, 0.0)
    waits = (grid["mode"] == SHARD) & (grid["microbatches"] > grid["pp"])
    waits = waits & ~in_halves(grid) & ~has_params_on_host(grid)
    return np.asarray(np.where(waits, numel * reduce_bytes, 0.0), dtype=np.float64)


def saved_bytes(grid: NDArray[np.void], kind: BlockKind) -> Floats:
    """Return [configs, options] bytes that a block saves for the backward of one microbatch."""
    per_sample = np.array(kind.saved_bytes)[OPTION_RECOMPUTE]
    samples = grid["micro"] / grid["cp"]
    if kind.has_options:
        samples = np.where(grid["offload"] & ACTIVATIONS_ON_HOST, 0.0, samples)
    else:
        # With a split backward, the first half of the backward of head and loss has run for all but
        # one of the pp microbatches in flight, and has freed what they saved.
        samples = np.where(in_halves(grid), samples / grid["pp"], samples)
    return np.asarray(samples[:, None] * per_sample[None, :], dtype=np.float64)
