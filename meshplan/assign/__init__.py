"""Apply a plan to a model: decide the layout of every tensor, the units and styles, and say why.

Only this package combines a plan with a model. Everything downstream (memory, pictures, runtime)
reads the resulting `Assignment` and makes no such decisions. This package does not import torch.

For example, let a rule state `tp: colwise` for `layers.0.attn.wq`, with a weight (out, in), on the
mesh {dp_shard: 4, tp: 2}. The style shards dim 0, `out`, over tp; the strategy full_shard then
shards dim 0 over dp_shard too. The weight is stored as `S(0)@tp,dp_shard`, and forward and backward
compute with `S(0)@tp`.
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
