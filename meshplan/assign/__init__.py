"""Turn a plan's words into layouts: what each tensor, unit and module of a model gets, and why.

A plan meets a model only here. Everything downstream (memory, pictures, runtime) reads the
`Assignment` and decides nothing. This package does not import torch.

The decisions for one parameter, `layers.0.attn.wq.weight` (out, in), on mesh {dp_shard: 4, tp: 2}:
its rule says `tp: colwise`, and this style shards `out` over tp; after that, the strategy
full_shard shards dim 0 over dp_shard. It is stored as `S(0)@tp,dp_shard` and computed with as
`S(0)@tp`.
"""

from meshplan.assign.base.types import (
    Assignment,
    ContextParallel,
    ExpertUse,
    Placed,
    Reason,
    Recompute,
    SequenceBoundary,
    StyleUse,
    Unit,
)
from meshplan.assign.main import assign
from meshplan.assign.tensor_parallel.pairs import around_pair, leaves_cut

__all__ = [
    "Assignment",
    "ContextParallel",
    "ExpertUse",
    "Placed",
    "Reason",
    "Recompute",
    "SequenceBoundary",
    "StyleUse",
    "Unit",
    "around_pair",
    "assign",
    "leaves_cut",
]
