"""Plans of a live model priced as they are stated: tp, pp, cp, ep, and what runs again in part.

Which seeded bug would this catch? Collectives of tp that are not counted, or counted along another
axis; what a stage hands on, or what runs again, left out; memory of another plan than `estimate`
tells; parameters of tp or ep counted whole, or all of them in the first place; flops of what each
rank of tp repeats counted for all.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from transformers import AutoConfig

from meshplan.api import checking
from meshplan.api.planning import search_plan
from meshplan.cli.app import main
from meshplan.cost.types import Sent
from meshplan.errors import Origin
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import cluster_of, request_of_file
from meshplan.planner.tables.whole_plan import Costed
from meshplan.runtime.estimate import composed, estimate
from meshplan.runtime.estimate.request import EstimateRequest
from meshplan.runtime.estimate.scale_down import ModelSource
from meshplan.runtime.live import priced as priced_module
from meshplan.runtime.live.priced import priced
from meshplan.runtime.trace import rehearse
from meshplan.runtime.trace.ops import record
from meshplan.spec.reader import load_spec

PIPELINE = {"schedule": "1F1B", "microbatches": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 4}, "tp_plan": "auto"},
    "tp, sequence": {"mesh": {"tp": 4}, "tp_plan": "auto", "sequence_parallel": True},
    "tp x fsdp": {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto", "strategy": "full_shard"},
    "pp": {"mesh": {"pp": 4}, "pipeline": PIPELINE},
    "pp x fsdp": {
        "mesh": {"pp": 2, "dp_shard": 2}, "strategy": "full_shard", "pipeline": PIPELINE,
    },
    "pp x tp": {"mesh": {"pp": 2, "tp": 2}, "tp_plan": "auto", "pipeline": PIPELINE},
    "cp": {"mesh": {"dp_shard": 2, "cp": 2}, "strategy": "full_shard"},
    "ep": {
        "mesh": {"dp_shard": 4, "ep": "2 in dp_shard"}, "strategy": "full_shard",
        "rules": [{"match": "**.experts", "place": {"ep": "ep_dispatch_experts"}}],
    },
    "selective": {
        "mesh": {"dp_shard": 4}, "strategy": "full_shard", "activation_checkpointing": "selective",
    },
    "offload": {"mesh": {"dp_shard": 4}, "strategy": "full_shard", "offload": "params"},
    "offload of both": {
        "mesh": {"dp_shard": 4}, "strategy": "full_shard", "activation_checkpointing": "full",
        "offload": {"params": True, "activations": True},
    },
    "saves": {
        "mesh": {"dp_shard": 4}, "strategy": "full_shard",
        "activation_checkpointing": {"mode": "selective", "save": ["mm"]},
    },
    "muon": {"mesh": {"dp_replicate": 4}, "strategy": "ddp", "optimizer": "muon"},
    "ddp": {"mesh": {"dp_replicate": 4}, "strategy": "ddp"},
    "compiled": {"mesh": {"dp_shard": 4}, "strategy": "full_shard", "compile": True},
    "full_shard": {"mesh": {"dp_shard": 4}, "strategy": "full_shard"},
}  # fmt: skip
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
EVERY_DAY = {("cp", "32-true"), ("offload", "bf16-mixed"), ("saves", "bf16-mixed")}
MODEL = "meshplan.runtime.demo_model:ByteLlama"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 8192, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip


def plan_of(layout: str, precision: str = "bf16-mixed", **more: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "hardware": {"nodes": 1, "gpus_per_node": 4, "gpu": "h100-sxm-80gb"},
        "precision": precision,
        "batch": {"micro": 4, "accumulate": 1, "seq_len": 128},
        "input": {"shape": [4, 128], "dtype": "int64"},
        **LAYOUTS[layout],
        **more,
    }


@pytest.fixture
def write(tmp_path):
    def written(plan: dict[str, Any]) -> str:
        path = tmp_path / "plan.yaml"
        path.write_text(json.dumps(plan))
        return str(path)

    return written


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param(
            layout, precision, marks=() if (layout, precision) in EVERY_DAY else pytest.mark.wide
        )
        for layout in LAYOUTS
        if layout != "ep"  # The demo's model has no experts.
        for precision in PRECISIONS
    ],
)
def test_what_check_passes_is_planned_with_the_bytes_of_estimate(layout, precision, write, capsys):
    path = write(plan_of(layout, precision))
    flags = ["-f", path, "--model", MODEL]
    assert main(["check", *flags]) == 0
    capsys.readouterr()
    assert main(["plan", *flags, "--json", "-q"]) == 0
    planned = json.loads(capsys.readouterr().out)["result"]
    # Under the lock, which has what the file leaves open.
    assert main(["estimate", *flags, "--json", "-q"]) == 0
    estimated = json.loads(capsys.readouterr().out)["result"]
    assert planned["step_s"] > 0
    worst = max(estimated["groups"], key=lambda group: group["band"][1])
    assert planned["peak_bytes"] == worst["band"][1]
    assert planned["fits"]


CASES = {
    "full_shard": {},
    "tp": {},
    "tp, sequence": {},
    "tp x fsdp": {"activation_checkpointing": "full"},
    "ep": {},
    "pp": {},
    "pp x fsdp": {"activation_checkpointing": "full"},
    "pp x tp": {},
    "cp": {},
    "selective": {},
    "offload": {},
    "offload of both": {},
}


def in_all(sent: Sent, samples: int) -> tuple[float, ...]:
    """Collectives and their bytes; rules know which bytes do not depend on the samples."""
    return (
        sent.all_reduces,
        samples * sent.all_reduce_bytes + sent.all_reduce_once_bytes,
        sent.gathers,
        samples * sent.gather_bytes + sent.gather_once_bytes,
        sent.all_to_alls,
        samples * sent.all_to_all_bytes + sent.all_to_all_once_bytes,
    )


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        pytest.param(each, more, marks=() if each == "tp, sequence" else pytest.mark.wide)
        for each, more in CASES.items()
    ],
)
def test_a_model_as_it_runs_takes_as_long_as_its_config_says(layout, more, write, tmp_path):
    """Two readings of one model: by the rules for its config, and its modules as they run."""
    config = MIXTRAL if layout == "ep" else LLAMA
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch = {"micro": 8, "accumulate": 1, "seq_len": 1024}
    stated = {"batch": batch, "input": {"shape": [8, 1024], "dtype": "int64"}, **more}
    path = write(plan_of(layout, **stated) | {"model": {"config": "config.json"}})
    question = request_of_file(path)
    by_config = Costed(checking.decide(path), question.cluster)
    source = ModelSource(
        entry="", origin=Origin(path), config=AutoConfig.for_model(**config),
        architecture=config["architectures"][0],
    )  # fmt: skip
    found = priced(
        EstimateRequest(spec=load_spec(path), source=source, device="h100-sxm-80gb"), print
    )
    as_run = Costed(found.plan, question.cluster, None, found.chain)
    told, ran = by_config.chain, as_run.chain
    assert ran.names == told.names
    for one, other in zip(ran.order, told.order, strict=True):
        of_run, of_rules = ran.kinds[one], told.kinds[other]
        assert of_run.forward.flops == pytest.approx(of_rules.forward.flops, rel=1e-3)
        if of_rules.has_options:
            assert in_all(of_run.sent_forward, 8) == in_all(of_rules.sent_forward, 8)
            assert of_run.context_bytes == of_rules.context_bytes
            assert of_run.boundary_bytes == of_rules.boundary_bytes
            assert sum(of_run.numels) == sum(of_rules.numels)
            if layout == "ep":  # Without it, experts are no unit of their own.
                assert of_run.expert_numel == of_rules.expert_numel > 0
                assert of_run.num_experts == of_rules.num_experts == 4
    # Rules leave out kernels of DTensor, and small ones of transformers.
    assert as_run.seconds == pytest.approx(by_config.seconds, rel=0.15)
    job = PlanningProblem(request_of_file(path, ["mesh={dp_shard: 4}", "strategy=full_shard"]))
    assert found.flops == pytest.approx(job.chain_at(1).flops, rel=0.01)


def test_the_forward_of_a_stated_plan_is_recorded_once_for_all_ranks(write, monkeypatch):
    """The plan is decided for memory and costs together, and sent to the processes that trace."""
    path, recorded, ran = write(plan_of("pp x tp")), [], []

    def record_and_count(model: Any, inputs: Any) -> Any:
        recorded.append(model)
        return record(model, inputs)

    def run_here(function: Any, tasks: Any) -> list[Any]:
        ran.extend(tasks)
        return [function(*task) for task in pickle.loads(pickle.dumps(tasks))]

    monkeypatch.setattr(rehearse, "record", record_and_count)
    source = ModelSource(entry=MODEL, origin=Origin(path))
    request = EstimateRequest(spec=load_spec(path), source=source, device="h100-sxm-80gb")
    by_subprocesses = priced(request, print)
    recorded.clear()
    for module in (composed, estimate, priced_module):
        monkeypatch.setattr(module, "run_in_subprocesses", run_here)
    found = priced(request, print)
    assert len(recorded) == 1
    assert len(ran) == 1 + 2  # The costs, and a rank of each stage.
    assert (found.chain, found.flops) == (by_subprocesses.chain, by_subprocesses.flops)
    assert found.memory == by_subprocesses.memory


@pytest.mark.parametrize("strategy", ["ddp", "full_shard"])
def test_all_reduces_of_synchronized_batchnorms_are_counted(strategy, write, capsys):
    """Each sums twice in forward: a count and a value per channel, then a value per channel."""
    axis = "dp_replicate" if strategy == "ddp" else "dp_shard"
    path = write({
        "version": 1, "mesh": {axis: 8}, "strategy": strategy, "precision": "bf16-mixed",
        "model": {"entry": "tests.helpers.planned:Normalizes"}, "sync_batchnorm": True,
        "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
        "activation_checkpointing": "none", "batch": {"micro": 4, "accumulate": 1},
        "input": {"shape": [4, 16, 64], "dtype": "float32"},
    })  # fmt: skip
    spec = load_spec(path)
    source = ModelSource(entry="tests.helpers.planned:Normalizes", origin=Origin(path))
    found = priced(EstimateRequest(spec=spec, source=source, device="h100-sxm-80gb"), print)
    kinds = [found.chain.kinds[number] for number in found.chain.order]
    forward, backward = (
        (sum(sent.statistics for sent in each), sum(sent.statistics_bytes for sent in each))
        for each in ([k.sent_forward for k in kinds], [k.sent_backward for k in kinds])
    )
    assert forward == backward == (4, 4 * (2 * (16 + 24) + 2))
    capsys.readouterr()
    assert main(["plan", "-f", path, "--json", "-q"]) == 0
    planned = json.loads(capsys.readouterr().out)["result"]
    cluster = cluster_of(spec, "h100-sxm-80gb")
    assert planned["step_s"] == pytest.approx(
        Costed(found.plan, cluster, None, found.chain).seconds, rel=1e-9
    )
    assert planned["peak_bytes"] == checking.estimate_memory(path).worst.band[1]


@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "broadcast_buffers"])
@pytest.mark.parametrize("is_open", [False, True])
def test_options_of_ddp_are_planned_with_ddp(is_open, option, write, capsys):
    open_fields = {"mesh": "auto", "strategy": "auto", "batch": {"global": 16, "seq_len": 128}}
    fields = open_fields if is_open else LAYOUTS["ddp"]
    plan = plan_of("ddp", "32-true", ddp={option: False}, **fields)
    flags = ["-f", write(plan), "--model", MODEL]
    assert main(["plan", *flags, "--json", "-q"]) == 0
    planned = json.loads(capsys.readouterr().out)["result"]
    assert planned["gap"] < 1e-6
    assert planned["strategy"] == "ddp"
    assert main(["estimate", *flags, "--json", "-q"]) == 0
    groups = json.loads(capsys.readouterr().out)["result"]["groups"]
    assert planned["peak_bytes"] == max(group["band"][1] for group in groups)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_an_optimizer_of_whole_tensors_is_planned_with_ddp(optimizer, write, capsys):
    """Neither steps on shards by a rule, so the strategies that make them are not searched."""
    fields = {"mesh": "auto", "strategy": "auto", "batch": {"global": 16, "seq_len": 128}}
    plan = plan_of("ddp", "32-true", optimizer=optimizer, **fields)
    flags = ["-f", write(plan), "--model", MODEL]
    assert main(["plan", *flags, "--json", "-q"]) == 0
    planned = json.loads(capsys.readouterr().out)["result"]
    assert planned["strategy"] == "ddp"
    why = {each["why"] for each in planned["rejected"] if "full_shard" in each["what"]}
    assert any(optimizer in each for each in why)
    assert main(["estimate", *flags, "--json", "-q"]) == 0
    groups = json.loads(capsys.readouterr().out)["result"]["groups"]
    assert planned["peak_bytes"] == max(group["band"][1] for group in groups)


@pytest.mark.parametrize("layout", ["full_shard", "tp x fsdp"])
def test_plan_of_a_module_says_what_the_file_is_without_its_choices(layout, write, capsys):
    plan = plan_of(layout)
    del plan["strategy"]
    flags = ["-f", write(plan), "--model", MODEL, "--json", "-q"]
    assert main(["estimate", *flags]) == 0
    groups = json.loads(capsys.readouterr().out)["result"]["groups"]
    assert main(["plan", *flags, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)["result"]
    assert planned["strategy"] != "full_shard"  # The default of this mesh.
    assert planned["as_written"]["peak_bytes"] == max(group["band"][1] for group in groups)
    assert planned["as_written"]["peak_bytes"] != planned["peak_bytes"]


def test_a_report_of_a_module_names_the_planner_as_the_origin_of_its_choices(write, tmp_path):
    """With tp_plan: auto, which needs the recorded forward again."""
    path = write(plan_of("tp x fsdp", activation_checkpointing="auto"))
    page = tmp_path / "report.html"
    assert main(["report", "-f", path, "--model", MODEL, "-o", str(page), "-q"]) == 0
    assert "It fits" in page.read_text()


@pytest.mark.wide
def test_what_ranks_of_tp_repeat_counts_once(write):
    """With the MLPs alone cut, attention and the head are computed by every rank."""
    rules = [
        {"match": "layers.*.ffn.w{1,3}", "place": {"tp": "colwise"}},
        {"match": "layers.*.ffn.w2", "place": {"tp": "rowwise"}},
    ]
    flops = []
    for more in ({"tp_plan": "none", "rules": rules}, {}):
        decision = search_plan(write(plan_of("tp", **more)), model=MODEL)
        flops.append(decision.flops)
    assert flops[0] == flops[1]


@pytest.mark.wide
def test_its_seconds_are_of_its_microbatches(write):
    """Twice as many microbatches of a stage take less than twice as long, and more than before."""
    seconds = []
    for micro, count in ((4, 4), (8, 8)):
        pipeline = {"schedule": "1F1B", "microbatches": count}
        path = write(plan_of("pp", batch={"micro": micro, "accumulate": 1}, pipeline=pipeline))
        decision = search_plan(path, model=MODEL)
        assert decision.chosen is not None
        seconds.append(decision.chosen.seconds)
    few, many = seconds
    # Of 4 stages: 4 + 3 turns, and 8 + 3.
    assert many / few == pytest.approx(11 / 7, rel=0.1)


def test_what_is_left_open_is_named(write, capsys):
    path = write(plan_of("cp", activation_checkpointing="auto"))
    flags = ["-f", path, "--model", MODEL]
    assert main(["plan", *flags, "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert "activation_checkpointing is left to the planner, which cannot search this plan" in err
    assert "context parallelism of a live model" in err
    assert "plan.yaml:1:" in err


@pytest.mark.parametrize("is_json", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_one_that_does_not_fit_is_said_not_to_fit(write, capsys, is_json):
    plan = write(plan_of("tp", activation_checkpointing="none"))
    flags = ["-f", plan, "--model", MODEL, "--set", "hardware.headroom=0.98"]
    assert main(["plan", *flags, "--dry-run", "-q", *(["--json"] if is_json else [])]) == 1
    out = capsys.readouterr().out
    if is_json:
        result = json.loads(out)["result"]
        assert not result["fits"]
        assert result["conflict"] is None
        return
    out = " ".join(out.split())
    assert "the plan as stated does not fit: expected 1." in out
    assert "over by" in out.lower()
    assert "other plans: the plan states everything" in out
    assert "even with all other settings open" not in out


@pytest.mark.wide
def test_its_frontier_is_itself_and_is_priced_once(write, capsys):
    flags = ["-f", write(plan_of("pp")), "--model", MODEL, "--dry-run", "--json", "--frontier"]
    assert main(["plan", *flags]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)["result"]
    assert result["frontier_is_whole"]
    assert [evaluated["step_s"] for evaluated in result["frontier"]] == [result["step_s"]]
    assert err.count("counting the operations of a rank") == 1


def test_two_layouts_of_it_are_compared_with_their_seconds(write, tmp_path, capsys):
    old = tmp_path / "old.yaml"
    old.write_text(json.dumps(plan_of("pp")))
    new = write(plan_of("full_shard"))
    model = ["--model", MODEL]
    assert main(["diff", str(old), new, *model, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["result"]
    assert found["old"]["step_s"] > 0
    assert found["new"]["step_s"] > 0
