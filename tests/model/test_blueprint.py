"""The graph read from a config is the model that transformers builds, name by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshplan.model.blueprint import from_config, from_mapping, from_params
from meshplan.model.graph import ModelGraph
from tests.helpers.calls import calls_of


def sizes(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv: int, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        **more,
    }


def _gpt2(embed: int, layers: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": embed, "n_layer": layers, "n_head": heads}


# Name -> (what the published config.json states about shapes, the published parameter count).
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7B": (
        {"model_type": "llama", **sizes(32000, 4096, 11008, 32, 32, 32)},
        6_738_415_616,
    ),
    "Llama-3-8B": (
        {"model_type": "llama", **sizes(128256, 4096, 14336, 32, 32, 8)},
        8_030_261_248,
    ),
    "Llama-3-70B": (
        {"model_type": "llama", **sizes(128256, 8192, 28672, 80, 64, 8)},
        70_553_706_496,
    ),
    "Mistral-7B": (
        {"model_type": "mistral", **sizes(32000, 4096, 14336, 32, 32, 8)},
        7_241_732_096,
    ),
    "Qwen2-7B": (
        {"model_type": "qwen2", **sizes(152064, 3584, 18944, 28, 28, 4)},
        7_615_616_512,
    ),
    "Qwen2-0.5B": (
        {
            "model_type": "qwen2",
            **sizes(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
        },
        494_032_768,
    ),
    "Qwen3-8B": (
        {"model_type": "qwen3", **sizes(151936, 4096, 12288, 36, 32, 8, head_dim=128)},
        8_190_735_360,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3",
            **sizes(151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True),
        },
        596_049_920,
    ),
    "Gemma-2-9B": (
        {"model_type": "gemma2", **sizes(256000, 3584, 14336, 42, 16, 8, head_dim=256)},
        9_241_705_984,
    ),
    "Gemma-2-2B": (
        {"model_type": "gemma2", **sizes(256000, 2304, 9216, 26, 8, 4, head_dim=256)},
        2_614_341_888,
    ),
    "GPT-2": (_gpt2(768, 12, 12), 124_439_808),
    "GPT-2-medium": (_gpt2(1024, 24, 16), 354_823_168),
    "GPT-2-large": (_gpt2(1280, 36, 20), 774_030_080),
    "GPT-2-XL": (_gpt2(1600, 48, 25), 1_557_611_200),
    "Mixtral-8x7B": (
        {
            "model_type": "mixtral",
            **sizes(32000, 4096, 14336, 32, 32, 8, num_local_experts=8),
        },
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            **sizes(151936, 2048, 6144, 48, 32, 4, head_dim=128),
            "num_experts": 128,
            "moe_intermediate_size": 768,
        },
        30_532_122_624,
    ),
    "DeepSeek-V3": (
        {
            "model_type": "deepseek_v3",
            **sizes(129280, 7168, 18432, 61, 128, 128),
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
        },
        671_026_404_352,
    ),
}

# Shapes that no published model has: switches, defaults and mixed layers.
ODD: dict[str, dict[str, Any]] = {
    "llama defaults": {"model_type": "llama", "num_hidden_layers": 2},
    "llama biased": {
        "model_type": "llama",
        **sizes(100, 64, 96, 2, 4, 2),
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 24,
        "hidden_act": "gelu",
    },
    "llama null kv heads": {
        "model_type": "llama",
        **sizes(100, 64, 96, 1, 4, 4),
        "num_key_value_heads": None,
    },
    "mistral defaults": {"model_type": "mistral", "num_hidden_layers": 1},
    "qwen2 defaults": {"model_type": "qwen2", "num_hidden_layers": 1},
    "qwen3 defaults": {"model_type": "qwen3", "num_hidden_layers": 1},
    "qwen3 biased": {
        "model_type": "qwen3",
        **sizes(100, 64, 96, 1, 4, 2),
        "attention_bias": True,
    },
    "gemma2 defaults": {"model_type": "gemma2", "num_hidden_layers": 2},
    "gemma2 untied": {
        "model_type": "gemma2",
        **sizes(100, 64, 96, 1, 4, 2),
        "tie_word_embeddings": False,
    },
    "gpt2 untied": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 100,
        "tie_word_embeddings": False,
    },
    "mixtral defaults": {"model_type": "mixtral", "num_hidden_layers": 1},
    "qwen3_moe defaults": {"model_type": "qwen3_moe", "num_hidden_layers": 1},
    "qwen3_moe mixed": {
        "model_type": "qwen3_moe",
        **sizes(100, 64, 96, 6, 4, 2),
        "mlp_only_layers": [3],
        "decoder_sparse_step": 2,
        "num_experts": 4,
    },
    "granite defaults": {"model_type": "granite", "num_hidden_layers": 1},
    "qwen2_moe defaults": {"model_type": "qwen2_moe", "num_hidden_layers": 1},
    "qwen2_moe mixed, without biases": {
        "model_type": "qwen2_moe",
        **sizes(100, 64, 96, 4, 4, 2),
        "qkv_bias": False,
        "mlp_only_layers": [1],
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "deepseek_v3 defaults": {"model_type": "deepseek_v3", "num_hidden_layers": 4},
    "deepseek_v3, queries whole, biased": {
        "model_type": "deepseek_v3",
        **sizes(100, 64, 96, 3, 4, 4),
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 6,
        "attention_bias": True,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "tie_word_embeddings": True,
    },
}


def _built_by_transformers(config: dict[str, Any]) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = {k: v for k, v in config.items() if k != "model_type"}
    parsed = transformers.AutoConfig.for_model(config["model_type"], **fields)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(parsed)


def _assert_same(graph: ModelGraph, model: Any) -> None:
    live = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {t.fqn: t.shape for t in graph.parameters} == live
    assert [t.fqn for t in graph.parameters] == list(live)
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert {name for t in graph.parameters for name in t.names} == every
    state = model.state_dict().keys()
    buffers = {name: (tuple(b.shape), name in state) for name, b in model.named_buffers()}
    told = {t.fqn: (t.shape, t.is_persistent) for t in graph.tensors.values() if t.is_buffer}
    assert told == buffers
    assert {t.dtype for t in graph.tensors.values()} == {"float32"}
    modules = {
        name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in model.named_modules()
    }
    assert {m.fqn: m.qualified_type for m in graph.modules.values()} == modules
    assert list(graph.modules) == list(modules)
    assert graph.tp_preset == model._tp_plan


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts_are_exact(name: str) -> None:
    config, count = PUBLISHED[name]
    assert from_mapping(config).num_params == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_agree_with_transformers(name: str) -> None:
    config, _ = PUBLISHED[name]
    _assert_same(from_mapping(config), _built_by_transformers(config))


@pytest.mark.parametrize("name", ODD)
def test_odd_models_agree_with_transformers(name: str) -> None:
    _assert_same(from_mapping(ODD[name]), _built_by_transformers(ODD[name]))


def test_the_comparison_can_fail() -> None:
    config = ODD["llama biased"]
    model = _built_by_transformers(config)
    with pytest.raises(AssertionError):
        _assert_same(from_mapping({**config, "mlp_bias": False}), model)


@pytest.mark.parametrize(
    ("config", "blocks"),
    [
        (ODD["deepseek_v3 defaults"], (0, 2, 3)),
        (ODD["deepseek_v3 defaults"], (2, 3)),
        (ODD["qwen3_moe mixed"], (1, 3, 4)),
        (ODD["mixtral defaults"] | {"num_hidden_layers": 3}, (0, 2)),
        (_gpt2(64, 3, 4), (0, 2)),
    ],
)
def test_a_model_of_some_of_its_blocks(
    tmp_path: Path, config: dict[str, Any], blocks: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole, part = from_config(tmp_path), from_config(tmp_path, blocks=blocks)
    names = whole.blocks()
    kept = {names[number]: name for number, name in zip(blocks, part.blocks(), strict=True)}

    def inside(graph: ModelGraph, fqn: str) -> list[tuple[str, tuple[int, ...]]]:
        return [
            (t.fqn.removeprefix(fqn), t.shape)
            for t in graph.tensors.values()
            if t.fqn.startswith(f"{fqn}.")
        ]

    for theirs, mine in kept.items():
        assert inside(part, mine) == inside(whole, theirs) != []


def test_kinds_dims_and_heads() -> None:
    graph = from_mapping(PUBLISHED["Llama-3-8B"][0])
    q_proj = graph.modules["model.layers.0.self_attn.q_proj"]
    assert (q_proj.kind, q_proj.head_dim, q_proj.packed) == ("linear", 128, 1)
    assert graph.modules["model.layers.0.mlp.up_proj"].head_dim is None
    assert graph.modules["model.layers.0.input_layernorm"].kind == "norm"
    assert graph.modules["model.layers"].kind == "container"
    assert graph.tensors["model.embed_tokens.weight"].dims == ("vocab", "embed")
    assert graph.tensors["model.layers.0.mlp.up_proj.weight"].dims == ("out", "in")
    assert graph.config["num_key_value_heads"] == 8
    assert len(graph.blocks()) == 32

    graph = from_mapping(PUBLISHED["GPT-2"][0])
    packed = graph.modules["transformer.h.0.attn.c_attn"]
    assert (packed.kind, packed.head_dim, packed.packed) == ("conv1d", 64, 3)
    assert graph.tensors["transformer.h.0.attn.c_attn.weight"].dims == ("in", "out")
    assert graph.tensors["transformer.wte.weight"].aliases == ("lm_head.weight",)

    graph = from_mapping(PUBLISHED["Mixtral-8x7B"][0])
    fused = graph.tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert (fused.shape, fused.dims) == ((8, 28672, 4096), ("expert", "out", "in"))


def test_seventy_billion_parameters_in_a_blink() -> None:
    """Ten milliseconds, in calls: 80 blocks of 13 modules and 9 tensors."""
    config, _ = PUBLISHED["Llama-3-70B"]
    assert calls_of(lambda: from_mapping(config)) < 35_000


def test_a_count_alone() -> None:
    graph = from_params(3_000_000_000)
    assert graph.num_params == 3_000_000_000
    assert graph.name == "3,000,000,000 parameters"
    assert graph.blocks() == ()
