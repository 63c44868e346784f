"""Compute the largest shard of a block's parameters on any data rank, with or without experts.

Parameters other than experts are sharded finely enough to count as evenly sharded. Without ep,
experts are in the unit of their block and are sharded along the dim of experts, so with 8 experts
each of 16 ranks has one expert or none. With ep, experts are a separate unit, sharded along a dim
whose size the ranks divide.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, for padding; `assign.base.pieces`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshplan.cost.grid import Array
from meshplan.cost.types import BlockKind


def expert_share(grid: Array, kind: BlockKind) -> Array:
    """Return the elements of experts on the data rank that has the most, [configurations].

    Args:
        grid: Configurations of `grid.GRID`; data ranks are taken to shard parameters.
        kind: The block as one rank of the grid's tp and ep computes it.
    """
    if not kind.num_experts:
        return np.zeros(len(grid))
    ranks = grid["dp_shard"].astype(np.float64) * grid["cp"] / grid["ep"]
    between = np.ceil(kind.num_experts / ranks) * (kind.expert_numel / kind.num_experts)
    return np.asarray(np.where(grid["ep"] > 1, kind.expert_numel / ranks, between))


def share(grid: Array, kind: BlockKind) -> Array:
    """Return the elements of parameters on the data rank that has the most, [configurations]."""
    ranks = grid["dp_shard"].astype(np.float64) * grid["cp"]
    return np.asarray((sum(kind.numels) - kind.expert_numel) / ranks + expert_share(grid, kind))


def trained(kind: BlockKind) -> BlockKind:
    """Return the kind with only the parameters that get a gradient."""
    if not kind.frozen:
        return kind
    return replace(kind, numels=(sum(kind.numels) - kind.frozen,), frozen=0)
