"""What stands alone: models of which nothing repeats, and one device.

Which seeded bug would this catch? A model of one layer asked for none of its blocks; a strategy
that is stated for one device and not planned, or planned as another; sharding over one rank where
nothing is gained by it, or left out where all that fits shards; its gathers for nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.api import checking
from meshplan.api.planning import search_plan
from meshplan.planner.answers.difference import _fields
from meshplan.planner.answers.settings import has
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.request import request_of_file
from meshplan.planner.tables.whole_plan import Costed
from tests.planner.test_planner import LLAMA, job

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
    found = checking.estimate_memory(path, overrides(chosen.stated))
    assert found.worst.band == chosen.memory.worst.band
    shut = {each.what: each.why for each in decision.rejected}
    assert shut["mesh.pp=2, 4, 8"] == "there is 1 block, and each stage has one"


@pytest.mark.parametrize("more", [{}, EXPERTS])
def test_the_one_block_recomputes_where_the_plan_says_so(job: Any, more: dict[str, Any]) -> None:
    path = job(LLAMA | more | {"num_hidden_layers": 1}, activation_checkpointing="full")
    chosen = search_plan(path).chosen
    assert chosen is not None
    recomputed = checking.estimate_memory(path, overrides(chosen.stated)).worst
    assert recomputed.band == chosen.memory.worst.band
    kept = overrides(chosen.stated | {"activation_checkpointing": "none"})
    assert checking.estimate_memory(path, kept).worst.band[0] > recomputed.band[0]


ONE: dict[str, Any] = {
    "hardware": {"nodes": 1, "gpus_per_node": 1, "gpu": "h100-sxm-80gb"},
    "batch": {"global": 4, "seq_len": 4096},
}
LARGE: dict[str, Any] = LLAMA | {
    "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["full_shard", "zero2", "zero1", "ddp"])
def test_a_stated_strategy_is_planned_for_one_device_too(job: Any, strategy: str) -> None:
    path = job(LLAMA, strategy=strategy, **ONE)
    decision = search_plan(path)
    chosen = decision.chosen
    assert chosen is not None
    assert chosen.plan.assignment.strategy.name == strategy
    found = checking.estimate_memory(path, overrides(chosen.stated))
    assert found.worst.band == chosen.memory.worst.band
    costed = Costed(chosen.plan, request_of_file(path).cluster)
    assert costed.seconds == pytest.approx(chosen.seconds)


def test_one_device_shards_over_itself_where_that_is_fastest(job: Any) -> None:
    """Of 16 blocks what is kept for backward fits beside no second copy of all gradients.

    A loss in parts makes room as well, so it is stated whole.
    """

    def best(layers: int, **more: Any) -> Any:
        whole = {"loss_chunks": 1, "allocator": "default"}
        path = job(LARGE | {"num_hidden_layers": layers}, **ONE, **whole, **more)
        chosen = search_plan(path).chosen
        return chosen, chosen.plan.assignment

    assert best(2)[1].strategy.name == "ddp"  # What is as fast, and simpler.
    (whole, kept), (shared, given) = best(16, strategy="ddp"), best(16)
    assert given.strategy.name in {"zero2", "full_shard"}
    assert len(given.recompute) < len(kept.recompute)
    assert shared.seconds < whole.seconds


def test_gathering_from_nobody_else_takes_time(job: Any) -> None:
    """To cast parameters once more, which so few tokens do not hide."""

    def seconds(strategy: str) -> float:
        batch = {"global": 1, "seq_len": 64}
        path = job(LARGE, **ONE | {"batch": batch}, strategy=strategy)
        chosen = search_plan(path).chosen
        assert chosen is not None
        return chosen.seconds

    assert seconds("full_shard") > 1.1 * seconds("ddp")


def test_what_one_device_does_is_called_so(job: Any) -> None:
    """By whoever explains the plan, and whoever compares it with another."""
    path = job(LLAMA, strategy="zero2", **ONE)
    fields = {}
    for strategy in ("zero2", "full_shard"):
        chosen = search_plan(path, overrides({"strategy": strategy})).chosen
        assert chosen is not None
        assert has(chosen, "strategy", strategy)
        assert not has(chosen, "strategy", "ddp")
        fields[strategy] = dict(_fields(chosen.plan))["strategy"]
    assert fields == {"zero2": "zero2", "full_shard": "full_shard"}
