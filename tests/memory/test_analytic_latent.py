"""Steps of DeepSeek-V3 told from a config are the traced ones, byte by byte.

Which seeded bug would this catch? A gradient of the part of keys that all heads share that is not
summed; a copy into a part of a tensor that takes nothing in backward; a router in the dtype of the
model; an expert of all tokens that is left out.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from meshplan.errors import PlanError, SpecError
from meshplan.model.blueprint import from_mapping
from tests.memory.test_analytic import (
    AUTO,
    BF16,
    FULL,
    LLAMA,
    TWICE,
    Case,
    told,
    told_and_traced,
    traced,
)
from tests.memory.test_analytic_experts import SPREAD, trained

SELECTIVE = {"activation_checkpointing": "selective"}
DEEPSEEK: dict[str, Any] = LLAMA | {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "moe_intermediate_size": 40,
    "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "q_lora_rank": 28, "kv_lora_rank": 20,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24,
    "head_dim": 8,
}  # fmt: skip
"""Values are as wide as keys: on CPU torch has a kernel for no others."""

CASES: dict[str, Case] = {
    "bf16": (DEEPSEEK, BF16, 2),
    "float32": (DEEPSEEK, {}, 2),
    "recomputed, spread": (DEEPSEEK, SPREAD | FULL, 4),
    "selective, queries at once": (DEEPSEEK | {"q_lora_rank": None}, BF16 | SELECTIVE, 2),
    "halves turned, biased, twice": (
        DEEPSEEK | {"rope_interleave": False, "attention_bias": True}, BF16 | TWICE, 2),
    "weights as they are, two for all": (
        DEEPSEEK | {"norm_topk_prob": False, "n_shared_experts": 2}, BF16 | FULL, 2),
    "beside tp": (
        DEEPSEEK, BF16 | AUTO | {"mesh": {"dp_shard": 2, "tp": 2}, "loss_parallel": True}, 4),
    "spread, beside tp": (
        DEEPSEEK,
        SPREAD | AUTO | {"mesh": {"dp_shard": 2, "tp": 2, "ep": "2 in dp_shard"}}, 4),
    "all sparse, replicated": (
        DEEPSEEK | {"first_k_dense_replace": 0}, {"mesh": {"dp_replicate": 2}}, 2),
    "spread, zero1, twice": (DEEPSEEK, SPREAD | TWICE | {"strategy": "zero1"}, 4),
    "all dense, tied": (
        DEEPSEEK | {"first_k_dense_replace": 3, "tie_word_embeddings": True}, BF16, 2),
    "most is attention": (
        DEEPSEEK | {
            "first_k_dense_replace": 2, "num_hidden_layers": 2, "intermediate_size": 8,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 16,
        }, BF16, 2),
}  # fmt: skip
DEFAULT = ("bf16", "recomputed, spread")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in DEFAULT else [pytest.mark.wide]) for c in CASES]
)
def test_a_told_step_is_the_traced_one(apart: ProcessPoolExecutor, case: str) -> None:
    mine, real = told_and_traced(apart, *CASES[case])
    assert mine[:2] == real[:2]


@pytest.mark.wide
def test_a_told_step_is_one_with_numbers(apart: ProcessPoolExecutor) -> None:
    """Tokens go where the router sends them."""
    real = apart.submit(trained, DEEPSEEK).result()
    assert isinstance(real, tuple), real
    assert told(DEEPSEEK, {"version": 1, "mesh": {"tp": 1}}, 1, 0) == real


LONG: dict[str, Any] = {"max_position_embeddings": 2048, "vocab_size": 192}
UNEVEN = LONG | {"qk_nope_head_dim": 16, "v_head_dim": 16}
WIDE = LONG | {"qk_nope_head_dim": 128, "v_head_dim": 128, "num_hidden_layers": 2}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("config", "more"),
    [
        (UNEVEN, BF16), (WIDE, BF16 | FULL), (UNEVEN, SELECTIVE), (LONG, BF16),
        (LONG | {"v_head_dim": 24}, {}),
    ],
)  # fmt: skip
def test_on_cuda_it_takes_what_cuda_takes(
    apart: ProcessPoolExecutor, config: dict[str, Any], more: dict[str, Any]
) -> None:
    """Where values are not as wide as keys, memory-efficient attention runs."""
    config, spec = DEEPSEEK | config, {"version": 1, "mesh": {"dp_shard": 2}} | more
    real = apart.submit(traced, config, spec, 2, 0, 2048, "cuda").result()
    assert isinstance(real, tuple), real
    mine = told(config, spec, 2, 0, 2048, "cuda")
    for phase in ("forward", "loss", "backward"):
        assert mine[0][phase][0] == pytest.approx(real[0][phase][0], rel=2e-5)
    assert mine[1].keys() == real[1].keys()
    for place, size in real[1].items():
        assert mine[1][place] == pytest.approx(size, rel=2e-5)


@pytest.mark.parametrize(
    ("config", "more", "device", "what"),
    [
        ({"v_head_dim": 16}, BF16, "cpu", "attention on CPUs: heads of 24 features, 16 for values"),
        ({"v_head_dim": 12}, BF16, "cuda", "heads of 24 features, 12 for values"),
        (
            {}, {"mesh": {"cp": 2}, "context": {"attention": "all_to_all"}}, "cuda",
            "context parallelism of multi-head latent attention",
        ),
        (
            {}, AUTO | {"rules": [{"match": "**.q_b_proj", "place": {"tp": "colwise"}}]}, "cpu",
            "a tensor that reaches model.layers.0.self_attn is not sharded as",
        ),
    ],
)  # fmt: skip
def test_what_no_row_stands_for_is_refused(
    config: dict[str, Any], more: dict[str, Any], device: str, what: str
) -> None:
    spec = {"version": 1, "mesh": {"dp_shard": 2}} | more
    with pytest.raises(PlanError, match=what):
        told(DEEPSEEK | config, spec, 2, 0, device=device)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"num_key_value_heads": 2}, "each of the 4 attention heads has its own keys and values"),
        ({"head_dim": 12}, "in this family head_dim must equal qk_rope_head_dim"),
        ({"num_experts_per_tok": 9}, "a token cannot use 9 of 8 experts"),
        ({"n_group": 3}, "8 experts do not divide into 3 equal groups"),
        ({"n_group": 8}, "8 experts do not divide into 8 equal groups of 2 or more"),
        ({"topk_group": 5}, "a token cannot use 5 of 4 groups"),
        ({"first_k_dense_replace": -1}, "-1 is not a size"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(more: dict[str, Any], what: str) -> None:
    with pytest.raises(SpecError, match=what):
        from_mapping(DEEPSEEK | more)
