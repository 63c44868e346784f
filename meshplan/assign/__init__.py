"""From words to layouts: what every tensor, unit and module of this model gets, and why.

The only place where a plan meets a model. Everything downstream (memory, pictures, runtime)
reads the `Assignment` and decides nothing. Refuses to know torch.

One parameter walking through, `layers.0.attn.wq.weight` (out, in), mesh {dp_shard: 4, tp: 2}:
its rule says `tp: colwise`, the style cuts `out` by tp; the strategy full_shard cuts dim 0 by
dp_shard after that. Stored as `S(0)@tp,dp_shard`, computed with as `S(0)@tp`.
"""

from meshplan.assign.main import assign
from meshplan.assign.pairs import around_pair, leaves_cut
from meshplan.assign.types import (
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
