"""The planner from a plan file to its lock: what it picks fits, and nothing it left is better."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshplan
from meshplan.api import checking
from meshplan.api.planning import search_plan
from meshplan.cli.app import main
from meshplan.cost.config import plan_as_config
from meshplan.cost.grid import OPTIONS
from meshplan.errors import MeshplanError, PlanError, SpecError
from meshplan.model.blueprint import from_config
from meshplan.planner.lock.lock import lock_path, overrides, read, write
from meshplan.planner.objectives.complete import complete_spec
from meshplan.planner.objectives.fastest import fastest_of
from meshplan.planner.problem.decision import Evaluated
from meshplan.planner.problem.overrides import BlockChoice, patterns
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of
from meshplan.planner.solve.config import Candidate, solve_config
from meshplan.spec.reader import load_spec
from tests.helpers import models
from tests.helpers.compiled_figures import check_compiled_figures
from tests.helpers.pooled import pooled_bytes

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
PLAN: dict[str, Any] = {
    "version": 1,
    "model": {"config": "config.json"},
    "hardware": {"nodes": 2, "gpus_per_node": 4, "gpu": "h100-sxm-80gb", "inter": "50GB/s"},
    "mesh": "auto",
    "strategy": "auto",
    "precision": "bf16-mixed",
    "batch": {"global": 64, "seq_len": 1024},
    "loss_chunks": 1,
    "allocator": "default",
}
"""With these stated a search is several times as fast; `OPEN` leaves them to the planner."""
OPEN: dict[str, Any] = {"loss_chunks": None, "allocator": None}


@pytest.fixture
def job(tmp_path):
    """Writes a plan file with its model; gives its path."""

    def write(config: dict[str, Any] = LLAMA, **fields: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config))
        path = tmp_path / "plan.yaml"
        stated = {key: value for key, value in (PLAN | fields).items() if value is not None}
        path.write_text(json.dumps(stated))
        return path

    return write


def job_of(path: Path) -> PlanningProblem:
    def load(more: Any) -> meshplan.Spec:
        return load_spec(path, more)

    graph = from_config(path.with_name("config.json"))
    return PlanningProblem(request_of(load, graph))


def test_nothing_that_fits_is_faster(job):
    """Against every row, each measured with every number of blocks at every level."""
    config = LLAMA | {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2816}
    hardware = PLAN["hardware"] | {"headroom": 0.94}  # Leaves 4.7 GiB.
    batch = {"global": 64, "seq_len": 1024, "micro": 8}
    at = job_of(job(config, mesh={"dp_shard": 8}, strategy=None, hardware=hardware, batch=batch))
    decision = fastest_of(at)
    numbers = at.table_at(at.profile)
    best, num_fit, num_over = float("inf"), 0, 0
    blocks = numbers.order.count(1)
    for row in range(len(numbers.grid)):
        for full in range(blocks + 1):
            for chosen in range(blocks + 1 - full):
                for reshard in (0, 1):
                    option_counts = [0] * len(OPTIONS)
                    for again, count in enumerate((blocks - full - chosen, chosen, full)):
                        option_counts[OPTIONS.index((again, reshard))] = count
                    only_first = tuple(int(number == 0) for number in range(len(OPTIONS)))
                    whole = (only_first, tuple(option_counts), only_first)
                    seconds = sum(
                        count * numbers.seconds[row, kind, option]
                        for kind, counts in enumerate(whole)
                        for option, count in enumerate(counts)
                        if count
                    )
                    step = float(numbers.grid["microbatches"][row] * seconds)
                    if not np.isfinite(step):
                        continue
                    candidate = Candidate(row, step, (0, blocks + 2), (whole,), (0.0,))
                    if at.measure(numbers, candidate).fits:
                        best, num_fit = min(best, step), num_fit + 1
                    else:
                        num_over += 1
    assert num_fit > 1
    assert num_over > 1
    assert decision.best_s <= best * (1 + 1e-9)
    assert decision.chosen is not None
    assert decision.chosen.seconds <= decision.best_s * 1.02


@pytest.mark.parametrize(
    ("size", "near"), [({}, 0.5), pytest.param(LARGE, 0.9, marks=pytest.mark.wide)]
)
def test_bounds_on_memory_are_below_what_is_replayed(job, size, near):
    """What rules a row out must never be above the truth, nor far below where sizes are real."""
    at = job_of(job(LLAMA | size))
    at.capacity = float("inf")
    numbers = at.table_at(at.profile)
    rng = np.random.default_rng(0)
    shares = []
    grid = numbers.grid
    plain = np.flatnonzero((grid["pp"] == 1) & (grid["tp"] == 1))  # Every mode, one microbatch too.
    for row in {*plain, *rng.choice(len(grid), 12, replace=False)}:
        offered = np.isfinite(numbers.seconds[row]).any(axis=0)
        for option in rng.choice(np.flatnonzero(offered), 2):
            mask = [number == option for number in range(len(OPTIONS))]
            one = solve_config(numbers.only(int(row), mask), 0, float("inf"))
            if one is None:
                continue
            candidate = Candidate(
                int(row), one.seconds, one.ends, one.option_counts, one.linear_bytes
            )
            measured = at.measure(numbers, candidate)
            assert not measured.why
            truth = pooled_bytes(at, measured)
            assert max(one.linear_bytes) <= truth, (numbers.grid[row], OPTIONS[option])
            shares.append(max(one.linear_bytes) / truth)
    assert np.median(shares) > near


def test_a_plan_of_a_configuration_is_that_configuration(job):
    """In every mode, in mixed precision, where FSDP2 runs ddp too; with and without a pipeline."""
    at = job_of(job())
    at.capacity = float("inf")
    grid, seen = at.table.grid, set()
    for row in np.flatnonzero((grid["tp"] == 1) & (grid["cp"] == 1)):
        key = (int(grid["mode"][row]), int(grid["pp"][row]) > 1)
        if key in seen:
            continue
        candidate = solve_config(at.table, int(row), float("inf"))
        measured = at.measure(at.table, candidate)
        if isinstance(measured.result, Evaluated):
            seen.add(key)
            assert plan_as_config(measured.result.plan)[0] == grid[row]
    assert {mode for mode, _ in seen} == {0, 1, 2}
    assert {has_stages for _, has_stages in seen} == {False, True}


def test_the_lock_is_the_same_byte_for_byte_and_makes_the_plan_whole(job, capsys):
    path = job()
    locks = []
    for _ in range(2):
        assert main(["plan", "-f", str(path), "-q"]) == 0
        locks.append(lock_path(path).read_bytes())
    assert locks[0] == locks[1]
    capsys.readouterr()
    decided = checking.decide(path)
    lock = read(lock_path(path))
    assert lock is not None
    assert {axis.name: axis.size for axis in decided.mesh} == lock.chosen["mesh"]
    assert decided.micro == lock.chosen["batch.micro"]
    assert main(["check", "-f", str(path)]) == 0
    assert "planning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (LLAMA, {"batch": {"global": 32, "seq_len": 1024}}, "another state of this file"),
        (LLAMA | {"num_hidden_layers": 5}, {}, "another model"),
    ],
)
def test_a_lock_of_something_else_is_not_used(job, capsys, config, fields, words):
    path = job()
    assert main(["plan", "-f", str(path), "-q"]) == 0
    job(config, **fields)
    assert main(["check", "-f", str(path)]) == 0
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "lock: 2", "lock: 1\ninputs: {}", "[1, 2", "lock: 1\n: :"])
def test_a_broken_lock_is_refused(job, text):
    path = job()
    lock_path(path).write_text(text)
    with pytest.raises(SpecError, match="not a lock file"):
        checking.decide(path)


def test_json_has_the_fields_of_the_schema(job, capsys):
    assert main(["plan", "-f", str(job()), "--json", "--dry-run", "-q"]) == 0
    content = json.loads(capsys.readouterr().out)
    result = content["result"]
    assert content["schema"] == "plan/1"
    for name, kind in {
        "mesh": dict, "strategy": str, "batch": dict, "activation_checkpointing": dict,
        "step_s": float, "tokens_per_s_per_gpu": float, "mfu": float, "peak_bytes": int,
        "limit_bytes": int, "fits": bool, "gap": float, "num_configs": int, "search_s": float,
        "ladder": dict, "alternatives": list, "rejected": list,
    }.items():  # fmt: skip
        assert isinstance(result[name], kind), name
    ladder = result["ladder"]
    assert ladder["roofline_s"] <= ladder["no_network_s"] <= ladder["plan_s"]
    assert ladder["no_memory_limit_s"] <= ladder["plan_s"]
    assert result["batch"]["global"] == 64
    assert result["fits"]
    assert result["peak_bytes"] <= result["limit_bytes"]
    assert np.prod(list(result["mesh"].values())) == 8
    assert {"what", "why"} == set(result["rejected"][0])


def test_a_pin_is_held(job):
    path = job(mesh={"dp_replicate": 2, "dp_shard": "auto"}, strategy=None)
    chosen = search_plan(path).chosen
    assert chosen is not None
    assert chosen.stated["mesh"] == {"dp_replicate": 2, "dp_shard": 4}
    path = job(strategy="zero1", activation_checkpointing="full")
    chosen = search_plan(path).chosen
    assert chosen is not None
    assert (chosen.stated["strategy"], chosen.stated["mesh"]) == ("zero1", {"dp_shard": 8})
    assert chosen.stated["activation_checkpointing"] == "full"
    path = job(batch={"global": 64, "seq_len": 1024, "micro": 4})
    chosen = search_plan(path).chosen
    assert chosen is not None
    assert chosen.stated["batch.micro"] == 4


def test_rules_are_pins(job):
    """What a rule says of single blocks stays, and is counted."""
    rules = [
        {"match": "model.layers.{1..2}", "activation_checkpointing": "full"},
        {"match": "model.layers.4", "reshard_after_forward": False},
    ]
    path = job(mesh={"dp_shard": 8}, strategy=None, rules=rules)
    free = search_plan(job(mesh={"dp_shard": 8}, strategy=None)).best_s
    path = job(mesh={"dp_shard": 8}, strategy=None, rules=rules)
    decision = search_plan(path)
    assert decision.chosen is not None
    a = decision.chosen.plan.assignment
    assert {f for f, r in a.recompute.items() if r.policy.mode == "full"} >= {
        "model.layers.1", "model.layers.2"
    }  # fmt: skip
    assert a.units["model.layers.4"].reshard_after_forward is False
    assert decision.best_s > free * 1.01


@pytest.mark.parametrize(
    ("fields", "mesh"),
    [
        ({"strategy": "ddp", "precision": "bf16-true"}, None),
        ({"loss_parallel": True, "tp_plan": "auto"}, None),
        ({"mesh": {"tp": 8}, "strategy": None, "loss_parallel": True}, {"tp": 8}),
        ({"hardware": {"nodes": 1, "gpus_per_node": 1, "gpu": "h100-sxm-80gb"}}, None),
        ({"hardware": {"nodes": 1, "gpus_per_node": 6, "gpu": "h100-sxm-80gb"},
          "batch": {"global": 48, "seq_len": 1000}}, None),
        ({"mesh": {"pp": 2, "dp_shard": "auto"}, "strategy": None, "clip_grad_norm": 1.0},
         {"pp": 2, "dp_shard": 4}),
        ({"optimizer": "sgd", "mesh": {"dp_shard": 8}}, {"dp_shard": 8}),
    ],
)  # fmt: skip
def test_what_else_a_plan_says_is_kept(job, fields, mesh):
    """Every plan that is given is the file's with the choices on top, whole and certified."""
    path = job(LLAMA | {"num_key_value_heads": 8}, **fields)
    decision = search_plan(path)
    chosen = decision.chosen
    assert chosen is not None
    assert chosen.memory.fits
    assert mesh is None or chosen.stated["mesh"] == mesh
    world = PLAN | fields
    assert chosen.plan.mesh.world_size == (
        world["hardware"]["nodes"] * world["hardware"]["gpus_per_node"]
    )
    if chosen.plan.mesh.size("tp") == 1:
        assert not chosen.plan.spec.loss_parallel
    again = checking.estimate_memory(path, overrides(chosen.stated))
    assert again.worst.band == chosen.memory.worst.band


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"hardware": PLAN["hardware"] | {"headroom": 0.94}},
        {"mesh": {"pp": 2, "dp_shard": "auto"}, "pipeline": {"schedule": "1F1B"}},
    ],
)
def test_compiled_blocks_are_planned_as_faster_within_the_memory_of_eager_ones(job, fields):
    eager = search_plan(job(**fields))
    compiled = search_plan(path := job(compile=True, **fields))
    check_compiled_figures(eager, compiled)
    found = checking.estimate_memory(path, overrides(compiled.chosen.stated))
    assert found.bound
    assert found.worst.band == compiled.chosen.memory.worst.band
    assert "without a compiler" in found.bound


def test_nothing_fits(job, capsys):
    path = job(hardware=PLAN["hardware"] | {"headroom": 0.99})
    assert main(["plan", "-f", str(path), "--dry-run"]) == 1
    assert "no configuration fits into 0.8 GiB" in capsys.readouterr().out
    assert not lock_path(path).exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch": {"seq_len": 1024}}, "states no samples per step"),
        ({"batch": {"global": 64}}, "states no sequence length"),
        ({"hardware": None}, "states no hardware"),
        ({"hardware": {"nodes": 1, "gpus_per_node": 8, "memory": "80GiB"}}, "speed is unknown"),
        ({"mesh": [2, 4]}, "bare mesh"),
        ({"solve": {"objective": "speed"}}, "'speed' is not an objective"),
        (
            {"activation_checkpointing": {"mode": "selective", "save": ["mm"]}},
            "a list of operations to save",
        ),
        ({"rules": [{"match": "model.layers.3.mlp", "stage": 1}]}, "splits stages between blocks"),
        (
            {"rules": [{"match": "model.layers.3", "reshard_after_forward": 2}]},
            "resharded over fewer ranks",
        ),
        ({"rules": [{"match": "model.layers.3", "place": "replicate"}]}, "along the same axes"),
        ({"rules": [{"match": "model.layers.3", "unit": False}]}, "blocks that are not units"),
        (
            {"batch": {"micro": 2, "accumulate": 1, "seq_len": 64}},
            "a step has 2 to 16 samples on the meshes that it allows",
        ),
        ({"rules": [{"match": "lm_head", "stage": 0}]}, "into the last stage"),
        (
            {
                "mesh": {"pp": 2, "dp_shard": 4},
                "batch": {"micro": 4, "accumulate": 2, "seq_len": 64},
            },
            "gradient accumulation around a pipeline",
        ),
        ({"mesh": {"dp_shard": "auto", "ep": "2 in dp_shard"}}, "no module of the model stacks"),
        ({"batch": {"global": 7, "seq_len": 64}, "mesh": {"dp_shard": 8}}, "7 is not a multiple"),
    ],
)
def test_what_cannot_be_planned_is_said(job, fields, words):
    with pytest.raises(MeshplanError, match=words):
        search_plan(job(**fields))


def test_a_step_of_one_microbatch_is_planned_if_the_mesh_says_how_many_ranks_read(job):
    fields = {"mesh": {"dp_shard": 8}, "strategy": "full_shard"}
    path = job(batch={"micro": 4, "seq_len": 64}, **fields)
    decision = search_plan(path)
    assert decision.chosen is not None
    assert decision.chosen.plan.accumulate == 1
    assert decision.samples == 32
    found = checking.estimate_memory(path, overrides(decision.chosen.stated))
    assert found.worst.band == decision.chosen.memory.worst.band


def test_adafactor_on_whole_parameters_is_planned(job):
    fields = {"mesh": {"dp_replicate": 8}, "strategy": "ddp", "precision": "32-true"}
    decision = search_plan(path := job(optimizer="adafactor", **fields))
    assert decision.chosen is not None
    found = checking.estimate_memory(path, overrides(decision.chosen.stated))
    assert found.worst.band == decision.chosen.memory.worst.band


def test_check_knows_that_adafactor_needs_whole_parameters(job):
    path = job(optimizer="adafactor", mesh={"dp_shard": 8}, strategy="full_shard")
    problems = checking.check_plan(path).problems
    assert "does not support sharded parameters" in problems[0].what


def test_a_time_limit_gives_an_honest_answer(job, capsys):
    path = job(solve={"time_limit": "0.000001s"})
    assert main(["plan", "-f", str(path), "--dry-run", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["fits"], result["is_whole"]) == (False, False)


def test_a_busy_machine_does_not_take_the_search_its_seconds(job, monkeypatch):
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(hours))
    decision = search_plan(job())
    assert decision.chosen is not None
    assert not decision.is_whole


@pytest.mark.parametrize(
    "words",
    [["estimate", "--trace"], pytest.param(["verify", "--ranks", "4"], marks=pytest.mark.wide)],
)
def test_the_other_verbs_go_by_the_lock(job, capsys, words):
    config = models.build("hf_llama").config.to_dict()
    path = job(
        config,
        hardware={"nodes": 1, "gpus_per_node": 4, "gpu": "h100-sxm-80gb"},
        batch={"global": 16, "seq_len": models.SEQ_LEN},
    )
    assert main(["plan", "-f", str(path), "-q"]) == 0
    assert main([words[0], "-f", str(path), *words[1:], "--json"]) == 0
    out, err = capsys.readouterr()
    assert "planning" not in err
    assert json.loads(out.splitlines()[-1])["result"]


def parallel_with_lock(path: str, states: str) -> list[Any]:
    model = meshplan.parallelize(models.build("hf_llama"), path)
    plan = model.meshplan.plan
    meshplan.save(states, model, step=1)
    return [str(plan.mesh), plan.micro, plan.accumulate]


def test_parallelize_reads_the_lock_and_states_record_it(job, pool, capsys, tmp_path):
    path = job(
        models.build("hf_llama").config.to_dict(),
        hardware={"nodes": 1, "gpus_per_node": 4, "gpu": "h100-sxm-80gb"},
        batch={"global": 16, "seq_len": models.SEQ_LEN},
    )
    assert main(["plan", "-f", str(path), "-q"]) == 0
    content = dict(read(lock_path(path)).content)
    del content["hash"]
    # Nobody would plan this: that it is used shows that the lock is.
    content["chosen"] = {
        "mesh": {"dp_replicate": 2, "dp_shard": 2}, "strategy": "hybrid_shard",
        "batch.micro": 2, "batch.accumulate": 2, "activation_checkpointing": "full",
    }  # fmt: skip
    write(lock_path(path), content)
    expected = ["dp_replicate 2 x dp_shard 2", 2, 2]
    states = str(tmp_path / "states")
    assert pool(4).run(parallel_with_lock, str(path), states) == [expected] * 4
    lock = read(lock_path(path))
    assert lock is not None
    known = lock.content["hash"]
    capsys.readouterr()
    assert main(["state", states]) == 0
    assert f"  lock       {known}\n" in capsys.readouterr().out
    assert main(["state", states, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["states"][0]["lock"] == known


@pytest.mark.wide
def test_what_is_left_open_without_a_config_is_planned_for_the_model_itself(job):
    path = job(model=None)
    found = checking.check_plan(path, model="meshplan.runtime.demo_model:build")
    assert found.problems == ()
    assert found.plan is not None
    assert found.plan.mesh.world_size == 8
    assert found.notes[-1] == "there is no plan.lock.yaml: planning"


def test_what_is_left_open_without_any_model_says_what_to_do(job):
    path = job(model=None)
    graph = replace(from_config(path.with_name("config.json")), config={})
    with pytest.raises(PlanError) as caught:
        complete_spec(path, lambda more: load_spec(path, more), graph)
    (problem,) = caught.value.problems
    assert problem.what == (
        "mesh and strategy are left to the planner, and there is no plan.lock.yaml"
    )
    assert problem.fix.startswith("add the model to the plan, such as model: {config: PATH}")


def test_names_are_folded_into_patterns():
    assert patterns(["a.0", "a.1", "a.2"]) == "a.{0..2}"
    assert patterns(["a.0", "a.2", "b.c", "a.3"]) == ["b.c", "a.0", "a.{2..3}"]
    assert BlockChoice("a.0", 0, 1).name == "a.0"


def test_what_stages_hand_on_takes_its_time(job):
    """As much longer as the network is slower, on the one cut that it crosses, there and back."""
    once = {}
    for speed in (50, 5):
        at = job_of(job(hardware=PLAN["hardware"] | {"inter": f"{speed}GB/s"}))
        grid = at.table.grid
        rows = (grid["pp"] == 2) & (grid["tp"] == 1) & (grid["micro"] == 4)
        once[speed], flat = at.table.once_s[rows], at.table.once_s[grid["pp"] == 1]
        assert not flat.any()
    sent = 4 * 1024 * LLAMA["hidden_size"] * 2
    assert (once[5] - once[50] >= 2 * sent * (1 / 5e9 - 1 / 50e9)).all()


@pytest.mark.parametrize("seq_len", [1024, 1_000_000, 1_000_000_000])
def test_what_stages_hand_on_is_held_until_its_gradient_comes(job, seq_len):
    """The hidden states of one microbatch, however many bytes; nothing without stages."""
    at = job_of(job(batch={"global": 64, "seq_len": seq_len}))
    grid, sent = at.table.grid, at.table.sent
    rows = (grid["pp"] > 1) & (grid["tp"] == 1)
    assert len({*grid["micro"][rows]}) > 1
    assert (sent[rows] == grid["micro"][rows] * (seq_len * LLAMA["hidden_size"] * 2.0)).all()
    assert not sent[grid["pp"] == 1].any()


def test_all_that_a_plan_lacks_is_said_at_once(job):
    """Otherwise the speed between nodes is only asked for once the batch is stated."""
    path = job(hardware={"nodes": 2, "gpus_per_node": 8, "gpu": "l40s-48gb"}, batch=None)
    with pytest.raises(PlanError) as raised:
        search_plan(path)
    whats = [problem.what for problem in raised.value.problems]
    assert len(whats) == 3
    for what, words in zip(whats, ("samples per step", "length", "between nodes"), strict=True):
        assert words in what
