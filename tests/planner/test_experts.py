"""The planner and experts: every way to spread them is tried, and no better one is left.

Which seeded bug would this catch? Sizes of ep that are left out, or that the mesh cannot lend;
experts of other ranks counted as a rank's own; bounds above what is really held where 8 experts are
cut over 16 ranks; rules of the plan file that the planner says once more.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshplan
from meshplan.api import checking
from meshplan.api.planning import search_plan
from meshplan.cli.app import main
from meshplan.cost.config import chain_of_plan
from meshplan.cost.grid import GRID, MODES, OPTIONS
from meshplan.model.blueprint import from_config
from meshplan.plan.plan import make_plan
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of, request_of_file
from meshplan.planner.solve.config import Candidate, solve_config
from meshplan.planner.solve.result import mesh_key
from meshplan.planner.solve.search import search
from meshplan.planner.space.enumeration import enumerate_grid
from meshplan.planner.space.ep import experts_of
from meshplan.planner.space.space import Freedom, divisors
from meshplan.planner.tables.whole_plan import Costed
from meshplan.spec.reader import load_spec
from tests.helpers.brute import always_fits, fastest
from tests.helpers.pooled import pooled_by_group
from tests.planner.test_planner import LLAMA, PLAN

MIXTRAL: dict[str, Any] = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": 3,
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 704,
}  # fmt: skip
SPREAD = {"match": "**.experts", "place": {"ep": "ep_dispatch_experts"}}


@pytest.fixture
def job(tmp_path):
    """Writes a plan file with its model; gives its path."""

    def write(config: dict[str, Any] = MIXTRAL, **fields: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        path = tmp_path / "plan.yaml"
        stated = {key: value for key, value in (PLAN | fields).items() if value is not None}
        path.write_text(json.dumps(stated))
        return path

    return write


def job_of(path: Path) -> PlanningProblem:
    def load(more: Any) -> meshplan.Spec:
        return load_spec(path, more)

    return PlanningProblem(request_of(load, from_config(path.with_name("config.json"))))


@pytest.mark.parametrize("seed", range(20))
def test_every_way_to_lend_is_in_the_space_once(seed):
    """Against all products of sizes."""
    rng = np.random.default_rng(seed)
    world = int(rng.choice([8, 12, 16, 24]))

    def some(*, has_one: bool = True) -> tuple[int, ...]:
        chosen = tuple(d for d in divisors(world) if (has_one and d == 1) or rng.random() < 0.6)
        return chosen or (1,)

    axes = {"pp": some(), "cp": some(), "tp": some(), "ep": some(has_one=False)}
    axes |= {"dp_replicate": divisors(world), "dp_shard": divisors(world)}
    sequence = {tp: bool(rng.random() < 0.5) for tp in axes["tp"]}
    free = Freedom(world=world, axes=axes, global_=world, schedules=(2,),
                   sequence_parallel=sequence)  # fmt: skip
    expected = set()
    for pp, cp, tp, ep, shard in itertools.product(
        axes["pp"], axes["cp"], axes["tp"], axes["ep"], divisors(world)
    ):
        if world % (pp * cp * tp * shard) or shard % ep:
            continue
        if cp > 1 and pp > 1:
            continue
        if ep > 1 and (cp > 1 or sequence[tp]):
            continue
        replicate = world // (pp * cp * tp * shard)
        if shard == 1:
            expected.add((pp, replicate, shard, cp, tp, ep, "ddp"))
        else:
            expected.add((pp, replicate, shard, cp, tp, ep, "shard"))
            if replicate == 1:
                expected.add((pp, replicate, shard, cp, tp, ep, "zero1"))
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    grid = enumerate_grid(free)
    found = [(*(int(r[n]) for n in names), MODES[r["mode"]]) for r in grid]
    assert len(grid) == len(np.unique(grid))
    assert set(found) == expected


@pytest.mark.parametrize(
    ("batch", "more"),
    [
        (16, {}),
        pytest.param(32, {}, marks=pytest.mark.wide),
        pytest.param(
            8, {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 4, "moe_intermediate_size": 704, "mlp_only_layers": [0],
                "head_dim": 64, "num_hidden_layers": 4}, marks=pytest.mark.wide),
    ],
)  # fmt: skip
def test_nothing_in_the_space_of_a_mixture_is_faster(job, batch, more):
    """The search over real figures, ep and all, against every cut and option of every row."""
    at = job_of(job(MIXTRAL | more, batch={"global": batch, "seq_len": 1024}))
    numbers = at.table
    assert {(1, 4), (2, 1), (2, 2), (2, 4)} <= {
        (int(each["pp"]), int(each["ep"])) for each in numbers.grid
    }
    rows = range(len(numbers.grid))
    held = np.array([max(one.linear_bytes) for row in rows
                     if (one := solve_config(numbers, row, float("inf"))) is not None])  # fmt: skip
    for share in (0.1, 0.3, 0.6):
        capacity = float(np.quantile(held, share))
        expected = min(fastest(numbers, row, capacity) for row in rows)
        found = search(numbers, capacity, always_fits, tolerance=0.0)
        seconds = found.best.seconds if found.best else float("inf")
        assert seconds == pytest.approx(expected, rel=1e-9)
        assert np.isfinite(seconds)


def test_bounds_on_memory_are_below_what_is_replayed(job):
    """Of 16 ranks 4 have an expert, where experts are not spread."""
    hardware = PLAN["hardware"] | {"gpus_per_node": 8}
    at = job_of(job(MIXTRAL | {"intermediate_size": 2816}, hardware=hardware))
    grid = at.grid
    plain = np.flatnonzero((grid["pp"] == 1) & (grid["micro"] == 1))
    assert {(1, 16), (2, 16), (4, 16)} <= {
        (int(grid[r]["ep"]), int(grid[r]["dp_shard"])) for r in plain
    }
    assert np.median(held_shares(at, plain)) > 0.5


DENSE_FIRST = MIXTRAL | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
    "moe_intermediate_size": 704, "mlp_only_layers": [0], "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (MIXTRAL | {"num_hidden_layers": 8, "intermediate_size": 2816}, 6),
        *(pytest.param(config | {"num_hidden_layers": 8}, 60, marks=pytest.mark.wide)
          for config in (MIXTRAL, DENSE_FIRST)),
    ],
)  # fmt: skip
def test_bounds_are_below_what_is_replayed_of_stages_that_spread_experts(job, config, count):
    """On every rank, and not only on the one that holds most."""
    at = job_of(job(config, hardware=PLAN["hardware"] | {"gpus_per_node": 8}))
    both = np.flatnonzero((at.grid["pp"] > 1) & (at.grid["ep"] > 1))
    assert {(2, 2), (2, 4), (4, 4), (8, 2)} <= {
        (int(at.grid[r]["pp"]), int(at.grid[r]["ep"])) for r in both
    }
    rows = np.random.default_rng(0).permutation(both)[:count]
    assert np.median(held_shares(at, rows)) > 0.7


def held_shares(at: PlanningProblem, rows: Iterable[int]) -> list[float]:
    """By row, how much of what a replay shows the linear figures do, which is never more."""
    at.capacity = float("inf")
    numbers, rng, shares = at.table, np.random.default_rng(0), []
    for row in map(int, rows):
        offered = np.isfinite(numbers.seconds[row]).any(axis=0)
        option = int(rng.choice(np.flatnonzero(offered)))
        mask = [number == option for number in range(len(OPTIONS))]
        one = solve_config(numbers.only(row, mask), 0, float("inf"))
        if one is None:
            continue
        candidate = Candidate(row, one.seconds, one.ends, one.option_counts, one.linear_bytes)
        measured = at.measure(numbers, candidate)
        assert not measured.why
        assert measured.result is not None
        truths = list(pooled_by_group(at, measured))
        if len(truths) == len(one.linear_bytes):
            for linear, truth in zip(one.linear_bytes, truths, strict=True):
                assert linear <= truth, (at.grid[row], OPTIONS[option])
        assert max(one.linear_bytes) <= max(truths), (at.grid[row], OPTIONS[option])
        shares.append(max(one.linear_bytes) / max(truths))
    return shares


def test_stages_are_charged_for_their_own_experts(job):
    """What pictures of a schedule show is what the search has added up."""
    at = job_of(job(MIXTRAL | {"num_hidden_layers": 4}, hardware=PLAN["hardware"]))
    row = int(np.flatnonzero((at.grid["pp"] == 2) & (at.grid["ep"] == 4))[0])
    one = solve_config(at.table, row, float("inf"))
    assert one is not None
    candidate = Candidate(row, one.seconds, one.ends, one.option_counts, one.linear_bytes)
    question = at.request
    plan = make_plan(question.read(overrides(at.stated(at.table, candidate))), question.graph)
    assert plan.mesh.size("ep") == 4
    chain = chain_of_plan(plan)
    assert chain.kinds == at.chain_at(int(at.grid[row]["tp"]), 4).kinds
    assert chain.kinds != at.chain_at(int(at.grid[row]["tp"]), 1).kinds


def test_a_rank_is_charged_for_the_experts_that_it_has(job):
    """In bf16 while they are gathered; of 4 experts that stay together 8 ranks keep one or none."""
    numbers = job_of(job(batch={"global": 16, "seq_len": 1024})).table
    (kind,) = {numbers.order[place] for place, name in enumerate(numbers.names) if name}
    stack, hidden = 3 * 512 * 704, 512
    dense = 2 * hidden * hidden + 2 * hidden * hidden // 2 + 4 * hidden + 2 * hidden
    kept, given_back = (OPTIONS.index((0, reshard)) for reshard in (0, 1))
    checked = set()
    for row in np.flatnonzero((numbers.grid["dp_shard"] == 8) & (numbers.grid["pp"] == 1)):
        config, held = numbers.grid[row], numbers.resident[row, kind]
        if MODES[config["mode"]] != "shard" or config["microbatches"] > 1:
            continue
        ep = int(config["ep"])
        checked.add(ep)
        gathered = held[kept] - held[given_back]
        assert gathered == 2 * (dense + 4 * stack // ep)
        padded = 2 if ep == 1 else 1
        assert held[given_back] == pytest.approx(16 * (dense + padded * 4 * stack) / 8)
    assert checked == {1, 2, 4}


def test_what_one_way_to_spread_holds_says_nothing_of_another():
    """Rows of one key are ruled out together."""
    rows = np.zeros(2, GRID)
    rows["ep"] = 1, 2
    assert mesh_key(rows[0]) != mesh_key(rows[1])


def test_what_is_chosen_is_whole_and_certified(job):
    """What experts gather between nodes takes longer than what tokens do."""
    config = MIXTRAL | {"intermediate_size": 14336, "num_local_experts": 8}
    hardware = PLAN["hardware"] | {"headroom": 0.8}
    path = job(config, hardware=hardware, mesh={"dp_shard": 8, "ep": "auto"}, strategy=None)
    decision = search_plan(path)
    chosen = decision.chosen
    assert chosen is not None
    ep = chosen.plan.mesh.size("ep")
    assert ep > 1
    assert chosen.stated["mesh"] == {"dp_shard": 8, "ep": f"{ep} in dp_shard"}
    assert chosen.memory.fits
    assert {"match": "model.layers.*.mlp.experts", "place": SPREAD["place"]} in (
        chosen.stated.values()
    )
    again = checking.estimate_memory(path, overrides(chosen.stated))
    assert again.worst.band == chosen.memory.worst.band
    for evaluated in (chosen, *decision.alternatives):
        costed = Costed(evaluated.plan, request_of_file(path).cluster)
        assert costed.seconds == pytest.approx(evaluated.seconds, rel=1e-9)
    assert set(chosen.plan.assignment.experts) == {
        f"model.layers.{n}.mlp.experts" for n in range(3)
    }


def test_what_a_plan_says_of_experts_is_kept(job):
    path = job(mesh={"dp_shard": "auto", "ep": "2 in dp_shard"}, strategy=None, rules=[SPREAD])
    at = job_of(path)
    assert set(at.grid["ep"]) == {2}
    chosen = search_plan(path).chosen
    assert chosen is not None
    assert chosen.plan.mesh.size("ep") == 2
    assert not any("place" in str(value) for value in chosen.stated.values())


def test_rules_that_spread_leave_no_other_way(job):
    at = job_of(job(rules=[SPREAD]))
    assert set(at.grid["ep"]) == {2, 4}
    assert job_of(job(mesh={"dp_shard": 8}, strategy=None)).free.axes["ep"] == (1,)


def test_sizes_that_cannot_be_say_why(job):
    why = {each.what: each.why for each in job_of(job()).free.rejected}
    assert why["mesh.ep=8"] == "4 experts do not divide by it"
    dense = {each.what: each.why for each in job_of(job(LLAMA)).free.rejected}
    assert dense["mesh.ep=2"] == "no module of the model stacks experts"


def test_experts_are_found_by_what_they_stack(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    found = experts_of(from_config(tmp_path))
    assert (found.modules, found.count) == (("model.layers.*.mlp.experts",), 4)


def test_explain_knows_ep(job, capsys):
    path = str(job())
    assert main(["explain", "why-not", "mesh.ep=3", "-f", path, "-q"]) == 1
    assert "not in the search space" in capsys.readouterr().out
    assert main(["explain", "why-not", "mesh.ep=4", "-f", path, "-q", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["result"]["answers"]
    assert answer["step_s"] >= answer["best_step_s"] * (1 - 1e-4)


def test_tokens_that_may_come_are_planned_for_where_experts_are_spread(job):
    """Where they are not, the plan takes the word back; figures stay below what is held."""

    def measured(capacity):
        stated = {"strategy": "zero1", "mesh": {"dp_shard": 8, "ep": "auto"}, "loss_chunks": 1}
        batch = {"global": 64, "micro": 8, "seq_len": 1024}
        at = job_of(job(**stated, batch=batch, experts={"capacity": capacity}))
        evaluated_plans = [solve_config(at.table, row, float("inf")) for row in range(len(at.grid))]
        found = [at.measure(at.table, evaluated, to_the_end=True) for evaluated in evaluated_plans]
        for evaluated, each in zip(evaluated_plans, found, strict=True):
            assert max(evaluated.linear_bytes) <= max(pooled_by_group(at, each))
        return [
            (evaluated.seconds, each.result)
            for evaluated, each in zip(evaluated_plans, found, strict=True)
        ]

    spread = 0
    for (seconds, even), (others, most) in zip(measured(None), measured(4), strict=True):
        assert seconds == others
        if even.plan.mesh.size("ep") == 1:
            assert most.plan.spec.experts.capacity is None
            assert most.memory.worst.band == even.memory.worst.band
        else:
            assert most.plan.spec.experts.capacity == 4
            assert most.memory.worst.band[1] > even.memory.worst.band[1]
            spread += 1
    assert spread == 2
