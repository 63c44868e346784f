"""The axis cp without a process: what a plan decides, shows, and what `check` refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.api.checking import check_plan
from meshplan.layout.layout import Layout
from meshplan.layout.mesh import Mesh
from meshplan.plan.plan import Plan
from meshplan.render.layouts.show import plan_to_json, plan_to_text

MODEL: dict[str, Any] = {"version": 1, "model": {"entry": "meshplan.runtime.demo_model:build"}}
TINY = str(Path(__file__).parents[1] / "bad_plans" / "needs_model" / "tiny_llama.json")
BOTH = {"mesh": {"dp_shard": 2, "cp": 2}}


def decide(plan: dict[str, Any]) -> Plan:
    checked = check_plan(MODEL | plan)
    assert checked.problems == ()
    assert checked.plan is not None
    return checked.plan


def refusal(plan: dict[str, Any], config: str | None = None) -> str:
    problems = check_plan(MODEL | plan, config=config).problems
    return "\n".join(f"{problem.what}\n{problem.fix}" for problem in problems)


@pytest.mark.parametrize(
    ("plan", "strategy", "wrapper", "layout"),
    [
        ({"mesh": {"cp": 4}}, "ddp", "ddp", "R"),
        ({"mesh": {"cp": 4}, "strategy": "ddp"}, "ddp", "ddp", "R"),
        ({"mesh": {"dp_replicate": 2, "cp": 2}}, "ddp", "ddp", "R"),
        ({"mesh": {"cp": 4}, "strategy": "full_shard"}, "full_shard", "units", "S(0)@cp"),
        ({"mesh": {"cp": 4}, "strategy": "zero1"}, "zero1", "units", "S(0)@cp"),
        (BOTH, "full_shard", "units", "S(0)@dp_shard,cp"),
        (BOTH | {"strategy": "zero2"}, "zero2", "units", "S(0)@dp_shard,cp"),
        (
            {"mesh": {"dp_replicate": 2, "cp": 2}, "strategy": "hybrid_shard"},
            "hybrid_shard",
            "units",
            "S(0)@cp",
        ),
        (
            {"mesh": {"dp_replicate": 2, "dp_shard": 2, "cp": 2}},
            "hybrid_shard",
            "units",
            "S(0)@dp_shard,cp",
        ),
    ],
)
def test_cp_holds_replicas_or_is_cut_as_the_strategy_says(plan, strategy, wrapper, layout):
    a = decide(plan).assignment
    stored = {placed.stored.spell(a.mesh) for placed in a.tensors.values()}
    assert (a.strategy.name, a.wrapper, stored) == (strategy, wrapper, {layout})


def test_ranks_along_cp_read_the_same_samples():
    plan = decide(BOTH | {"batch": {"micro": 3, "global": 12}})
    assert (plan.num_data_ranks, plan.accumulate) == (2, 2)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_dp_shard_and_cp_cut_as_one_axis(size, dp_shard, cp, tp):
    mesh = Mesh.of({"dp_shard": dp_shard, "cp": cp, "tp": tp})
    together = Mesh.of({"dp_shard": dp_shard * cp, "tp": tp})
    two, one = Layout((("tp", "dp_shard", "cp"),)), Layout((("tp", "dp_shard"),))
    for rank in range(mesh.world_size):
        assert two.slices((size,), mesh, rank) == one.slices((size,), together, rank)
        padded = two.padded_numel((size,), mesh, ("dp_shard", "cp"), rank)
        assert padded == one.padded_numel((size,), together, ("dp_shard",), rank)


def test_uneven_cuts_differ_from_one_cut_after_the_other():
    """Five rows over 2 x 2 ranks: 2, 2, 1, 0 and not 2, 1, 1, 1."""
    mesh, layout = Mesh.of({"dp_shard": 2, "cp": 2}), Layout((("dp_shard", "cp"),))
    assert [layout.local_numel((5,), mesh, rank) for rank in range(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize(
    ("stated", "chunks"),
    [
        ({}, [(0, 5), (1, 4), (2, 3)]),
        ({"balance": False}, [(0,), (1,), (2,)]),
        ({"attention": "all_to_all"}, [(0,), (1,), (2,)]),
        ({"attention": "all_to_all", "balance": True}, [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_chunks_of_the_sequence(stated, chunks):
    plan = {"mesh": {"cp": 3}, "context": stated} if stated else {"mesh": {"cp": 3}}
    context = decide(plan).assignment.context
    assert context is not None
    assert [context.chunks(3, rank) for rank in range(3)] == chunks
    assert sorted(c for each in chunks for c in each) == list(range(context.num_chunks(3)))


def test_the_digest_knows_the_attention():
    plans = [{}, {"balance": False}, {"attention": "all_to_all"}]
    assert len({decide(BOTH | {"context": stated}).digest() for stated in plans}) == 3


def test_show():
    plan = decide(BOTH | {"batch": {"micro": 1, "seq_len": 64}})
    line = next(line for line in plan_to_text(plan) if line.startswith("cp "))
    assert line == (
        "cp         mesh (all_gather); rank 0 holds chunks 0 and 3 of 4, 32 tokens, of each sample"
    )
    assert plan_to_json(plan)["context"]["attention"] == "all_gather"
    assert plan_to_json(decide({"mesh": {"dp_shard": 2}}))["context"] is None


@pytest.mark.parametrize(
    ("plan", "what", "fix"),
    [
        (
            BOTH | {"batch": {"seq_len": 30}},
            "a sequence of 30 cannot be divided into 4 chunks, two per cp rank",
            "use a multiple of 4, or write context: {balance: false}",
        ),
        (
            BOTH | {"batch": {"seq_len": 31}, "context": {"attention": "all_to_all"}},
            "a sequence of 31 cannot be divided into 2 parts, one per cp rank",
            "use a multiple of 2",
        ),
        (
            {"mesh": {"dp_shard": 2}, "context": {"balance": True}},
            "'context' has no effect without a cp axis (the mesh has dp_shard 2)",
            "add cp to the mesh, or remove context",
        ),
        (
            {"mesh": {"cp": 2, "dp_shard": 2}},
            "cp comes before dp_shard, but the ranks that share a sample must be adjacent",
            "write mesh: {dp_shard: 2, cp: 2}",
        ),
        (
            BOTH | {"rules": [{"match": "head", "place": {"cp": "S(0)"}}]},
            "cp shards the sequence, not parameters: the parameters of sharded modules are "
            "sharded over dp_shard and cp together",
            "place the module on dp_shard",
        ),
        (
            {
                "mesh": {"cp": 2, "tp": 2},
                "batch": {"seq_len": 36},
                "context": {"balance": False},
                "sequence_parallel": True,
                "rules": [{"match": "head", "place": {"tp": "vocab"}}],
            },
            "",
            "",
        ),
        (
            {
                "mesh": {"cp": 2, "tp": 2},
                "batch": {"seq_len": 34},
                "context": {"balance": False},
                "sequence_parallel": True,
                "rules": [{"match": "head", "place": {"tp": "vocab"}}],
            },
            "a sequence of 34 does not divide by cp x tp 4, but sequence_parallel shards it",
            "use a multiple of 4",
        ),
    ],
)
def test_refusals(plan, what, fix):
    assert refusal(plan) == (f"{what}\n{fix}" if what else "")


def test_heads_of_a_config():
    plan = {"mesh": {"cp": 8}, "context": {"attention": "all_to_all"}}
    assert refusal({k: v for k, v in plan.items() if k != "context"}, TINY) == ""
    assert "heads do not divide by cp 8, but all_to_all gives each rank whole" in refusal(
        plan, TINY
    )


def test_attention_inside_torch():
    plan = BOTH | {"model": {"entry": "tests.assign.test_context_check:encoder"}}
    assert refusal(plan).startswith("0.self_attn (MultiheadAttention) computes attention inside")


def encoder() -> object:
    from torch import nn

    return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32), nn.Linear(16, 16))


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"attention": "ring"}, "'ring' is not a context-parallel attention method"),
        ({"balance": "yes"}, "'yes' is not true or false"),
        ({"kind": "all_gather"}, "kind"),
        ("all_gather", "context"),
    ],
)
def test_bad_words(stated, says):
    with pytest.raises(ValueError, match=says):
        check_plan(MODEL | BOTH | {"context": stated})
