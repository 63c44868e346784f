"""Sequences over ranks in the planner: what is searched, what its figures say, what is refused.

Which seeded bug would this catch? Heads that ranks cannot share out, activations of the whole
sequence, an exchange that nobody pays, a pair of axes that clash.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.cli.app import main
from meshplan.errors import PlanError
from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.memory.log.driver import communicators, driver_bytes
from meshplan.plan.plan import make_plan
from meshplan.planner.lock.lock import overrides
from meshplan.planner.objectives.fastest import fastest_of
from meshplan.planner.problem.excess import SHARES
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of_file
from meshplan.planner.solve.config import ConfigSolver, solve_config
from meshplan.planner.tables.whole_plan import Costed

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def job(kv_heads: int = 4, **more: Any) -> PlanningProblem:
        config = LLAMA | {"num_key_value_heads": kv_heads}
        (tmp_path / "config.json").write_text(json.dumps(config))
        plan = {
            "version": 1, "model": {"config": "config.json"}, "mesh": "auto", "strategy": "auto",
            "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
            "precision": "bf16-mixed", "batch": {"global": 16, "seq_len": 2048}, **more,
        }  # fmt: skip
        (tmp_path / "plan.yaml").write_text(json.dumps(plan))
        return PlanningProblem(request_of_file(tmp_path / "plan.yaml"))

    return job


def test_the_space_has_every_number_of_ranks_that_shares_out_heads(write: Any) -> None:
    job = write()
    grid = job.grid
    sizes = [(tp, cp) for tp in (1, 2, 4) for cp in (1, 2, 4, 8) if tp * cp <= 8]
    ways = {(int(row["tp"]), int(row["cp"]), int(row["gathers_kv"])) for row in grid}
    assert ways == {
        (tp, cp, way) for tp, cp in sizes for way in (0, 1)
        if (cp > 1 if way else tp * cp <= 4)
    }  # fmt: skip
    assert not ((grid["cp"] > 1) & (grid["pp"] > 1)).any()


def test_a_space_without_one_way_of_attention_says_why(write: Any) -> None:
    a100 = {"nodes": 1, "gpus_per_node": 8, "gpu": "a100-sxm-80gb"}
    job = write(hardware=a100)
    assert not job.grid["gathers_kv"].any()
    whys = {each.what: each.why for each in job.free.rejected}
    assert "no fused kernel" in whys["context.attention=all_gather"]
    why = whys["mesh.cp=8"]
    assert why.startswith("16 and 4 heads do not divide by it; with context.attention: all_gather")
    assert "no fused kernel" in why
    for odd in (write(kv_heads=1), write(batch={"global": 16, "seq_len": 2046})):
        left_out = {each.what for each in odd.free.rejected}
        way = 1 if "context.attention=all_gather" in left_out else 0
        assert odd.grid["cp"].max() > 1
        assert ("context.attention=all_to_all" in left_out) == (way == 0)
        assert not (odd.grid["gathers_kv"][odd.grid["cp"] > 1] == way).any()


def test_the_other_way_of_a_plan_that_states_one(write: Any, tmp_path: Path, capsys: Any) -> None:
    """Slower by a third on this GPU, whose kernels are slow under a mask: stated it is kept."""
    fields = {
        "mesh": {"dp_shard": 2, "cp": 4}, "batch": {"global": 2, "seq_len": 16384},
        "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": "a100-sxm-80gb"},
    }  # fmt: skip
    write(kv_heads=16, context={"attention": "all_gather"}, **fields)
    path = str(tmp_path / "plan.yaml")
    ask = ["explain", "why-not", "context.attention=all_to_all", "-f", path, "-q"]
    assert main(ask) == 0
    assert "%: faster, but the plan states another value" in capsys.readouterr().out
    assert main([*ask, "--set", "context.attention="]) == 0
    assert "the plan uses it" in capsys.readouterr().out


def test_heads_that_tp_and_cp_do_not_share_out_are_the_reason(write: Any) -> None:
    mesh, hardware = {"tp": 4, "cp": 2}, {"nodes": 1, "gpus_per_node": 8, "gpu": "a100-sxm-80gb"}
    with pytest.raises(PlanError, match="no tp x cp divides 16 and 4 heads"):
        _ = write(mesh=mesh, strategy=None, hardware=hardware).grid


def test_figures_are_those_of_the_plan_and_no_more_than_is_replayed(write: Any) -> None:
    job, rng, shares = write(), random.Random(0), []
    rows = [int(row) for row in np.flatnonzero(job.grid["cp"] > 1)]
    for row in rng.sample(rows, 12):
        smallest = ConfigSolver(job.table, row, float("inf")).smallest()
        room = max(smallest.linear_bytes) * rng.choice((1.01, 1.2, 1.5, 3))
        found = solve_config(job.table, row, room) or smallest
        stated = job.stated(job.table, found)
        is_gathered = bool(job.grid["gathers_kv"][row])
        assert stated["context.attention"] == ("all_gather" if is_gathered else "all_to_all")
        plan = make_plan(job.request.read(overrides(stated)), job.request.graph)
        assert plan.mesh.size("cp") == job.grid["cp"][row]
        assert Costed(plan, job.request.cluster).seconds == pytest.approx(found.seconds)
        live = analytic_log_of_rank(plan, 0, device=job.request.device).pooled_bytes
        assert found.linear_bytes[0] <= live
        shares.append(found.linear_bytes[0] / live)
    assert np.median(shares) > 0.6


@pytest.mark.parametrize("is_reversed", [False, True])
def test_gathering_opens_no_communicator_of_an_exchange(write: Any, is_reversed: bool) -> None:
    """Whichever way is asked first: what ranks need for communicators is that of their plan."""
    job = write(kv_heads=8)
    found = {False: set(), True: set()}
    rows = [int(row) for row in np.flatnonzero(job.grid["cp"] > 1)]
    for row in reversed(rows) if is_reversed else rows:
        smallest = ConfigSolver(job.table, row, float("inf")).smallest()
        plan = make_plan(
            job.request.read(overrides(job.stated(job.table, smallest))), job.request.graph
        )
        opened = communicators(plan.assignment, gpus_per_node=8)
        device = job.request.device
        more = driver_bytes(device, opened).high - driver_bytes(device, ()).high
        assert job.taken(row) * SHARES == pytest.approx(more)
        found[bool(job.grid["gathers_kv"][row])].add(more)
    assert max(found[True]) < max(found[False])


def test_one_long_sequence_is_cut(write: Any) -> None:
    """There is nothing else to share out among as many ranks."""
    decision = fastest_of(write(kv_heads=8, batch={"global": 1, "seq_len": 131072}))
    assert decision.chosen is not None
    assert decision.chosen.stated["mesh"].get("cp", 1) > 1
    assert decision.chosen.memory.fits


def test_what_a_plan_says_of_attention_is_kept(write: Any) -> None:
    """Stated, sequences are cut."""
    job = write(context={"attention": "all_to_all"})
    assert job.grid["cp"].min() > 1
    found = solve_config(job.table, 0, float("inf"))
    assert found is not None
    assert "context.attention" not in job.stated(job.table, found)


def test_keys_and_values_are_gathered_where_a_plan_says_so(write: Any) -> None:
    """Over any number of ranks; figures are those of the plan, and no more than is replayed."""
    job, rng = write(context={"attention": "all_gather"}), random.Random(1)
    assert {int(row["cp"]) for row in job.grid} == {2, 4, 8}
    rows = [int(row) for row in range(len(job.grid))]
    for row in rng.sample(rows, 6):
        found = solve_config(job.table, row, float("inf"))
        assert found is not None
        stated = job.stated(job.table, found)
        assert "context.attention" not in stated
        plan = make_plan(job.request.read(overrides(stated)), job.request.graph)
        assert Costed(plan, job.request.cluster).seconds == pytest.approx(found.seconds)
        for place in {0, plan.mesh.size("cp") - 1}:
            rank = next(
                r for r in range(plan.mesh.world_size) if plan.mesh.index(r, ("cp",)) == place
            )
            live = analytic_log_of_rank(plan, rank, device=job.request.device).pooled_bytes
            assert found.linear_bytes[0] <= live


def test_what_no_kernel_takes_is_not_planned(write: Any) -> None:
    hardware = {"nodes": 1, "gpus_per_node": 8, "gpu": "a100-sxm-80gb"}
    with pytest.raises(PlanError, match="no fused kernel"):
        _ = write(context={"attention": "all_gather"}, hardware=hardware).grid
    assert len(write(16, context={"attention": "all_gather"}, hardware=hardware).grid)
