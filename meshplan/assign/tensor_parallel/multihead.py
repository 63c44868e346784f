"""nn.MultiheadAttention sharded by heads, as one module.

Its forward reads the weights of its projections, `out_proj` included, without calling these
modules, so a style on them would have no effect. One style therefore covers the whole module: q, k
and v are sharded along the output dim, separately if they are fused in one weight, and `out_proj`
along its input dim.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.assign.base.pieces import divisor_fix
from meshplan.assign.base.types import Preset
from meshplan.errors import Problem
from meshplan.layout.layout import Layout, Piece
from meshplan.model.graph import ModelGraph, ModuleInfo, TensorInfo
from meshplan.model.heads import role


def multihead_pieces(
    graph: ModelGraph, info: ModuleInfo, preset: Preset, tp: int, *, sequence_parallel: bool
) -> tuple[Piece, ...] | Problem:
    """Return the three pieces q, k and v, each with all heads, or why tp cannot divide them."""
    origin = preset.reason.origin
    heads, head_dim = role(info.sizes, "heads") or 0, role(info.sizes, "head_dim") or 0
    if any(t.fqn.endswith(".bias_k") or t.fqn == "bias_k" for t in graph.owned(info.fqn)):
        what = f"{info.fqn} adds a bias to its keys (add_bias_kv), which tp cannot shard"
        return Problem(f"{what} in this version", origin, "leave this module out of tp")
    if sequence_parallel and tp > 1:
        what = f"{info.fqn} is a {info.type}, which cannot run under sequence_parallel"
        return Problem(f"{what} in this version", origin, "remove sequence_parallel")
    if heads % tp:
        return Problem(
            f"{info.fqn}: {heads} heads of {head_dim} do not divide by tp {tp}",
            origin,
            divisor_fix(heads, tp, "this module"),
        )
    return (Piece(heads * head_dim, tp),) * 3


def multihead_cuts(
    graph: ModelGraph, info: ModuleInfo, dp_shard: int
) -> Iterator[tuple[TensorInfo, Layout]]:
    """Yield (parameter, layout on tp) for each parameter of the module.

    Biases are replicated, and so is a fused weight whose dim 1 does not divide by dp_shard: tp
    shards dim 0 in pieces, so dp_shard would have to shard dim 1.
    """
    for tensor in graph.owned(info.fqn):
        layout = Layout.whole(len(tensor.shape))
        if tensor.fqn.endswith("in_proj_weight") and tensor.shape[1] % dp_shard == 0:
            layout = layout.cut("tp", 0, 3)
        elif tensor.fqn.endswith(("q_proj_weight", "k_proj_weight", "v_proj_weight")):
            layout = layout.cut("tp", 0)
        yield tensor, layout
    for tensor in graph.owned(f"{info.fqn}.out_proj" if info.fqn else "out_proj"):
        layout = Layout.whole(len(tensor.shape))
        yield tensor, layout.cut("tp", 1) if len(tensor.shape) == 2 else layout
