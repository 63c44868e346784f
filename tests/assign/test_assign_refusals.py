"""What a plan says in vain is refused, not ignored, on live models that nobody prepared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshplan import make_plan
from meshplan.errors import PlanError
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.thin = nn.Parameter(torch.ones(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh()) * self.thin.sum(0)


def two_blocks() -> nn.Module:
    return nn.Sequential(Block(), Block())


def half_blocks() -> nn.Module:
    model = two_blocks()
    model[1].thin = nn.Parameter(model[1].thin.data.bfloat16())
    return model


def with_attention() -> nn.Module:
    return nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))


def weight_normed() -> nn.Module:
    return nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))


SHARD: dict[str, Any] = {"version": 1, "strategy": "full_shard"}
TP: dict[str, Any] = {"version": 1, "mesh": {"dp_shard": 2, "tp": 4}}


def rule(match: Any, **fields: Any) -> dict[str, Any]:
    return {"rules": [{"match": match, **fields}]}


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a module's field on a parameter": (
        two_blocks,
        SHARD | rule({"param": "0.thin"}, place="replicate", precision="bf16-mixed"),
        "rules[0].precision: 'precision' cannot be stated for a parameter, only for a module",
    ),
    "a unit where nothing is sharded": (
        two_blocks,
        {"version": 1, "strategy": "ddp"} | rule("0", unit=True),
        "rules[0].unit: 'unit' has no effect: this plan does not shard, so it has no units",
    ),
    "a dim that no parameter has": (
        two_blocks,
        SHARD | rule("0", place={"dp_shard": "S(5)"}),
        "rules[0].place.dp_shard: no parameter of '0' has a dim 5",
    ),
    "a dim that the weight has not": (
        two_blocks,
        TP | rule("0.up", place={"tp": "S(5)"}),
        "rules[0].place.tp: the weight of 0.up has 2 dims, so it has no dim 5",
    ),
    "a part that is empty": (
        two_blocks,
        TP | rule({"param": "0.thin"}, place={"tp": "S(0)"}),
        "0.thin: dim 0 of size 3 leaves no elements for the last rank of tp 4",
    ),
    "two dtypes in one unit by rule": (
        half_blocks,
        SHARD | rule({"param": "1.thin"}, place="shard"),
        "1.thin is bfloat16 and 1.up.weight is float32, but one unit ('1') reduces their "
        "gradients together",
    ),
    "a projection that is never called": (
        with_attention,
        TP | rule({"param": "0.out_proj.weight"}, place={"tp": "S(0)"}),
        "0.out_proj.weight cannot be sharded by tp: NonDynamicallyQuantizableLinear is never",
    ),
    "a weight that is computed": (
        weight_normed,
        TP | rule("0", place={"tp": "rowwise"}),
        "its weight is computed from other parameters",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case):
    make, plan, text = CASES[case]
    with pytest.raises(PlanError) as refused:
        make_plan(load_spec(plan), graph_of(make()), world_size=8)
    assert text in str(refused.value)


def test_a_precision_by_rule_counts_without_a_data_axis():
    plan = TP | {"mesh": {"tp": 4}}
    plan["rules"] = [
        {"match": "*.up", "place": {"tp": "colwise"}},
        {"match": "*.down", "place": {"tp": "rowwise"}},
        {"match": "0", "precision": "bf16-mixed"},
    ]
    decided = make_plan(load_spec(plan), graph_of(two_blocks()), world_size=4)
    assert decided.assignment.wrapper == "units"
    assert decided.assignment.tensors["0.up.weight"].compute_dtype == "bfloat16"


def test_reading_a_model_does_not_run_it():
    model = nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))
    before = {name: b.clone() for name, b in model.named_buffers()}
    graph_of(model)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_nothing_trainable_needs_no_wrapper():
    model = two_blocks().requires_grad_(False)
    spec = load_spec({"version": 1, "strategy": "ddp"})
    assert make_plan(spec, graph_of(model), world_size=4).assignment.wrapper == "none"
