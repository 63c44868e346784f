"""A Plan: its digest stands for every decision and nothing else; its batch adds up."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from meshplan.errors import PlanError
from meshplan.model.graph import ModelGraph
from meshplan.plan.plan import Plan, make_plan, problems_without_model
from meshplan.spec.reader import load_spec
from tests.helpers.graphs import blocks

BASE: dict[str, Any] = {
    "version": 1,
    "mesh": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "precision": "bf16-mixed",
    "batch": {"micro": 2, "accumulate": 2},
    "clip_grad_norm": 1.0,
    "activation_checkpointing": "full",
    "rules": [
        {"match": "layers.*.up", "place": {"tp": "colwise"}},
        {"match": "layers.*.down", "place": {"tp": "rowwise"}},
        {"match": "layers.0", "place": "replicate"},
    ],
}


def decide(plan: dict[str, Any], on: ModelGraph | None = None) -> Plan:
    return make_plan(load_spec(plan), on or blocks())


def digest(**changes: Any) -> str:
    return decide(BASE | changes).digest()


def ruled(*more: dict[str, Any]) -> dict[str, Any]:
    return {"rules": [*BASE["rules"], *more]}


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": {"dp_replicate": 4, "dp_shard": 1, "tp": 2}},
        {"mesh": {"tp": 2, "dp_replicate": 2, "dp_shard": 2}},
        {"strategy": "hybrid_shard_zero2"},
        {"precision": "bf16-true"},
        {"precision": {"param": "bf16", "reduce": "bf16", "master": "fp32"}},
        {"batch": {"micro": 4, "accumulate": 2}},
        {"batch": {"micro": 2, "accumulate": 4}},
        {"clip_grad_norm": 2.0},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": {"mode": "full", "every": 2}},
        {"sequence_parallel": True},
        ruled({"match": "layers.1", "place": "replicate"}),
        ruled({"match": "layers.1", "unit": False}),
        ruled({"match": "layers.1", "reshard_after_forward": False}),
        ruled({"match": "layers.1", "precision": "32-true"}),
        ruled({"match": "layers.1", "activation_checkpointing": "none"}),
        ruled({"match": "layers.1", "place": {"dp_shard": "S(1)"}}),
        ruled({"match": "head", "place": {"tp": "vocab"}}),
        ruled({"match": "norm", "place": {"tp": "sequence_parallel"}}),
        ruled({"match": {"param": "norm.weight"}, "place": "replicate"}),
        ruled({"match": "head", "apply": "pkg.mod:function"}),
    ],
)
def test_every_decision_is_in_the_digest(changes: dict[str, Any]) -> None:
    assert digest(**changes) != digest()


def test_options_of_ddp_are_in_the_digest() -> None:
    ddp = {"version": 1, "mesh": {"dp_replicate": 2}}
    assert decide(ddp).digest() != decide(ddp | {"ddp": {"bucket_mb": 1}}).digest()


def test_another_model_has_another_digest() -> None:
    one = {"version": 1, "mesh": {"dp_shard": 2}}
    assert decide(one).digest() != decide(one, blocks(tied=True)).digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"hardware": {"nodes": 2, "gpus_per_node": 4}},
        {"strategy": "hsdp"},
        {"optimizer": "sgd"},
        {"batch": {"global": 16, "micro": 2}},
        {"batch": {"global": 16, "accumulate": 2}},
        {"precision": {"param": "bf16", "reduce": "fp32", "master": "fp32"}},
        ruled({"match": "layers.1", "place": "shard", "why": "as it was"}),
        ruled({"match": "nothing", "place": "shard", "optional": True}),
    ],
)
def test_what_changes_no_decision_changes_no_digest(changes: dict[str, Any]) -> None:
    assert digest(**changes) == digest()


def test_comments_and_the_order_of_keys_do_not_matter(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("version: 1\nmesh: {dp_shard: 4}\nprecision: bf16-mixed\nclip_grad_norm: 1\n")
    second.write_text(
        "# the same\nclip_grad_norm: 1.0\n\nprecision: BF16-mixed  # said late\n"
        "mesh:\n  dp_shard: 4\nversion: 1\n"
    )
    one, other = (make_plan(load_spec(path), blocks()) for path in (first, second))
    assert one.digest() == other.digest()


def test_a_plan_travels_between_processes() -> None:
    plan = decide(BASE)
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert copy.digest() == plan.digest()


# The batch: any two of micro, accumulate and global give the third. Four data ranks.


@pytest.mark.parametrize(
    ("batch", "accumulate", "micro"),
    [
        ({}, 1, None),
        ({"seq_len": 128}, 1, None),
        ({"micro": 3}, 1, 3),
        ({"accumulate": 3}, 3, None),
        ({"micro": 3, "accumulate": 2}, 2, 3),
        ({"global": 24}, 1, 6),
        ({"global": 24, "micro": 3}, 2, 3),
        ({"global": 24, "accumulate": 3}, 3, 2),
        ({"global": 24, "micro": 3, "accumulate": 2}, 2, 3),
    ],
)
def test_batch_arithmetic(batch: dict[str, int], accumulate: int, micro: int | None) -> None:
    plan = decide({"version": 1, "mesh": {"dp_shard": 4}, "batch": batch})
    assert (plan.accumulate, plan.micro) == (accumulate, micro)
    assert plan.num_data_ranks == 4


def test_ranks_along_tp_read_the_same_samples() -> None:
    plan = decide(BASE | {"batch": {"global": 16, "micro": 2}})
    assert (plan.num_data_ranks, plan.accumulate) == (4, 2)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"global": 30},
            "<mapping>: batch.global: 30 is not a multiple of 4 data ranks\n    fix: use 28 or 32",
        ),
        (
            {"global": 2},
            "<mapping>: batch.global: 2 is not a multiple of 4 data ranks\n    fix: use 4 or 8",
        ),
        (
            {"global": 20, "micro": 2},
            "<mapping>: batch.global: 20 is not a multiple of micro 2 x 4 data ranks = 8\n"
            "    fix: use 16 or 24",
        ),
        (
            {"global": 20, "accumulate": 2},
            "<mapping>: batch.global: 20 is not a multiple of accumulate 2 x 4 data ranks = 8\n"
            "    fix: use 16 or 24",
        ),
        (
            {"global": 32, "micro": 2, "accumulate": 2},
            "<mapping>: batch.global: 32 is not micro 2 x accumulate 2 x 4 data ranks = 16\n"
            "    fix: leave out one of global, micro and accumulate",
        ),
    ],
)
def test_a_batch_that_does_not_add_up(batch: dict[str, int], message: str) -> None:
    # The number of ranks comes from the job, so that the file alone cannot show the mistake.
    spec = load_spec({"version": 1, "strategy": "full_shard", "batch": batch})
    with pytest.raises(PlanError) as caught:
        make_plan(spec, blocks(), world_size=4)
    assert str(caught.value) == f"meshplan: 1 problem\n{message}"


def test_what_a_plan_alone_shows() -> None:
    """Without a model: mesh, batch and what this version lacks; rules wait for the model."""
    spec = load_spec({
        "version": 1, "strategy": "ddp", "mesh": {"dp_shard": 4}, "offload": {"params": "auto"},
        "rules": [{"match": "no.such.module", "place": "shard"}],
    })  # fmt: skip
    said = [problem.what.partition(" ")[0] for problem in problems_without_model(spec)]
    assert said == ["ddp", "'offload:"]
    assert problems_without_model(load_spec({"version": 1, "mesh": {"dp_shard": 4}})) == []
