"""When there is no plan: what contradicts what, and what would help, each word of it searched."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshplan.api.planning import search_plan
from meshplan.cli.app import main
from meshplan.errors import PlanError
from meshplan.planner.answers.infeasible import Trouble, _Asking, trouble_of
from meshplan.planner.answers.stated import Statement, statements_of, without
from meshplan.planner.lock.lock import lock_path, overrides
from meshplan.planner.objectives.offload_variants import fastest_that_fits
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of_file
from meshplan.render.plans.trouble import trouble_to_text
from meshplan.spec.reader import load_spec
from tests.planner.test_planner import LLAMA, OPEN, job

__all__ = ["job"]

WIDE = LLAMA | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}


def tight(headroom, nodes=1):
    return {"nodes": nodes, "gpus_per_node": 4, "gpu": "h100-sxm-80gb", "inter": "50GB/s",
            "headroom": headroom}  # fmt: skip


CASES = [
    # Memory: the batch and what is recomputed, on a mesh that would do.
    {"mesh": {"dp_shard": 4}, "strategy": "full_shard", "hardware": tight(0.95),
     "batch": {"global": 32, "seq_len": 1024, "micro": 8}, "activation_checkpointing": "none"},
    # Words that contradict each other, whatever memory there is.
    {"mesh": {"dp_shard": "auto", "tp": 2}, "hardware": tight(0.5),
     "batch": {"global": 16, "seq_len": 1024, "micro": 16}},
    # A rule is in the way.
    {"mesh": {"dp_shard": 4}, "strategy": None, "hardware": tight(0.94),
     "batch": {"global": 32, "seq_len": 1024, "micro": 8},
     "rules": [{"match": "model.layers.{0..3}", "activation_checkpointing": "none",
                "reshard_after_forward": False}]},
]  # fmt: skip


MOST = [pytest.param(case, marks=pytest.mark.wide) for case in CASES[:2]] + CASES[2:]


def fits(question, dropped):
    """Whether anything does, by a whole search."""
    again = replace(question, read=lambda more: without(question.read, dropped, more))
    try:
        found = fastest_that_fits(PlanningProblem(again))
    except PlanError:
        return False
    assert found.is_whole
    return found.best is not None


@pytest.mark.parametrize("fields", MOST)
def test_the_conflict_is_real_and_the_least(job, fields):
    question = request_of_file(job(WIDE, **fields))
    trouble = trouble_of(question)
    every = statements_of(question.read(()))
    kept = trouble.conflict
    assert kept
    assert trouble.is_least
    others = [each for each in every if each not in kept]
    assert not fits(question, others)
    for one in kept:
        assert fits(question, [*others, one])


@pytest.mark.parametrize("fields", MOST)
def test_every_remedy_is_a_plan(job, fields):
    """With its setting in the file, and nothing else changed, `meshplan plan` finds as much."""
    path = job(WIDE, **fields)
    trouble = trouble_of(request_of_file(path))
    assert trouble.remedies
    keys = [(each.num_gpus, each.evaluated.seconds) for each in trouble.remedies]
    assert keys == sorted(keys)
    for each in trouble.remedies:
        assert each.evaluated.memory.fits
        assert each.evaluated.plan.mesh.world_size == each.num_gpus
        if any(path.startswith("rules") for path in each.setting):
            continue  # Takes a rule's word back, which no setting can.
        again = search_plan(path, overrides(each.setting))
        assert again.chosen is not None
        assert again.best_s <= each.evaluated.seconds * (1 + 1e-4)


def test_more_devices_are_the_fewest_that_do(job):
    """8 do not, 16 do, and 12 as well."""
    fields = {"mesh": {"dp_shard": 8}, "strategy": "full_shard", "hardware": tight(0.915, 2),
              "batch": {"global": 48, "seq_len": 64, "micro": 1}}  # fmt: skip
    large = WIDE | {"hidden_size": 4096, "intermediate_size": 11008,
                    "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
    path = job(large, **fields)
    asked = _Asking(request_of_file(path), lambda text: None)
    asked._deadline = float("inf")
    (more,) = asked._by_devices()
    assert more.change == "12 GPUs (3 nodes of 4)"
    assert search_plan(path, overrides(more.setting)).best_s <= more.evaluated.seconds * (1 + 1e-4)


@pytest.mark.wide
def test_nothing_stated_and_nothing_fits(job):
    path = job(mesh=None, strategy=None, hardware=tight(0.985),
               batch={"global": 4, "seq_len": 1024})  # fmt: skip
    trouble = trouble_of(request_of_file(path))
    assert trouble.conflict == ()
    assert trouble.is_hopeless


def test_statements_are_left_out_one_by_one(job):
    rules = [{"match": "model.layers.0", "activation_checkpointing": "full", "place": "shard",
              "reshard_after_forward": False}]  # fmt: skip
    path = job(mesh={"tp": 2, "dp_shard": "auto"}, strategy="zero2", rules=rules,
               batch={"global": 64, "seq_len": 64, "micro": 2}, **OPEN)  # fmt: skip

    def read(more):
        return load_spec(path, more)

    every = statements_of(read(()))
    assert [each.path for each in every] == [
        "mesh.tp", "mesh", "strategy", "batch.micro", "rules[0].activation_checkpointing",
        "rules[0].reshard_after_forward", "rules[0].place",
    ]  # fmt: skip
    by_path = {each.path: each for each in every}
    assert without(read, [], ()) == read(())
    spec = without(read, [by_path["mesh.tp"]], ())
    assert spec.mesh == {"tp": "auto", "dp_shard": "auto"}
    assert (spec.strategy, spec.rules) == ("zero2", read(()).rules)
    spec = without(read, [by_path["mesh"]], ())
    assert spec.mesh["tp"] == 2
    assert spec.mesh["pp"] == "auto"
    spec = without(read, [by_path["rules[0].reshard_after_forward"]], ["batch.micro=4"])
    assert spec.batch.micro == 4
    assert spec.rules[0].reshard_after_forward is None
    assert spec.rules[0].activation_checkpointing.mode == "full"
    assert spec.rules[0].data == "shard"
    assert without(read, [by_path["rules[0].place"]], ()).rules[0].data is None


def test_it_is_told_with_exit_code_1(job, capsys):
    path = job(WIDE, **CASES[1])
    assert main(["plan", "-f", str(path), "--json", "-q"]) == 1
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["fits"] is False
    assert result["mesh"] is None
    assert result["conflict"]["is_least"]
    assert "batch.micro" in {each["path"] for each in result["conflict"]["statements"]}
    assert {"change", "setting", "num_gpus", "step_s", "peak_bytes"} <= result["fixes"][0].keys()
    assert not lock_path(path).exists()


def test_a_trouble_on_paper():
    statement = Statement("batch.micro", "8")
    trouble = Trouble(conflict=(statement,), is_least=True, is_hopeless=False, why="",
                      remedies=(), is_whole=True)  # fmt: skip
    assert trouble_to_text(trouble) == [
        "with every other setting open, no plan with this one fits; leave it open as well, and a "
        "plan fits",
        "  batch.micro: 8",
        "",
        "no single change that helps was found",
    ]
    (line, *_) = trouble_to_text(replace(trouble, conflict=(), is_hopeless=True))
    assert "even with only model, batch" in line
    (line, *_) = trouble_to_text(replace(trouble, conflict=(), is_whole=False))
    assert "the time limit was reached" in line
    (line, *_) = trouble_to_text(replace(trouble, conflict=(), is_whole=False, is_interrupted=True))
    assert line.startswith("the search was interrupted before")
    (line, *_) = trouble_to_text(replace(trouble, is_least=False, is_whole=False))
    assert "some of these" in line


def test_time_that_is_up_claims_nothing(job):
    path = job(WIDE, **CASES[0], solve={"time_limit": "0.000001s"})
    trouble = trouble_of(request_of_file(path))
    assert not trouble.is_whole
    assert not trouble.is_least
    assert trouble.remedies == ()
