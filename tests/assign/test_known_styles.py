"""`tp_plan: auto` of a config is what the data flow of the live model gives.

Which seeded bug would this catch? A style of the wrong module, a count of heads read off another
projection, a rule that takes one module out of a pair and leaves the other cut.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshplan.errors import PlanError
from meshplan.model.blueprint import from_mapping
from meshplan.plan.plan import Plan, make_plan
from meshplan.runtime.trace.ops import record
from meshplan.runtime.trace.rehearse import rehearser
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.memory.test_analytic import GPT2, LLAMA, QWEN3
from tests.memory.test_analytic_experts import MIXTRAL, QWEN, QWEN2
from tests.memory.test_analytic_latent import DEEPSEEK

TWO = {"num_hidden_layers": 2}
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "qwen3, tied": (QWEN3 | TWO | {"tie_word_embeddings": True}, 2, {}),
    "gpt2": (GPT2 | {"n_layer": 2}, 2, {}),
    "llama, a rule takes one of a pair": (
        LLAMA | TWO, 2,
        {"rules": [{"match": "{lm_head,model.layers.1.*.q_proj}", "place": {"tp": "R"}}]}),
    "llama": (LLAMA | TWO, 2, {}),
    "llama with biases": (LLAMA | TWO | {"attention_bias": True, "mlp_bias": True}, 2, {}),
    "llama, heads of its own": (LLAMA | TWO | {"num_key_value_heads": 4}, 4, {}),
    "llama, too few heads": (LLAMA | TWO, 4, {}),
    "llama, odd heads": (
        LLAMA | TWO | {"num_key_value_heads": 3, "num_attention_heads": 12}, 2, {}),
    "llama, odd feed-forward": (LLAMA | TWO | {"intermediate_size": 111}, 2, {}),
    "llama, few words": (LLAMA | TWO | {"vocab_size": 40}, 2, {}),
    "llama, words whole": (
        LLAMA | TWO, 2, {"rules": [{"match": "model.embed_tokens", "place": {"tp": "R"}}]}),
    "llama, only feed-forward": (
        LLAMA | TWO, 2,
        {"tp_plan": "none", "rules": [{"match": "**.mlp.*_proj", "place": {"tp": "auto"}}]}),
    "mistral": (LLAMA | TWO | {"model_type": "mistral"}, 2, {}),
    "qwen2, tied": (LLAMA | TWO | {"model_type": "qwen2", "tie_word_embeddings": True}, 2, {}),
    "qwen3, too few heads": (QWEN3 | TWO, 4, {}),
    "mixtral": (MIXTRAL | TWO, 2, {}),
    "mixtral, too few heads": (MIXTRAL | TWO, 4, {}),
    "qwen3_moe, one block dense": (QWEN | TWO | {"mlp_only_layers": [0]}, 2, {}),
    "granite": (LLAMA | TWO | {"model_type": "granite"}, 2, {}),
    "qwen2_moe": (QWEN2 | TWO, 2, {}),
    "deepseek_v3": (DEEPSEEK | TWO, 2, {}),
    "mixtral, spread": (
        MIXTRAL | TWO, 4,
        {
            "mesh": {"dp_shard": 2, "tp": 2, "ep": "2 in dp_shard"},
            "rules": [{"match": "**.experts", "place": {"ep": "ep_dispatch_experts"}}],
        }),
    "gpt2, odd heads": (GPT2 | {"n_layer": 2, "n_head": 3}, 2, {}),
    "gpt2, odd words": (
        GPT2 | {"n_layer": 2, "vocab_size": 161, "tie_word_embeddings": False}, 2, {}),
}  # fmt: skip
DEFAULT = ("qwen3, tied", "gpt2", "llama, a rule takes one of a pair")


def decided(config: dict[str, Any], size: int, more: dict[str, Any]) -> tuple[Plan, Plan]:
    """What the live model and its config give."""
    spec = load_spec({"version": 1, "mesh": {"tp": size}, "tp_plan": "auto"} | more)
    made = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    ids = (torch.zeros(2, 16, dtype=torch.long),)
    live = make_plan(spec, graph_of(model, record(model, ids)), rehearse=rehearser(model, ids))
    return live, make_plan(spec, from_mapping(config))


def styles(plan: Plan) -> dict[str, Any]:
    return {
        fqn: (use.style, use.pieces, use.is_proved, str(use.reason))
        for fqn, use in plan.assignment.styles.items()
    }


def told_whole(plan: Plan) -> list[str]:
    """What `auto` says of experts and routers, which it leaves whole."""
    said = [each.what for each in plan.assignment.warnings]
    parts = [part for what in said for part in what.partition(": ")[2].split("; ")]
    return [part for part in parts if "mlp.experts" in part or "mlp.gate " in part]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in CASES]
)
def test_a_config_gives_what_the_data_flow_gives(case: str) -> None:
    live, told = decided(*CASES[case])
    assert styles(told) == styles(live)
    theirs, mine = told_whole(live), told_whole(told)
    # What a model leaves whole may be too much to be listed.
    is_cut_short = any(" more" in each.what for each in live.assignment.warnings)
    assert sorted(mine) == sorted(theirs) or (is_cut_short and set(theirs) <= set(mine))
    assert told.digest() == live.digest()
    matrices = {f for f, p in told.assignment.tensors.items() if len(p.info.shape) > 1}
    whole = [{f for f in matrices if not p.assignment.tensors[f].computed.axes}
             for p in (live, told)]  # fmt: skip
    assert whole[0] == whole[1]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (LLAMA | {"num_key_value_heads": 1}, "auto needs the live model to see how"),
        (LLAMA | {"model_type": "gemma2"}, "there is no live model"),
        (
            LLAMA | {"num_key_value_heads": 3, "num_attention_heads": 3, "vocab_size": 40,
                     "intermediate_size": 111},
            "auto finds no pair of projections to shard over tp 2",
        ),
    ],
)  # fmt: skip
def test_what_a_config_does_not_tell_is_refused(config: dict[str, Any], what: str) -> None:
    spec = load_spec({"version": 1, "mesh": {"tp": 2}, "tp_plan": "auto"})
    with pytest.raises(PlanError, match=what):
        make_plan(spec, from_mapping(config))
