"""`tp_plan: hf`: transformers' own plan under the rules, refused where it cannot be done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshplan.model.blueprint import from_mapping
from meshplan.model.graph import ModelGraph
from tests.helpers import parity
from tests.helpers.graphs import TP, blocks, decide, refusal, stored, tp
from tests.runtime.apply.test_parity import assert_same

HF: dict[str, Any] = TP | {"tp_plan": "hf"}
PLAN = {
    "embed": "embedding_rowwise",
    "head": "colwise_rep",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def planned(**words: str) -> ModelGraph:
    return replace(blocks(), tp_preset=PLAN | words)


def test_words_become_styles_with_the_preset_as_their_reason() -> None:
    plan = decide(HF, on=planned())
    assert {fqn: use.style.name for fqn, use in plan.styles.items() if "1" not in fqn} == {
        "embed": "vocab", "head": "colwise_gather_output",
        "layers.0.up": "colwise", "layers.0.down": "rowwise",
        "layers.2.up": "colwise", "layers.2.down": "rowwise",
    }  # fmt: skip
    assert str(plan.styles["head"].reason) == "tp_plan: hf (<mapping>)"
    assert stored(plan, "layers.1.down.weight") == "S(1)@tp"


def test_rules_override_module_by_module() -> None:
    rules = tp("head", "vocab"), tp("layers.1", "R")
    plan = decide(HF, *rules, on=planned())
    assert plan.styles["head"].style.name == "vocab"
    assert "layers.1.up" not in plan.styles
    assert "layers.2.up" in plan.styles
    assert stored(plan, "layers.1.up.weight") == "R"


@pytest.mark.parametrize(
    ("plan", "words", "message"),
    [
        (
            HF,
            {"layers.*.attn": "local_params"},
            "tp_plan: transformers' tp plan has 'local_params' for layers.0.attn, which is not "
            "available yet in this version\n"
            "    fix: replicate it with a rule: {match: 'layers.*.attn', place: {tp: R}}",
        ),
        (
            HF,
            {"layers.*.up.weight": "packed_rowwise"},
            "tp_plan: transformers' tp plan has 'packed_rowwise' for layers.0.up.weight, which is "
            "not available yet in this version\n"
            "    fix: replicate it with a rule: {match: 'layers.*.up', place: {tp: R}}",
        ),
        (
            HF,
            {"layers.*.attn": "colwise"},
            "tp_plan: 'colwise' cannot be applied to layers.0.attn (Attention): it needs a linear, "
            "conv1d or embedding module\n"
            "    fix: use tp_plan: auto, which follows the recorded forward",
        ),
        (
            HF | {"mesh": {"dp_shard": 2}},
            {},
            "tp_plan: 'tp_plan' has no effect without a tp axis\n"
            "    fix: add tp to the mesh, or remove tp_plan",
        ),
    ],
)
def test_presets_that_cannot_be(plan: Any, words: dict[str, str], message: str) -> None:
    assert refusal(plan, on=planned(**words)) == message


def test_a_model_without_a_plan() -> None:
    assert refusal(HF, tp("head", "vocab")) == (
        "tp_plan: transformers has no tp plan for Model\n"
        "    fix: write rules with colwise and rowwise, or try tp_plan: auto"
    )


def test_a_rule_lifts_the_refusal() -> None:
    on = planned(**{"layers.*.attn": "local_params"})
    assert decide(HF, tp("layers.*.attn", "R"), on=on).styles
    on = planned(**{"layers.*.up.weight": "packed_rowwise"})
    assert decide(HF, tp({"param": "layers.*.up.weight"}, "R"), on=on).styles


def test_a_config_file_brings_the_plan_along() -> None:
    dense = decide(HF, on=from_mapping({"model_type": "qwen3", **SIZES}))
    at = "model.layers.1"
    assert dense.styles[f"{at}.self_attn.q_norm"].style.name == "replicated_with_grad_allreduce"
    assert str(dense.tensors[f"{at}.mlp.down_proj.weight"].stored) == "S(1)@tp"
    experts = from_mapping({"model_type": "mixtral", **SIZES})
    assert "'moe_tp_experts' for model.layers.0.mlp.experts," in refusal(HF, on=experts)
    assert decide(HF, tp("**.experts", "R"), on=experts).styles


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("hf_llama", {"mesh": {"tp": 4}}),
    "tied": ("hf_llama_tied", {"mesh": {"dp_shard": 2, "tp": 2}}),
    "norms of heads": ("qwen3", {"mesh": {"dp_replicate": 2, "tp": 2}}),
    "a rule above": (
        "qwen3",
        {
            "mesh": {"dp_shard": 2, "tp": 2},
            "rules": [{"match": "model.layers.0", "place": {"tp": "R"}}],
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(pool: Any, case: str) -> None:
    name, plan = CASES[case]
    assert_same(pool(4).run(parity.train, name, {"version": 1, "tp_plan": "hf", **plan})[0])
