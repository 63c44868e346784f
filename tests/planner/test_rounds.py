"""Several stages a rank in the planner: what is searched, what its figures say, what is refused.

Which seeded bug would this catch? A stage that a rank is not charged for, blocks dealt out to
others than the plan says, a bubble of one stage too many, links that are sent over for nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.cost.grid import MODES, OPTIONS, SCHEDULE_WORDS, in_halves
from meshplan.cost.pipeline import pipeline_seconds
from meshplan.cost.profile import profile_of
from meshplan.cost.simulate import simulate
from meshplan.errors import PlanError
from meshplan.layout.schedules import SCHEDULES
from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.plan.plan import Plan, make_plan
from meshplan.planner.lock.lock import overrides
from meshplan.planner.objectives.fastest import fastest_of
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of_file
from meshplan.planner.solve.config import Candidate, ConfigSolver, solve_config
from meshplan.planner.tables.memory_bounds import is_late
from meshplan.planner.tables.whole_plan import Costed
from tests.planner.test_gauge import LLAMA

HALVED = "InterleavedZeroBubble"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def job(**more: Any) -> PlanningProblem:
        plan = {
            "version": 1, "model": {"config": "config.json"}, "mesh": "auto", "strategy": "auto",
            "hardware": {"nodes": 2, "gpus_per_node": 8, "gpu": "h100-sxm-80gb",
                         "inter": "50GB/s"},
            "precision": "bf16-mixed", "batch": {"global": 64, "seq_len": 512}, **more,
        }  # fmt: skip
        (tmp_path / "plan.yaml").write_text(json.dumps(plan))
        return PlanningProblem(request_of_file(tmp_path / "plan.yaml"))

    return job


def some(job: PlanningProblem, count: int) -> Iterator[tuple[Candidate, Plan]]:
    """Random rows with several stages a rank, in little memory or as little as can be."""
    rng, numbers = random.Random(0), job.table
    several = np.flatnonzero(job.grid["virtual"] > 1)
    scatters = is_late(job.grid) & (job.grid["mode"] == MODES.index("shard"))
    scattered = np.flatnonzero(scatters & ~in_halves(job.grid))
    some_rows = rng.sample([int(each) for each in several], count - 3)
    for row in (*some_rows, *rng.sample([int(each) for each in scattered], 3)):
        smallest = ConfigSolver(numbers, row, float("inf")).smallest()
        room = max(smallest.linear_bytes) * rng.choice((1.01, 1.2, 1.5, 3))
        found = solve_config(numbers, row, room) or smallest
        stated = job.stated(numbers, found)
        yield found, make_plan(job.request.read(overrides(stated)), job.request.graph)


def test_the_space_has_a_few_stages_and_every_even_number_of_them(write: Any) -> None:
    grid = write().grid
    assert {int(word) for word in grid["schedule"]} == {
        SCHEDULE_WORDS.index(word) for word in ("", "1F1B", "Interleaved1F1B", HALVED)
    }
    of = {pp: {int(v) for v in grid["virtual"][grid["pp"] == pp]} for pp in (1, 2, 4, 8, 16)}
    assert of == {1: {1}, 2: {1, 2, 3, 4, 9}, 4: {1, 2, 3, 4}, 8: {1, 2}, 16: {1}}
    several = grid[grid["virtual"] > 1]
    assert (several["microbatches"] >= several["pp"]).all()
    row = SCHEDULES["Interleaved1F1B"]
    assert not any(row.problem(int(r["pp"]), int(r["microbatches"])) for r in several)


def test_figures_are_those_of_the_plan_and_no_more_than_is_replayed(write: Any) -> None:
    """What the search went by, the whole plan says too; and its memory is below the truth."""
    job, shares = write(), []
    for candidate, plan in some(job, 12):
        stages, config = plan.assignment.stages, job.grid[candidate.row]
        assert stages is not None
        word = SCHEDULE_WORDS[config["schedule"]]
        assert (stages.schedule, stages.virtual) == (word, config["virtual"])
        assert stages.num == len(candidate.ends) - 1
        assert Costed(plan, job.request.cluster).seconds == pytest.approx(candidate.seconds)
        for place in (0, stages.num_ranks - 1):
            rank = place * (plan.mesh.world_size // stages.num_ranks)
            live = analytic_log_of_rank(plan, rank, device=job.request.device).pooled_bytes
            assert candidate.linear_bytes[place] <= live
            shares.append(candidate.linear_bytes[place] / live)
    assert np.median(shares) > 0.6


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_gradients_that_no_rank_shares_are_charged_once(write: Any, precision: str) -> None:
    """Without data ranks, and with nothing cast, FSDP2 has no units: they lie in one place."""
    job = write(precision=precision)
    grid, numbers = job.grid, job.table
    is_alone = (grid["dp_replicate"] * grid["dp_shard"] * grid["cp"] == 1) & (grid["pp"] > 1)
    shares = []
    for row in map(int, np.flatnonzero(is_alone & (grid["micro"] < 4))[::4]):
        found = ConfigSolver(numbers, row, float("inf")).smallest()
        plan = make_plan(job.request.read(overrides(job.stated(numbers, found))),
                         job.request.graph)  # fmt: skip
        assert bool(plan.assignment.units) == (precision == "bf16-mixed")
        pp, world = plan.mesh.size("pp"), plan.mesh.world_size
        for place in (pp // 2, pp - 1):
            held = analytic_log_of_rank(
                plan, place * world // pp, device=job.request.device
            ).pooled_bytes
            assert found.linear_bytes[place] <= held
            shares.append(found.linear_bytes[place] / held)
    assert np.median(shares) > 0.75


def test_a_played_step_takes_about_as_long_as_told(write: Any) -> None:
    job = write()
    for candidate, plan in some(job, 12):
        stages = plan.assignment.stages
        assert stages is not None
        found = Costed(plan, job.request.cluster).stage_seconds
        ranks, count = stages.num_ranks, stages.microbatches
        played = simulate(
            SCHEDULES[stages.schedule], found.forward_s, found.backward_s, ranks=ranks,
            microbatches=count, crossing_s=found.crossing_s,
        )  # fmt: skip
        each = [f + b for f, b in zip(found.forward_s, found.backward_s, strict=True)]
        by_rank = [sum(each[rank::ranks]) for rank in range(ranks)]
        own = job.grid[candidate.row : candidate.row + 1]
        most, total = np.array([max(by_rank)]), np.array([sum(by_rank)])
        told = float(pipeline_seconds(own, most, total, found.crossing_s)[0])
        spread = max(each) / min(each) - 1
        assert abs(told / played.seconds - 1) <= 0.02 + 0.4 * spread


def test_links_that_are_slower_than_stages_are_what_takes_the_time(write: Any) -> None:
    job = write()
    slow = replace(profile_of(job.request.cluster), inter_bytes_per_s=1e8, intra_bytes_per_s=1e8)
    numbers = job.table_at(slow)
    rows = np.flatnonzero(job.grid["virtual"] > 1)
    for row in map(int, rows[:: len(rows) // 10]):
        one = solve_config(numbers, row, float("inf"))
        assert one is not None
        config = job.grid[row]
        boundary = int(config["micro"]) * 512 * 1024 * 2
        sent = 2 * int(config["microbatches"]) * int(config["virtual"]) * boundary / 1e8
        assert one.seconds > sent


def test_stages_of_a_rank_are_stated_or_free(write: Any) -> None:
    stated = write(pipeline={"schedule": "Interleaved1F1B", "virtual": 2})
    assert {int(v) for v in stated.grid["virtual"]} == {2}
    either = write(pipeline={"schedule": "auto", "virtual": 3})
    words = {SCHEDULE_WORDS[int(word)] for word in either.grid["schedule"]}
    several = {"Interleaved1F1B", HALVED}
    assert (words, {int(v) for v in either.grid["virtual"]}) == (several, {3})
    none = write(pipeline={"schedule": "1F1B"})
    assert {int(v) for v in none.grid["virtual"]} == {1}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"pipeline": {"schedule": "1F1B", "virtual": 2}}, "1F1B has 1 stages per rank"),
        ({"pipeline": {"schedule": "ZBVZeroBubble"}}, "plans with the schedule ZBVZeroBubble"),
        ({"pipeline": {"schedule": "Interleaved1F1B"},
          "rules": [{"match": "model.layers.3", "activation_checkpointing": "full"}]},
         "not all alike"),
        ({"pipeline": {"schedule": "Interleaved1F1B"},
          "rules": [{"match": "model.layers.3", "stage": 0}]}, "the plan states stages"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said(write: Any, fields: dict[str, Any], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        _ = write(**fields).grid


def test_blocks_that_are_not_alike_keep_it_out_of_the_space(write: Any) -> None:
    rule = {"match": "model.layers.3", "activation_checkpointing": "full"}
    either = {each.what for each in write().free.rejected}
    assert "pipeline.schedule=ZBVZeroBubble, DualPipeV" in either
    assert not any("pipeline.schedule=Interleaved" in each for each in either)
    job = write(rules=[rule])
    assert {int(v) for v in job.grid["virtual"]} == {1}
    assert f"pipeline.schedule=Interleaved1F1B, {HALVED}" in {r.what for r in job.free.rejected}


def test_it_is_chosen_where_a_bubble_is_what_costs(write: Any) -> None:
    """Few microbatches: with more stages a rank waits less."""
    mesh = {"pp": 4, "dp_shard": 4}
    job = write(mesh=mesh, batch={"global": 16, "seq_len": 512}, pipeline={"schedule": "auto"})
    decision = fastest_of(job)
    assert decision.chosen is not None
    assert decision.chosen.stated["pipeline.schedule"] == HALVED
    alone = fastest_of(write(mesh=mesh, batch={"global": 16, "seq_len": 512}, pipeline={}))
    assert alone.chosen is not None
    assert decision.chosen.seconds < 0.97 * alone.chosen.seconds


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"activation_checkpointing": "full"}, "recomputed in each half"),
        ({"strategy": "full_shard"}, "stay gathered"),
        ({"offload": "params"}, "no figures"),
        ({"rules": [{"match": "model.layers.*", "reshard_after_forward": True}]}, "stay gathered"),
    ],
)
def test_halves_are_left_out_where_they_do_not_go(
    write: Any, fields: dict[str, Any], why: str
) -> None:
    job = write(**fields)
    assert SCHEDULE_WORDS.index(HALVED) not in job.grid["schedule"]
    assert any(HALVED in each.what and why in each.why for each in job.free.rejected)
    with pytest.raises(PlanError, match=why):
        _ = write(**fields, pipeline={"schedule": HALVED}).grid


def test_nothing_runs_again_nor_is_given_back_in_halves(write: Any) -> None:
    job = write()
    rows = np.flatnonzero(job.grid["schedule"] == SCHEDULE_WORDS.index(HALVED))
    assert not job.grid["offload"][rows].any()
    options = {n for n, each in enumerate(OPTIONS) if each == (0, 0)}
    found = np.argwhere(np.isfinite(job.table.seconds[rows]))
    assert {int(option) for *_, option in found} == options
