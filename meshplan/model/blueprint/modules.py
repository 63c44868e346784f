"""Build the modules of a decoder: one function for Llama-like families, one for GPT-2.

Source: transformers 5.23, `models/<family>/modeling_*.py`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from meshplan.model.blueprint.builder import GraphBuilder
from meshplan.model.blueprint.config import Facts, attention_sizes
from meshplan.model.blueprint.families import Family
from meshplan.model.blueprint.parts import attention_of, dense_layers, gated_mlp, sparse_mlp

_MAX_LAYERS: Final = 10_000


def build_decoder(family: Family, facts: Facts, build: GraphBuilder) -> None:
    """Add the modules and tensors of a Llama-like decoder."""
    vocab, hidden = facts.size("vocab_size"), facts.size("hidden_size")
    num_layers = facts.size("num_hidden_layers", most=_MAX_LAYERS)
    attention, turned = attention_of(family, facts, build)
    default_act = "gelu_pytorch_tanh" if family.activation == "hidden_activation" else "silu"
    act = facts.config.get(family.activation) or default_act
    dense_mlp = gated_mlp(family, facts, build, facts.size("intermediate_size"), act)
    routed_mlp = sparse_mlp(family, facts, build, act) if family.moe else dense_mlp
    dense = dense_layers(family, facts, num_layers)
    tied = facts.flag("tie_word_embeddings", family.ties)
    facts.window(family.window)
    facts.finish()
    prefix, rms_norm = family.prefix, f"{family.prefix}RMSNorm"

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
        (dense_mlp if i in dense else routed_mlp)(f"{layer}.mlp")
        for name in family.norms:
            build.norm(f"{layer}.{name}", hidden, rms_norm)
    build.norm("model.norm", hidden, rms_norm)
    build.module("model.rotary_emb", f"{prefix}RotaryEmbedding")
    for name in ("inv_freq", "original_inv_freq"):
        build.buffer(f"model.rotary_emb.{name}", (-(-turned // 2),))
    _lm_head(build, vocab, hidden, tied)
    build.tp_preset = _preset(family)
    if family.is_plain and "experts_implementation" not in facts.sizes:
        ends = dict.fromkeys(("lm_head", "model.embed_tokens"), "vocab")
        cut = {name: word for name, word in build.tp_preset.items() if ".experts" not in name}
        build.tp_derived = cut | _of_all(family) | ends


def _of_all(family: Family) -> dict[str, str]:
    """Return the styles of the shared expert's projections by name; {} without a shared expert.

    They apply even if the tp plan of transformers leaves the shared expert out.
    """
    at, words = f"model.layers.*.mlp.{family.shared}", ("colwise", "colwise", "rowwise")
    names = ("gate_proj", "up_proj", "down_proj") if family.shared else ()
    return {f"{at}.{name}": word for name, word in zip(names, words, strict=False)}


def _preset(family: Family) -> dict[str, str]:
    """Return the tp plan that transformers ships with the family, as in `ModelGraph.tp_preset`."""
    attention = {}
    if family.attention == "by_head":
        attention = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise")
        attention |= {"o_proj": "rowwise"}
    if family.qk_norm:
        attention |= dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")
    dense = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    experts = {
        "experts.gate_up_proj": "packed_colwise",
        "experts.down_proj": "rowwise",
        "experts": "moe_tp_experts",
    }
    mlp = (experts if family.moe else {}) | (dense if family.has_dense else {})
    if family.shared == "shared_experts":
        mlp |= {f"shared_experts.{name}": word for name, word in dense.items()}
    layer = {f"self_attn.{name}": word for name, word in attention.items()}
    layer |= {f"mlp.{name}": word for name, word in mlp.items()}
    return {
        "lm_head": "colwise_gather_output",
        "model.embed_tokens": "embedding_rowwise",
        **{f"model.layers.*.{name}": word for name, word in layer.items()},
    }


def build_gpt2(facts: Facts, build: GraphBuilder) -> None:
    """Add GPT-2's modules: learned positions, LayerNorm with bias, transposed fused weights."""
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


def _lm_head(build: GraphBuilder, vocab: int, hidden: int, tied: bool) -> None:
    """Add the output projection; if `tied`, without a weight, which is the embedding's."""
    build.linear("lm_head", vocab, hidden)
    if tied:
        del build.parameters["lm_head.weight"]
