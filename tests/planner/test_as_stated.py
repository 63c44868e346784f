"""Plans of configs that the planner prices as they are stated, because it cannot search their like.

Which seeded bug would this catch? Seconds of another schedule than the plan's; a pipeline that runs
twice and is counted once; gathers of the root unit taken to be hidden; what a `save:` list does not
save counted as saved; the search taking such a plan for a usual one.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from meshplan.api import checking, planning
from meshplan.api.planning import search_plan
from meshplan.cli.app import main
from meshplan.cost.chain import with_optimizer
from meshplan.cost.config import chain_of_plan
from meshplan.cost.profile import without
from meshplan.cost.simulate import simulate
from meshplan.errors import PlanError
from meshplan.layout.schedules import SCHEDULES
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.request import cluster_of
from meshplan.planner.tables import whole_plan
from meshplan.planner.tables.whole_plan import Costed
from meshplan.traffic.forecast import forecast
from tests.cost.test_step import COUNTING, wire

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 8192, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
PIPED = {"mesh": {"pp": 4, "dp_shard": 2}, "strategy": "zero2"}
DDP = {"mesh": {"dp_replicate": 8}, "strategy": "ddp", "precision": "bf16-true"}
SHARDED = {"mesh": {"dp_shard": 8}, "strategy": "full_shard"}


def piped(schedule, microbatches=8, **more):
    return {**PIPED, "pipeline": {"schedule": schedule, "microbatches": microbatches, **more}}


STATED = {
    "ZBV": (piped("ZBVZeroBubble"), "the schedule ZBVZeroBubble"),
    "DualPipeV": (piped("DualPipeV"), "the schedule DualPipeV"),
    "breadth first": (piped("LoopedBFS", virtual=2), "the schedule LoopedBFS"),
    "stages a rank": (
        piped(
            "Interleaved1F1B",
            virtual=2,
            split=[[f"model.layers.{first}"] for first in (0, 3, 5, 7, 9, 11, 13, 15)],
        ),
        "stated stages of which a rank has several",
    ),
    "accumulation": (
        {**piped("1F1B"), "batch": {"micro": 8, "accumulate": 2, "seq_len": 256}},
        "gradient accumulation around a pipeline",
    ),
    "a list to save": (
        {**SHARDED, "activation_checkpointing": {"mode": "selective", "save": ["mm"]}},
        "a list of operations to save",
    ),
    "reshard": (
        {**SHARDED, "rules": [{"match": "model.layers.*", "reshard_after_forward": 2}]},
        "resharding over fewer ranks",
    ),
    "a block that is replicated": (
        {**SHARDED, "rules": [{"match": "model.layers.3", "place": "replicate"}]},
        "units that are not all sharded along the same axes",
    ),
    "an embedding that is replicated": (
        {**SHARDED, "rules": [{"match": "model.embed_tokens", "place": "replicate"}]},
        "units that are not all sharded along the same axes",
    ),
    "a block on the host": (
        {**SHARDED, "rules": [{"match": "model.layers.3", "offload": "params"}]},
        "offloaded parameters of single modules",
    ),
    "no unit": (
        {**SHARDED, "rules": [{"match": "model.layers.3", "unit": False}]},
        "blocks that are not units",
    ),
}


@pytest.fixture
def write(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def written(fields, nodes=1):
        plan = {
            "version": 1,
            "model": {"config": "config.json"},
            "hardware": {"nodes": nodes, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
            "precision": "bf16-mixed",
            "batch": {"micro": 8, "accumulate": 1, "seq_len": 256},
            "activation_checkpointing": "none",
            **fields,
        }
        path = tmp_path / "plan.yaml"
        path.write_text(json.dumps(plan))
        return path

    return written


def costed(path):
    plan = checking.decide(path)
    return Costed(plan, cluster_of(plan.spec, "h100-sxm-80gb"))


@pytest.mark.parametrize("name", STATED)
def test_a_stated_plan_is_priced(name, write, capsys):
    fields, why = STATED[name]
    path = write(fields)
    decision = search_plan(path)
    assert decision.chosen is not None
    assert decision.num_configs == 1
    assert why in decision.rejected[0].why
    assert decision.chosen.seconds == costed(path).seconds
    assert math.isfinite(decision.chosen.seconds)
    found = checking.estimate_memory(path)
    assert decision.chosen.memory.worst.band == found.worst.band
    assert main(["plan", "-f", str(path), "-q", "--dry-run"]) == 0
    assert "the plan as it is stated" in capsys.readouterr().out


@pytest.mark.parametrize("name", STATED)
def test_what_is_left_open_needs_a_search(name, write):
    """The search does not take such a plan for one that it has figures for."""
    fields, _ = STATED[name]
    with pytest.raises(PlanError) as error:
        search_plan(write({**fields, "strategy": "auto"}))
    assert "priced as it stands" in error.value.problems[0].fix


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"mesh": "auto", "strategy": "auto"}, id="everything"),
        pytest.param({"mesh": {"pp": 2, "dp_shard": 4}, "strategy": "zero1",
                      "pipeline": {"schedule": "Interleaved1F1B", "virtual": 3}}, id="stages"),
        pytest.param({"mesh": {"dp_shard": 4, "tp": 2}, "strategy": "auto"}, id="tp"),
        pytest.param({"mesh": {"dp_replicate": 2, "dp_shard": 4}}, id="hybrid"),
    ],
)  # fmt: skip
def test_a_choice_written_as_a_plan_is_priced_as_it_was_chosen(fields, write):
    """So are the alternatives: nothing that `plan` proposes may be refused once it is typed in."""
    batch = {"global": 64, "micro": "auto", "seq_len": 2048}
    path = write({**fields, "batch": batch, "activation_checkpointing": "auto"})
    decision = search_plan(path)
    for each in (decision.chosen, *decision.alternatives):
        again = search_plan(path, overrides(each.stated)).chosen
        assert again.seconds == pytest.approx(each.seconds, rel=1e-9)
        assert again.memory.worst.band == each.memory.worst.band


def test_what_a_stated_plan_leaves_out_has_its_default(write):
    path = write({"mesh": {"pp": 4, "dp_shard": 2}, "pipeline": {"schedule": "ZBVZeroBubble"}})
    decision = search_plan(path)
    assert decision.num_configs == 1
    assert decision.chosen.plan.digest() == checking.decide(path).digest()
    found = checking.estimate_memory(path)
    assert decision.chosen.memory.worst.band == found.worst.band


def test_a_plan_that_the_search_completes_is_searched(write):
    """With tp, the planner adds the styles that a plan leaves out."""
    path = write({"mesh": {"dp_shard": 4, "tp": 2}, "strategy": "full_shard"})
    decision = search_plan(path)
    assert decision.chosen.stated["tp_plan"] == "auto"


def test_what_does_not_fit_is_said(write):
    path = write({**piped("ZBVZeroBubble"), "batch": {"micro": 8, "seq_len": 262144}})
    with pytest.raises(PlanError, match=r"the plan as stated does not fit: .* of 79\.1 GiB"):
        search_plan(path)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_a_simulated_step_takes_as_long_as_the_closed_form(schedule, write, monkeypatch):
    several = {} if schedule in ("GPipe", "1F1B") else {"virtual": 2}
    path = write(piped(schedule, 16, **several) | {"batch": {"micro": 16, "seq_len": 256}})
    closed = costed(path).seconds
    monkeypatch.setattr(whole_plan, "CLOSED_FORMS", frozenset())
    assert costed(path).seconds == pytest.approx(closed, rel=0.05)


def test_a_pipeline_that_runs_twice_takes_twice_as_long(write):
    once = costed(write(piped("1F1B"))).seconds
    batch = {"micro": 8, "accumulate": 2, "seq_len": 256}
    twice = costed(write({**piped("1F1B"), "batch": batch})).seconds
    batch = {"micro": 16, "accumulate": 1, "seq_len": 256}
    longer = costed(write({**piped("1F1B", 16), "batch": batch})).seconds
    # The optimizer steps once, and the second run waits once more for its first microbatch.
    assert longer < twice < 2 * once


def test_the_stages_of_a_v_are_where_the_schedule_has_them(write):
    """With stages 0 and 7 on the first rank, a slow last stage delays the first rank, too."""
    found = costed(write(piped("ZBVZeroBubble")))
    stages = found.plan.assignment.stages
    assert [stages.rank_of(place.stage) for place in found._places[:2]] == [0, 0]
    assert stages.rank_of(found._places[-1].stage) == 0
    assert sum(place.stage == 7 for place in found._places) >= 2


def test_the_root_unit_is_waited_for(write):
    usual = costed(write(SHARDED))
    rules = [{"match": "model.layers.{3..6}", "unit": False}]
    rooted = costed(write({**SHARDED, "rules": rules}))
    assert rooted.seconds > usual.seconds
    silent = [each.with_profile(without(usual.profile, network=True)) for each in (usual, rooted)]
    assert silent[0].seconds == pytest.approx(silent[1].seconds, rel=1e-9)
    three, nine = (rooted.block(f"model.layers.{number}") for number in (3, 9))
    assert three.exposed_s > nine.exposed_s


def test_parameters_are_gathered_from_the_ranks_that_have_them(write):
    rules = [{"match": "model.layers.*", "reshard_after_forward": 8}]
    sharded = {"mesh": {"dp_shard": 32}, "strategy": "full_shard"}
    usual = costed(write(sharded, nodes=4))
    near = costed(write({**sharded, "rules": rules}, nodes=4))
    assert near.seconds < usual.seconds
    one, other = (each.block("model.layers.5") for each in (usual, near))
    assert other.forward_s == one.forward_s
    assert other.backward_s < one.backward_s


@pytest.mark.parametrize("strategy", ["full_shard", "zero2", "zero1", "hybrid_shard"])
@pytest.mark.parametrize("match", ["model.layers.{2..3}", "model.embed_tokens", "**.mlp"])
def test_the_bytes_of_units_along_other_axes_are_those_of_the_forecast(strategy, match, write):
    """Without what computation hides, and at a byte a second, seconds are bytes."""
    mesh = {"dp_replicate": 2, "dp_shard": 4} if "hybrid" in strategy else {"dp_shard": 8}
    fields = {
        "mesh": mesh, "strategy": strategy, "rules": [{"match": match, "place": "replicate"}],
        "batch": {"micro": 1, "accumulate": 3, "seq_len": 64},
    }  # fmt: skip
    plan = checking.decide(write(fields))
    found = Costed(plan, cluster_of(plan.spec, "h100-sxm-80gb"))
    sent = 0.0
    for place in found.with_profile(COUNTING)._places_of(COUNTING):
        sent += 3 * (place.forward_s + place.backward_s) + place.once_s
    usual = wire(forecast(plan), plan.mesh)
    assert sent == pytest.approx(usual, rel=1e-9)


def test_a_block_on_the_host_takes_as_long_as_with_all_of_them_there(write):
    rules = [{"match": "model.layers.3", "offload": "params"}]
    usual, one, all_of_them = (
        costed(write({**SHARDED, **more})) for more in ({}, {"rules": rules}, {"offload": "params"})
    )
    assert one.block("model.layers.3") == all_of_them.block("model.layers.3")
    assert one.block("model.layers.4") == usual.block("model.layers.4")
    assert usual.seconds < one.seconds < all_of_them.seconds


def test_what_a_list_does_not_save_is_computed_again(write):
    def seconds(recompute):
        return costed(write({**SHARDED, "activation_checkpointing": recompute})).seconds

    default = seconds("selective")
    listed = seconds({"mode": "selective", "save": ["mm", "bmm", "conv", "sdpa"]})
    products = seconds({"mode": "selective", "save": ["mm"]})
    attention = seconds({"mode": "selective", "save": ["sdpa"]})
    assert listed == default
    assert default < products < attention < seconds("full")


def test_halves_of_a_backward_reduce_gradients_once(write):
    """As under the schedule that is searched: parameters stay gathered, whatever the strategy."""
    found = [
        costed(write({**piped("ZBVZeroBubble"), "strategy": strategy}))
        for strategy in ("zero2", "full_shard")
    ]
    assert found[0].seconds == found[1].seconds
    # A reduction in each backward, as 1F1B under zero2 has it, is no part of the backward.
    free = [each.with_profile(without(each.profile, network=True)) for each in found]
    stages = zip(found[0].stage_seconds.backward_s, free[0].stage_seconds.backward_s, strict=True)
    assert all(one == pytest.approx(other, rel=1e-9) for one, other in stages)


def test_a_replicated_block_is_stepped_on_by_every_rank(write):
    fields, _ = STATED["a block that is replicated"]
    found = costed(write(fields))
    three, four = (
        next(float(place.found.update_s[0]) for place in found._places if place.name == name)
        for name in ("model.layers.3", "model.layers.4")
    )
    assert three == pytest.approx(8 * four)


def test_what_sends_take_longer_than_computation_is_told(write, monkeypatch):
    """Each rank of a V has two stages, which share its link."""
    path = write(piped("ZBVZeroBubble"))
    usual = costed(path)
    slow = usual.with_profile(replace(usual.profile, intra_bytes_per_s=1e7))
    sends = 2 * 8 * 2 * slow.stage_seconds.crossing_s
    assert slow.seconds > sends
    computes = 8 * sum(place.compute_s for place in slow._places) / 4
    again = slow.with_profile(slow.profile)
    monkeypatch.setattr(whole_plan, "unhidden_seconds", lambda *_: [0.0])
    assert slow.seconds - again.seconds == pytest.approx(sends - computes, rel=1e-9)


def test_all_units_replicated_alike_are_no_shards(write):
    rules = [{"match": "**", "place": "replicate"}]
    fields = {"activation_checkpointing": {"mode": "selective", "save": ["mm"]}}
    replicated = costed(write({**SHARDED, "rules": rules, **fields}))
    ddp = {**SHARDED, "mesh": {"dp_replicate": 8}, "strategy": "ddp"}
    assert replicated.seconds == pytest.approx(costed(write({**ddp, **fields})).seconds, rel=0.05)
    sharded = costed(write({**SHARDED, **fields}))
    assert replicated.phases["optimizer"] == pytest.approx(8 * sharded.phases["optimizer"])


@pytest.mark.parametrize(
    "rule",
    [
        {"match": "**.mlp", "unit": True, "reshard_after_forward": False},
        {"match": "model.embed_tokens", "unit": True},
    ],
)
def test_a_unit_that_is_resharded_otherwise_than_its_block_has_no_seconds(rule, write):
    path = write({**SHARDED, "rules": [rule]})
    with pytest.raises(PlanError, match="resharded otherwise"):
        costed(path)


def test_muon_multiplies_in_bfloat16(write):
    seconds = []
    for precision in ("32-true", "bf16-true"):
        fields = {**DDP, "precision": precision}
        found = costed(write({**fields, "optimizer": "muon"}))
        without_it = costed(write({**fields, "optimizer": "adamw"}))
        seconds.append((found.seconds - without_it.seconds) * found.profile.efficiency)
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-6)


def test_only_what_is_trained_is_multiplied(write):
    plan = checking.decide(write({**DDP, "optimizer": "muon"}))
    chain = chain_of_plan(plan)
    name = "model.embed_tokens.weight"
    frozen = {name: replace(plan.graph.tensors[name], trainable=False)}
    graph = replace(plan.graph, tensors={**plan.graph.tensors, **frozen})
    kinds = with_optimizer(chain, graph, "muon").kinds
    assert sum(k.step_flops for k in kinds) < sum(k.step_flops for k in chain.kinds)


def test_another_optimizer_is_another_plan(write):
    (found,) = planning.explain(write(piped("ZBVZeroBubble")), ("why-not", "optimizer=sgd"))
    assert not found.is_planned


def test_the_fewest_nodes_of_a_stated_plan_are_its_own(write, capsys):
    words = ["--tokens", "1e12", "--days", "30", "--dry-run", "-q"]
    assert main(["plan", "-f", str(write(piped("ZBVZeroBubble"))), *words]) == 2
    said = capsys.readouterr().err
    assert "plans like this one are not" in said
    assert "on the 8 GPUs of its mesh it trains in" in said


def test_a_config_without_rules_is_priced_by_a_trace(write, tmp_path):
    sizes = {"num_hidden_layers": 2, "head_dim": 64, "query_pre_attn_scalar": 64,
             "sliding_window": 256, "hidden_act": "gelu_pytorch_tanh"}  # fmt: skip
    config = LLAMA | sizes | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    path = write({**SHARDED, "batch": {"micro": 2, "accumulate": 1, "seq_len": 128}})
    (tmp_path / "config.json").write_text(json.dumps(config))
    decision = search_plan(path)
    assert decision.chosen.seconds > 0
    assert decision.flops > 0


def test_a_difference_in_what_is_saved_is_told(write, tmp_path, capsys):
    paths = []
    for name, saved in (("one", "mm"), ("other", "sdpa")):
        recompute = {"mode": "selective", "save": [saved]}
        path = write({**SHARDED, "activation_checkpointing": recompute})
        paths.append(path.rename(tmp_path / f"{name}.yaml"))
    assert main(["diff", *map(str, paths)]) == 1
    assert "selective, save: mm" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_a_v_takes_as_long_as_the_schedule_that_is_searched(schedule):
    """The reason why the planner does not search them."""
    for ranks, rounds, ratio, crossing_s in itertools.product(
        (2, 4, 8, 16), (2, 3, 8), (1.8, 2.0, 2.2), (0.0, 0.02)
    ):
        step, searched = (
            simulate(
                SCHEDULES[name], [1.0] * 2 * ranks, [ratio] * 2 * ranks, ranks=ranks,
                microbatches=rounds * ranks, crossing_s=crossing_s,
            ).seconds
            for name in (schedule, "InterleavedZeroBubble")
        )  # fmt: skip
        assert step >= 0.99 * searched


def test_other_settings_of_a_stated_plan_are_priced(write, capsys):
    path = write(piped("ZBVZeroBubble"))
    decision = search_plan(path)

    def why_not(setting):
        (found,) = planning.explain(path, ("why-not", setting))
        return found

    other = why_not("pipeline.schedule=DualPipeV")
    assert other.base_s == decision.chosen.seconds
    assert other.seconds == costed(write(piped("DualPipeV"))).seconds
    path = write(piped("ZBVZeroBubble"))
    assert why_not("pipeline.schedule=ZBVZeroBubble").is_planned
    searched = why_not("pipeline.schedule=Interleaved1F1B")
    assert searched.evaluated.plan.assignment.stages.schedule == "Interleaved1F1B"
    assert "16 devices" in why_not("mesh.tp=2").why
    assert "a step would have 32 samples, not 16" in why_not("batch.micro=16").why
    assert main(["explain", "-f", str(path), "why", "mesh"]) == 2
    assert "ask why-not mesh.pp=VALUE" in capsys.readouterr().err
    assert main(["draw", "-f", str(path), "--what", "ladder", "-o", f"{path.parent}/l.svg"]) == 2
    assert "the ladder shows a search for the fastest plan" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["loss_chunks=8", "activation_checkpointing=full"])
def test_what_keeps_a_stated_plan_from_being_one_is_the_reason(setting, write, capsys):
    """Not the schedule, nor what is followed already: leave nothing auto."""
    fields, _ = STATED["ZBV"]
    path = str(write(fields))
    assert main(["check", "-f", path, "--set", setting]) == 1
    told = capsys.readouterr().out
    assert "do not go together" in told
    assert main(["plan", "-f", path, "--set", setting, "-q", "--dry-run"]) == 2
    assert capsys.readouterr().err == told
    assert main(["explain", "why-not", setting, "-f", path, "-q"]) == 1
    assert "do not go together" in capsys.readouterr().out


def test_a_setting_with_which_a_stated_plan_does_not_fit(write):
    fields, _ = STATED["reshard"]
    batch = {"micro": 8, "accumulate": 1, "seq_len": 16384}
    path = write({**fields, "activation_checkpointing": "full", "batch": batch})
    (found,) = planning.explain(path, ("why-not", "activation_checkpointing=none"))
    assert found.base_s is not None
    assert found.seconds is None
    assert found.missing_bytes > 0


def test_the_products_of_muons_step_take_time(write):
    plain, muon = (costed(write({**DDP, "optimizer": word})) for word in ("adamw", "muon"))
    plan = muon.plan
    # Of a matrix of a rows and b >= a columns: X X^T, its square, and their product with X.
    shapes = [info.shape for info in plan.graph.parameters if len(info.shape) == 2]
    flops = sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes)
    speed = muon.profile.peak_flops * muon.profile.efficiency
    assert muon.seconds - plain.seconds == pytest.approx(flops / speed, rel=1e-6)
    assert muon.phases["optimizer"] - plain.phases["optimizer"] == pytest.approx(flops / speed)
    decision = search_plan(write({**DDP, "optimizer": "muon", "strategy": "auto"}))
    assert decision.chosen.seconds == pytest.approx(muon.seconds, rel=1e-9)
    # Of a pipeline, each rank steps on the matrices of its stages.
    fields = {**DDP, "mesh": {"pp": 2, "dp_replicate": 4}}
    apart = [
        costed(write({**fields, "optimizer": word, "pipeline": {"microbatches": 8}})).seconds
        for word in ("adamw", "muon")
    ]
    assert 0.4 < (apart[1] - apart[0]) / (flops / speed) < 0.7


def test_muons_step_on_shards_has_no_seconds(write):
    path = write({**SHARDED, "optimizer": "muon"})
    with pytest.raises(PlanError, match="the products of Muon's step on sharded parameters"):
        costed(path)
