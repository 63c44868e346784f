"""Read a decoder's sizes and switches from the graph of its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from meshplan.errors import PlanError, Problem
from meshplan.layout.styles import Style, style_for
from meshplan.model.graph import ModelGraph, pattern_of

BY_TRACE: Final = "write model: {entry: PKG.MOD:FN} in the plan, to trace the model with torch"

_KNOWN: Final = frozenset(
    {
        "GPT2LMHeadModel",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "DeepseekV3ForCausalLM",
        "GraniteForCausalLM",
        "Qwen2MoeForCausalLM",
    }
)

_SCALED: Final = frozenset({"GraniteForCausalLM"})
"""Families that multiply embeddings, the output of each half block, and logits by constants."""

_MASKED: Final = frozenset({"Qwen2MoeForCausalLM"})
"""Families whose code makes a mask for sliding windows even if no block has such a window."""

_WIDE_WEIGHTS: Final = frozenset({"MixtralForCausalLM", "DeepseekV3ForCausalLM"})
"""Families that keep the router's weights of a token's experts in float32."""

_UNKNOWN: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "experts_implementation": (
            "activation memory of the config's experts_implementation depends on the routing",
            f"remove it from the config (transformers then uses grouped_mm), or {BY_TRACE}",
        ),
        "output_router_logits": (
            "there is no rule for what the loss over output_router_logits saves for backward",
            f"remove it from the config, or {BY_TRACE}",
        ),
        "router_jitter_noise": (
            "there is no rule for what router_jitter_noise saves for backward",
            f"remove it from the config, or {BY_TRACE}",
        ),
    }
)
"""Switches of models with experts for which there are no rules: (problem, fix) by key of
`ModelGraph.config`."""

_ACTIVATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "SiLUActivation": "silu",
        "NewGELUActivation": "gelu_new",
        "GELUActivation": "gelu",
        "GELUTanh": "gelu",
        "ReLU": "relu",
    }
)
"""For each activation class of transformers or torch, the op that saves the same tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Sizes of multi-head latent attention, which computes keys and values from a latent vector.

    Args:
        q_rank: Features of the latent vector of queries (`q_lora_rank`); 0 if one projection makes
            queries.
        kv_rank: Features of the latent vector of keys and values (`kv_lora_rank`).
        straight: Features of one head's query that are not rotated (`qk_nope_head_dim`).
        turned: Features of one head's query that are rotated by position (`qk_rope_head_dim`).
        value: Features of one head's value (`v_head_dim`).
        bias: If True, the projections into latent vectors and the output projection have a bias.
        is_interleaved: If True, neighbouring features are rotated together; otherwise the two
            halves.
    """

    q_rank: int
    kv_rank: int
    straight: int
    turned: int
    value: int
    bias: bool = False
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes and switches of a decoder of repeated blocks.

    Args:
        layers: Number of blocks.
        hidden: Features of the hidden states.
        heads: Number of heads of queries.
        kv_heads: Number of heads of keys and values.
        head_dim: Features of one head of queries and keys.
        mlp: Features of the hidden layer of the feed-forward.
        vocab: Rows of the embedding.
        activation: Op of the activation function; see `activations.activate`.
        positions: Rows of the table of learned positions; 0 if positions are rotary.
        tied: If True, the output head uses the embedding's weight.
        qkv_bias, o_bias, mlp_bias: If True, these projections have a bias.
        qk_norm: If True, queries and keys are normalised per head.
        dropout: Dropout probability of the outputs of attention and feed-forward; 0 for none.
        embed_dropout: Dropout probability of the embeddings; 0 for none.
        window: Tokens of attention's sliding window; 0 for none.
        scales: If True, constants multiply embeddings, outputs of attention and feed-forward, and
            logits.
        has_mask: If True, the model's code makes a mask that no block uses.
        experts: Number of experts of a block; 0 if there are none.
        top_k: Number of experts for each token; 0 if there are none.
        expert_mlp: Features of the hidden layer of one expert.
        dense: Numbers of the blocks without experts, in a model whose other blocks have experts.
        scales_weights: If True, the router's weights of a token's experts are divided by their sum.
        has_wide_weights: If True, these weights stay in float32.
        groups: (number of groups of experts, number of groups to which a token's experts are
            limited); None if the router has no groups.
        shared_mlp: Features of the hidden layer of the shared expert; 0 if there is none.
        gates_shared: If True, a gate multiplies the output of the shared expert for each token.
        latent: Sizes of multi-head latent attention; None for ordinary attention.
        styles: Styles that `tp_plan: auto` gives the modules if tp divides all their sizes, by fqn
            with `*` for the numbers of blocks.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    activation: str = "silu"
    positions: int = 0
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    embed_dropout: float = 0.0
    window: int = 0
    scales: bool = False
    has_mask: bool = False
    experts: int = 0
    top_k: int = 0
    expert_mlp: int = 0
    dense: frozenset[int] = frozenset()
    scales_weights: bool = False
    has_wide_weights: bool = False
    groups: tuple[int, int] | None = None
    shared_mlp: int = 0
    gates_shared: bool = False
    latent: Latent | None = None
    styles: Mapping[str, Style] = field(default_factory=dict, compare=False)

    def is_sparse(self, number: int) -> bool:
        """Return True if this block is a mixture of experts."""
        return self.experts > 0 and number not in self.dense

    @property
    def turned(self) -> int:
        """Features of one head that are rotated by position."""
        return self.head_dim if self.latent is None else self.latent.turned

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def shape_of(graph: ModelGraph) -> Shape:
    """Return the sizes of a model, read from a blueprint's graph.

    Raises:
        PlanError: There are no rules for the blocks of this model.
    """
    sizes, tensors = graph.config, graph.tensors
    root = graph.modules[""].type if "" in graph.modules else ""
    if root not in _KNOWN:
        what = f"there are no rules for the operators of {root or graph.name}"
        known = ", ".join(sorted(_KNOWN))
        raise PlanError(Problem(what, fix=f"{BY_TRACE}; a config is enough for {known}"))
    is_gpt2 = root == "GPT2LMHeadModel"
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    first = "transformer.h.0" if is_gpt2 else "model.layers.0"
    if problems := [
        Problem(what, fix=fix) for key, (what, fix) in _UNKNOWN.items() if key in sizes
    ]:
        raise PlanError(problems)
    names = ("mlp.act", "mlp.act_fn", "mlp.experts.act_fn")
    act = next(graph.modules[at].type for n in names if (at := f"{first}.{n}") in graph.modules)
    if act not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        what = f"there is no rule for what the activation {act} saves for backward"
        raise PlanError(Problem(what, fix=f"{BY_TRACE}; a config is enough for {known}"))

    def has(name: str) -> bool:
        return f"{first}.{name}" in tensors

    latent = _latent_of(graph) if "kv_lora_rank" in sizes else None
    head_dim = sizes.get("head_dim", hidden // heads)
    return Shape(
        layers=sizes["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=sizes.get("num_key_value_heads", heads),
        head_dim=head_dim if latent is None else latent.straight + latent.turned,
        mlp=sizes.get("n_inner", 4 * hidden) if is_gpt2 else sizes["intermediate_size"],
        vocab=sizes["vocab_size"],
        activation=_ACTIVATIONS[act],
        positions=sizes["max_position_embeddings"] if is_gpt2 else 0,
        tied="lm_head.weight" not in tensors,
        qkv_bias=is_gpt2 or has("self_attn.q_proj.bias"),
        o_bias=is_gpt2 or has("self_attn.o_proj.bias"),
        mlp_bias=is_gpt2 or has("mlp.up_proj.bias"),
        qk_norm=has("self_attn.q_norm.weight"),
        dropout=sizes.get("resid_pdrop", 0),
        embed_dropout=sizes.get("embd_pdrop", 0),
        window=sizes.get("sliding_window", 0),
        scales=root in _SCALED,
        has_mask=root in _MASKED and "sliding_window" not in sizes,
        latent=latent,
        styles=_styles(graph),
        **_experts_of(graph),
    )


def _latent_of(graph: ModelGraph) -> Latent:
    """Return the sizes of multi-head latent attention, read from the config."""
    sizes, first = graph.config, "model.layers.0.self_attn"
    return Latent(
        q_rank=sizes.get("q_lora_rank", 0),
        kv_rank=sizes["kv_lora_rank"],
        straight=sizes["qk_nope_head_dim"],
        turned=sizes["qk_rope_head_dim"],
        value=sizes["v_head_dim"],
        bias=f"{first}.o_proj.bias" in graph.tensors,
        is_interleaved="rope_interleave" in sizes,
    )


def _experts_of(graph: ModelGraph) -> dict[str, Any]:
    """Return the sizes of blocks with experts, as keyword arguments of `Shape`; {} without experts.

    Raises:
        PlanError: A token is routed to more experts than there are.
    """
    layers = range(graph.config["num_hidden_layers"])
    stacks = {n: graph.tensors.get(f"model.layers.{n}.mlp.experts.down_proj") for n in layers}
    stack = next((tensor for tensor in stacks.values() if tensor is not None), None)
    if stack is None:
        return {}
    top_k = graph.config["num_experts_per_tok"]
    if top_k > stack.shape[0]:
        what = f"a token cannot be sent to {top_k} of {stack.shape[0]} experts"
        raise PlanError(Problem(what, fix=f"set num_experts_per_tok to at most {stack.shape[0]}"))
    number = next(n for n, tensor in stacks.items() if tensor is not None)
    at = f"model.layers.{number}.mlp"
    names = (f"{at}.{name}.up_proj.weight" for name in ("shared_experts", "shared_expert"))
    shared = next((graph.tensors[name] for name in names if name in graph.tensors), None)
    groups = (
        (graph.config["n_group"], graph.config["topk_group"]) if "n_group" in graph.config else None
    )
    return {
        "groups": groups,
        "shared_mlp": shared.shape[0] if shared is not None else 0,
        "gates_shared": f"{at}.shared_expert_gate" in graph.modules,
        "experts": stack.shape[0],
        "top_k": top_k,
        "expert_mlp": stack.shape[-1],
        "dense": frozenset(n for n, tensor in stacks.items() if tensor is None),
        "scales_weights": "norm_topk_prob" in graph.config,
        "has_wide_weights": graph.modules[""].type in _WIDE_WEIGHTS,
    }


def _styles(graph: ModelGraph) -> Mapping[str, Style]:
    kinds = {pattern_of(fqn): info.kind for fqn, info in graph.modules.items()}
    found = {name: style_for(word, kinds.get(name, "")) for name, word in graph.tp_derived.items()}
    return {name: style for name, style in found.items() if style is not None}
