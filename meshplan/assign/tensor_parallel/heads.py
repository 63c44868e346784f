"""Find the attributes of attention modules, such as `num_heads`, that need their local values.

Once the projections are sharded, `view(b, s, self.num_heads, self.head_dim)` runs on the heads of
one rank, so `num_heads` must be the number of these. An attribute is changed only if its name has a
role in `heads.ROLES` and its value is what this role has in the sharded projections.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.assign.base.pieces import out_width
from meshplan.assign.base.tensor_cuts import TensorParallel
from meshplan.assign.base.types import LocalAttribute, StyleUse
from meshplan.layout.layout import Piece
from meshplan.layout.mesh import Mesh
from meshplan.model.graph import ModelGraph, ModuleInfo
from meshplan.model.heads import ROLES, role


def local_attributes(graph: ModelGraph, mesh: Mesh, out: TensorParallel) -> None:
    """Add to `out` the local attributes of modules with projections that are sharded by heads."""
    tp = mesh.size("tp")
    by_parent: dict[str, list[tuple[int, int]]] = {}
    for fqn, use in out.styles.items():
        info = graph.modules[fqn]
        width = out_width(graph, info)
        if width is None or use.style.output[1] != "S(-1)":
            continue
        if info.kind == "conv1d" and use.pieces and tp > 1:
            local = sum(piece.part for piece in use.pieces)
            out.attributes.append(LocalAttribute(fqn, "nf", width, local))
        if info.head_dim:
            around = by_parent.setdefault(fqn.rpartition(".")[0], [])
            around += _heads(info, use, width, tp)
    for fqn, heads in by_parent.items():
        if tp > 1 and heads:
            out.attributes += _localized(graph.modules[graph.first_name(fqn)], heads)


def _heads(info: ModuleInfo, use: StyleUse, width: int, tp: int) -> Iterator[tuple[int, int]]:
    """Yield (number of heads, number of heads on one rank) of each projection in a weight."""
    assert info.head_dim is not None
    for piece in use.pieces or (Piece(width, tp),):
        # A fused weight may have pieces that are no heads, such as a gate; skip these.
        if piece.part % info.head_dim == 0 and piece.size % piece.parts == 0:
            yield piece.size // info.head_dim, piece.part // info.head_dim


def _localized(info: ModuleInfo, heads: list[tuple[int, int]]) -> Iterator[LocalAttribute]:
    (queries, own_queries), (keys, own_keys) = max(heads), min(heads)
    head_dim = role(info.sizes, "head_dim") or 0
    expected = {
        "heads": (queries, own_queries),
        "kv_heads": (keys, own_keys),
        "groups": (queries // keys, own_queries // own_keys),
        "width": (queries * head_dim, own_queries * head_dim),
    }
    for name, value in info.sizes.items():
        whole, local = expected.get(ROLES[name], (value, value))
        if value == whole != local:
            yield LocalAttribute(info.fqn, name, whole, local)
