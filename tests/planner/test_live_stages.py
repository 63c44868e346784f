"""Pipeline stages of a live model: what the search finds is the best of all stated plans.

Which seeded bug would this catch? Bytes sent between stages, parameters outside of the blocks, or
work between blocks that count in another stage than the one that has them; a rank over the limit
that is not told from its neighbour; a cut that is dropped although it fits; the trace of one stage
taken for another one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from meshplan.cli.app import main
from meshplan.errors import PlanError, Problem
from meshplan.plan.plan import Plan
from meshplan.planner.objectives.fastest import fastest_of
from meshplan.planner.problem.decision import PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.space.space import EmptySpaceError
from meshplan.planner.space.trials import with_axes
from meshplan.planner.tables.whole_plan import Costed
from meshplan.runtime.fake_step import few_microbatches
from meshplan.runtime.live import stage_traces
from meshplan.runtime.live.planned import request_of_entry
from meshplan.runtime.live.traced import TracedModel
from meshplan.spec.reader import load_spec
from tests.helpers import staged
from tests.planner.test_live import runs_as_one

BLOCKS = ("layers.0", "layers.1", "layers.2")
FIVE = (*BLOCKS, "layers.3", "layers.4")
WITH_TP = {
    "mesh": {"pp": 2, "dp_shard": 2, "tp": 2},
    "tp_plan": "auto",
    "sequence_parallel": False,
    "loss_parallel": False,
    "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
}
FOUR_STAGES = {
    "mesh": {"pp": 4, "dp_shard": 2},
    "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
}


def plan_of(name: str, **fields: Any) -> dict[str, Any]:
    """A plan with two stages of two data ranks each, where only the pipeline is left open."""
    return {
        "version": 1,
        "model": {"entry": f"tests.helpers.staged:{name}"},
        "hardware": {"nodes": 1, "gpus_per_node": 4, "gpu": "h100-sxm-80gb"},
        "mesh": {"pp": 2, "dp_shard": 2},
        "strategy": "full_shard",
        "activation_checkpointing": "none",
        "pipeline": {"schedule": "1F1B"},
        "precision": "bf16-mixed",
        "allocator": "default",
        "input": staged.INPUTS.get(name, staged.INPUTS["alike"]),
        "batch": {"global": 8, "micro": "auto"},
        **fields,
    }


def of_microbatches(name: str, count: int, **fields: Any) -> dict[str, Any]:
    """`plan_of` this model, with this number of microbatches of a pipeline."""
    return plan_of(
        name,
        pipeline={"schedule": "1F1B", "microbatches": count},
        batch={"global": 8, "micro": 4, "accumulate": 1},
        **fields,
    )


class Stated(NamedTuple):
    seconds: float
    most_bytes: int
    plan: dict[str, Any]


def all_stated(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every plan that the open one allows, written by hand."""
    recomputed = [()]
    pp, blocks = plan["mesh"]["pp"], BLOCKS if plan["mesh"]["pp"] == 2 else FIVE
    if plan["activation_checkpointing"] == "auto":
        recomputed = [
            some for n in range(len(blocks) + 1) for some in itertools.combinations(blocks, n)
        ]
    cuts = itertools.combinations(blocks[1:], pp - 1)
    for cut, count, some in itertools.product(cuts, (1, 2, 4), recomputed):
        rules = [{"match": block, "activation_checkpointing": "full"} for block in some]
        yield plan | {
            "activation_checkpointing": "none",
            "batch": {"global": 8, "micro": 4, "accumulate": 1},
            "pipeline": plan["pipeline"]
            | {"microbatches": count, "split": [[blocks[0]], *([block] for block in cut)]},
            **({"rules": rules} if rules else {}),
        }


def priced(question: PlanRequest, path: Path, plan: dict[str, Any]) -> Stated:
    path.write_text(json.dumps(plan))
    assert question.traced is not None
    found = question.traced.priced(load_spec(path))
    seconds = Costed(found.plan, question.cluster, question.profile, found.chain).seconds
    return Stated(seconds, found.memory.worst.band[1], plan)


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """`ask(name, recompute)`: (request, every stated plan with its price), once for this file."""

    @cache
    def of(name: str, recompute: str, tp: int = 1) -> tuple[PlanRequest, list[Stated]]:
        folder = tmp_path_factory.mktemp(name)
        more = FOUR_STAGES if name == "five" else WITH_TP if tp > 1 else {}
        plan = plan_of(name, activation_checkpointing=recompute, **more)
        (folder / "plan.json").write_text(json.dumps(plan))
        question = request_of_entry(folder / "plan.json", (), None)
        each = [priced(question, folder / "stated.json", one) for one in all_stated(plan)]
        return question, each

    return of


WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("name", "recompute", "tp"),
    [
        ("unlike", "none", 1),
        ("tied", "none", 2),
        pytest.param("tied", "auto", 1, marks=WIDE),
        pytest.param("five", "none", 1, marks=WIDE),
        pytest.param("alike", "none", 1, marks=WIDE),
        pytest.param("alike", "auto", 1, marks=WIDE),
        pytest.param("tied", "auto", 2, marks=WIDE),
        pytest.param("unlike", "auto", 1, marks=WIDE),
    ],
)
def test_what_is_found_is_the_fastest_of_all_stated_plans_that_fit(name, recompute, tp, ask):
    question, each = ask(name, recompute, tp)
    traced = question.traced
    assert isinstance(traced, TracedModel)
    sizes = sorted({one.most_bytes for one in each})
    assert len(sizes) > 2
    fastest = set()
    for size in (sizes[-1], sizes[len(sizes) // 2], sizes[1], sizes[0]):
        # The search allows for the error of composed steps, up to 1% of what tensors need.
        limit = int(size * 1.0007)
        traced._limit_bytes = limit
        found = fastest_of(PlanningProblem(replace(question, limit_bytes=limit)))
        best = min(one.seconds for one in each if one.most_bytes <= limit)
        most = min(one.seconds for one in each if one.most_bytes <= size)
        assert found.chosen is not None
        assert found.gap <= 1e-4
        assert best * (1 - 1e-4) <= found.chosen.seconds <= most * (1 + 1e-4)
        assert found.chosen.memory.worst.band[1] <= limit
        fastest.add(best)
    assert len(fastest) > 1  # The limit matters.


@pytest.mark.parametrize("count", [pytest.param(1, marks=WIDE), pytest.param(2, marks=WIDE), 4])
def test_the_seconds_of_a_found_plan_are_those_of_the_same_plan_stated(count, ask, tmp_path):
    _, each = ask("unlike", "none")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(of_microbatches("unlike", count)))
    question = request_of_entry(path, (), None)
    found = fastest_of(PlanningProblem(question)).chosen
    assert isinstance(question.traced, TracedModel)
    # The microbatches of 4 microbatches have one sample, on which this model runs other operators.
    assert question.traced.traces(question.read(())).is_single_unlike
    stated = [one.seconds for one in each if one.plan["pipeline"]["microbatches"] == count]
    assert found is not None
    assert found.seconds == pytest.approx(min(stated), rel=1e-4)


def test_stages_that_would_share_a_parameter_of_a_block_are_refused_in_words(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of("repeating")))
    with pytest.raises(EmptySpaceError, match=r"would share the parameter 'layers\.0\.up\.weight'"):
        fastest_of(PlanningProblem(request_of_entry(path, (), None)))


def test_a_stated_cut_that_is_not_searched_counts_what_it_sends(tmp_path):
    path = tmp_path / "plan.json"
    stated = {"schedule": "1F1B", "microbatches": 2, "split": [["layers.0"], ["layers.2"]]}
    batch = {"global": 8, "micro": 4, "accumulate": 1}
    path.write_text(json.dumps(plan_of("tied", pipeline=stated, batch=batch)))
    traced = request_of_entry(path, (), None).traced
    assert traced is not None
    kinds = traced.priced(load_spec(path)).chain.kinds
    tokens = staged.INPUTS["tied"]["shape"][1]
    assert {kind.boundary_bytes for kind in kinds} == {tokens * staged.WIDTH * 2}  # In bfloat16.


@pytest.mark.parametrize("is_rank_known", [False, pytest.param(True, marks=WIDE)])
def test_a_cut_that_cannot_run_hides_no_other_and_counts_in_the_gap(
    is_rank_known, ask, tmp_path, monkeypatch
):
    _, each = ask("uneven", "none")
    few = [one for one in each if one.plan["pipeline"]["microbatches"] == 4]
    ordered = sorted(few, key=lambda one: one.seconds)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(of_microbatches("uneven", 4)))
    question = request_of_entry(path, (), None)
    traced = question.traced
    assert isinstance(traced, TracedModel)
    first = ordered[0].plan["pipeline"]["split"][1][0]
    why = Problem("this stage cannot run", None, "use another")

    def is_cut_there(plan: Plan) -> bool:
        stages = plan.assignment.stages
        return stages is not None and next(fqn for fqn, at in stages.units if at == 1) == first

    def refusing(spec, decide=traced.decide):
        plan = decide(spec)
        if is_cut_there(plan) and spec.strategy is not None:
            raise PlanError(why)
        return plan

    def failing(plan, rank, loop, run=traced._stages._traced):
        if is_cut_there(plan) and plan.mesh.index(rank, ("pp",)) == 1:
            raise PlanError(why)
        return run(plan, rank, loop)

    if is_rank_known:
        monkeypatch.setattr(traced._stages, "_traced", failing)
    else:
        monkeypatch.setattr(traced, "decide", refusing)
    found = fastest_of(PlanningProblem(question))
    others = [one.seconds for one in ordered if one.plan["pipeline"]["split"][1][0] != first]
    assert found.chosen is not None
    assert found.chosen.seconds == pytest.approx(others[0], rel=1e-4)
    lost = 1 - ordered[0].seconds / others[0]
    assert lost > 1e-3
    # Where the rank is known, and its blocks have one choice only, the cut is no plan at all.
    assert found.gap == pytest.approx(0 if is_rank_known else lost, abs=2e-4)


def test_where_no_stage_can_run_the_reason_is_told(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of("unlike")))
    question = request_of_entry(path, (), None)
    assert isinstance(question.traced, TracedModel)

    def failing(plan, rank, loop):
        raise PlanError(Problem("this stage cannot run", None, "use another"))

    monkeypatch.setattr(question.traced._stages, "_traced", failing)
    found = fastest_of(PlanningProblem(question))
    assert found.chosen is None
    assert any("this stage cannot run" in each.why for each in found.rejected)


def planned_of(path: Path, capsys: Any, *flags: str) -> Any:
    capsys.readouterr()
    assert main(["plan", "-f", str(path), "-q", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)["result"]


def test_a_found_plan_runs_as_one_process_does(pool, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of("uneven", activation_checkpointing="auto")))
    chosen = fastest_of(PlanningProblem(request_of_entry(path, (), None))).chosen
    assert chosen is not None
    assert chosen.plan.assignment.stages is not None
    stated = {
        "mesh": {"pp": 2, "dp_shard": 2},
        "strategy": "full_shard",
        "input": {"shape": [8, 4, 8, 8]},  # Of the small model that is trained.
    }
    runs_as_one(pool, "uneven", stated | chosen.stated)


def test_a_lock_keeps_the_found_stages_and_estimate_agrees(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(of_microbatches("uneven", 4)))
    found = planned_of(path, capsys)
    again = planned_of(path, capsys, "--dry-run")
    assert again["step_s"] == pytest.approx(found["step_s"], rel=1e-4)
    assert again["peak_bytes"] == found["peak_bytes"]
    assert main(["estimate", "-f", str(path), "--json", "-q"]) == 0
    groups = json.loads(capsys.readouterr().out)["result"]["groups"]
    # What is chosen is traced as `estimate` does it, so the bytes are equal.
    assert max(group["band"][1] for group in groups) == found["peak_bytes"]


@pytest.mark.parametrize("name", ["uneven", "keeping"])
def test_few_microbatches_of_many_need_what_all_of_them_do(name, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    stated = {"schedule": "1F1B", "microbatches": 16, "split": [["layers.0"], ["layers.2"]]}
    batch = {"global": 64, "micro": 32, "accumulate": 1}
    path.write_text(json.dumps(plan_of(name, pipeline=stated, batch=batch)))
    traced = request_of_entry(path, (), None).traced
    assert isinstance(traced, TracedModel)
    plan = traced.decide(load_spec(path))
    few = traced.memory(plan)
    for module in (few_microbatches, stage_traces):
        monkeypatch.setattr(module, "num_traced", lambda stages: stages.microbatches)
    again = request_of_entry(path, (), None).traced
    assert again is not None
    every = again.memory(plan)
    assert [group.ranks for group in few.groups] == [(0, 1), (2, 3)]
    for mine, whole in zip(few.groups, every.groups, strict=True):
        assert mine.peak == whole.peak


def test_why_not_stages_names_the_best_plan_with_them(ask, tmp_path, capsys):
    _, each = ask("uneven", "none")
    plan = plan_of("uneven", mesh="auto")
    del plan["pipeline"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    assert main(["explain", "why-not", "mesh.pp=2", "-f", str(path), "-q", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["result"]["answers"]
    assert answer["step_s"] == pytest.approx(min(one.seconds for one in each), rel=1e-4)
    assert answer["plan_step_s"] <= answer["step_s"]


def test_a_forward_that_cannot_be_cut_is_refused_in_words(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of("looped")))
    with pytest.raises(EmptySpaceError, match=r"'layers\.0' runs 2 times"):
        fastest_of(PlanningProblem(request_of_entry(path, (), None)))


def test_each_parameter_counts_in_the_stage_that_has_it(ask):
    question, _ = ask("uneven", "none")
    assert question.traced is not None
    chain = question.traced.chain(with_axes(question.read(()), {"pp": 2}), 2)
    model = staged.uneven()
    parts = [model.inp, *model.layers, model.head]
    numels = [sum(p.numel() for p in part.parameters()) for part in parts]
    assert [sum(chain.kinds[kind].numels) for kind in chain.order] == numels
    assert chain.starts == (True, False, True, True, False)


def test_the_linear_bytes_of_a_stage_are_just_below_what_its_replay_needs(tmp_path):
    """Higher ones would exclude plans that fit; much lower ones would exclude nothing."""
    path = tmp_path / "plan.json"
    batch = {"global": 256, "micro": 128, "accumulate": 1}
    path.write_text(json.dumps(of_microbatches("deep", 4) | {"batch": batch}))
    found = fastest_of(PlanningProblem(request_of_entry(path, (), None))).chosen
    assert found is not None
    places = []
    for group in found.memory.groups:
        places.append(found.plan.mesh.index(group.ranks[0], ("pp",)))
        linear = found.candidate.linear_bytes[places[-1]]
        assert 0.75 * group.peak.requested_bytes < linear <= group.peak.requested_bytes
    assert places == [0, 1]
