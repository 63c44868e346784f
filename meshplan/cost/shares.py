"""Compute the share of a block that each data rank keeps, with or without experts.

Parameters other than experts are sharded finely enough to count as even. Experts that stay in the
unit of their block are sharded between experts, so of 8 experts 16 ranks have one or none.
Experts spread over ep are a unit of their own, sharded along a dim that divides.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, for padding; `assign.base.pieces`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.types import BlockKind

Array = NDArray[Any]


def expert_share(grid: Array, kind: BlockKind) -> Array:
    """Elements of experts on the data rank that has the most, where data ranks shard parameters.

    Args:
        kind: The block as one rank of the grid's tp and ep computes it.
    """
    if not kind.num_experts:
        return np.zeros(len(grid))
    ranks = grid["dp_shard"].astype(np.float64) * grid["cp"] / grid["ep"]
    between = np.ceil(kind.num_experts / ranks) * (kind.expert_numel / kind.num_experts)
    return np.asarray(np.where(grid["ep"] > 1, kind.expert_numel / ranks, between))


def share(grid: Array, kind: BlockKind) -> Array:
    """Elements of all parameters on the data rank that has most of them."""
    ranks = grid["dp_shard"].astype(np.float64) * grid["cp"]
    return np.asarray((sum(kind.numels) - kind.expert_numel) / ranks + expert_share(grid, kind))


def trained(kind: BlockKind) -> BlockKind:
    """Return the kind reduced to those of its parameters that get a gradient."""
    if not kind.frozen:
        return kind
    return replace(kind, numels=(sum(kind.numels) - kind.frozen,), frozen=0)
