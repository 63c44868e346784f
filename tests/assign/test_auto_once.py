"""`tp_plan: auto` derives once what many plans of a model share, and decides each as if alone.

Which seeded bug would this catch? A derivation of another size of tp, of other rules, of another
model or with another place in the plan file; one that is made again for each data axis.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from meshplan.errors import PlanError
from meshplan.model.graph import ModelGraph
from meshplan.model.rehearsal import Rehearsal, Rehearser, Stopped
from meshplan.plan.plan import make_plan
from meshplan.runtime.trace.ops import record
from meshplan.runtime.trace.rehearse import rehearser
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec
from tests.helpers import models

AUTO: dict[str, Any] = {"version": 1, "tp_plan": "auto", "mesh": {"tp": 2}}
WHOLE = {"match": "**.mlp", "place": {"tp": "R"}}
PLANS: list[dict[str, Any]] = [
    {},
    {"mesh": {"tp": 4}},
    {"mesh": {"dp_shard": 2, "tp": 2}, "strategy": "full_shard"},
    {"sequence_parallel": True},
    {"sequence_parallel": True, "loss_parallel": True},
    {"mesh": {"tp": 3}},
    {"rules": [WHOLE]},
    {"rules": [WHOLE, {"match": "**.mlp", "place": {"tp": "auto"}}]},
    {"rules": [{"match": "**", "place": {"tp": "R"}}, WHOLE]},
    {"tp_plan": "none", "rules": [{"match": "**.mlp", "place": {"tp": "auto"}}]},
    {"sequence_parallel": True, "mesh": {"tp": 3}},
]


def recorded(name: str) -> tuple[ModelGraph, Rehearser]:
    model, inputs = models.build(name), models.batch(name, 0, 2)[0]
    return graph_of(model, record(model, inputs)), rehearser(model, inputs)


def said(more: dict[str, Any], graph: ModelGraph, rehearse: Rehearser) -> str:
    """All that is decided, with its warnings and reasons, or all problems with their places."""
    try:
        plan = make_plan(load_spec(AUTO | more), graph, rehearse=rehearse)
    except PlanError as error:
        return error.render()
    a = plan.assignment
    return f"{plan.digest()} {a.warnings} {a.results} {[use.reason for use in a.styles.values()]}"


@pytest.mark.parametrize("name", ["hf_llama", pytest.param("t5", marks=pytest.mark.wide)])
def test_plans_decided_one_after_the_other_are_those_decided_alone(name):
    graph, shared = recorded(name)
    alone = [said(more, *recorded(name)) for more in PLANS]
    assert len(set(alone)) == len(PLANS)
    assert [said(more, graph, shared) for more in PLANS] == alone
    assert [said(more, graph, shared) for more in reversed(PLANS)] == alone[::-1]


def test_data_axes_need_no_other_derivation(monkeypatch):
    graph, shared = recorded("hf_llama")
    classified: list[object] = []
    chosen: list[int] = []

    def classify(flow: Any) -> Any:
        classified.append(flow)
        return real_classify(flow)

    def choose(uses: Any, size: int, *others: Any) -> Any:
        chosen.append(size)
        return real_choose(uses, size, *others)

    module = sys.modules["meshplan.assign.auto.derive"]  # `auto.derive` is the function in it.
    real_classify, real_choose = module.classify, module.choose
    monkeypatch.setattr(module, "classify", classify)
    monkeypatch.setattr(module, "choose", choose)
    for size in (2, 4, 2):
        for mesh in ({"tp": size}, {"dp_shard": 2, "tp": size}, {"dp_replicate": 4, "tp": size}):
            for sequence_parallel in (False, True):
                more = {"mesh": mesh, "sequence_parallel": sequence_parallel}
                make_plan(load_spec(AUTO | more), graph, rehearse=shared)
    assert classified == [graph.flow]
    assert chosen == [2, 4]


def test_each_graph_has_its_own_derivations():
    stopped = Stopped(module="", num_ops=0, text="")
    rehearse = Rehearser(lambda what: stopped)
    graphs = [recorded("hf_llama")[0], recorded("t5")[0]]
    made: list[str] = []

    def derive(name: str) -> str:
        made.append(name)
        return name

    for _ in range(2):
        found = [rehearse.once(each, "key", lambda each=each: derive(each.name)) for each in graphs]
        assert found == [each.name for each in graphs]
    assert made == [each.name for each in graphs]


def test_equal_rehearsals_run_once():
    ran: list[Rehearsal] = []

    def run(what: Rehearsal) -> Stopped:
        ran.append(what)
        return Stopped(module="", num_ops=len(ran), text="")

    rehearse = Rehearser(run)
    asked = [Rehearsal(size=2), Rehearsal(size=4), Rehearsal(size=2, parts={})]
    results = [rehearse(each) for each in asked]
    assert results[0] is results[2]
    assert results[0] != results[1]
    assert ran == asked[:2]
