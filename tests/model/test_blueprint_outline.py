"""A config is cut into the stages into which the recorded model is cut.

Which seeded bug would this catch? A module that runs elsewhere than where it stands in the outline,
one left out, a tensor that is not read where it is: stages, or the tensors that they hold, differ.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.model.blueprint import from_mapping
from meshplan.model.graph import ModelGraph
from meshplan.plan.plan import Plan, make_plan
from meshplan.spec.reader import load_spec

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 7, "max_position_embeddings": 64,
    "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
GPT2: dict[str, Any] = {
    "vocab_size": 96, "n_embd": 32, "n_layer": 7, "n_head": 4, "n_positions": 64,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"model_type": "llama"},
    "llama, tied": SIZES | {"model_type": "llama", "tie_word_embeddings": True},
    "granite": SIZES | {"model_type": "granite"},
    "mistral": SIZES | {"model_type": "mistral"},
    "qwen2": SIZES | {"model_type": "qwen2"},
    "qwen3": SIZES | {"model_type": "qwen3"},
    "gemma2": SIZES | {"model_type": "gemma2"},
    "mixtral": SIZES | MOE | {"model_type": "mixtral"},
    "qwen3_moe": SIZES | MOE | {"model_type": "qwen3_moe", "moe_intermediate_size": 16},
    "gpt2": GPT2 | {"model_type": "gpt2"},
    "gpt2 without dropout": GPT2 | {"model_type": "gpt2", "embd_pdrop": 0.0},
}
DEFAULT = ("llama, tied", "mixtral", "gpt2")
PLANS: tuple[dict[str, Any], ...] = (
    {"mesh": {"pp": 2}},
    {"mesh": {"pp": 4}, "pipeline": {"schedule": "GPipe"}},
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "Interleaved1F1B", "virtual": 3}},
    {"mesh": {"pp": 2, "dp_shard": 2}, "rules": [{"match": "**.{layers,h}.2", "stage": 1}]},
)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in CASES]
)
def test_a_config_has_the_stages_of_the_model(case: str) -> None:
    recorded, told = _recorded(CASES[case]), from_mapping(CASES[case])
    for plan in PLANS:
        spec = {"version": 1} | plan
        theirs, mine = _decided(spec, recorded), _decided(spec, told)
        assert mine.assignment.stages == theirs.assignment.stages
        assert not any("order in which modules" in w.what for w in mine.assignment.warnings)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_stages_are_listed_by_hand(case: str) -> None:
    at = "model.layers" if case == "llama" else "transformer.h"
    first = "model.embed_tokens" if case == "llama" else "transformer.wte"
    split = [[first, f"{at}.0"], [f"{at}.1", f"{at}.2"], [f"{at}.3"], [f"{at}.4", "lm_head"]]
    spec = {"version": 1, "mesh": {"pp": 4}, "pipeline": {"split": split}}
    recorded, told = _recorded(CASES[case]), from_mapping(CASES[case])
    assert _decided(spec, told).assignment.stages == _decided(spec, recorded).assignment.stages


def test_more_stages_than_modules_open_a_block() -> None:
    """An outline does not show what is inside of one: the order of definition counts."""
    graph = from_mapping(CASES["llama"] | {"num_hidden_layers": 2})
    found = _decided({"version": 1, "mesh": {"pp": 8}}, graph).assignment
    assert found.stages is not None
    assert any("order in which modules are defined" in w.what for w in found.warnings)


def test_a_forward_that_returns_more_has_no_outline() -> None:
    assert from_mapping(CASES["llama"]).outline is not None
    assert from_mapping(CASES["llama"] | {"output_hidden_states": True}).outline is None


def _decided(spec: dict[str, Any], graph: ModelGraph) -> Plan:
    return make_plan(load_spec(spec), graph)


def _recorded(config: dict[str, Any]) -> ModelGraph:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from meshplan.runtime.trace.ops import record
    from meshplan.runtime.trace.structure import graph_of

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return graph_of(model, record(model, (torch.zeros(2, 8, dtype=torch.long),)))
