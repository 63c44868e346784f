"""Which part of a block each data rank keeps, where blocks hold experts too.

Ranks share out what is no expert's finely enough to call it evenly. Experts that stay in the unit
of their block are cut between experts, so of 8 experts 16 ranks hold one or none; spread ones are a
unit of their own, which is cut where it divides.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, for padding; `assign.pieces`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.types import BlockKind

Array = NDArray[Any]


def expert_share(grid: Array, kind: BlockKind) -> Array:
    """Elements of experts that the fullest data rank keeps, where ranks share them out.

    Args:
        kind: As one rank of the grid's tp and ep computes it.
    """
    if not kind.num_experts:
        return np.zeros(len(grid))
    ranks = grid["dp_shard"].astype(np.float64) * grid["cp"] / grid["ep"]
    between = np.ceil(kind.num_experts / ranks) * (kind.expert_numel / kind.num_experts)
    return np.asarray(np.where(grid["ep"] > 1, kind.expert_numel / ranks, between))


def share(grid: Array, kind: BlockKind) -> Array:
    """Elements of all parameters that it keeps."""
    ranks = grid["dp_shard"].astype(np.float64) * grid["cp"]
    return np.asarray((sum(kind.numels) - kind.expert_numel) / ranks + expert_share(grid, kind))


def trained(kind: BlockKind) -> BlockKind:
    """The same with those of its parameters alone that get a gradient."""
    if not kind.frozen:
        return kind
    return replace(kind, numels=(sum(kind.numels) - kind.frozen,), frozen=0)
