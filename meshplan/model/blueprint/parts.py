"""The parts of a decoder layer: attention, dense and sparse feed-forward.

Each function here reads the sizes of one part and returns a function that adds the part's modules.
So the sizes of all parts are read before any module is added, and all problems of a config are
reported together.

Source: transformers 5.23, `models/<family>/modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from meshplan.model.blueprint.builder import GraphBuilder
from meshplan.model.blueprint.config import Facts, attention_sizes
from meshplan.model.blueprint.families import Family

Put = Callable[[str], None]
"""Function that adds the modules and tensors of one part under an fqn."""

_EACH_GROUP: Final = 2
"""Number of a group's best experts whose scores are added to give the group's score."""


def attention_of(family: Family, facts: Facts, build: GraphBuilder) -> tuple[Put, int]:
    """Return a function that adds an attention, and how many features of a head are rotated.

    Rotary embeddings rotate these features.
    """
    return _ATTENTIONS[family.attention](family, facts, build)


def _by_head(family: Family, facts: Facts, build: GraphBuilder) -> tuple[Put, int]:
    """Return `attention_of` for attention with one projection each for queries, keys and values."""
    hidden, (heads, kv_heads, head_dim) = facts.size("hidden_size"), attention_sizes(facts)
    qkv_bias, o_bias = family.flag(family.qkv_bias, facts), family.flag(family.o_bias, facts)
    sizes = MappingProxyType({"head_dim": head_dim, "num_key_value_groups": heads // kv_heads})

    def put(at: str) -> None:
        build.module(at, f"{family.prefix}Attention", sizes=sizes)
        for name, num in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            build.linear(f"{at}.{name}", num * head_dim, hidden, bias=qkv_bias, head_dim=head_dim)
        build.linear(f"{at}.o_proj", hidden, heads * head_dim, bias=o_bias, head_dim=head_dim)
        if family.qk_norm:
            build.norm(f"{at}.q_norm", head_dim, f"{family.prefix}RMSNorm")
            build.norm(f"{at}.k_norm", head_dim, f"{family.prefix}RMSNorm")

    return put, head_dim


def _latent(family: Family, facts: Facts, build: GraphBuilder) -> tuple[Put, int]:
    """Return `attention_of` for multi-head latent attention.

    Queries, and keys and values of all heads, are each projected from one narrow vector per token.

    Source: DeepSeek-V2 report, section 2.1 (multi-head latent attention).
    """
    hidden, heads = facts.size("hidden_size"), facts.size("num_attention_heads")
    q_rank, kv_rank = facts.size_or_none("q_lora_rank"), facts.size("kv_lora_rank")
    turned, straight = facts.size("qk_rope_head_dim"), facts.size("qk_nope_head_dim")
    value, bias = facts.size("v_head_dim"), facts.flag("attention_bias")
    if facts.flag("rope_interleave", True):
        facts.sizes["rope_interleave"] = 1
    if facts.size("num_key_value_heads", heads) != heads:
        facts.problem(
            "num_key_value_heads",
            f"each of the {heads} attention heads has its own keys and values in this family",
            f"write {heads}, or remove the key",
        )
    if facts.config.get("head_dim") not in (None, turned):
        what = f"in this family head_dim must equal qk_rope_head_dim, which is {turned}"
        facts.problem("head_dim", what, f"write {turned}, or remove the key")
    norm, wide = f"{family.prefix}RMSNorm", heads * (straight + turned)
    sizes = MappingProxyType({"num_heads": heads, "num_key_value_groups": 1})

    def put(at: str) -> None:
        build.module(at, f"{family.prefix}Attention", sizes=sizes)
        if q_rank is None:
            build.linear(f"{at}.q_proj", wide, hidden)
        else:
            build.linear(f"{at}.q_a_proj", q_rank, hidden, bias=bias)
            build.norm(f"{at}.q_a_layernorm", q_rank, norm)
            build.linear(f"{at}.q_b_proj", wide, q_rank)
        build.linear(f"{at}.kv_a_proj_with_mqa", kv_rank + turned, hidden, bias=bias)
        build.norm(f"{at}.kv_a_layernorm", kv_rank, norm)
        build.linear(f"{at}.kv_b_proj", heads * (straight + value), kv_rank)
        build.linear(f"{at}.o_proj", hidden, heads * value, bias=bias)

    return put, turned


_ATTENTIONS: Final[Mapping[str, Callable[[Family, Facts, GraphBuilder], tuple[Put, int]]]] = (
    MappingProxyType({"by_head": _by_head, "latent": _latent})
)


def gated_mlp(family: Family, facts: Facts, build: GraphBuilder, width: int, act: object) -> Put:
    """Return a function that adds a feed-forward of gate, up and down projections.

    Args:
        family: The model family.
        facts: The config's values.
        build: The graph under construction.
        width: Number of features between the projections.
        act: Name of the activation, as in a config.json.
    """
    hidden, bias = facts.size("hidden_size"), family.flag(family.mlp_bias, facts)

    def put(at: str) -> None:
        build.module(at, f"{family.prefix}MLP")
        build.linear(f"{at}.gate_proj", width, hidden, bias=bias)
        build.linear(f"{at}.up_proj", width, hidden, bias=bias)
        build.linear(f"{at}.down_proj", hidden, width, bias=bias)
        build.activation(f"{at}.act_fn", act)

    return put


def sparse_mlp(family: Family, facts: Facts, build: GraphBuilder, act: object) -> Put:
    """Return a function that adds a router, its experts and, if the family has it, a shared one."""
    hidden, count = facts.size("hidden_size"), facts.size("num_experts")
    facts.experts(scales_weights=family.flag(family.scales_weights, facts))
    width = facts.size("moe_intermediate_size" if family.mixes_dense else "intermediate_size")
    if family.has_groups:
        _groups(facts, count)
    shared = None
    if family.shared == "shared_experts":
        every = facts.size("n_shared_experts") * width
        shared = gated_mlp(family, facts, build, every, act)
    elif family.shared == "shared_expert":
        every = facts.size("shared_expert_intermediate_size")
        shared = gated_mlp(family, facts, build, every, act)

    def gate(at: str) -> None:
        build.module(at, f"{family.prefix}{family.router}")
        build.parameter(f"{at}.weight", (count, hidden), ("expert", "in"))
        if family.has_groups:
            build.buffer(f"{at}.e_score_correction_bias", (count,), is_persistent=True)

    def experts(at: str) -> None:
        build.module(at, f"{family.prefix}Experts")
        for name, shape in (
            ("gate_up_proj", (count, 2 * width, hidden)), ("down_proj", (count, hidden, width)),
        ):  # fmt: skip
            build.parameter(f"{at}.{name}", shape, ("expert", "out", "in"))
        build.activation(f"{at}.act_fn", act)

    def shared_gate(at: str) -> None:
        build.linear(at, 1, hidden)

    puts = {
        "gate": gate, "experts": experts, family.shared: shared, "shared_expert_gate": shared_gate,
    }  # fmt: skip

    def put(at: str) -> None:
        build.module(at, f"{family.prefix}{family.sparse_block}")
        for child in family.moe:
            child_put = puts[child]
            assert child_put is not None
            child_put(f"{at}.{child}")

    return put


def _groups(facts: Facts, count: int) -> None:
    """Record a problem if the number of expert groups, or of groups per token, is impossible."""
    groups, chosen = facts.size("n_group"), facts.size("topk_group")
    if count % groups or count // groups < _EACH_GROUP:
        what = f"{count} experts do not divide into {groups} equal groups of {_EACH_GROUP} or more"
        facts.problem("n_group", what, "change n_group or the number of experts")
    if chosen > groups:
        what = f"a token cannot use {chosen} of {groups} groups of experts"
        facts.problem("topk_group", what, f"write at most {groups}")


def dense_layers(family: Family, facts: Facts, num_layers: int) -> frozenset[int]:
    """Return which of the first `num_layers` layers of a mixture of experts are dense."""
    if family.mixes_dense == "first_k_dense_replace":
        return frozenset(range(min(num_layers, facts.size(family.mixes_dense, least=0))))
    if family.mixes_dense == "decoder_sparse_step":
        step = facts.size(family.mixes_dense)
        skipped = frozenset(n for n in range(num_layers) if (n + 1) % step)
        return skipped | facts.layers("mlp_only_layers")
    return frozenset()
