"""Plans whose sequence tp cuts: found beside auto, bounded from below, refused where it must be.

Which seeded bug would this catch? Figures of whole activations for parts, or of parts where a block
holds the whole; a bound above what a replay shows.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.cli.app import main
from meshplan.cost.grid import SCHEDULE_WORDS
from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.plan.plan import make_plan
from meshplan.planner.answers.explain import Asker
from meshplan.planner.lock.lock import overrides
from meshplan.planner.objectives import fastest
from meshplan.planner.objectives.fastest import decide
from meshplan.planner.problem.decision import Decision
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of_file
from meshplan.planner.solve.config import ConfigSolver, solve_config
from meshplan.planner.solve.result import SearchResult
from meshplan.planner.space.space import EmptySpaceError, less_sharded
from meshplan.planner.tables.whole_plan import Costed
from tests.planner.test_context import LLAMA

ZERO_BUBBLE = "InterleavedZeroBubble"


def job_of(folder: Path, config: dict[str, Any] = LLAMA, **more: Any) -> PlanningProblem:
    (folder / "config.json").write_text(json.dumps(config))
    plan = {
        "version": 1, "model": {"config": "config.json"}, "mesh": "auto", "strategy": "auto",
        "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
        "precision": "bf16-mixed", "batch": {"global": 16, "seq_len": 2048}, **more,
    }  # fmt: skip
    (folder / "plan.yaml").write_text(json.dumps(plan))
    return PlanningProblem(request_of_file(folder / "plan.yaml"))


def test_it_is_cut_wherever_tp_is_and_as_stated(tmp_path: Path) -> None:
    free = job_of(tmp_path).free
    assert free.sequence_parallel == {1: False, 2: True, 4: True}
    grid = job_of(tmp_path).grid
    assert (grid["schedule"][grid["tp"] > 1] == SCHEDULE_WORDS.index(ZERO_BUBBLE)).any()
    stated = job_of(tmp_path, sequence_parallel=False)
    assert stated.free.sequence_parallel == {1: False, 2: False, 4: False}
    assert len(stated.grid) == len(grid)
    odd = job_of(tmp_path, batch={"global": 16, "seq_len": 2046})
    assert odd.free.sequence_parallel == {1: False, 2: True, 4: False}


def test_what_cannot_be_cut_is_said_where_nothing_is_left(tmp_path: Path, capsys: Any) -> None:
    batch = {"global": 16, "seq_len": 2047}
    stated = {"mesh": {"dp_shard": 4, "tp": 2}, "sequence_parallel": True, "tp_plan": "auto"}
    with pytest.raises(EmptySpaceError):
        _ = job_of(tmp_path, batch=batch, **stated).grid
    assert main(["plan", "-f", str(tmp_path / "plan.yaml"), "-q"]) == 1
    assert "mesh.tp=2: a sequence of 2047 does not divide by tp 2" in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_halves_of_parts_hold_no_less_than_is_charged(tmp_path: Path, precision: str) -> None:
    """Every rank of random rows whose backwards are split, against all its pools."""
    job, rng = job_of(tmp_path, precision=precision), random.Random(5)
    grid, shares = job.grid, []
    is_split = (grid["tp"] > 1) & (grid["schedule"] == SCHEDULE_WORDS.index(ZERO_BUBBLE))
    rows = [int(row) for row in np.flatnonzero(is_split)]
    for row in rng.sample(rows, 10):
        smallest = ConfigSolver(job.table, row, float("inf")).smallest()
        found = solve_config(job.table, row, max(smallest.linear_bytes) * rng.choice((1.01, 2)))
        plan = make_plan(
            job.request.read(overrides(job.stated(job.table, found or smallest))),
            job.request.graph,
        )
        assert plan.assignment.crossings
        pp, world = plan.mesh.size("pp"), plan.mesh.world_size
        for place, bound in enumerate((found or smallest).linear_bytes):
            log = analytic_log_of_rank(plan, place * world // pp, device=job.request.device)
            assert bound <= log.pooled_bytes
            shares.append(bound / log.pooled_bytes)
    assert np.median(shares) > 0.7


@pytest.mark.wide
@pytest.mark.parametrize("stages", [False, True])
def test_figures_are_those_of_the_plan_and_no_more_than_is_replayed(
    tmp_path: Path, stages: bool
) -> None:
    job, rng = job_of(tmp_path), random.Random(3)
    grid = job.grid
    rows = [int(r) for r in np.flatnonzero((grid["tp"] > 1) & ((grid["pp"] > 1) == stages))]
    shares = []
    for row in rng.sample(rows, 8):
        smallest = ConfigSolver(job.table, row, float("inf")).smallest()
        found = solve_config(job.table, row, max(smallest.linear_bytes) * rng.choice((1.01, 2)))
        found = found or smallest
        stated = job.stated(job.table, found)
        assert stated["sequence_parallel"] is True
        plan = make_plan(job.request.read(overrides(stated)), job.request.graph)
        assert Costed(plan, job.request.cluster).seconds == pytest.approx(found.seconds)
        pp, world = plan.mesh.size("pp"), plan.mesh.world_size
        for place, bound in enumerate(found.linear_bytes):
            log = analytic_log_of_rank(plan, place * world // pp, device=job.request.device)
            assert bound <= log.pooled_bytes
            shares.append(bound / log.pooled_bytes)
    assert np.median(shares) > 0.6


def test_parts_cost_less_than_whole_activations(tmp_path: Path) -> None:
    """Norms and sums of parts; a gather and a scatter are sent for each sum over all ranks."""
    cut = job_of(tmp_path).chain_at(4)
    whole = job_of(tmp_path, sequence_parallel=False).chain_at(4)
    (one,), (other,) = ([k for k in c.kinds if k.has_options] for c in (cut, whole))
    assert one.boundary_bytes * 4 == other.boundary_bytes
    assert one.saved_bytes[2] * 4 == other.saved_bytes[2]  # All of it runs again.
    assert one.forward.moved_bytes < other.forward.moved_bytes
    assert (one.sent_forward.gathers, one.sent_forward.all_reduces) == (4, 0)
    assert (other.sent_forward.gathers, other.sent_forward.all_reduces) == (0, 2)


@pytest.mark.wide
def test_why_it_is_cut_is_said_in_seconds(tmp_path: Path) -> None:
    job_of(tmp_path, mesh={"dp_shard": 2, "tp": 4})
    asker = Asker(request_of_file(tmp_path / "plan.yaml"))
    whole = asker.why_not("sequence_parallel=false")
    assert whole.seconds is not None
    assert whole.base_s is not None
    assert whole.seconds > 1.02 * whole.base_s
    assert whole.evaluated is not None
    assert not whole.evaluated.plan.assignment.crossings
    assert asker.why_not("sequence_parallel=true").seconds == whole.base_s
    job_of(tmp_path, sequence_parallel=False)
    stated = Asker(request_of_file(tmp_path / "plan.yaml"))
    assert stated.why_not("sequence_parallel=true").why == "the plan states it"


@pytest.mark.parametrize(("tokens", "is_sequence"), [(128, False), (4096, True)])
def test_the_fastest_setting_of_tp_is_found_where_the_plan_states_none(
    tmp_path: Path, tokens: int, is_sequence: bool
) -> None:
    """A short sequence waits for the host at each collective, of which there are twice as many."""
    big = LLAMA | {
        "hidden_size": 4096, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 8,
    }  # fmt: skip

    def answer(**more: Any) -> Decision:
        words = {"mesh": {"dp_shard": 2, "tp": 4}, "batch": {"global": 2, "seq_len": tokens}}
        return decide(job_of(tmp_path, big, **words, **more).request)

    every = [
        answer(sequence_parallel=cuts, loss_parallel=cuts_loss)
        for cuts in (True, False)
        for cuts_loss in (True, False)
    ]
    found = answer()
    assert found.best_s == min(each.best_s for each in every)
    assert found.chosen is not None
    assert found.chosen.plan.spec.sequence_parallel is is_sequence
    assert found.gap == 0.0
    assert found.is_whole
    assert found.num_configs == sum(each.num_configs for each in every)


def test_settings_of_tp_that_are_stated_or_refused_are_not_searched(tmp_path: Path) -> None:
    job = job_of(tmp_path, sequence_parallel=True, loss_parallel=True)
    assert not list(less_sharded(job.spec, job.free, job.refuses))
    job = job_of(tmp_path, loss_parallel=True)
    (other,) = less_sharded(job.spec, job.free, job.refuses)
    assert other.axes["tp"] == (2, 4)
    assert other.sequence_parallel == {1: False, 2: False, 4: False}
    assert other.loss_parallel == job.free.loss_parallel
    # A size whose sequence cannot be sharded has been searched without it.
    job = job_of(tmp_path, loss_parallel=True, batch={"global": 16, "seq_len": 2046})
    (other,) = less_sharded(job.spec, job.free, job.refuses)
    assert other.axes["tp"] == (2,)


def test_a_search_of_less_sharding_that_is_stopped_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time limit, or by the user: then it is not said that time was up."""
    job = job_of(tmp_path)
    stopped = replace(SearchResult(), is_whole=False, lower_s=0.0)
    pressed: list[bool] = []

    def search(*_: Any, **__: Any) -> SearchResult:
        pressed.append(is_pressed)
        return stopped

    monkeypatch.setattr(fastest, "fastest_that_fits", search)
    for is_pressed in (False, True):
        pressed.clear()
        found = decide(replace(job.request, is_stopped=lambda: any(pressed)))
        assert found.gap == 1.0
        assert not found.is_whole
        assert found.is_interrupted is is_pressed
