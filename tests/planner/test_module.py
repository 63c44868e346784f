"""`explain MODULE` and `explain memory`: what decided, what is held, what it takes."""

from __future__ import annotations

import json

import pytest

from meshplan.api import checking, planning
from meshplan.api.planning import explain_module, search_plan
from meshplan.api.source import source_of
from meshplan.cli.app import main
from meshplan.cost.profile import without
from meshplan.errors import PlanError, SpecError
from meshplan.memory import state_bytes
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.request import cluster_of, request_of_file
from meshplan.planner.tables.whole_plan import Costed
from meshplan.units import format_bytes, format_gib
from tests.planner.test_planner import LLAMA, PLAN, job

__all__ = ["job"]

MESHES = [
    {}, {"mesh": {"pp": 2, "dp_shard": 4}}, {"mesh": {"tp": 2, "dp_shard": 4}},
    {"mesh": {"dp_replicate": 8}, "strategy": "ddp"},
    {"mesh": {"dp_shard": 8}, "strategy": "zero1"},
    {"mesh": {"dp_shard": 8}, "hardware": PLAN["hardware"] | {"headroom": 0.94}},
]  # fmt: skip


@pytest.mark.parametrize("fields", MESHES)
def test_a_whole_plan_takes_what_the_search_says(job, fields):
    path = job(LLAMA | {"hidden_size": 1024, "num_hidden_layers": 5}, **fields)
    decision = search_plan(path)
    assert decision.chosen is not None
    for evaluated in (decision.chosen, *decision.alternatives):
        costed = Costed(evaluated.plan, request_of_file(path).cluster)
        assert costed.seconds == pytest.approx(evaluated.seconds, rel=1e-12)
        assert costed.tokens == decision.tokens


def test_blocks_add_up_to_the_step(job):
    """Without a pipeline: every microbatch of every block, and what comes once."""
    path = job(mesh={"dp_shard": 4, "tp": 2}, strategy="full_shard")
    decision = search_plan(path)
    plan = decision.chosen.plan
    costed = Costed(plan, request_of_file(path).cluster)
    blocks = [costed.block(name) for name in ("", *plan.graph.blocks())]
    each = sum(block.forward_s + block.backward_s for block in blocks)
    assert plan.accumulate * each + sum(b.update_s for b in blocks) == pytest.approx(costed.seconds)
    assert all(0 < b.exposed_s < b.forward_s + b.backward_s for b in blocks)
    alone = Costed(plan, costed.cluster, without(costed.profile, network=True))
    assert alone.block("model.layers.1").exposed_s == 0
    # Full recomputation runs forward again, and keeps what the block is given.
    more = [f"batch.micro={plan.micro}", "activation_checkpointing=full"]
    again = Costed(
        checking.decide(path, [*overrides(decision.chosen.stated), *more]), costed.cluster
    )
    one, two = costed.block("model.layers.1"), again.block("model.layers.1")
    assert two.backward_s - one.backward_s > 0.5 * one.forward_s
    kept = plan.micro * 1024 * LLAMA["hidden_size"] * 2 // plan.mesh.size("tp")
    assert again.saved_bytes("model.layers.1") == pytest.approx(kept, rel=0.1)
    assert costed.saved_bytes("model.layers.1") > 5 * kept


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer": "muon"}, "Muon's step on sharded parameters"),
        ({"batch": {"seq_len": 64}}, "states no batch size"),
    ],
)  # fmt: skip
def test_what_has_no_figures_is_refused(job, fields, words):
    whole = {"mesh": {"dp_shard": 8}, "strategy": "full_shard",
             "batch": {"micro": 4, "accumulate": 1, "seq_len": 64}}  # fmt: skip
    plan = checking.decide(job(**(whole | fields)))
    with pytest.raises(PlanError, match=words):
        Costed(plan, cluster_of(plan.spec, "h100-sxm-80gb"))
    answer = explain_module(plan, "model.layers.1")
    assert answer.cost is None
    assert words in answer.why_no_cost


def test_a_module_says_what_decided_and_what_it_holds(job):
    rules = [{"match": "model.layers.{1..2}", "activation_checkpointing": "full"}]
    path = job(mesh={"pp": 2, "dp_shard": 4}, strategy="full_shard", rules=rules,
               batch={"micro": 8, "accumulate": 1, "seq_len": 1024})  # fmt: skip
    plan = checking.decide(path)
    answer = explain_module(plan, "model.layers.4.mlp")
    up = next(t for t in answer.tensors if t.placed.info.fqn.endswith("up_proj.weight"))
    assert (up.rank, answer.rank, answer.block) == (4, 4, "model.layers.4")  # The second stage.
    shape = LLAMA["intermediate_size"], LLAMA["hidden_size"]
    assert up.states.parameters_bytes == shape[0] * shape[1] * 4 // 4
    assert up.states.optimizer_bytes == 2 * up.states.parameters_bytes + 4
    assert any("stage 1 of 2" in what for what, _ in answer.facts)
    again = explain_module(plan, "model.layers.2.mlp.up_proj.weight")
    reason = dict(again.facts)["model.layers.2 is recomputed"]
    assert reason.origin.path.startswith("rules[0]")
    assert reason.text == "activation_checkpointing: full"
    assert "model.layers.4 is recomputed" not in dict(answer.facts)


@pytest.mark.parametrize("mesh", [{"dp_shard": 8}, {"dp_replicate": 2, "dp_shard": 4}])
def test_the_whole_model_holds_what_its_rank_does(job, mesh):
    plan = checking.decide(job(mesh=mesh, strategy=None, batch={"micro": 1, "accumulate": 1}))
    answer = explain_module(plan, "")
    assert answer.states == state_bytes(plan.assignment, "adamw", 0)
    parts = [t.states.total_bytes for t in answer.tensors]
    assert sum(parts) == answer.states.total_bytes
    assert "has 6 blocks" in answer.why_no_cost
    assert "in no block" in explain_module(plan, "lm_head").why_no_cost


def test_choices_of_the_planner_are_said_to_be(job, capsys):
    path = job()
    plan = checking.decide(path)
    (tensor,) = explain_module(plan, "lm_head").tensors
    assert tensor.decided_by[-1].origin.file == "the planner"
    assert main(["plan", "-f", str(path), "-q"]) == 0
    (tensor,) = explain_module(checking.decide(path), "lm_head").tensors
    assert tensor.decided_by[-1].origin.file == "plan.lock.yaml"
    capsys.readouterr()
    assert main(["explain", "lm_head", "-f", str(path)]) == 0
    assert "plan.lock.yaml strategy" in capsys.readouterr().out


def test_json_of_a_module(job, capsys):
    path = job(mesh={"dp_shard": 8}, strategy="full_shard",
               batch={"micro": 1, "accumulate": 1, "seq_len": 64})  # fmt: skip
    assert main(["explain", "model.layers.0", "-f", str(path), "--json", "-q"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == "explain/1"
    module = content["result"]["module"]
    seconds = module["seconds_per_microbatch"]
    assert seconds.keys() == {"forward_s", "backward_s", "exposed_s", "update_s"}
    assert 0 < seconds["forward_s"] < seconds["backward_s"]
    assert module["tensors"][0]["layout"] == "S(0)@dp_shard"
    assert module["tensors"][0]["decided_by"][0]["text"].startswith("strategy")
    assert main(["explain", "model.layers.0", "-f", str(path)]) == 0
    assert "time of model.layers.0 per microbatch" in capsys.readouterr().out


def test_tensors_that_are_alike_are_one_row(job, capsys):
    path = job(mesh={"dp_shard": 8}, strategy="full_shard")
    assert main(["explain", "", "-f", str(path)]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("the model: LlamaForCausalLM, under ")
    rows = [line.split()[0] for line in lines if "S(0)@dp_shard" in line]
    assert len(rows) == len(set(rows)) == 3 + 9
    assert rows[0] == "model.embed_tokens.weight"
    assert rows[1] == "model.layers.{0..5}.self_attn.q_proj.weight"
    assert main(["explain", "", "-f", str(path), "--json"]) == 0
    tensors = json.loads(capsys.readouterr().out)["result"]["module"]["tensors"]
    assert len(tensors) == 3 + 6 * 9 + 2  # What rotates is kept in two buffers.


def test_memory_is_told_from_the_textbook_to_the_byte(job, capsys):
    path = job(mesh={"dp_shard": 8}, strategy="full_shard",
               batch={"micro": 1, "accumulate": 1, "seq_len": 64})  # fmt: skip
    assert main(["explain", "memory", "-f", str(path), "--json", "-q"]) == 0
    memory = json.loads(capsys.readouterr().out)["result"]["memory"]
    steps = memory["reconciliation"]
    assert steps[0]["name"].startswith("textbook: full_shard, 16*a/n")
    assert sum(step["delta_bytes"] for step in steps) == memory["total_bytes"]
    assert memory["total_bytes"] == checking.estimate_memory(path).worst.peak.total_bytes
    assert main(["explain", "memory", "-f", str(path)]) == 0
    text = capsys.readouterr().out
    assert "from the textbook formula to this estimate" in text
    assert main(["plan", "-f", str(path), "--json", "-q"]) == 0
    peak = json.loads(capsys.readouterr().out)["result"]["peak_bytes"]
    assert memory["band"][1] == peak
    title = text.partition("\n")[0]
    assert title.startswith("ranks 0-7, in backward")
    assert f", at most {format_gib(peak).split()[0]}, of 79.1 GiB  ok, " in title
    error = next(line for line in text.splitlines() if line.startswith("  error "))
    assert f" {format_bytes(peak)}  margin of error" in error
    hardware = PLAN["hardware"] | {"headroom": 0.99}
    path = job(mesh={"dp_shard": 8}, strategy="full_shard", hardware=hardware,
               batch={"micro": 1, "accumulate": 1, "seq_len": 1024})  # fmt: skip
    assert main(["explain", "memory", "-f", str(path), "--json", "-q"]) == 1


def test_a_name_that_nothing_has_is_refused(job, capsys):
    path = job(mesh={"dp_shard": 8}, strategy="full_shard")
    with pytest.raises(SpecError, match="did you mean 'lm_head'"):
        explain_module(checking.decide(path), "lm_hea")
    assert main(["explain", "model.layers.77", "-f", str(path)]) == 2


def test_the_block_of_a_python_model_is_timed_by_a_trace(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "version: 1\nmodel: {entry: meshplan.runtime.demo_model:build}\nmesh: {dp_shard: 4}\n"
        "hardware: {nodes: 1, gpus_per_node: 4, gpu: h100-sxm-80gb}\nstrategy: full_shard\n"
        "batch: {micro: 4, seq_len: 128}\nactivation_checkpointing: none\n"
    )
    plan = checking.decide(path)
    answer = planning.explain_module(plan, "layers.1", source=source_of(path, ()))
    step_s = search_plan(path).chosen.seconds
    blocks = len(plan.graph.blocks())
    cost = answer.cost
    assert 0.5 * step_s < blocks * (cost.forward_s + cost.backward_s) < step_s
    assert answer.saved_bytes is None
    assert "which has no config" in planning.explain_module(plan, "layers.1").why_no_cost
