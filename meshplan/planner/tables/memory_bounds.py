"""Bytes that a rank holds, from below: what rules a row out before anything is replayed.

States and what is saved for backward, all of which is there in the loss. What comes and goes
(prefetched parameters, buffers of reductions, temporaries of the optimizer) is left out, so that no
figure is above the real one; the replay has them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import (
    ACTIVATIONS_THERE,
    MODES,
    OPTION_RECOMPUTE,
    OPTION_RESHARD,
    in_halves,
)
from meshplan.cost.host import is_there
from meshplan.cost.shares import share
from meshplan.cost.types import BlockKind
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.plan.plan import Plan
from meshplan.planner.knapsack.knapsack import Floats
from meshplan.planner.tables.in_flight import has_gradients
from meshplan.spec.spec import OPTIMIZER_STATES

Options = NDArray[np.bool_]
_DDP, _ZERO1, _SHARD = range(len(MODES))


@dataclass(frozen=True, slots=True)
class HeldElementBytes:
    """Bytes of one element.

    Attributes:
        stored: Of a parameter as the optimizer has it; its gradient has as many.
        computed: Of a parameter as forward has it.
        states: Of all that the optimizer keeps.
    """

    stored: int
    computed: int
    states: int


def element_bytes_of(plan: Plan) -> HeldElementBytes:
    """The least of all parameters of a plan."""
    placed = [p for p in plan.assignment.tensors.values() if not p.info.is_buffer]
    stored = min(DTYPE_BYTES[p.dtype] for p in placed)
    computed = min(DTYPE_BYTES[p.compute_dtype] for p in placed)
    return HeldElementBytes(stored, computed, stored * OPTIMIZER_STATES.get(plan.spec.optimizer, 0))


def is_late(grid: NDArray[np.void]) -> NDArray[np.bool_]:
    """By row with several stages a rank, whether each has had a backward when the most is there.

    Gradients are there then, and the buffers that they were scattered from.
    """
    return np.asarray((grid["virtual"] > 1) & has_gradients(grid))


def scattering_bytes(
    grid: NDArray[np.void], block: BlockKind, late: NDArray[np.bool_], reduce_bytes: int
) -> Floats:
    """[rows] what every rank then holds for its stages: each keeps its buffer to its next one.

    That is its last unit's: of a block whose experts are one of their own, either of them.
    """
    trained = float(sum(block.numels) - block.frozen)
    apart = min(float(block.expert_numel), trained - block.expert_numel)
    numel = np.where(grid["ep"] > 1, max(apart, 0.0), trained)
    scatters = late & (grid["mode"] == _SHARD) & ~in_halves(grid) & ~is_there(grid)
    many = np.where(scatters, grid["virtual"] - 1, 0)
    return np.asarray(many * numel * reduce_bytes, dtype=np.float64)


def resident_bytes(
    grid: NDArray[np.void], kind: BlockKind, sizes: HeldElementBytes, late: NDArray[np.bool_]
) -> Floats:
    """[rows, options] what one block holds in the loss, whatever the microbatch.

    Args:
        late: As `is_late`.
    """
    numel = float(sum(kind.numels))
    mode = grid["mode"][:, None]
    held = np.where(mode == _DDP, numel, share(grid, kind)[:, None])
    trained = held * trained_share(kind)
    own = held * sizes.stored + trained * sizes.states
    # What is computed with is a copy, unless nothing is cut and nothing cast.
    is_copied = (mode != _DDP) | (sizes.computed != sizes.stored)
    is_freed = (mode == _SHARD) & kind.has_options & OPTION_RESHARD[None, :]
    waits = have_waited(grid, late)[:, None]
    copied = np.where(is_copied & ~is_freed, numel * sizes.computed, 0.0)
    is_bucket = (mode == _DDP) & (grid["pp"] == 1)[:, None]
    gradients = np.where(waits | is_bucket, whole_bytes(grid, kind, sizes)[:, None], 0.0)
    gradients = gradients + reduced_bytes(grid, kind, sizes)[:, None]
    own = np.where(is_there(grid)[:, None], 0.0, own + gradients)
    return np.asarray(own + copied, dtype=np.float64)


def have_waited(grid: NDArray[np.void], late: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """By row, whether every block had a backward before the moment when the most is there."""
    return np.asarray(has_gradients(grid) & ((grid["virtual"] == 1) | late))


def whole_bytes(grid: NDArray[np.void], kind: BlockKind, sizes: HeldElementBytes) -> Floats:
    """[rows] gradients of a block that wait whole, until they are reduced at the end.

    Of backwards in halves they are as they were computed.
    """
    numel = float(sum(kind.numels)) * trained_share(kind)
    whole = np.where(in_halves(grid), min(sizes.computed, sizes.stored), sizes.stored) * numel
    is_whole = ((grid["mode"] != _SHARD) | in_halves(grid)) & ~is_there(grid)
    return np.asarray(np.where(is_whole, whole, 0.0), dtype=np.float64)


def reduced_bytes(grid: NDArray[np.void], kind: BlockKind, sizes: HeldElementBytes) -> Floats:
    """[rows] gradients of a block as its data ranks share them out, all there before the update.

    Those of units lie in a pool of their own, which never shrinks; DDP has them in buckets. Where
    no other rank has a part in them and nothing is cast, there are no units.
    """
    is_alone = grid["dp_replicate"] * grid["dp_shard"] * grid["cp"] == 1
    is_piped = (grid["pp"] > 1) & ~(is_alone & (sizes.computed == sizes.stored))
    are_units = ((grid["mode"] != _DDP) | is_piped) & ~is_there(grid)
    held = np.where(grid["mode"] == _DDP, float(sum(kind.numels)), share(grid, kind))
    reduced = held * trained_share(kind) * sizes.stored
    return np.asarray(np.where(are_units, reduced, 0.0), dtype=np.float64)


def step_bytes(grid: NDArray[np.void], kind: BlockKind, sizes: HeldElementBytes) -> Floats:
    """[rows] what one block holds when the optimizer begins: states and gradients."""
    numel = float(sum(kind.numels))
    held = np.where(grid["mode"] == _DDP, numel, share(grid, kind))
    trained = held * trained_share(kind)
    held_bytes = held * sizes.stored + trained * (sizes.stored + sizes.states)
    return np.asarray(np.where(is_there(grid), 0.0, held_bytes), dtype=np.float64)


def reducing_bytes(
    grid: NDArray[np.void], kind: BlockKind, sizes: HeldElementBytes, reduce_bytes: int
) -> Floats:
    """[rows] a block's whole gradients as backward made them, and what they are summed in.

    Its parameters go before that, and are there until then.

    Assumes: a block is one unit, and spread experts one of their own.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py, `post_backward`.
    """
    each = sizes.computed + max(sizes.computed, reduce_bytes)
    is_cut = (grid["mode"] == _SHARD) & (grid["dp_shard"] * grid["cp"] > 1) & ~in_halves(grid)
    made = _unit(grid, kind) * each * trained_share(kind)
    return np.asarray(np.where(is_cut, made, 0.0), dtype=np.float64)


def passing_bytes(grid: NDArray[np.void], kind: BlockKind, offered: Options) -> Floats:
    """[rows] what a rank holds more than before that block's pass, the last one that it begins.

    Args:
        offered: [rows, options] what the block may do.
    """
    samples = (grid["micro"] / grid["cp"])[:, None]
    within = samples * np.array(kind.transient_bytes)[OPTION_RECOMPUTE][None, :]
    passing = np.where(offered, within, np.inf).min(axis=1)
    return np.asarray(np.where(in_halves(grid), 0.0, passing), dtype=np.float64)


def turning_bytes(
    made: Floats, grid: NDArray[np.void], kind: BlockKind, offered: Options
) -> Floats:
    """[rows] the same at the end of its backward, when what it kept is gone.

    Args:
        made: `reducing_bytes`.
    """
    kept = np.where(offered, saved_bytes(grid, kind), 0.0).max(axis=1)
    return np.asarray(np.maximum(made - kept, 0.0), dtype=np.float64)


def always_bytes(grid: NDArray[np.void], kind: BlockKind, sizes: HeldElementBytes) -> Floats:
    """[rows] what one block holds all the time: its share, and what the optimizer keeps."""
    held = np.where(grid["mode"] == _DDP, float(sum(kind.numels)), share(grid, kind))
    own = held * sizes.stored + held * trained_share(kind) * sizes.states
    return np.asarray(np.where(is_there(grid), 0.0, own), dtype=np.float64)


def ahead_bytes(
    made: Floats, grid: NDArray[np.void], kind: BlockKind, count: int, sizes: HeldElementBytes
) -> Floats:
    """[rows] parameters of a block that are gathered while another's gradients are reduced.

    Some rank has two of a kind where there are more of it than ranks along pp.
    """
    is_there = (made > 0) & (count > grid["pp"])
    return np.asarray(np.where(is_there, _unit(grid, kind) * sizes.computed, 0.0))


def _unit(grid: NDArray[np.void], kind: BlockKind) -> Floats:
    """[rows] elements of the largest unit of a block."""
    numel = float(sum(kind.numels))
    spread = max(float(kind.expert_numel), numel - kind.expert_numel)
    return np.asarray(np.where(grid["ep"] > 1, spread, numel), dtype=np.float64)


def trained_share(kind: BlockKind) -> float:
    """The share of a block's elements that get a gradient."""
    numel = sum(kind.numels)
    return 1 - kind.frozen / numel if numel else 1.0


def waiting_bytes(
    grid: NDArray[np.void], first: BlockKind, last: BlockKind, reduce_bytes: int
) -> Floats:
    """[rows] the root unit's gradients of the microbatch before, as they were sent.

    FSDP2 lets go of what it scatters when the next one comes to be; the root's is the last.

    Args:
        first, last: What lies before and after the blocks: of the root unit, in a pipeline of the
            units around the first and the last stage.
        reduce_bytes: Of an element that is summed.
    """
    at_first, at_last = (float(sum(kind.numels) - kind.frozen) for kind in (first, last))
    numel = at_last + np.where(grid["pp"] == 1, at_first, 0.0)
    waits = (grid["mode"] == _SHARD) & (grid["microbatches"] > grid["pp"])
    waits = waits & ~in_halves(grid) & ~is_there(grid)
    return np.asarray(np.where(waits, numel * reduce_bytes, 0.0), dtype=np.float64)


def saved_bytes(grid: NDArray[np.void], kind: BlockKind) -> Floats:
    """[rows, options] what one block keeps of one microbatch."""
    per_sample = np.array(kind.saved_bytes)[OPTION_RECOMPUTE]
    samples = grid["micro"] / grid["cp"]
    if kind.has_options:
        samples = np.where(grid["offload"] & ACTIVATIONS_THERE, 0.0, samples)
    else:
        # The loss is behind its first half: of what is in flight one microbatch has it all.
        samples = np.where(in_halves(grid), samples / grid["pp"], samples)
    return np.asarray(samples[:, None] * per_sample[None, :], dtype=np.float64)
