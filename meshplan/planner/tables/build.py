"""Build the `CostTable` of a model on a machine.

Its figures derive from the chains of block costs, one for each `cost.grid.ProgramKey`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import ACTIVATIONS_ON_HOST, OPTIONS, RECOMPUTE, SHARD, cuts_of
from meshplan.cost.host import has_params_on_host
from meshplan.cost.pipeline import crossing_seconds, sending_seconds
from meshplan.cost.profile import Profile
from meshplan.cost.rows import widths_of
from meshplan.cost.step import terms
from meshplan.cost.types import BlockKind, Chain
from meshplan.layout.mesh import AXES
from meshplan.planner.knapsack.knapsack import Floats
from meshplan.planner.space.fixed import Pin, Pins
from meshplan.planner.tables.cost_table import CostTable
from meshplan.planner.tables.memory_bounds import (
    HeldElementBytes,
    always_bytes,
    backward_growth_bytes,
    have_waited,
    is_late,
    passing_bytes,
    prefetched_bytes,
    reduced_bytes,
    reducing_bytes,
    resident_bytes,
    saved_bytes,
    scattering_bytes,
    step_bytes,
    waiting_bytes,
    whole_bytes,
)
from meshplan.planner.tables.stream_pools import stream_pools_of
from meshplan.spec.spec import Precision

_FULL: Final = np.array([mode == RECOMPUTE.index("full") for mode, _ in OPTIONS])
_ONCE: Final = [OPTIONS.index((0, reshard)) for _, reshard in OPTIONS]
"""For each option, the index of the option with the same reshard and without recomputation."""


def cost_table_of(
    grid: NDArray[np.void],
    chain_of: Callable[[int, int, int, int], Chain],
    *,
    profile: Profile,
    gpus_per_node: int,
    precision: Precision,
    dtype: str,
    sizes: HeldElementBytes,
    recompute: tuple[int, ...],
    reshard: tuple[int, ...],
    pins: Pins,
    are_units: bool = False,
    order: Sequence[str] = AXES,
) -> CostTable:
    """Build the cost table of a grid.

    Args:
        grid: The configurations.
        chain_of: Maps the fields of a `ProgramKey` to the chain of block costs of one rank.
        profile: Speeds of the machine.
        gpus_per_node: Devices of one node.
        precision: Dtypes by role.
        dtype: Dtype of the model's parameters.
        sizes: Bytes of one element by role.
        recompute: Indices into `cost.grid.RECOMPUTE` that the plan leaves open.
        reshard: Values of reshard after forward, 0 or 1, that the plan leaves open.
        pins: Choices that rules fix for single blocks, by fqn.
        are_units: If True, each block is one FSDP unit, whose parameters are gathered together and
            whose gradients are reduced together.
        order: The axes of the mesh, outermost first.
    """
    # Many keys have one chain, if the model is known by its config: build their rows at once.
    rows_of: dict[int, list[NDArray[np.int64]]] = {}
    distinct: dict[int, Chain] = {}
    for cut in cuts_of(grid):
        chain = chain_of(*cut)
        distinct[id(chain)] = chain
        rows_of.setdefault(id(chain), []).append(cut.rows(grid))
    chains, left = _aligned(distinct, pins)
    first = next(iter(chains.values()))
    shape = (len(grid), len(first.kinds), len(OPTIONS))
    compute, traffic, tensor, host, launch, update, unreduced_grad_bytes = (
        np.zeros(shape[:2]) for _ in range(7)
    )
    repeated = np.zeros(shape)
    seconds, saved, resident = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
    last_stage_extra_bytes, sent, step_floor_bytes, crossing, reduction_floor_bytes = (
        np.zeros(len(grid)) for _ in range(5)
    )
    # A rank may have blocks of a single kind, whichever it is: only the minimum over kinds is sure.
    backward_extra_bytes, passes, all_ranks_extra_bytes, pooled, at_first, at_last = (
        np.full(len(grid), np.inf) for _ in range(6)
    )
    reduce_bytes = widths_of(precision, dtype).reduce
    late = is_late(grid)
    for key, chain in chains.items():
        rows = np.concatenate(rows_of[key])
        part = grid[rows]
        counts = np.bincount(chain.order, minlength=len(chain.kinds))
        boundary, always, passing = 0.0, np.zeros(len(part)), np.zeros(len(part))
        for number, kind in enumerate(chain.kinds):
            found = terms(
                part,
                kind,
                profile,
                gpus_per_node,
                precision,
                dtype=dtype,
                order=order,
            )
            pin = left[number]
            own_recompute, own_reshard = pin.recompute or recompute, pin.reshard or reshard
            if not kind.has_options:
                own_recompute, own_reshard = (0,), (0,)
            is_sharded = (part["mode"] == SHARD)[:, None]
            offered = np.where(
                is_sharded,
                _options(own_recompute, own_reshard)[None],
                _options(own_recompute, (0,))[None],
            )
            if kind.has_options and part["offload"].any():
                # Activations are offloaded only where every block is recomputed in full.
                waits = (part["offload"] & ACTIVATIONS_ON_HOST) > 0
                offered = offered & (_FULL[None] | ~waits[:, None])
            seconds[rows, number] = np.where(offered, found.seconds, np.inf)
            compute[rows, number], tensor[rows, number] = found.compute_s, found.exposed_tp_s
            traffic[rows, number] = found.traffic_s
            host[rows, number], launch[rows, number] = found.host_s, found.launch_s
            on_device = np.where(has_params_on_host(part), 0.0, found.update_s)
            update[rows, number] = on_device / part["microbatches"]
            there = np.where(np.isfinite(found.seconds), found.seconds, 0.0)
            repeated[rows, number] = there - there[:, _ONCE]
            saved[rows, number] = saved_bytes(part, kind)
            resident[rows, number] = resident_bytes(part, kind, sizes, late[rows])
            is_counted = have_waited(part, late[rows]) | (part["pp"] == 1)
            unreduced_grad_bytes[rows, number] = np.where(
                is_counted, 0.0, whole_bytes(part, kind, sizes)
            )
            if kind.has_options:
                own = scattering_bytes(part, kind, late[rows], reduce_bytes)
                all_ranks_extra_bytes[rows] = np.minimum(all_ranks_extra_bytes[rows], own)
                if are_units:
                    pools = stream_pools_of(part, kind, _ends(chain), sizes, reduce_bytes)
                    pooled[rows] = np.minimum(pooled[rows], pools.every)
                    at_first[rows] = np.minimum(at_first[rows], pools.first)
                    at_last[rows] = np.minimum(at_last[rows], pools.last)
            if are_units:
                made = reducing_bytes(part, kind, sizes, reduce_bytes) * kind.has_options
                num_bytes = always_bytes(part, kind, sizes) + reduced_bytes(part, kind, sizes)
                own = made + prefetched_bytes(made, part, kind, int(counts[number]), sizes)
                always, passing = always + counts[number] * num_bytes, np.maximum(passing, own)
                reduction_floor_bytes[rows] = np.maximum(
                    reduction_floor_bytes[rows], num_bytes + own
                )
                if kind.has_options:
                    own = backward_growth_bytes(made, part, kind, offered)
                    backward_extra_bytes[rows] = np.minimum(backward_extra_bytes[rows], own)
                    own = passing_bytes(part, kind, offered)
                    passes[rows] = np.minimum(passes[rows], own)
            step_floor_bytes[rows] += counts[number] * step_bytes(part, kind, sizes)
            boundary = max(boundary, kind.boundary_bytes)
        # Without a pipeline, a rank has all blocks. With one, only a single block is sure.
        reduction_floor_bytes[rows] = np.where(
            part["pp"] == 1, always + passing, reduction_floor_bytes[rows]
        )
        reduction_floor_bytes[rows] += _known(pooled[rows])
        ends = chain.kinds[chain.order[0]], chain.kinds[chain.order[-1]]
        # While the last block runs forward or backward, the modules after it have nothing saved: do
        # not count what they save (`behind`).
        behind = sum(saved_bytes(part, kind)[:, 0] for kind in _ends(chain)[1])
        last_stage_extra_bytes[rows] = part["micro"] / part["cp"] * ends[1].transient_bytes[0]
        last_stage_extra_bytes[rows] = np.maximum(
            last_stage_extra_bytes[rows], _known(passes[rows]) - behind
        )
        last_stage_extra_bytes[rows] += waiting_bytes(part, *ends, reduce_bytes)
        last_stage_extra_bytes[rows] = np.maximum(
            last_stage_extra_bytes[rows], _known(backward_extra_bytes[rows]) - behind
        )
        cut_at = [k.boundary_bytes for k in chain.kinds if k.has_options] or [0.0]
        if not chain.saves_outputs:
            sent[rows] = np.where(part["pp"] > 1, part["micro"] / part["cp"] * min(cut_at), 0.0)
        crossing[rows] = crossing_seconds(part, boundary, profile, gpus_per_node, order)
    counts = np.bincount(first.order, minlength=len(first.kinds))
    return CostTable(
        grid=grid,
        order=first.order,
        names=first.names,
        starts=next((chain.starts for chain in chains.values() if chain.starts), ()),
        seconds=seconds,
        saved=saved,
        resident=resident,
        last_stage_extra_bytes=last_stage_extra_bytes,
        backward_extra_bytes=np.maximum(_known(backward_extra_bytes), _known(passes)),
        unreduced_grad_bytes=unreduced_grad_bytes,
        sent=sent,
        all_ranks_extra_bytes=_known(all_ranks_extra_bytes) + _known(pooled),
        first_rank_extra_bytes=_known(at_first),
        last_rank_extra_bytes=_known(at_last),
        step_floor_bytes=step_floor_bytes,
        reduction_floor_bytes=reduction_floor_bytes,
        once_s=sending_seconds(grid, compute @ counts, crossing),
        compute_s=compute,
        traffic_s=traffic,
        tensor_s=tensor,
        recompute_s=repeated,
        host_s=host,
        launch_s=launch,
        update_s=update,
    )


def _known(least: Floats) -> Floats:
    """Replace by 0 the infinite minima of configurations to which no kind contributed."""
    return np.where(np.isfinite(least), least, 0.0)


def _ends(chain: Chain) -> tuple[list[BlockKind], list[BlockKind]]:
    """Return (kinds of the places before the blocks, kinds of the places after the blocks)."""
    kinds = [chain.kinds[number] for number in chain.order]
    blocks = [place for place, kind in enumerate(kinds) if kind.has_options] or [len(kinds)]
    return kinds[: blocks[0]], kinds[blocks[-1] + 1 :]


def _options(recompute: tuple[int, ...], reshard: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return an [options] mask of the options with these values of recompute and reshard."""
    return np.array([mode in recompute and freed in reshard for mode, freed in OPTIONS])


def _aligned(chains: dict[int, Chain], pins: Pins) -> tuple[dict[int, Chain], tuple[Pin, ...]]:
    """Return the chains with a common numbering of their kinds, and the pin of each kind.

    Two places get the same kind if they have the same kind in every chain and the plan's rules fix
    the same choices for both.
    """
    some = next(iter(chains.values()))
    none = Pin()
    left = [pins.get(name, none) for name in some.names]
    keys = list(zip(*(chain.order for chain in chains.values()), left, strict=True))
    kinds = list(dict.fromkeys(keys))
    order = tuple(kinds.index(key) for key in keys)
    aligned = {
        cut: replace(chain, kinds=tuple(chain.kinds[key[at]] for key in kinds), order=order)
        for at, (cut, chain) in enumerate(chains.items())
    }
    return aligned, tuple(key[-1] for key in kinds)
