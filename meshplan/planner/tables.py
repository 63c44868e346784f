"""A model on a machine as `Numbers`: the chain of each size of tp, its seconds and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import MODES, OPTIONS
from meshplan.cost.profile import Profile
from meshplan.cost.step import crossing_seconds, pipeline_seconds, terms
from meshplan.cost.types import Chain
from meshplan.planner.held import ElementBytes, resident_bytes, saved_bytes, step_bytes
from meshplan.planner.numbers import Numbers
from meshplan.planner.space import Pin, Pins
from meshplan.spec import Precision


def numbers_of(
    grid: NDArray[np.void],
    chain_of: Callable[[int], Chain],
    *,
    profile: Profile,
    gpus_per_node: int,
    precision: Precision,
    dtype: str,
    sizes: ElementBytes,
    recompute: tuple[int, ...],
    reshard: tuple[int, ...],
    pins: Pins,
) -> Numbers:
    """Everything that the search reads.

    Args:
        chain_of: The model as one rank of so many along tp computes it.
        precision: Dtypes by role.
        dtype: Of the model's parameters.
        recompute, reshard: What the plan leaves to blocks.
        pins: What rules leave to single ones.
    """
    tps = np.unique(grid["tp"])
    chains = {int(tp): _split(chain_of(int(tp)), pins) for tp in tps}
    first, _ = chains[int(tps[0])]
    shape = (len(grid), len(first.kinds), len(OPTIONS))
    seconds, saved, resident = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
    top, floor, crossing = (np.zeros(len(grid)) for _ in range(3))
    for tp, (chain, left) in chains.items():
        rows = np.flatnonzero(grid["tp"] == tp)
        part = grid[rows]
        counts = np.bincount(chain.order, minlength=len(chain.kinds))
        boundary = 0.0
        for number, kind in enumerate(chain.kinds):
            found = terms(part, kind, profile, gpus_per_node, precision, dtype=dtype)
            pin = left[number]
            again, back = pin.recompute or recompute, pin.reshard or reshard
            if not kind.has_options:
                again, back = (0,), (0,)
            is_sharded = (part["mode"] == MODES.index("shard"))[:, None]
            offered = np.where(is_sharded, _options(again, back)[None], _options(again, (0,))[None])
            seconds[rows, number] = np.where(offered, found.seconds, np.inf)
            saved[rows, number] = saved_bytes(part, kind)
            resident[rows, number] = resident_bytes(part, kind, sizes)
            floor[rows] += counts[number] * step_bytes(part, kind, sizes)
            boundary = max(boundary, kind.boundary_bytes)
        top[rows] = part["micro"] * chain.kinds[chain.order[-1]].transient_bytes[0]
        crossing[rows] = crossing_seconds(part, boundary, profile, gpus_per_node)
    zero = np.zeros(len(grid))
    return Numbers(
        grid=grid,
        order=first.order,
        names=first.names,
        seconds=seconds,
        saved=saved,
        resident=resident,
        top=top,
        floor=floor,
        once_s=pipeline_seconds(grid, zero, zero, crossing),
    )


def _options(recompute: tuple[int, ...], reshard: tuple[int, ...]) -> NDArray[np.bool_]:
    return np.array([again in recompute and back in reshard for again, back in OPTIONS])


def _split(chain: Chain, pins: Pins) -> tuple[Chain, tuple[Pin, ...]]:
    """The chain with a kind for each different pin of its blocks, and the pins by kind."""
    none = Pin()
    keys = [
        (kind, pins.get(name, none)) for kind, name in zip(chain.order, chain.names, strict=True)
    ]
    kinds = list(dict.fromkeys(keys))
    order = tuple(kinds.index(key) for key in keys)
    split = replace(chain, kinds=tuple(chain.kinds[kind] for kind, _ in kinds), order=order)
    return split, tuple(pin for _, pin in kinds)
