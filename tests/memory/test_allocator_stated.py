"""`allocator: expandable`: what is told is of that allocator, and it is the one that runs.

Which seeded bug would this catch? An estimate or a search that reserves as by default, a fix that
is offered and does not help, settings of the environment that are lost or overruled.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshplan.api.planning import search_plan
from meshplan.cli.app import main
from meshplan.layout.hardware import find_device
from meshplan.memory import with_workspaces
from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.memory.answer.reserved import reserve_from_start
from meshplan.plan.plan import make_plan
from meshplan.planner.answers.infeasible import trouble_of
from meshplan.planner.problem.request import request_of_file
from meshplan.runtime.apply.allocator import allocator_problems, with_growth
from meshplan.spec.reader import load_spec
from tests.planner.test_planner import job
from tests.planner.test_remedy import WIDE, tight

__all__ = ["job"]

GROWS = {"allocator": "expandable"}
FULL: dict[str, Any] = {
    "mesh": {"dp_shard": 4}, "strategy": "full_shard", "activation_checkpointing": "full",
    "batch": {"micro": 8, "accumulate": 1, "seq_len": 1024},
}  # fmt: skip


def test_what_is_told_is_reserved_by_that_allocator(job, capsys):
    found = []
    for more in ({}, GROWS):
        path = job(WIDE, hardware=tight(0.5), **FULL, **more)
        assert main(["estimate", "-f", str(path), "--json"]) == 0
        (group,) = json.loads(capsys.readouterr().out)["result"]["groups"]
        question = request_of_file(path)
        plan = make_plan(question.read(()), question.graph)
        log = with_workspaces(
            analytic_log_of_rank(plan, 0, device=question.device), question.device
        )
        held = reserve_from_start(log, plan.spec, expandable=bool(more))
        assert group["peak"]["reserved_bytes"] == held.reserved_bytes
        found.append(group["peak"]["reserved_bytes"])
    assert found[1] < found[0]


def test_where_it_is_all_that_helps_it_is_found_and_helps(job):
    """Limits between what the two reserve: chosen where it is open, offered where it is not."""
    limit = 1 - 4.33e9 / find_device("h100-sxm-80gb").memory_bytes
    batch = {"global": 32, "micro": 8, "seq_len": 1024}
    path = job(WIDE, hardware=tight(limit), **FULL | {"batch": batch, "allocator": None})
    chosen = search_plan(path).chosen
    assert chosen is not None
    assert chosen.stated["allocator"] == GROWS["allocator"]
    assert "offload" not in chosen.stated
    stated = ["allocator=default", "offload=none"]
    assert search_plan(path, stated).chosen is None
    trouble = trouble_of(request_of_file(path, stated))
    remedy = next(each for each in trouble.remedies if each.setting == GROWS)
    assert remedy.evaluated.memory.fits
    assert remedy.change == "allocator: default -> expandable"
    again = search_plan(path, ["allocator=expandable", "offload=none"])
    assert again.chosen is not None
    assert again.best_s <= remedy.evaluated.seconds * (1 + 1e-4)


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ""),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, "},
            "max_split_size_mb:64,expandable_segments:True",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "unread:1"},
            "backend:native,expandable_segments:True",
        ),
    ],
)
def test_what_the_environment_says_stays(environment, settings):
    assert with_growth(environment) == settings
    assert not list(allocator_problems(load_spec({"version": 1} | GROWS), environment))


def test_an_environment_that_says_otherwise_is_refused():
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:False"}
    (problem,) = allocator_problems(load_spec({"version": 1} | GROWS), environment)
    assert "PYTORCH_CUDA_ALLOC_CONF sets expandable_segments:false" in problem.what
    assert not list(allocator_problems(load_spec({"version": 1}), environment))
