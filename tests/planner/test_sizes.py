"""Other objectives: the least memory, the least cost, memory against time, the fewest devices."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from meshplan.api import checking
from meshplan.api.planning import fewest_devices, search_plan
from meshplan.cli.app import main
from meshplan.cost.grid import OPTIONS
from meshplan.errors import SpecError
from meshplan.planner.answers.frontier import frontier, undominated
from meshplan.planner.lock.lock import lock_path, overrides, read
from meshplan.planner.objectives.fastest import decide
from meshplan.planner.objectives.memory import LeastMemory, least_rows
from meshplan.planner.objectives.num_devices import Size, _Fewest, fewest, positive, with_nodes
from meshplan.planner.problem.decision import Evaluated
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of_file
from meshplan.planner.solve.config import Candidate, ConfigSolver, solve_config
from meshplan.planner.solve.result import ReplayedMemory
from meshplan.planner.tables.cost_table import memory_bounds
from meshplan.render.plans.sizing import frontier_to_text
from tests.planner.test_planner import LLAMA, job

__all__ = ["job"]

SMALL = LLAMA | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
ONE = {"nodes": 1, "gpus_per_node": 4, "gpu": "h100-sxm-80gb", "inter": "50GB/s"}
ROUND = {2**k for k in range(18)} | {3 * 2**k for k in range(17)}
DATA = {"dp_replicate": "auto", "dp_shard": "auto"}


def test_the_least_memory_of_all(job):
    """Against every configuration, each with every option for all blocks."""
    path = job(SMALL, mesh=DATA, hardware=ONE, batch={"global": 16, "seq_len": 512},
               solve={"objective": "memory"})  # fmt: skip
    question = request_of_file(path)
    at = PlanningProblem(question)
    numbers = at.table
    least = math.inf
    for row in range(len(numbers.grid)):
        for option in range(len(OPTIONS)):
            mask = [number == option for number in range(len(OPTIONS))]
            one = solve_config(numbers.only(row, mask), 0, math.inf)
            if one is None:
                continue
            tried = Candidate(row, one.seconds, one.ends, one.option_counts, one.linear_bytes)
            least = min(least, at.measure(numbers, tried).result.memory.high_bytes)
    decision = search_plan(path)
    assert decision.objective == "memory"
    assert decision.is_whole
    high = decision.chosen.memory.high_bytes
    assert high <= least
    assert high * (1 - decision.gap) <= least
    assert decision.chosen.seconds > decide(question).best_s
    again = checking.estimate_memory(path, overrides(decision.chosen.stated))
    assert again.high_bytes == high


def test_what_holds_more_than_it_seems_is_passed_by(job):
    """Whatever the real bytes are above the linear ones, the least of all is found."""
    path = job(SMALL, hardware=ONE, batch={"global": 16, "seq_len": 512})
    numbers = PlanningProblem(request_of_file(path)).table
    for seed in range(8):
        rng = np.random.default_rng(seed)
        share = rng.uniform(1, 1.5, len(numbers.grid))
        seen = {}

        def measure(numbers, candidate, share=share, seen=seen, allocators=()):
            high = max(candidate.linear_bytes) * share[candidate.row]
            seen[candidate.row] = high
            memory = SimpleNamespace(high_bytes=high)
            evaluated = Evaluated(stated={}, seconds=1.0, plan=None, memory=memory)
            return ReplayedMemory(fits=True, result=evaluated)

        fake = SimpleNamespace(
            table=numbers, measure=measure, widened=float, allow=lambda limit: None,
            free=SimpleNamespace(allocators=("default",)),
            request=SimpleNamespace(is_stopped=lambda: False),
        )  # fmt: skip
        found = LeastMemory(fake, math.inf)
        every = least_rows(numbers.grid, memory_bounds(numbers), math.inf)
        held = {
            row: max(ConfigSolver(numbers, row, math.inf).smallest().linear_bytes) * share[row]
            for row in every
        }
        assert found.evaluated.memory.high_bytes == min(held.values())
        assert found.lower_bytes <= min(held.values())
        assert len(seen) < len(held)


def test_sizes_that_are_not_in_order(monkeypatch, job):
    """Only 3 and 8 nodes and more do: halving finds 8, and looking at all that are fewer 3."""
    path = job(SMALL, hardware=ONE, batch={"global": 16, "seq_len": 512}, mesh=DATA)
    asked = []

    def size(self, nodes):
        asked.append(nodes)
        days = 1.0 if nodes == 3 or nodes >= 8 else 9.0
        return Size(nodes=nodes, num_gpus=4 * nodes, days=days, least_days=0.0, decision=None)

    monkeypatch.setattr(_Fewest, "_size", size)
    monkeypatch.setattr(_Fewest, "_first", lambda self: 1)
    found = fewest(request_of_file(path), 1e6, 2.0)
    assert (found.answer.nodes, found.is_fewest) == (3, True)
    assert len(asked) == len(set(asked))
    question = replace(request_of_file(path), is_stopped=lambda: True)
    found = fewest(question, 1e6, 2.0)
    assert (found.answer, found.is_fewest) == (None, False)


def test_memory_that_nothing_fits_into(job):
    path = job(SMALL, mesh=DATA, hardware=ONE | {"headroom": 0.99},
               batch={"global": 16, "seq_len": 512}, solve={"objective": "memory"})  # fmt: skip
    assert search_plan(path).chosen is None


def test_a_frontier_is_of_plans_that_beat_each_other(job):
    path = job(SMALL, mesh=DATA, hardware=ONE, batch={"global": 16, "seq_len": 512})
    question = request_of_file(path)
    evaluated_plans, is_whole = frontier(question)
    assert is_whole
    assert len(evaluated_plans) >= 3
    seconds = [evaluated.seconds for evaluated in evaluated_plans]
    held = [evaluated.memory.high_bytes for evaluated in evaluated_plans]
    assert seconds == sorted(set(seconds))
    assert held == sorted(set(held), reverse=True)
    assert seconds[0] == pytest.approx(decide(question).best_s)
    # With the memory of one less, nothing is as fast.
    slower = decide(replace(question, limit_bytes=held[1] - 1))
    assert slower.best_s > seconds[1]
    for evaluated in evaluated_plans[1:3]:
        assert checking.estimate_memory(path, overrides(evaluated.stated)).high_bytes == (
            evaluated.memory.high_bytes
        )
    assert undominated([*evaluated_plans, *evaluated_plans]) == evaluated_plans
    lines = frontier_to_text(evaluated_plans, is_whole=False)
    assert lines[0].endswith("(search incomplete: time limit reached)")
    assert frontier_to_text(evaluated_plans, is_whole=False, is_interrupted=True)[0].endswith(
        "interrupted)"
    )
    assert len([line for line in lines if " GiB  mesh: " in line]) == len(evaluated_plans)


def test_the_cheapest_number_of_nodes(job):
    """A small batch on many nodes is faster, and dearer."""
    hardware = ONE | {"nodes": 4}
    fields = {"hardware": hardware, "batch": {"global": 16, "seq_len": 512}, "mesh": DATA}
    fast = search_plan(job(SMALL, **fields))
    path = job(SMALL, **fields, solve={"objective": "cost"})
    cheap = search_plan(path)
    hours = {}
    for nodes in (1, 2, 4):
        question = with_nodes(request_of_file(path), nodes)
        hours[nodes] = decide(question).chosen.seconds * nodes
    best = min(hours, key=hours.get)
    assert best < 4
    assert cheap.chosen.plan.mesh.world_size == 4 * best
    assert cheap.chosen.stated["hardware.nodes"] == best
    assert cheap.chosen.seconds * best == pytest.approx(hours[best])
    assert cheap.chosen.seconds > fast.chosen.seconds
    assert main(["plan", "-f", str(path), "-q"]) == 0
    assert read(lock_path(path)).chosen["hardware.nodes"] == best
    assert checking.decide(path).mesh.world_size == 4 * best


def test_the_fewest_nodes_in_time(job):
    """Every smaller number of nodes is too slow, by a plan of its own or by its bound."""
    path = job(SMALL, hardware=ONE, batch={"global": 48, "seq_len": 512}, mesh=DATA)
    question = request_of_file(path)
    step = 48 * 512
    days = {}
    for nodes in (1, 2, 3, 4, 6):
        days[nodes] = decide(with_nodes(question, nodes)).chosen.seconds / 86400
    allowed = (days[3] + days[2]) / 2 * 1000
    found = fewest(question, 1000 * step, allowed)
    assert found.is_fewest
    assert found.answer.nodes == 3
    assert found.answer.days == pytest.approx(days[3] * 1000)
    for size in found.sizes:
        if size.nodes < 3:
            assert size.least_days <= days[size.nodes] * 1000 * (1 + 1e-9)
            assert size.days is None or size.days > allowed
    looked = {size.nodes for size in found.sizes}
    assert looked >= set(range(min(looked), 3))
    # More nodes need not be faster, and 5 do not divide the batch.
    allowed = days[6] * (1 + 1e-9)
    found = fewest(question, step, allowed)
    assert found.is_fewest
    assert found.answer.nodes == min(n for n in days if days[n] <= allowed)


def test_fewest_on_the_command_line(job, capsys):
    path = job(SMALL, hardware=ONE, batch={"global": 48, "seq_len": 512}, mesh=DATA)
    words = ["plan", "-f", str(path), "--tokens", "24.576e6", "-q"]
    assert main([*words, "--days", "0.001", "--price", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    training = result["training"]
    answer = training["answer"]
    assert training["is_fewest"]
    assert answer["days"] <= 0.001
    assert answer["num_gpus"] == np.prod(list(result["mesh"].values()))
    assert answer["price"] == pytest.approx(2 * 24 * answer["days"] * answer["num_gpus"])
    assert result["chosen"]["hardware.nodes"] == answer["nodes"]
    assert checking.decide(path).mesh.world_size == answer["num_gpus"]
    assert main([*words, "--days", "0.001", "--dry-run"]) == 0
    assert "<- the fewest" in capsys.readouterr().out
    assert main([*words, "--days", "1e-9", "--json", "--set", "solve.time_limit=0.2s"]) == 1
    assert json.loads(capsys.readouterr().out)["result"]["training"]["answer"] is None
    assert main([*words]) == 2
    with pytest.raises(SpecError, match="not a positive number"):
        fewest_devices(path, tokens="many", days=3)
    for text in ("0", "-1", "inf", "nan", "x"):
        with pytest.raises(SpecError):
            positive(text, "--days")


def test_too_few_samples_are_told_with_as_many_as_would_do(job, capsys):
    """Round numbers of nodes are tried, and none that could only be slower."""
    path = job(SMALL, mesh=DATA, hardware=ONE, batch={"global": 4, "seq_len": 512})
    training = fewest_devices(path, tokens=1e9, days=0.02)
    assert training.answer is None
    nodes = [size.nodes for size in training.sizes]
    assert all(n == nodes[0] or n in ROUND for n in nodes)
    assert nodes[:3] == [1, 2, 3]
    assert max(nodes) < 64
    samples, size = training.more
    assert samples > training.samples == 4
    assert size.days <= 0.02
    held = fewest_devices(path, [f"batch.global={samples}"], tokens=1e9, days=0.02)
    assert held.answer.days <= 0.02
    words = ["plan", "-f", str(path), "--dry-run", "--tokens", "1e9", "--days", "0.02", "-q"]
    assert main(words) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"raise batch.global: with {samples:,} samples, {size.num_gpus:,} GPUs take" in said


def test_frontier_and_cost_in_json(job, capsys):
    path = job(SMALL, mesh=DATA, hardware=ONE, batch={"global": 16, "seq_len": 512})
    words = ["plan", "-f", str(path), "--dry-run", "-q", "--price", "3"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert not result["frontier_is_whole"]
    assert result["frontier"][0]["step_s"] <= result["step_s"]
    cost = result["cost"]
    assert cost["gpu_hours_per_step"] == pytest.approx(4 * result["step_s"] / 3600)
    assert cost["price_per_step"] == pytest.approx(3 * cost["gpu_hours_per_step"])
    tokens = 16 * 512
    assert cost["price_per_million_tokens"] == pytest.approx(cost["price_per_step"] / tokens * 1e6)
    assert main([*words, "--json", "--frontier"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["frontier_is_whole"]
    assert {"step_s", "peak_bytes", "mesh"} <= result["frontier"][-1].keys()
