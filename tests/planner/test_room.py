"""What makes room is searched: parts of the loss and the allocator first, the host last."""

from __future__ import annotations

import itertools
import re

import pytest
import yaml

from meshplan.api import checking
from meshplan.api.planning import lock_plan, search_plan
from meshplan.cli.app import main
from meshplan.errors import SpecError
from meshplan.planner.lock.lock import read, spec_hash, write
from meshplan.planner.objectives.offload_variants import fastest_that_fits
from meshplan.planner.objectives.simplify import SLACK
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of_file
from meshplan.planner.solve.search import TOLERANCE
from meshplan.planner.space.enumeration import enumerate_grid
from meshplan.spec.reader import load_spec
from tests.bench.no_better import ask, draw
from tests.bench.planned_models import MODELS, write_plan
from tests.planner.test_planner import LLAMA, OPEN, job

__all__ = ["job"]

EIGHT_B = MODELS["Llama-3.1-8B"]
PUBLISHED = OPEN | {
    "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": "a100-sxm-40gb"},
    "mesh": {"dp_shard": 8},
    "strategy": "full_shard",
    "batch": {"micro": 1, "global": 64, "seq_len": 8192},
}
"""In the search it was answered with offload alone, 53 s a step; in parts the loss lets it fit."""


def test_a_loss_in_parts_is_taken_before_the_host(job):
    """Of Llama-3.1-8B on 8 A100 with 40 GB."""
    path = job(EIGHT_B, **PUBLISHED)
    decision = search_plan(path)
    assert decision.chosen is not None
    assert decision.chosen.stated["loss_chunks"] > 1
    assert "offload" not in decision.chosen.stated
    assert 27.0 < decision.chosen.seconds < 28.0
    held = search_plan(path, ["offload=none"])
    assert held.chosen is not None
    assert held.chosen.stated == decision.chosen.stated


@pytest.mark.parametrize("mesh", [{"dp_shard": 8}, "auto"])
@pytest.mark.parametrize("headroom", [0.9, 0.85])
def test_the_space_is_all_that_could_be_stated(job, mesh, headroom):
    """With the parts and the allocator left open, the answer is the best with either stated."""
    batch = {"global": 64, "seq_len": 2048}
    path = job(
        LLAMA | {"vocab_size": 131_072}, strategy="full_shard", batch=batch, mesh=mesh, **OPEN
    )
    at = [f"hardware.headroom={headroom}", "offload=none"]
    free = search_plan(path, at)
    held = [
        search_plan(path, [*at, f"loss_chunks={chunks}", f"allocator={allocator}"]).best_s
        for chunks, allocator in itertools.product(
            PlanningProblem(request_of_file(path, at)).free.loss_chunks, ("default", "expandable")
        )
    ]
    assert free.best_s == pytest.approx(min(held), rel=2 * TOLERANCE)
    assert min(held) < max(held)


def test_the_loss_of_tp_is_cut_along_the_vocabulary(job):
    """Unless the plan says that it is not."""
    path = job(EIGHT_B, **PUBLISHED | {"mesh": {"dp_shard": 2, "tp": 4}})
    cut, whole = search_plan(path), search_plan(path, ["loss_parallel=false"])
    assert cut.chosen is not None
    assert whole.chosen is not None
    assert cut.chosen.stated["loss_parallel"] is True
    assert "loss_parallel" not in whole.chosen.stated
    assert cut.chosen.seconds < whole.chosen.seconds * (1 - SLACK)
    assert "loss_parallel" not in search_plan(path, ["mesh={dp_shard: 8}"]).chosen.stated


def test_what_is_stated_is_kept(job):
    path = job(EIGHT_B, **PUBLISHED)
    for more in (["loss_chunks=1"], ["loss_chunks=1", "allocator=default"]):
        decision = search_plan(path, more)
        assert decision.chosen is not None
        spec = decision.chosen.plan.spec
        assert spec.loss_chunks == 1
        assert "loss_chunks" not in decision.chosen.stated
        if len(more) == 2:
            assert spec.allocator == "default"
    assert set(PlanningProblem(request_of_file(path, ["loss_chunks=6"])).grid["loss_chunks"]) == {6}


def test_what_lies_on_the_host_unasked_is_said_first(job, capsys):
    path = job(EIGHT_B, **PUBLISHED)
    flags = ["--set", "loss_chunks=1", "--dry-run", "-q"]
    assert main(["plan", "-f", str(path), *flags]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("; without offload no plan fits")
    assert "with offload: params, " in first
    assert re.search(r"123\.\d GiB of a node's 1,152\.0 GiB host memory \(assumed\);", first)
    assert main(["plan", "-f", str(path), "--dry-run", "-q"]) == 0
    assert "offload" not in capsys.readouterr().out.splitlines()[0]


def test_the_lock_has_what_was_chosen_and_every_verb_goes_by_it(job, capsys):
    path = job(EIGHT_B, **PUBLISHED | {"allocator": "auto", "loss_chunks": "auto"})
    decision = search_plan(path)
    lock_plan(path, decision)
    found = read(path.with_name("plan.lock.yaml"))
    assert found is not None
    assert found.chosen["loss_chunks"] > 1
    assert found.chosen["allocator"] in ("default", "expandable")
    plan = checking.decide(path)
    assert plan.assignment.chunked_loss is not None
    assert plan.assignment.chunked_loss.chunks == found.chosen["loss_chunks"]
    assert plan.spec.allocator == found.chosen["allocator"]
    assert main(["explain", "-f", str(path), "why", "loss_chunks"]) == 0
    assert f"loss_chunks={found.chosen['loss_chunks']}: the plan uses it" in capsys.readouterr().out


def test_a_lock_cannot_change_what_is_stated(job):
    path = job(EIGHT_B, **PUBLISHED, activation_checkpointing="auto")
    lock_plan(path, search_plan(path))
    lock = path.with_name("plan.lock.yaml")
    content = yaml.safe_load(lock.read_text())
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"loss_chunks": 1}))
    content["inputs"]["plan"] = spec_hash(load_spec(path))
    write(lock, {key: value for key, value in content.items() if key != "hash"})
    with pytest.raises(SpecError, match="the plan says loss_chunks: 1"):
        checking.decide(path)


def test_what_a_loss_in_parts_does_not_go_with_is_not_tried_with_it(job):
    """Neither in a pipeline, nor over parts of the sequence, nor over parts of the vocabulary."""
    grid = enumerate_grid(PlanningProblem(request_of_file(job(**OPEN))).free)
    spread = (grid["pp"] > 1) | (grid["cp"] > 1) | (grid["tp"] > 1)
    assert spread.any()
    assert (grid["loss_chunks"][spread] == 1).all()
    assert (grid["loss_chunks"][~spread] > 1).any()


@pytest.mark.parametrize("seed", [3, *(pytest.param(n, marks=pytest.mark.wide) for n in range(9))])
def test_no_single_change_beats_the_answer(seed, tmp_path):
    """Of what `why-not` and `--fixes` can price; `tests.bench.no_better` asks of 200 plans."""
    found = ask(*draw(seed, tmp_path, ("Llama-3.2-1B", "Llama-3.1-8B")), most=4, seed=seed)
    assert found.num
    assert not found.is_beaten, (found.words, found.best, SLACK)


@pytest.mark.parametrize("offload", ["none", "auto"])
def test_only_plans_that_are_faster_are_found(tmp_path, offload):
    hardware = {"gpus_per_node": 8, "gpu": "rtx-4090-24gb"}
    batch = {"global": 16, "seq_len": 4096}
    path = write_plan(tmp_path, "Llama-3.2-1B", batch=batch, hardware=hardware, offload=offload)
    request = request_of_file(path)
    best = fastest_that_fits(PlanningProblem(request)).best
    slower = fastest_that_fits(PlanningProblem(request), below_s=best.seconds * 1.01)
    assert slower.best.seconds == pytest.approx(best.seconds, rel=TOLERANCE)
    faster = fastest_that_fits(PlanningProblem(request), below_s=best.seconds * (1 - TOLERANCE))
    assert (faster.best, faster.measured, faster.is_whole) == (None, None, True)
