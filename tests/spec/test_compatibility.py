"""Pairs of features that do not go together: refused by name, without a model, one message each."""

from __future__ import annotations

from typing import Any

import pytest

from meshplan.errors import PlanError
from meshplan.plan.plan import make_plan, problems_without_model
from meshplan.spec.compatibility import CLASHES, FEATURES, clashes
from meshplan.spec.reader import load_spec
from tests.helpers.graphs import graph

STATED: dict[str, dict[str, Any]] = {
    "pp": {"mesh": {"pp": 2}},
    "cp": {"mesh": {"cp": 2}},
    "tp": {"mesh": {"tp": 2}},
    "ep": {"mesh": {"dp_shard": 2, "ep": "2 in dp_shard"}},
    "sequence_parallel": {"sequence_parallel": True, "mesh": {"tp": 2}},
    "loss_parallel": {"loss_parallel": True},
    "loss_chunks": {"loss_chunks": 4},
    "sync_batchnorm": {"sync_batchnorm": True},
    "compile": {"compile": True},
    "activation_checkpointing": {"activation_checkpointing": "full"},
    "offloaded parameters": {"offload": "params"},
    "offloaded activations": {"offload": {"activations": True}},
    "a schedule that splits the backward": {
        "mesh": {"pp": 2},
        "pipeline": {"schedule": "ZBVZeroBubble", "virtual": 2},
    },
}
"""A plan that states each feature."""

ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


def plan_of(*features: str) -> dict[str, Any]:
    out: dict[str, Any] = {"version": 1}
    mesh: dict[str, Any] = {}
    for feature in features:
        mesh |= STATED[feature].get("mesh", {})
        out |= STATED[feature]
    out["mesh"] = {axis: mesh[axis] for axis in ORDER if axis in mesh} or {"dp_shard": 2}
    return out


def found(*features: str) -> list[str]:
    return [problem.what for problem in clashes(load_spec(plan_of(*features)))]


def test_every_feature_has_a_plan_that_states_it_and_no_other_does():
    assert set(STATED) == set(FEATURES)
    bare = load_spec({"version": 1, "mesh": {"dp_shard": 2}})
    for name, feature in FEATURES.items():
        assert feature(load_spec(plan_of(name))), name
        assert feature(bare) is None


@pytest.mark.parametrize("clash", CLASHES, ids=lambda c: f"{c.left}, {c.right}")
def test_a_pair_is_refused_and_each_of_it_alone_is_not(clash):
    assert f"{clash.left} and {clash.right} do not go together: {clash.why}" in found(
        clash.left, clash.right
    )
    assert found(clash.left) == found(clash.right) == []


def test_both_ways_of_deciding_refuse_it():
    spec = load_spec(plan_of("cp", "pp"))
    what = "cp and pp do not go together"
    assert any(what in problem.what for problem in problems_without_model(spec))
    with pytest.raises(PlanError, match=what):
        make_plan(spec, graph({"a": "linear"}, {"a.weight": (4, 4)}))


def test_a_rule_states_a_feature_too():
    plan = plan_of("a schedule that splits the backward")
    plan["rules"] = [{"match": "a", "activation_checkpointing": "full"}]
    (problem,) = clashes(load_spec(plan))
    assert problem.origin is not None
    assert problem.origin.path == "rules[0].activation_checkpointing"
