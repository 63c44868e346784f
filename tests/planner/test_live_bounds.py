"""Plans for models in which the shape of some tensors depends on values: an upper bound holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshplan.api import checking
from meshplan.api.planning import search_plan
from meshplan.errors import PlanError
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.planner.lock.lock import overrides
from meshplan.runtime.live.planned import request_of_entry

OPEN: dict[str, Any] = {
    "version": 1,
    "hardware": {"nodes": 1, "gpus_per_node": 4, "gpu": "h100-sxm-80gb"},
    "mesh": "auto",
    "strategy": "auto",
    "activation_checkpointing": "auto",
    "batch": {"global": 64, "seq_len": 64},
}
STAGES = {
    "mesh": {"pp": 2, "dp_shard": 2},
    "strategy": "full_shard",
    "pipeline": {"schedule": "1F1B", "microbatches": 4},
    "batch": {"micro": 8, "accumulate": 4, "seq_len": 64},
    "activation_checkpointing": "none",
}


def plan_of(entry: str, **fields: Any) -> dict[str, Any]:
    return OPEN | {"model": {"entry": f"tests.helpers.estimated:{entry}"}} | fields


_PICKED = "aten.nonzero.default selects as much as possible, in blocks.2"


@pytest.mark.parametrize(
    ("entry", "fields", "words"),
    [
        ("picking", {}, _PICKED),
        pytest.param("picking", STAGES, _PICKED, marks=pytest.mark.wide),
        ("recurrent", {}, "lstm is a recurrent layer"),
    ],
)
def test_what_is_chosen_has_the_upper_bound_that_estimate_tells(entry, fields, words):
    plan = plan_of(entry, **fields)
    chosen = search_plan(plan).chosen
    assert chosen is not None
    assert chosen.seconds > 0
    assert words in chosen.memory.bound
    told = checking.estimate_memory(plan, overrides(chosen.stated), fixes=False)
    assert told.bound == chosen.memory.bound
    assert [g.peak for g in told.groups] == [g.peak for g in chosen.memory.groups]
    assert [g.band for g in told.groups] == [g.band for g in chosen.memory.groups]


STATED = overrides(
    {"mesh": {"dp_shard": 4}, "strategy": "full_shard", "batch.micro": 4, "batch.accumulate": 4,
     "activation_checkpointing": "none"}
)  # fmt: skip


def traced_by_the_search(path: Path, entry: str) -> MemoryEstimate:
    """The memory of `STATED` as the search has it, which certifies only what it chooses."""
    path.write_text(json.dumps(plan_of(entry)))
    request = request_of_entry(path, (), None)
    assert request.traced is not None
    return request.traced.memory(request.traced.decide(request.read(STATED)))


def test_what_the_search_traces_is_the_bound_too(tmp_path):
    path = tmp_path / "plan.yaml"
    found = traced_by_the_search(path, "picking")
    told = checking.estimate_memory(path, STATED, fixes=False)
    assert found.bound == told.bound
    assert [g.peak for g in found.groups] == [g.peak for g in told.groups]


def test_a_model_whose_step_has_no_bound_is_not_searched(tmp_path):
    with pytest.raises(PlanError) as error:
        traced_by_the_search(tmp_path / "plan.yaml", "filling")
    (problem,) = error.value.problems
    assert "aten.nonzero.default" in problem.what
    assert "no upper bound can be proved" in problem.what
    assert "aten.ones.default in blocks.1 makes a larger tensor" in problem.what
