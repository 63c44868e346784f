"""Models of which nothing repeats, from their config: what a trial has of a model is all of it."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan import api
from meshplan.cli import main
from meshplan.planner.lock import overrides
from meshplan.planning import search_plan
from tests.test_planner import LLAMA, job

__all__ = ["job"]

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 512, "decoder_sparse_step": 1,
    "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, EXPERTS])
def test_a_model_of_one_layer_is_planned(job: Any, more: dict[str, Any]) -> None:
    path = job(LLAMA | more | {"num_hidden_layers": 1})
    decision = search_plan(path)
    chosen = decision.chosen
    assert chosen is not None
    assert decision.gap <= 1e-4
    found = api.estimate_memory(path, overrides(chosen.stated))
    assert found.worst.band == chosen.memory.worst.band
    shut = {each.what: each.why for each in decision.rejected}
    assert shut["mesh.pp=2, 4, 8"] == "there is 1 block, and each stage has one"


@pytest.mark.parametrize("more", [{}, EXPERTS])
def test_what_nobody_can_recompute_is_named(job: Any, more: dict[str, Any], capsys: Any) -> None:
    path = job(LLAMA | more | {"num_hidden_layers": 1}, activation_checkpointing="full")
    assert main(["plan", "-f", str(path), "-q"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "has no repeated blocks, so nothing says what to recompute" in out
    assert "without it something does activation_checkpointing: full" in out
    assert "activation_checkpointing: full -> none" in out
