"""Model families as data: how the modules of each differ from Llama's, and its default sizes.

To add a family with Llama's module tree, add an entry to `FAMILIES`.

Source: transformers 5.23, `models/<family>/configuration_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from meshplan.model.blueprint.config import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The differences of one decoder family's modules from Llama's.

    An argument of type `bool | str` is either the family's fixed answer, or the key at which its
    configs state it.

    Args:
        prefix: Prefix of its class names.
        defaults: transformers' default of each size that a config may leave out.
        qkv_bias, o_bias, mlp_bias: If True, the projections have a bias.
        attention: The kind of attention: "by_head", or "latent" (multi-head latent attention).
        qk_norm: If True, queries and keys are normalised per head.
        norms: The norms of one layer, in order.
        moe: Names of the children of a sparse block in definition order, () for a dense model.
        sparse_block, router: Class names, without the prefix.
        has_groups: If True, a token's experts come from few groups of experts, and a buffer of
            corrections is added to the scores by which they are chosen.
        mixes_dense: The config key that determines which layers are dense; "" if none is. Families
            with such a key state the width of an expert as moe_intermediate_size.
        scales_weights: If True, the weights of a token's experts are normalised to sum to 1.
        on_by_default: Boolean config keys whose default is true.
        activation: The config key of the activation's name.
        embedding: Class of the token embedding.
        window: If True, attention sees only the last `sliding_window` tokens.
        scales: If True, embeddings, residual branches and logits are multiplied by constants.
        ties: If True, input and output embeddings are one tensor unless the config states
            otherwise.
    """

    prefix: str
    defaults: Mapping[str, int]
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    attention: str = "by_head"
    qk_norm: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    moe: tuple[str, ...] = ()
    sparse_block: str = "SparseMoeBlock"
    router: str = "TopKRouter"
    has_groups: bool = False
    mixes_dense: str = ""
    scales_weights: bool | str = False
    on_by_default: frozenset[str] = frozenset()
    activation: str = "hidden_act"
    embedding: str = "Embedding"
    window: bool | str = False
    scales: bool = False
    ties: bool = False

    def flag(self, key: bool | str, facts: Facts) -> bool:
        """Return the value of a `bool | str` argument: fixed, or read from the config."""
        return facts.flag(key, key in self.on_by_default)

    @property
    def is_plain(self) -> bool:
        """True if the styles that `tp_plan: auto` derives are known without a recorded forward.

        This is so if a layer computes what Llama's layer does. These styles do not shard experts.
        """
        return len(self.norms) == 2

    @property
    def shared(self) -> str:
        """Name of the expert in a sparse block that all tokens use; "" if there is none."""
        return next((name for name in self.moe if name in ("shared_expert", "shared_experts")), "")

    @property
    def has_dense(self) -> bool:
        """True if a layer may have a dense feed-forward instead of experts."""
        return not self.moe or bool(self.mixes_dense)


def _sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, **more: int
) -> Mapping[str, int]:
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return MappingProxyType(sizes | more)


_BIAS_KEY: Final = "attention_bias"

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": Family(
            prefix="Llama",
            defaults=_sizes(32000, 4096, 11008, 32, 32),
            qkv_bias=_BIAS_KEY,
            o_bias=_BIAS_KEY,
            mlp_bias="mlp_bias",
        ),
        "mistral": Family(
            prefix="Mistral",
            defaults=_sizes(32000, 4096, 14336, 32, 32, num_key_value_heads=8),
            window=True,
        ),
        "qwen2": Family(
            prefix="Qwen2",
            defaults=_sizes(151936, 4096, 22016, 32, 32, num_key_value_heads=32),
            qkv_bias=True,
            window="use_sliding_window",
        ),
        "qwen3": Family(
            prefix="Qwen3",
            defaults=_sizes(151936, 4096, 22016, 32, 32, num_key_value_heads=32, head_dim=128),
            qkv_bias=_BIAS_KEY,
            o_bias=_BIAS_KEY,
            qk_norm=True,
            window="use_sliding_window",
        ),
        "gemma2": Family(
            prefix="Gemma2",
            defaults=_sizes(256000, 2304, 9216, 26, 8, num_key_value_heads=4, head_dim=256),
            qkv_bias=_BIAS_KEY,
            o_bias=_BIAS_KEY,
            norms=(
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            activation="hidden_activation",
            embedding="Gemma2TextScaledWordEmbedding",
            ties=True,
        ),
        "granite": Family(
            prefix="Granite",
            defaults=_sizes(32000, 4096, 11008, 32, 32),
            qkv_bias=_BIAS_KEY,
            o_bias=_BIAS_KEY,
            mlp_bias="mlp_bias",
            scales=True,
        ),
        "mixtral": Family(
            prefix="Mixtral",
            defaults=_sizes(
                32000, 4096, 14336, 32, 32,
                num_key_value_heads=8, num_experts=8, num_experts_per_tok=2,
            ),
            moe=("gate", "experts"),
            scales_weights=True,
            window="sliding_window",
        ),
        "qwen3_moe": Family(
            prefix="Qwen3Moe",
            defaults=_sizes(
                151936, 2048, 6144, 24, 32,
                num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
                moe_intermediate_size=768, decoder_sparse_step=1,
            ),
            qkv_bias=_BIAS_KEY,
            o_bias=_BIAS_KEY,
            qk_norm=True,
            moe=("experts", "gate"),
            mixes_dense="decoder_sparse_step",
            scales_weights="norm_topk_prob",
            window="use_sliding_window",
        ),
        "deepseek_v3": Family(
            prefix="DeepseekV3",
            defaults=_sizes(
                129280, 7168, 18432, 61, 128,
                q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
                v_head_dim=128, num_experts=256, num_experts_per_tok=8, n_shared_experts=1,
                moe_intermediate_size=2048, n_group=8, topk_group=4, first_k_dense_replace=3,
            ),
            attention="latent",
            moe=("experts", "gate", "shared_experts"),
            sparse_block="MoE",
            router="TopkRouter",
            has_groups=True,
            mixes_dense="first_k_dense_replace",
            scales_weights="norm_topk_prob",
            on_by_default=frozenset({"norm_topk_prob"}),
        ),
        "qwen2_moe": Family(
            prefix="Qwen2Moe",
            defaults=_sizes(
                151936, 2048, 5632, 24, 16,
                num_key_value_heads=16, num_experts=60, num_experts_per_tok=4,
                moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
                decoder_sparse_step=1,
            ),
            qkv_bias="qkv_bias",
            moe=("gate", "experts", "shared_expert", "shared_expert_gate"),
            mixes_dense="decoder_sparse_step",
            scales_weights="norm_topk_prob",
            on_by_default=frozenset({"qkv_bias"}),
            window="use_sliding_window",
        ),
    }
)  # fmt: skip
"""The families with Llama's module tree by `model_type`; GPT-2 has another one."""

GPT2_DEFAULTS: Final = MappingProxyType(
    {
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
    }
)
"""GPT-2's default sizes, by the keys that the other families use."""
