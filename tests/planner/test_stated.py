"""Every statement that narrows the space can be left out, and is named where it is in the way.

Which seeded bug would this catch? A key that is in the way and that nobody tries without: then
"with nothing stated nothing fits" would be untrue; one that is said to be in the way and is not;
a way out that is none once it stands in the file.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshplan.api.planning import search_plan
from meshplan.cli.app import main
from meshplan.errors import PlanError
from meshplan.planner.answers.infeasible import _Asking
from meshplan.planner.answers.stated import Statement, statements_of, without
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of_file
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import Spec
from tests.planner.test_experts import MIXTRAL
from tests.planner.test_planner import LLAMA, OPEN, job
from tests.planner.test_remedy import WIDE, tight

__all__ = ["job"]

LARGE = WIDE | {"hidden_size": 4096, "intermediate_size": 11008,
                "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
FOUR = LLAMA | {"num_hidden_layers": 4}
USUAL: dict[str, Any] = {
    "strategy": None, "hardware": tight(0.5), "batch": {"global": 16, "seq_len": 256},
    "solve": {"time_limit": "10min"},
}  # fmt: skip
MEMORY = {"batch": {"global": 4, "seq_len": 64}, "mesh": {"dp_shard": 4}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "sequence_parallel": (
        FOUR,
        {"mesh": {"dp_shard": 2, "tp": 2}, "sequence_parallel": True,
         "batch": {"global": 4, "seq_len": 255}},
        {"mesh.tp", "sequence_parallel"},
    ),
    "ep": (
        MIXTRAL,
        {"mesh": {"dp_shard": 2, "tp": 2, "ep": "2 in dp_shard"}, "sequence_parallel": True},
        {"mesh.ep", "sequence_parallel"},
    ),
    "tp_plan": (
        FOUR,
        {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "none"},
        {"mesh.tp", "tp_plan"},
    ),
    "loss_chunks": (
        FOUR,
        {"mesh": {"dp_shard": 2, "pp": 2}, "loss_chunks": 4},
        {"mesh.pp", "loss_chunks"},
    ),
    "pipeline": (
        FOUR,
        {"mesh": {"dp_shard": 4}, "pipeline": {"microbatches": 4}},
        {"mesh", "pipeline"},
    ),
    "pipeline.virtual": (
        FOUR,
        {"mesh": {"dp_shard": 2, "pp": 2}, "pipeline": {"schedule": "auto", "virtual": 3}},
        {"pipeline", "pipeline.virtual"},
    ),
    "context": (
        FOUR,
        {"mesh": {"dp_shard": 4}, "context": {"attention": "all_gather"}},
        {"mesh", "context"},
    ),
    "rules.stage": (
        FOUR,
        {"mesh": {"dp_shard": 4}, "rules": [{"match": "model.layers.1", "stage": "last"}]},
        {"mesh", "rules[0].stage"},
    ),
    "rules.place": (
        LARGE,
        MEMORY
        | {"hardware": tight(0.85), "rules": [{"match": "model.layers.*", "place": "replicate"}]},
        {"mesh", "rules[0].place"},
    ),
    "offload": (
        LARGE,
        MEMORY | {"hardware": tight(0.9), "offload": "none"},
        {"mesh", "offload"},
    ),
    "offload_alone": (
        LARGE,
        MEMORY | {"hardware": tight(0.935), "offload": "none"},
        {"offload"},
    ),
    "experts.capacity": (
        MIXTRAL | {"hidden_size": 1024, "intermediate_size": 2816},
        {"mesh": {"dp_shard": 4, "ep": "4 in dp_shard"}, "hardware": tight(0.9),
         "activation_checkpointing": "none", "experts": {"capacity": 4},
         "rules": [{"match": "**.experts", "place": {"ep": "ep_dispatch_experts"}}],
         "batch": {"global": 16, "micro": 4, "seq_len": 2048}},
        {"activation_checkpointing", "batch.micro", "experts.capacity", "rules[0].place"},
    ),
    "batch": (
        WIDE,
        {"mesh": {"dp_shard": 4}, "hardware": tight(0.953), "activation_checkpointing": "none",
         "batch": {"micro": 32, "accumulate": 1, "seq_len": 1024}},
        {"batch.accumulate"},
    ),
}  # fmt: skip
"""By what is in the way: (config, fields, the paths of the conflict)."""
DEAR = ("offload_alone", "experts.capacity", "batch", "ep", "rules.stage", "loss_chunks")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.wide] if c in DEAR else []) for c in CASES]
)
def test_what_is_in_the_way_is_named_and_a_way_out_is_a_plan(
    job: Any, capsys: Any, case: str
) -> None:
    config, fields, expected = CASES[case]
    path = job(config, **(USUAL | fields))
    assert main(["plan", "-f", str(path), "--json", "-q"]) == 1
    result = json.loads(capsys.readouterr().out)["result"]
    conflict = result["conflict"]
    assert {each["path"] for each in conflict["statements"]} == expected
    assert conflict["is_least"]
    assert not conflict["is_hopeless"]
    assert result["fixes"]
    for fix in result["fixes"]:
        if not case.startswith("rules"):  # Takes a rule's word back, which no setting can.
            again = search_plan(path, overrides(fix["setting"]))
            assert again.chosen is not None
            assert again.best_s <= fix["step_s"] * (1 + 1e-4)


def test_a_conflict_reads_as_the_file_does(job: Any, capsys: Any) -> None:
    config, fields, _ = CASES["sequence_parallel"]
    assert main(["plan", "-f", str(job(config, **(USUAL | fields))), "-q"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  sequence_parallel: true" in lines
    assert any(line.startswith("  without sequence_parallel: true") for line in lines)


@pytest.mark.wide
def test_a_borrowed_axis_is_no_hindrance_to_say_that_nothing_fits(job: Any, capsys: Any) -> None:
    rules = [{"match": "**.experts", "place": {"ep": "ep_dispatch_experts"}}]
    path = job(MIXTRAL, **USUAL | {"mesh": {"dp_shard": 4, "ep": "2 in dp_shard"}, "rules": rules,
                                   "hardware": tight(0.985)})  # fmt: skip
    assert main(["plan", "-f", str(path), "-q"]) == 1
    assert "even with only model, batch, precision" in capsys.readouterr().out


def test_every_key_that_narrows_is_a_statement(job: Any) -> None:
    """Those left out are what is trained, the machine, and how long to search."""
    rules = [{"match": "model.layers.0", "place": {"tp": "colwise"}, "unit": True}]
    path = job(
        mesh={"pp": 2, "dp_shard": 4, "ep": "2 in dp_shard"}, rules=rules, tp_plan="hf",
        context={"attention": "all_to_all", "balance": False}, offload={"params": True},
        pipeline={"microbatches": 8}, sequence_parallel=False, loss_parallel=True, loss_chunks=2,
        allocator=None, compile=True, experts={"capacity": 1.5},
        batch={"micro": 2, "accumulate": 4, "seq_len": 64},
    )  # fmt: skip
    found = {each.path: each for each in statements_of(load_spec(path))}
    assert {path: each.text for path, each in found.items()} == {
        "mesh.pp": "2", "mesh.dp_shard": "4", "mesh.ep": "2 in dp_shard",
        "mesh": "no axes but pp, dp_shard, ep", "batch.micro": "2", "batch.accumulate": "4",
        "offload.params": "true", "context": "attention all_to_all, balance false",
        "tp_plan": "hf", "sequence_parallel": "false", "loss_parallel": "true",
        "loss_chunks": "2", "compile": "true", "experts.capacity": "1.5",
        "pipeline": "stated", "pipeline.schedule": "1F1B", "pipeline.microbatches": "8",
        "rules[0].unit": "true of model.layers.0",
        "rules[0].place": "tp colwise of model.layers.0",
    }  # fmt: skip
    spec = without(lambda more: load_spec(path, more), found.values(), ())
    assert statements_of(spec) == (Statement("mesh", "no axes but pp, dp_replicate, dp_shard, "
                                             "cp, tp, ep"),)  # fmt: skip
    assert spec.batch.of_data_rank == 8
    usual = Spec()
    for name in ("context", "tp_plan", "sequence_parallel", "offload", "pipeline", "loss_chunks"):
        assert getattr(spec, name) == getattr(usual, name)
    assert not {"context", "tp_plan", "sequence_parallel", "pipeline"} & spec.origins.keys()


def test_stages_are_left_out_part_by_part(job: Any) -> None:
    pipeline = {"microbatches": 4, "virtual": 2}
    path = job(mesh={"pp": "auto", "dp_shard": "auto"}, pipeline=pipeline, **OPEN)
    found = {each.path: each for each in statements_of(load_spec(path))}
    assert set(found) == {"mesh", "pipeline", "pipeline.virtual", "pipeline.microbatches"}

    def left(*paths: str) -> Spec:
        return without(lambda more: load_spec(path, more), [found[p] for p in paths], ())

    # Nothing but virtual said that it is no 1F1B.
    assert left("pipeline.virtual").pipeline.schedule == "auto"
    assert left("pipeline.microbatches").pipeline.microbatches == "auto"
    # What is said of stages holds where there are any: this is the rest.
    some = left("pipeline")
    assert (some.pipeline, some.mesh) == (None, {"pp": 1, "dp_shard": "auto"})
    every = left("pipeline", "pipeline.virtual", "pipeline.microbatches")
    assert (every.pipeline, every.mesh) == (None, {"pp": "auto", "dp_shard": "auto"})


def test_what_allows_more_may_be_what_fits(job: Any) -> None:
    """Without the word, 8 ranks of cp have two chunks each, and 264 tokens no 16 of them."""
    mesh, context = {"cp": 8}, {"attention": "all_gather", "balance": False}
    hardware, batch = tight(0.5) | {"gpus_per_node": 8}, {"global": 16, "seq_len": 264}
    path = job(**USUAL | {"mesh": mesh, "context": context, "hardware": hardware, "batch": batch})
    question = request_of_file(path)
    assert len(PlanningProblem(question).grid)
    (word,) = (each for each in statements_of(question.read(())) if each.path == "context")
    assert word.allows_more
    asked = _Asking(question, lambda text: None)
    asked._deadline = float("inf")
    assert asked._anything_of([word]).fits is False
    found = asked._anything_without([word])
    assert (found.fits, found.dropped) == (True, ())


def test_a_key_without_a_value_states_nothing(job: Any) -> None:
    path = job(**USUAL | {"mesh": "auto"})
    usual = PlanningProblem(request_of_file(path)).free
    for key in ("sequence_parallel", "tp_plan", "activation_checkpointing"):
        assert key not in load_spec(path, [f"{key}="]).origins
        assert PlanningProblem(request_of_file(path, [f"{key}="])).free == usual
    assert load_spec(path, ["context.attention="]).context is None


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (
            {"activation_checkpointing": {"mode": "auto", "budget": 0.5}},
            "a budget for activation memory",
        ),
        ({"batch": {"global": 16, "seq_len": 256, "accumulate": {"0": 2, "4": 4}}}, "the epoch"),
    ],
)
def test_what_the_planner_would_overrule_is_refused(
    job: Any, fields: dict[str, Any], what: str
) -> None:
    with pytest.raises(PlanError, match=what):
        PlanningProblem(request_of_file(job(**USUAL | fields)))
