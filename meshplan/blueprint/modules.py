"""Modules and tensors in definition order, and the two shapes of decoder that put them there.

Source: transformers 5.23, `models/<family>/modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from meshplan.blueprint.config import Facts, attention_sizes
from meshplan.blueprint.families import Family
from meshplan.graph import ModelGraph, ModuleInfo, TensorInfo
from meshplan.styles import dims_of

_MAX_LAYERS: Final = 10_000

_ACTIVATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "silu": "transformers.activations.SiLUActivation",
        "gelu": "transformers.activations.GELUActivation",
        "gelu_new": "transformers.activations.NewGELUActivation",
        "gelu_fast": "transformers.activations.FastGELUActivation",
        "gelu_pytorch_tanh": "transformers.activations.GELUTanh",
        "relu": "torch.nn.modules.activation.ReLU",
    }
)

_TORCH: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Linear": "torch.nn.modules.linear",
        "Embedding": "torch.nn.modules.sparse",
        "LayerNorm": "torch.nn.modules.normalization",
        "Dropout": "torch.nn.modules.dropout",
        "ModuleList": "torch.nn.modules.container",
        "Conv1D": "transformers.pytorch_utils",
    }
)


class Builder:
    """Gathers modules and tensors in definition order."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.modules: dict[str, ModuleInfo] = {}
        self.parameters: dict[str, TensorInfo] = {}
        self.buffers: dict[str, TensorInfo] = {}
        self.tp_preset: dict[str, str] = {}
        self.tp_derived: dict[str, str] = {}

    def graph(self, name: str, config: dict[str, int]) -> ModelGraph:
        tensors = self.parameters | self.buffers
        return ModelGraph(
            name=name,
            modules=MappingProxyType(self.modules),
            tensors=MappingProxyType(tensors),
            config=MappingProxyType(config),
            tp_preset=MappingProxyType(self.tp_preset),
            tp_derived=MappingProxyType(self.tp_derived),
        )

    def module(self, fqn: str, type: str, kind: str = "other", **facts: Any) -> None:
        """A module; `facts` are further fields of its ModuleInfo."""
        self.modules[fqn] = ModuleInfo(
            fqn=fqn,
            type=type,
            qualified_type=f"{_TORCH.get(type, self.source)}.{type}",
            kind=kind,
            has_forward=type != "ModuleList",
            **facts,
        )

    def parameter(
        self,
        fqn: str,
        shape: tuple[int, ...],
        dims: tuple[str, ...],
        aliases: tuple[str, ...] = (),
    ) -> None:
        self.parameters[fqn] = TensorInfo(fqn=fqn, shape=shape, dims=dims, aliases=aliases)

    def buffer(self, fqn: str, shape: tuple[int, ...]) -> None:
        self.buffers[fqn] = TensorInfo(
            fqn=fqn,
            shape=shape,
            dims=("",) * len(shape),
            trainable=False,
            is_buffer=True,
            is_persistent=False,
        )

    def linear(
        self,
        fqn: str,
        out: int,
        into: int,
        *,
        bias: bool = False,
        kind: str = "linear",
        **facts: Any,
    ) -> None:
        """A Linear, or transformers' Conv1D, whose weight lies the other way round."""
        shape = (out, into) if kind == "linear" else (into, out)
        self.module(fqn, "Linear" if kind == "linear" else "Conv1D", kind, **facts)
        self.parameter(f"{fqn}.weight", shape, dims_of(kind, "weight", 2))
        if bias:
            self.parameter(f"{fqn}.bias", (out,), dims_of(kind, "bias", 1))

    def embedding(
        self, fqn: str, vocab: int, embed: int, type: str = "Embedding", tied_to: str = ""
    ) -> None:
        self.module(fqn, type, "embedding")
        aliases = (tied_to,) if tied_to else ()
        self.parameter(f"{fqn}.weight", (vocab, embed), dims_of("embedding", "weight", 2), aliases)

    def norm(self, fqn: str, size: int, type: str, bias: bool = False) -> None:
        self.module(fqn, type, "norm")
        self.parameter(f"{fqn}.weight", (size,), dims_of("norm", "weight", 1))
        if bias:
            self.parameter(f"{fqn}.bias", (size,), dims_of("norm", "bias", 1))

    def activation(self, fqn: str, name: object) -> None:
        qualified = _ACTIVATIONS.get(str(name), f"transformers.activations.{name}")
        type = qualified.rpartition(".")[2]
        self.modules[fqn] = ModuleInfo(fqn=fqn, type=type, qualified_type=qualified)


def build_decoder(family: Family, facts: Facts, build: Builder) -> None:
    """The shape that Llama gave its name to."""
    vocab, hidden = facts.size("vocab_size"), facts.size("hidden_size")
    num_layers = facts.size("num_hidden_layers", most=_MAX_LAYERS)
    heads, kv_heads, head_dim = attention_sizes(facts)
    mlp = facts.size("intermediate_size")
    num_experts = facts.size("num_experts") if family.moe else 0
    expert_mlp, sparse_step, dense = mlp, 1, frozenset[int]()
    if family.moe:
        facts.experts(family.scales_weights)
    if family.mixes_dense:
        expert_mlp = facts.size("moe_intermediate_size")
        sparse_step, dense = facts.size("decoder_sparse_step"), facts.layers("mlp_only_layers")
    qkv_bias, o_bias = facts.flag(family.qkv_bias), facts.flag(family.o_bias)
    mlp_bias = facts.flag(family.mlp_bias)
    tied = facts.flag("tie_word_embeddings", family.ties)
    facts.window(family.window)
    default_act = "gelu_pytorch_tanh" if family.activation == "hidden_activation" else "silu"
    act = facts.config.get(family.activation) or default_act
    facts.finish()
    prefix, rms_norm = family.prefix, f"{family.prefix}RMSNorm"

    sizes = MappingProxyType({"head_dim": head_dim, "num_key_value_groups": heads // kv_heads})

    def attention(at: str) -> None:
        build.module(at, f"{prefix}Attention", sizes=sizes)
        for name, num in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            build.linear(f"{at}.{name}", num * head_dim, hidden, bias=qkv_bias, head_dim=head_dim)
        build.linear(f"{at}.o_proj", hidden, heads * head_dim, bias=o_bias, head_dim=head_dim)
        if family.qk_norm:
            build.norm(f"{at}.q_norm", head_dim, rms_norm)
            build.norm(f"{at}.k_norm", head_dim, rms_norm)

    def dense_mlp(at: str) -> None:
        build.module(at, f"{prefix}MLP")
        build.linear(f"{at}.gate_proj", mlp, hidden, bias=mlp_bias)
        build.linear(f"{at}.up_proj", mlp, hidden, bias=mlp_bias)
        build.linear(f"{at}.down_proj", hidden, mlp, bias=mlp_bias)
        build.activation(f"{at}.act_fn", act)

    def sparse_mlp(at: str) -> None:
        build.module(at, f"{prefix}SparseMoeBlock")
        for child in family.moe:
            if child == "gate":
                build.module(f"{at}.gate", f"{prefix}TopKRouter")
                build.parameter(f"{at}.gate.weight", (num_experts, hidden), ("expert", "in"))
                continue
            fused, down = (num_experts, 2 * expert_mlp, hidden), (num_experts, hidden, expert_mlp)
            build.module(f"{at}.experts", f"{prefix}Experts")
            build.parameter(f"{at}.experts.gate_up_proj", fused, ("expert", "out", "in"))
            build.parameter(f"{at}.experts.down_proj", down, ("expert", "out", "in"))
            build.activation(f"{at}.experts.act_fn", act)

    build.module("model", f"{prefix}Model")
    head = "lm_head.weight" if tied else ""
    build.embedding("model.embed_tokens", vocab, hidden, family.embedding, tied_to=head)
    if family.embedding != "Embedding":
        build.buffer("model.embed_tokens.embed_scale", ())
    build.module("model.layers", "ModuleList", "container")
    for i in range(num_layers):
        layer = f"model.layers.{i}"
        build.module(layer, f"{prefix}DecoderLayer")
        attention(f"{layer}.self_attn")
        is_sparse = family.moe and i not in dense and (i + 1) % sparse_step == 0
        (sparse_mlp if is_sparse else dense_mlp)(f"{layer}.mlp")
        for name in family.norms:
            build.norm(f"{layer}.{name}", hidden, rms_norm)
    build.norm("model.norm", hidden, rms_norm)
    build.module("model.rotary_emb", f"{prefix}RotaryEmbedding")
    for name in ("inv_freq", "original_inv_freq"):
        build.buffer(f"model.rotary_emb.{name}", (-(-head_dim // 2),))
    _lm_head(build, vocab, hidden, tied)
    build.tp_preset = _preset(family)
    if family.is_plain and "experts_implementation" not in facts.sizes:
        ends = dict.fromkeys(("lm_head", "model.embed_tokens"), "vocab")
        cut = {name: word for name, word in build.tp_preset.items() if ".experts" not in name}
        build.tp_derived = cut | ends


def _preset(family: Family) -> dict[str, str]:
    """The tp plan that transformers ships with the family."""
    attention = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise"}
    if family.qk_norm:
        attention |= dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")
    dense = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    experts = {
        "experts.gate_up_proj": "packed_colwise",
        "experts.down_proj": "rowwise",
        "experts": "moe_tp_experts",
    }
    mlp = (experts if family.moe else {}) | (dense if family.has_dense else {})
    layer = {f"self_attn.{name}": word for name, word in attention.items()}
    layer |= {"self_attn.o_proj": "rowwise"} | {f"mlp.{name}": word for name, word in mlp.items()}
    return {
        "lm_head": "colwise_gather_output",
        "model.embed_tokens": "embedding_rowwise",
        **{f"model.layers.*.{name}": word for name, word in layer.items()},
    }


def build_gpt2(facts: Facts, build: Builder) -> None:
    """GPT-2: learned positions, LayerNorm with bias, transposed and packed projections."""
    vocab, hidden = facts.size("vocab_size"), facts.size("hidden_size")
    positions = facts.size("max_position_embeddings")
    num_layers = facts.size("num_hidden_layers", most=_MAX_LAYERS)
    heads, _, head_dim = attention_sizes(facts)
    mlp = facts.size("n_inner", 4 * hidden)
    tied = facts.flag("tie_word_embeddings", True)
    facts.dropout("embd_pdrop", 0.1)
    facts.dropout("resid_pdrop", 0.1)
    if facts.flag("add_cross_attention"):
        facts.problem("add_cross_attention", "cross attention is not supported", "remove the key")
    act = facts.config.get("activation_function") or "gelu_new"
    facts.finish()

    build.module("transformer", "GPT2Model")
    head = "lm_head.weight" if tied else ""
    build.embedding("transformer.wte", vocab, hidden, tied_to=head)
    build.embedding("transformer.wpe", positions, hidden)
    build.module("transformer.drop", "Dropout")
    build.module("transformer.h", "ModuleList", "container")

    def conv(at: str, out: int, into: int, **facts: Any) -> None:
        build.linear(at, out, into, bias=True, kind="conv1d", **facts)

    sizes = MappingProxyType({"num_heads": heads, "head_dim": head_dim, "split_size": hidden})
    fused = {"head_dim": head_dim, "packed": 3, "pieces": (hidden,) * 3}

    for i in range(num_layers):
        layer = f"transformer.h.{i}"
        build.module(layer, "GPT2Block")
        build.norm(f"{layer}.ln_1", hidden, "LayerNorm", bias=True)
        build.module(f"{layer}.attn", "GPT2Attention", sizes=sizes)
        conv(f"{layer}.attn.c_attn", 3 * hidden, hidden, **fused)
        conv(f"{layer}.attn.c_proj", hidden, hidden, head_dim=head_dim)
        build.module(f"{layer}.attn.attn_dropout", "Dropout")
        build.module(f"{layer}.attn.resid_dropout", "Dropout")
        build.norm(f"{layer}.ln_2", hidden, "LayerNorm", bias=True)
        build.module(f"{layer}.mlp", "GPT2MLP")
        conv(f"{layer}.mlp.c_fc", mlp, hidden)
        conv(f"{layer}.mlp.c_proj", hidden, mlp)
        build.activation(f"{layer}.mlp.act", act)
        build.module(f"{layer}.mlp.dropout", "Dropout")
    build.norm("transformer.ln_f", hidden, "LayerNorm", bias=True)
    _lm_head(build, vocab, hidden, tied)
    words = {"attn.c_attn": "packed_colwise", "attn.c_proj": "rowwise"}
    words |= {"mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}
    build.tp_derived = {f"transformer.h.*.{name}": word for name, word in words.items()}
    build.tp_derived |= dict.fromkeys(("transformer.wte", "lm_head"), "vocab")


def _lm_head(build: Builder, vocab: int, hidden: int, tied: bool) -> None:
    """The output projection; tied, its weight is the embedding's and already there."""
    build.linear("lm_head", vocab, hidden)
    if tied:
        del build.parameters["lm_head.weight"]
