"""What a plan states of pipelines and of every n-th block is held, and the rest is the best."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshplan.api import checking
from meshplan.api.planning import search_plan
from meshplan.errors import PlanError
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.request import request_of_file
from meshplan.planner.solve.config import ConfigSolver, solve_config
from meshplan.planner.space.fixed_stages import LAST, FixedStages
from meshplan.planner.tables.whole_plan import Costed
from tests.planner.test_planner import LLAMA, PLAN, job, job_of

__all__ = ["job"]

PIPED = {"mesh": {"pp": "auto", "dp_shard": "auto"}, "strategy": None}


def stages_of(plan):
    """The stage of each block."""
    held = plan.assignment.stages.tensors
    return [held[f"{block}.mlp.up_proj.weight"][0] for block in plan.graph.blocks()]


def chosen_of(path):
    """Every plan that is told, each certified for the file with its choices on top, and timed."""
    decision = search_plan(path)
    assert decision.chosen is not None
    for evaluated in (decision.chosen, *decision.alternatives):
        again = checking.estimate_memory(path, overrides(evaluated.stated))
        assert again.worst.band == evaluated.memory.worst.band
        costed = Costed(evaluated.plan, request_of_file(path).cluster)
        assert costed.seconds == pytest.approx(evaluated.seconds, rel=1e-9)
    return decision, [decision.chosen, *decision.alternatives]


def test_a_split_is_held(job):
    """Whatever else it names, it says where the blocks are cut, and how many stages there are."""
    split = [["model.embed_tokens", "model.layers.0"], ["model.layers.1"],
             ["model.layers.4", "lm_head"]]  # fmt: skip
    hardware = PLAN["hardware"] | {"nodes": 3}
    path = job(**PIPED, pipeline={"split": split}, hardware=hardware,
               batch={"global": 48, "seq_len": 1024})  # fmt: skip
    decision, evaluated_plans = chosen_of(path)
    for evaluated in evaluated_plans:
        assert evaluated.stated["mesh"]["pp"] == 3
        assert stages_of(evaluated.plan) == [0, 1, 1, 1, 2, 2]
        assert "pipeline.split" not in evaluated.stated
    free, _ = chosen_of(job(**PIPED | {"mesh": {"pp": 3, "dp_shard": "auto"}},
                            hardware=hardware, batch={"global": 48, "seq_len": 1024}))  # fmt: skip
    assert decision.best_s > free.best_s * 1.01


@pytest.mark.parametrize(
    ("rules", "pp", "wanted"),
    [
        ([{"match": "model.layers.1", "stage": 1}], {2, 4}, {1: 1}),
        ([{"match": "model.layers.{0..4}", "stage": "first"}], {2}, dict.fromkeys(range(5), 0)),
        ([{"match": "model.layers.2", "stage": "last"}, {"match": "lm_head", "stage": "last"}],
         {2}, {2: 1}),
        ([{"match": "model.layers.5", "stage": 3}], {4}, {5: 3}),
    ],
)  # fmt: skip
def test_stages_by_rule_are_held(job, rules, pp, wanted):
    _, evaluated_plans = chosen_of(job(**PIPED, rules=rules))
    for evaluated in evaluated_plans:
        assert evaluated.stated["mesh"]["pp"] in pp
        stages = stages_of(evaluated.plan)
        assert {block: stages[block] for block in wanted} == wanted


def test_cuts_with_stages_that_are_stated_are_the_best(job):
    """Against every cut of six blocks into three stages."""
    rules = [{"match": "model.layers.1", "stage": 1}, {"match": "model.layers.3", "stage": 1}]
    config = LLAMA | {"num_hidden_layers": 6}
    at = job_of(job(config, mesh={"pp": 3, "dp_shard": "auto"}, strategy=None, rules=rules,
                    hardware=PLAN["hardware"] | {"nodes": 3},
                    batch={"global": 12, "seq_len": 128}))  # fmt: skip
    numbers = at.table
    places = len(numbers.order)
    for row in range(len(numbers.grid)):
        found = solve_config(numbers, row, at.capacity)
        assert found is not None
        seconds = numbers.seconds[row].min(axis=1)[list(numbers.order)]
        grid = numbers.grid[row]
        best = float("inf")
        # Place n + 1 is block n: blocks 1 to 3 are of the middle stage.
        for first, second in itertools.combinations(range(2, places - 1), 2):
            if not (first <= 2 and second >= 5):
                continue
            sums = [seconds[:first].sum(), seconds[first:second].sum(), seconds[second:].sum()]
            best = min(best, (grid["microbatches"] - 1) * max(sums) + sum(sums))
        assert found.seconds == pytest.approx(best + numbers.once_s[row])
        assert ConfigSolver(numbers, row, float("inf")).smallest().ends[1] <= 2


def test_which_numbers_of_stages_can_be():
    blocks = [f"b.{n}" for n in range(4)]
    assert [FixedStages({}).can_cut(blocks, n) for n in (1, 2, 4, 5)] == [True, True, True, False]
    assert [FixedStages({"b.1": 1}).can_cut(blocks, n) for n in (2, 3, 4)] == [True] * 3
    assert [FixedStages({"b.1": 0}).can_cut(blocks, n) for n in (2, 3, 4)] == [True, True, False]
    assert [FixedStages({"b.2": LAST}).can_cut(blocks, n) for n in (2, 3, 4)] == [True, True, False]
    assert not FixedStages({"b.0": 1}).can_cut(blocks, 2)
    assert not FixedStages({"b.1": 1, "b.2": 0}).can_cut(blocks, 2)
    assert [FixedStages({}, 3).can_cut(blocks, n) for n in (2, 3)] == [False, True]
    for seed in range(50):
        rng = np.random.default_rng(seed)
        pins = {f"b.{n}": int(rng.integers(3)) for n in rng.choice(4, 2, replace=False)}
        for stages in (2, 3):
            evaluated_plans = itertools.combinations(range(1, 4), stages - 1)
            cuts = [[sum(n >= end for end in ends) for n in range(4)] for ends in evaluated_plans]
            possible = any(all(cut[int(b[2:])] == s for b, s in pins.items()) for cut in cuts)
            assert FixedStages(pins).can_cut(blocks, stages) == possible, pins


def test_microbatches_are_held(job):
    _, evaluated_plans = chosen_of(job(**PIPED, pipeline={"microbatches": 4}))
    for evaluated in evaluated_plans:
        assert evaluated.stated["mesh"]["pp"] > 1
        assert evaluated.plan.assignment.stages.microbatches == 4
        assert evaluated.plan.micro * evaluated.plan.num_data_ranks == 64


def test_the_batch_of_a_rank_is_held_along_a_pipeline(job):
    """`batch.micro` is what a pipeline cuts into microbatches, not one of these."""
    _, evaluated_plans = chosen_of(job(**PIPED | {"mesh": {"pp": 2, "dp_shard": "auto"}},
                            batch={"global": 64, "seq_len": 1024, "micro": 16}))  # fmt: skip
    for evaluated in evaluated_plans:
        assert (evaluated.plan.micro, evaluated.plan.accumulate) == (16, 1)
    # The rest is accumulated around the pipeline, which is priced, and not searched.
    decision = search_plan(job(**PIPED | {"mesh": {"pp": 2, "dp_shard": "auto"}},
                               batch={"global": 64, "seq_len": 1024, "micro": 4}))  # fmt: skip
    assert decision.chosen is not None
    assert (decision.chosen.plan.micro, decision.chosen.plan.accumulate) == (4, 4)
    assert decision.num_configs == 1


def test_every_nth_block_is_held(job):
    asked = {"mode": "full", "every": 3}
    rules = [{"match": "model.layers.{4..5}",
              "activation_checkpointing": {"mode": "selective", "every": 2}}]  # fmt: skip
    fields = {"mesh": {"dp_shard": 8}, "strategy": None, "activation_checkpointing": asked}
    decision, evaluated_plans = chosen_of(job(**fields, rules=rules))
    for evaluated in evaluated_plans:
        modes = {f: r.policy.mode for f, r in evaluated.plan.assignment.recompute.items()}
        assert modes == {"model.layers.0": "full", "model.layers.3": "full",
                         "model.layers.4": "selective"}  # fmt: skip
        assert "activation_checkpointing" not in evaluated.stated
    for other, is_faster in (("full", False), ("none", True)):
        path = job(**fields | {"activation_checkpointing": other}, rules=rules)
        assert (search_plan(path).best_s < decision.best_s) == is_faster


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pipeline": {"split": [["model.layers.0"], ["model.layer.2"]]}}, "is not a module"),
        ({"pipeline": {"split": [["model.layers"], ["lm_head"]]}}, "splits stages between blocks"),
        ({"mesh": {"pp": 2, "dp_shard": 4},
          "pipeline": {"split": [["model.layers.0"], ["model.layers.2"], ["model.layers.3"]]}},
         "no mesh of 8"),
        ({"rules": [{"match": "model.layers.0", "stage": "last"}]}, "no mesh of 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused(job, fields, words):
    with pytest.raises(PlanError, match=words):
        search_plan(job(**(PIPED | fields)))


@pytest.mark.parametrize("mesh", [{"tp": 2, "dp_shard": "auto"}, "auto"])
def test_a_rule_that_places_on_tp_is_planned_with_tp(mesh, job):
    """Trials without tp leave its placements out; a plan without tp would not have the axis."""
    rules = [
        {"match": "model.layers.*.mlp.{gate_proj,up_proj}", "place": {"tp": "colwise"}},
        {"match": "model.layers.*.mlp.down_proj", "place": {"tp": "rowwise"}},
    ]
    _, evaluated_plans = chosen_of(job(mesh=mesh, strategy=None, rules=rules))
    for evaluated in evaluated_plans:
        assert evaluated.stated["mesh"]["tp"] > 1
