"""Names that models give to the sizes of their attention heads, and the role of each.

`runtime.trace.structure` and `blueprint` read the attributes of these names, and `assign` decides
which of them must be set to local values when the heads are sharded. An attribute is used only if
its value fits its role, so that an attribute with the same name and another meaning is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

ROLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "nheads", "heads",
             "num_attn_heads", "num_q_heads", "num_query_heads", "n_q_heads"), "heads",
        ),
        **dict.fromkeys(
            ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads",
             "n_head_kv", "num_k_heads", "num_v_heads"), "kv_heads",
        ),
        **dict.fromkeys(
            ("num_key_value_groups", "num_kv_groups", "num_queries_per_kv", "n_rep", "group"),
            "groups",
        ),
        **dict.fromkeys(("inner_dim", "all_head_size", "split_size", "attn_dim"), "width"),
        **dict.fromkeys(
            ("head_dim", "attention_head_size", "key_value_proj_dim", "dim_head", "d_head",
             "head_size"), "head_dim",
        ),
    }
)  # fmt: skip
"""Roles by attribute name: `heads` (number of query heads), `kv_heads`, `groups` (query heads per
kv head), `width` (features of all heads together) and `head_dim` (features of one head). Names such
as hidden_size are left out, because they can also mean the width of the model.

Source: the attention modules of torch, transformers 5.23, diffusers and timm.
"""

FUSED: Final[Mapping[str, int]] = MappingProxyType(
    {
        "c_attn": 3, "qkv": 3, "qkv_proj": 3, "Wqkv": 3, "to_qkv": 3,
        "gate_up_proj": 2, "gate_up": 2,
    }
)  # fmt: skip
"""Number of projections that are concatenated in one weight, by the name of the fused module."""

HEAD_BY_HEAD: Final[Mapping[str, int]] = MappingProxyType({"query_key_value": 3})
"""Number of projections that are interleaved head by head (Megatron's order), by the name of the
fused module. A contiguous shard of such a weight has the q, k and v of whole heads.
"""


def role(sizes: Mapping[str, int], wanted: str) -> int | None:
    """Return the value of the first attribute in `sizes` whose role is `wanted`, or None."""
    return next((value for name, value in sizes.items() if ROLES.get(name) == wanted), None)


def pieces_of(name: str, out: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the output sizes of the projections in a fused weight, in order; () if not known.

    Args:
        name: The last part of the projection's fqn.
        out: Size of the fused output dim.
        sizes: `ModuleInfo.sizes` of the attention module that contains the projection.

    >>> pieces_of("qkv_proj", 96, {"num_heads": 8, "num_kv_heads": 2, "head_dim": 8})
    (64, 16, 16)
    """
    count = FUSED.get(name)
    if count is None:
        return ()
    head_dim, groups = role(sizes, "head_dim"), role(sizes, "groups")
    kv_heads = role(sizes, "kv_heads")
    heads = role(sizes, "heads") or (kv_heads * groups if kv_heads and groups else None)
    if count == 2:
        return (out // 2,) * 2 if out % 2 == 0 else ()
    if heads and head_dim:
        queries, keys = heads * head_dim, (kv_heads or heads) * head_dim
        # Cross-attention computes queries in another projection, and fuses only keys and values.
        fitting = [p for p in ((queries, keys, keys), (keys, keys)) if sum(p) == out]
        return fitting[0] if fitting else ()
    if kv_heads or groups or out % count:
        return ()
    return (out // count,) * count
