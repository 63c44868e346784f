"""A live module as a graph: what is read from it, and that a config gives the same graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from meshplan.model.blueprint import from_mapping
from meshplan.model.graph import ModelGraph
from meshplan.runtime.trace.structure import graph_of
from tests.helpers import models


def kinds(graph: ModelGraph) -> dict[str, int]:
    counts = Counter(module.kind for module in graph.modules.values())
    return {kind: counts[kind] for kind in ("linear", "conv1d", "embedding", "norm", "container")}


@pytest.mark.parametrize(
    ("name", "numbers", "blocks"),
    [
        ("own_llama", (29, 0, 1, 9, 1), ["layers.0", "layers.1", "layers.2", "layers.3"]),
        ("hf_llama", (15, 0, 1, 5, 1), ["model.layers.0", "model.layers.1"]),
        ("gpt2", (1, 8, 2, 5, 1), ["transformer.h.0", "transformer.h.1"]),
        ("qwen3", (15, 0, 1, 9, 1), ["model.layers.0", "model.layers.1"]),
        ("bert", (14, 0, 3, 6, 1), ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
        ("vit", (13, 0, 0, 5, 1), ["vit.layers.0", "vit.layers.1"]),
        (
            "t5",
            (33, 0, 5, 12, 6),
            ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
        ),
        ("resnet", (1, 0, 0, 0, 1), ["blocks.0", "blocks.1", "blocks.2"]),
        ("odd", (7, 0, 0, 0, 2), ["blocks.0", "blocks.1"]),
    ],
)
def test_kinds_and_blocks(name: str, numbers: tuple[int, ...], blocks: list[str]) -> None:
    graph = graph_of(models.build(name))
    assert tuple(kinds(graph).values()) == numbers
    assert list(graph.blocks()) == blocks


def test_blocks_in_lists_of_lists_are_the_modules_that_run() -> None:
    model = nn.Module()
    model.groups = nn.ModuleList(
        nn.ModuleList(nn.TransformerEncoderLayer(8, 2) for _ in range(3)) for _ in range(2)
    )
    expected = [f"groups.{group}.{number}" for group in range(2) for number in range(3)]
    assert list(graph_of(model).blocks()) == expected


@pytest.mark.parametrize("name", models.NAMES)
def test_every_tensor_once_and_under_all_its_names(name: str) -> None:
    model = models.build(name)
    graph = graph_of(model)
    assert graph.num_params == sum(p.numel() for p in model.parameters())
    first = dict(model.named_parameters()) | dict(model.named_buffers())
    every = dict(model.named_parameters(remove_duplicate=False))
    every |= dict(model.named_buffers(remove_duplicate=False))
    assert set(graph.tensors) == set(first)
    assert sorted(n for t in graph.tensors.values() for n in t.names) == sorted(every)
    for fqn, info in graph.tensors.items():
        assert info.shape == tuple(first[fqn].shape)
        assert info.trainable == first[fqn].requires_grad
        assert all(every[alias] is first[fqn] for alias in info.aliases)
    in_state = {name for t in graph.tensors.values() if t.is_persistent for name in t.names}
    assert in_state == set(model.state_dict())


@pytest.mark.parametrize("name", models.NAMES)
def test_meta_and_real_models_are_one_graph(name: str) -> None:
    with torch.device("meta"):
        on_meta = models.BUILDERS[name]()
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}
    assert graph_of(on_meta) == graph_of(models.build(name))


def test_the_odd_ones() -> None:
    graph = graph_of(models.build("odd"))
    assert graph.modules["shared"].aliases == ("twin", "blocks.0.shared", "blocks.1.shared")
    assert graph.tensors["shared.0.bias"].aliases[0] == "twin.0.bias"
    assert graph.tensors["temperature"].shape == ()
    assert not graph.tensors["frozen.weight"].trainable
    assert not graph.tensors["ramp"].is_persistent
    assert graph.tensors["blocks.0.shift"].is_persistent
    assert not graph.modules["blocks"].has_forward
    assert graph.modules["shared"].has_forward  # a Sequential is called


def test_tied_weights_of_the_zoo() -> None:
    tied = {
        name: [t.names for t in graph_of(models.build(name)).parameters if t.aliases]
        for name in ("hf_llama", "hf_llama_tied", "t5", "bert")
    }
    assert tied["hf_llama"] == []
    assert tied["hf_llama_tied"] == [("model.embed_tokens.weight", "lm_head.weight")]
    assert [len(names) for names in tied["t5"]] == [4]
    assert [names[1] for names in tied["bert"]] == [
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    ]


@pytest.mark.parametrize(
    ("name", "projection"),
    [
        ("own_llama", "layers.0.attn.wo"),
        ("hf_llama", "model.layers.1.self_attn.k_proj"),
        ("gpt2", "transformer.h.0.attn.c_proj"),
        ("bert", "bert.encoder.layer.0.attention.self.query"),
        ("vit", "vit.layers.0.attention.q_proj"),
        ("t5", "decoder.block.0.layer.0.SelfAttention.v"),
    ],
)
def test_projections_of_attention_know_their_heads(name: str, projection: str) -> None:
    graph = graph_of(models.build(name))
    assert graph.modules[projection].head_dim == models.HEAD_DIM
    outside = [
        m
        for f, m in graph.modules.items()
        if "attn" not in f.lower() and "attention" not in f.lower()
    ]
    assert {module.head_dim for module in outside} == {None}


def test_packed_projections_and_dims() -> None:
    graph = graph_of(models.build("gpt2"))
    assert graph.modules["transformer.h.0.attn.c_attn"].packed == 3
    assert graph.modules["transformer.h.0.attn.c_proj"].packed == 1
    assert graph.tensors["transformer.h.0.mlp.c_fc.weight"].dims == ("in", "out")
    assert graph.tensors["transformer.h.0.mlp.c_fc.bias"].dims == ("out",)
    assert graph.tensors["transformer.wte.weight"].dims == ("vocab", "embed")


def test_what_looks_like_a_linear_and_is_not() -> None:
    """MultiheadAttention reads out_proj's weight and never calls it: a style would do nothing."""
    graph = graph_of(nn.MultiheadAttention(8, 2))
    assert graph.modules["out_proj"].kind == "other"
    assert (
        graph_of(nn.Sequential(nn.GroupNorm(2, 4), nn.BatchNorm1d(4))).modules["0"].kind == "other"
    )


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied with biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_gives_the_graph_of_the_live_model(name: str) -> None:
    """All of it: names, order, shapes, dims, kinds, head sizes, aliases, what is persistent."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, more = FAMILIES[name]
    config = AutoConfig.for_model(family, **({} if family == "gpt2" else SMALL), **more)
    with torch.device("meta"):
        live = graph_of(AutoModelForCausalLM.from_config(config))
    read = from_mapping(config.to_dict())
    assert list(read.modules.items()) == list(live.modules.items())
    assert list(read.tensors) == list(live.tensors)
    for fqn, tensor in live.tensors.items():
        # A config knows what the dims of fused experts mean; a live parameter does not tell.
        known = read.tensors[fqn]
        is_expert = not any(tensor.dims) and "mlp" in fqn
        assert (replace(known, dims=tensor.dims) if is_expert else known) == tensor
    assert read.blocks() == live.blocks()
