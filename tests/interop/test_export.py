"""Plans become files of other tools, and what such a file says comes back unchanged.

Which seeded bug would this catch? A word that is written as another one, a fact that export drops
without saying so, a default of the tool that is not written although the plan means otherwise.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshplan.cli.app import main
from meshplan.errors import PlanError, SpecError
from meshplan.interop.configs.exporting import export_spec
from meshplan.interop.configs.importing import import_file
from meshplan.interop.configs.statements import facts_of
from meshplan.interop.configs.tools import TOOLS
from meshplan.spec.reader import load_spec
from meshplan.spec.spec import Spec

NAMES = {"deepspeed": "t.json", "accelerate": "t.yaml", "lightning": "t.yaml", "hf": "t.json",
         "torchtitan": "t.py", "megatron": "t.sh", "nanotron": "t.yaml"}  # fmt: skip
PRECISIONS = (
    None, "bf16-mixed", "16-mixed", "bf16-true", "32-true",
    {"param": "bf16", "reduce": "bf16", "master": "fp32"},
    {"param": "fp16", "reduce": "fp16", "master": "fp32"},
)  # fmt: skip
AXES = {"ddp": ("dp_replicate",), "zero1": ("dp_shard",), "zero2": ("dp_shard",),
        "full_shard": ("dp_shard",), "hybrid_shard": ("dp_replicate", "dp_shard"),
        "hybrid_shard_zero2": ("dp_replicate", "dp_shard")}  # fmt: skip


@st.composite
def plans(draw) -> dict:
    """Plans with what some tool can say, and with much that some cannot."""

    def maybe(*values):
        return draw(st.sampled_from((None, *values)))

    strategy = draw(st.sampled_from(tuple(AXES)))
    sizes = {axis: draw(st.sampled_from((2, 4))) for axis in AXES[strategy]}
    tp, pp, cp = (draw(st.sampled_from((1, 1, 2))) for _ in range(3))
    ranks = tp * pp * cp
    for size in sizes.values():
        ranks *= size
    mesh = {"pp": pp, **sizes, "cp": cp, "tp": tp}
    mesh = {axis: size for axis, size in mesh.items() if size > 1 or axis in sizes}
    if "dp_shard" in mesh and draw(st.booleans()) and cp == pp == 1:
        mesh["ep"] = "2 in dp_shard"
    micro, accumulate = draw(st.sampled_from((1, 2, 3))), maybe(2, 4)
    batch = {"micro": micro, "accumulate": accumulate, "seq_len": maybe(1024)}
    plan = {
        "version": 1, "strategy": strategy, "mesh": mesh, "precision": maybe(*PRECISIONS),
        "hardware": {"nodes": 2, "gpus_per_node": ranks // 2},
        "clip_grad_norm": maybe(0.5, 1.0), "optimizer": maybe("adamw", "adamw_fused", "sgd"),
        "activation_checkpointing": maybe("full", "selective", {"mode": "full", "every": 2}),
        "offload": maybe("params") if strategy == "full_shard" else None,
        "compile": maybe(True), "sync_batchnorm": maybe(True), "loss": maybe("tokens"),
    }  # fmt: skip
    if tp > 1:
        plan |= {"tp_plan": draw(st.sampled_from(("auto", "hf"))), "sequence_parallel": maybe(True)}
    if pp > 1:
        count = draw(st.sampled_from((2, 4)))
        plan["pipeline"] = {"schedule": draw(st.sampled_from(("1F1B", "GPipe"))),
                            "microbatches": count}  # fmt: skip
        batch |= {"micro": micro * count, "accumulate": None}
    if cp > 1:
        plan["context"] = {"attention": draw(st.sampled_from(("all_gather", "all_to_all")))}
    # DistributedDataParallel computes in float32, and nothing is cut.
    is_plain = strategy == "ddp" and plan["precision"] in (None, "32-true") and pp == tp == 1
    if is_plain and draw(st.booleans()):
        plan["ddp"] = {"bucket_mb": 50, "static_graph": True}
    if strategy != "ddp" and draw(st.booleans()):
        plan["rules"] = [{"match": {"type": "Block"}, "unit": True}]
    plan["batch"] = {key: value for key, value in batch.items() if value is not None}
    return {key: value for key, value in plan.items() if value is not None}


def meaning_of(facts: dict) -> dict:
    """Facts of a plan, with those that hold if it says nothing of them."""
    meant = {"optimizer": Spec().optimizer,
             "precision": dict.fromkeys(("param", "reduce", "master"), "float32")}  # fmt: skip
    if "mesh.cp" in facts:
        attention = facts.get("context.attention", "all_gather")
        meant |= {"context.attention": attention, "context.balance": attention == "all_gather"}
    if "mesh.pp" in facts:
        meant["pipeline.schedule"] = "1F1B"
    return meant | facts


def check_round_trip(tmp_path, plan: dict | str, tool: str, exported) -> None:
    """The import of an export means what the plan does, but for what either side cannot say."""
    spec = load_spec(plan)
    path = tmp_path / NAMES[tool]
    path.write_text(exported.text)
    ranks = spec.hardware
    assert ranks is not None
    imported = import_file(str(path), TOOLS, nodes=ranks.nodes, gpus_per_node=ranks.gpus_per_node)
    assert imported.tool == tool, exported.text
    assert imported.is_whole, (imported.of("refused"), exported.text)
    before = facts_of(spec)
    after = facts_of(load_spec(yaml.safe_load(imported.text)))
    apart = {each.partition(":")[0] for each, _ in (*exported.unsaid, *exported.assumed)}
    if any(name.startswith("rules[") for name in apart):
        apart.add("tp_plan")  # A file that cannot name modules leaves styles to be derived.
    if "context.attention" in apart:
        apart.add("context.balance")  # What is assumed of it depends on the attention.
    before, after = meaning_of(before), meaning_of(after)
    for name in {*before, *after} - apart:
        assert before.get(name) == after.get(name), (name, exported, imported.text)


@pytest.mark.parametrize("tool", TOOLS)
def test_what_both_can_say_comes_back(tmp_path, tool):
    seen: list[bool] = []

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck),
              database=None, derandomize=True)  # fmt: skip
    @given(plans())
    def check(plan):
        exported = export_spec(load_spec(plan), tool, TOOLS)
        assert exported.unsaid or not exported.is_decisive
        seen.append(not exported.is_decisive)
        if not exported.is_decisive:  # Else the command line gives no file.
            check_round_trip(tmp_path, plan, tool, exported)

    check()
    assert sum(seen) >= 5, "too few of the drawn plans can be said at all"


@pytest.mark.parametrize("tool", TOOLS)
def test_plans_of_the_repository_come_back(tmp_path, tool):
    count = 0
    for path in sorted(Path("plans").glob("*.yaml")):
        if not load_spec(str(path)).free_fields:
            exported = export_spec(load_spec(str(path)), tool, TOOLS)
            count += not exported.is_decisive
            if not exported.is_decisive:
                check_round_trip(tmp_path, str(path), tool, exported)
    assert count >= 3


def test_what_the_tool_adds_to_a_plan_is_told(tmp_path, capsys):
    """The Trainer takes 8 samples and a fused AdamW unless its file says otherwise."""
    path = tmp_path / "plan.yaml"
    path.write_text("version: 1\nstrategy: ddp\nhardware: {nodes: 1, gpus_per_node: 8}\n")
    assert main(["export", "-f", str(path), "--to", "hf"]) == 0
    shown = capsys.readouterr().err
    assert "not in the plan: batch.micro: 8 (per_device_train_batch_size is 8 if left" in shown
    assert "not in the plan: optimizer: adamw_fused (optim is adamw_torch_fused if" in shown
    assert main(["export", "-f", str(path), "--to", "megatron", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["assumed"] == []


@pytest.mark.parametrize("tool", ["torchtitan", "megatron", "hf"])
@pytest.mark.parametrize(
    "batch", [{"micro": 1, "accumulate": 4}, {"micro": 1, "global": 32},
              {"micro": 1, "accumulate": 4, "global": 32}],
)  # fmt: skip
def test_two_batch_sizes_imply_the_third(tool, batch):
    """Torchtitan and Megatron have no key for the accumulation, the Trainer none for all ranks."""
    spec = load_spec({"version": 1, "strategy": "ddp", "batch": batch,
                      "hardware": {"nodes": 1, "gpus_per_node": 8}})  # fmt: skip
    exported = export_spec(spec, tool, TOOLS)
    assert not exported.is_decisive
    assert not [each for each, _ in exported.unsaid if each.startswith("batch.")]
    sizes = {"torchtitan": "global_batch_size=32", "megatron": "--global-batch-size 32",
             "hf": '"gradient_accumulation_steps": 4'}  # fmt: skip
    assert sizes[tool] in exported.text


def test_what_is_said_in_other_words_is_not_called_unsaid():
    spec = load_spec({"version": 1, "strategy": "full_shard", "activation_checkpointing": "full"})
    exported = export_spec(spec, "torchtitan", TOOLS)
    assert "FullAC" in exported.text
    assert "activation_checkpointing" not in str(exported.unsaid)


def test_a_plan_that_a_tool_cannot_train_is_no_file(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    plan = {"version": 1, "strategy": "hybrid_shard", "mesh": {"dp_replicate": 2, "dp_shard": 4}}
    path.write_text(json.dumps(plan))
    out = tmp_path / "theirs.json"
    assert main(["export", "-f", str(path), "--to", "deepspeed", "-o", str(out)]) == 1
    shown = capsys.readouterr()
    assert "not in the file: strategy: hybrid_shard (its schema has no replicas" in shown.out
    assert not out.exists()
    assert main(["export", "-f", str(path), "--to", "deepspeed", "--partial", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["unsaid"][0]["statement"] == "strategy: hybrid_shard"
    out = out.with_suffix(".yaml")
    assert main(["export", "-f", str(path), "--to", "accelerate", "-o", str(out)]) == 0
    theirs = yaml.safe_load(out.read_text())
    assert theirs["parallelism_config"] == {"parallelism_config_dp_replicate_size": 2,
                                            "parallelism_config_dp_shard_size": 4}  # fmt: skip


@pytest.mark.parametrize(("tool", "name", "other"), [
    ("deepspeed", "x.yaml", "x.json"), ("accelerate", "x.json", "x.yaml"),
    ("lightning", "x.json", "x.yaml"), ("hf", "x.yaml", "x.json"),
    ("torchtitan", "x.toml", "x.py"), ("torchtitan", "x.sh", "x.py"),
    ("megatron", "x.yaml", "x.sh"), ("nanotron", "x.json", "x.yaml"),
])  # fmt: skip
def test_a_name_of_another_form_is_refused(tmp_path, capsys, tool, name, other):
    """Python in a file x.toml would be read as TOML, by people and by tools."""
    out = tmp_path / name
    assert main(["export", "-f", "plans/ddp.yaml", "--to", tool, "-o", str(out)]) == 2
    shown = capsys.readouterr().err
    assert f"{name}: the file for {TOOLS[tool].title} is" in shown
    assert f"fix: write -o {tmp_path / other}" in shown
    assert not out.exists()
    fixed = tmp_path / other
    assert main(["export", "-f", "plans/ddp.yaml", "--to", tool, "-o", str(fixed)]) == 0
    plan = tmp_path / "plan.json"
    assert main(["import", str(fixed), "-o", str(plan), "--gpus-per-node", "8"]) == 2
    assert "a plan is YAML" in capsys.readouterr().err
    assert main(["import", str(fixed), "--gpus-per-node", "8"]) == 0


@pytest.mark.parametrize(("tool", "keys"), [
    ("accelerate", ("num_processes", "num_machines")), ("lightning", ("devices", "num_nodes")),
])  # fmt: skip
def test_ranks_of_an_axis_that_a_file_lacks_are_left_out(tool, keys):
    """Eight ranks beside axes of four contradict each other, which accelerate refuses."""
    plan = {"version": 1, "mesh": {"pp": 2, "dp_shard": 4}, "pipeline": {"microbatches": 2},
            "hardware": {"nodes": 1, "gpus_per_node": 8}}  # fmt: skip
    exported = export_spec(load_spec(plan), tool, TOOLS)
    assert exported.is_decisive
    assert not [key for key in keys if key in exported.text], exported.text
    whys = {statement.partition(":")[0]: why for statement, why in exported.unsaid}
    assert "the file lacks mesh.pp" in whys["hardware.nodes"]
    whole = export_spec(load_spec({**plan, "mesh": {"dp_shard": 8}, "pipeline": None}), tool, TOOLS)
    assert all(key in whole.text for key in keys)


def test_what_is_left_to_the_planner_cannot_be_exported(tmp_path):
    with pytest.raises(PlanError, match="'strategy' is left to the planner"):
        export_spec(load_spec({"version": 1, "strategy": "auto"}), "hf", TOOLS)
    with pytest.raises(SpecError, match="there is no tool 'horovod'"):
        export_spec(load_spec({"version": 1, "strategy": "ddp"}), "horovod", TOOLS)


def test_defaults_of_a_tool_are_written_where_the_plan_means_otherwise():
    """The Trainer clips at 1 and torchtitan shards the sequence unless they are told not to."""
    spec = load_spec({"version": 1, "strategy": "full_shard", "mesh": {"dp_shard": 2, "tp": 2}})
    assert json.loads(export_spec(spec, "hf", TOOLS).text)["max_grad_norm"] == 0
    text = export_spec(spec, "torchtitan", TOOLS).text
    assert "enable_sequence_parallel=False" in text
    assert "max_norm=10000000000.0" in text
    assert "activation_checkpoint=None" in text
    assert "--clip-grad 0.0" in export_spec(spec, "megatron", TOOLS).text


@pytest.mark.parametrize(
    ("tool", "plan", "line"),
    [
        ("hf", {}, '"average_tokens_across_devices": false'),
        ("hf", {"loss": "tokens"}, '"average_tokens_across_devices": true'),
        ("nanotron", {"strategy": "zero1", "mesh": {"pp": 2, "dp_shard": 2}}, "pp_engine: 1f1b"),
        ("nanotron", {}, "dtype: float32"),
        ("nanotron", {"ddp": {"bucket_mb": 50}}, "ddp_bucket_cap_mb: 50\n"),
        ("nanotron", {}, "batch_accumulation_per_replica: 1"),
        ("nanotron", {"activation_checkpointing": "full"}, "PyPI has no recompute_layer"),
        ("megatron", {"precision": "16-mixed"}, "--accumulate-allreduce-grads-in-fp32"),
        ("megatron", {"strategy": "full_shard", "mesh": {"dp_shard": 2}}, "fsdp_dtensor"),
        ("megatron", {"activation_checkpointing": "full"}, "--recompute-method uniform"),
        (
            "megatron",
            {"mesh": {"dp_replicate": 2, "tp": 2}, "tp_plan": "auto"},
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        ),
        ("megatron", {}, "torchrun --nnodes 1 --nproc-per-node 2 pretrain_gpt.py \\\n"),
        ("deepspeed", {}, '"gradient_clipping": 0.0'),
        (
            "deepspeed",
            {"strategy": "zero1", "mesh": {"dp_shard": 2, "ep": "2 in dp_shard"}},
            '"enabled": true',
        ),
        (
            "torchtitan",
            {
                "mesh": {"pp": 2, "dp_replicate": 2},
                "pipeline": {"microbatches": 2},
                "batch": {"micro": 2},
            },
            "disable_cuda_graphs=True",
        ),
    ],
)
def test_what_a_tool_would_do_otherwise_is_written(tool, plan, line):
    plan = {"version": 1, "strategy": "ddp", "mesh": {"dp_replicate": 2}, **plan}
    ranks = load_spec(plan).mesh
    plan["hardware"] = {"nodes": 1, "gpus_per_node": math.prod(
        size for size in ranks.values() if isinstance(size, int))}  # fmt: skip
    assert line in export_spec(load_spec(plan), tool, TOOLS).text


@pytest.mark.parametrize("tool", ["deepspeed", "megatron"])
def test_float32_needs_no_key(tool):
    plan = {"version": 1, "strategy": "ddp", "mesh": {"dp_replicate": 2}, "precision": "32-true"}
    assert export_spec(load_spec(plan), tool, TOOLS).unsaid == ()
    other = export_spec(load_spec(plan | {"precision": "bf16-true"}), tool, TOOLS)
    assert [statement.partition(":")[0] for statement, _ in other.unsaid] == ["precision"]


@pytest.mark.parametrize(
    ("tool", "plan", "name", "why"),
    [
        ("torchtitan", {}, "loss", "targets of all ranks"),
        ("torchtitan", {"mesh": {"dp_replicate": 2, "cp": 2}}, "strategy", "parameters over cp"),
        ("nanotron", {"mesh": {"dp_shard": 4, "ep": "2 in dp_shard"}, "strategy": "zero1"},
         "mesh.ep", "multiply"),
        ("deepspeed", {"mesh": {"pp": 2, "dp_shard": 2}, "strategy": "zero2"}, "strategy",
         "stages 0 and 1"),
        ("deepspeed", {"activation_checkpointing": "full"}, "activation_checkpointing",
         "DeepSpeed's checkpoint function"),
    ],
)  # fmt: skip
def test_what_a_tool_does_in_its_own_way_is_listed(tool, plan, name, why):
    plan = {"version": 1, "strategy": "ddp", "mesh": {"dp_replicate": 2}, **plan}
    exported = export_spec(load_spec(plan), tool, TOOLS)
    whys = {statement.partition(":")[0]: reason for statement, reason in exported.unsaid}
    assert why in whys[name]
    said = export_spec(load_spec(plan | {"loss": "tokens"}), "torchtitan", TOOLS)
    assert "loss: tokens" not in [statement for statement, _ in said.unsaid]


@pytest.mark.parametrize("tool", TOOLS)
def test_every_row_of_a_table_is_found_by_its_path(tool):
    table = TOOLS[tool].table
    for row in table.rows:
        path = row.path.removesuffix(".**").removesuffix(".*")
        path += ".anything" if row.path.endswith("*") else ""
        assert table.row(path) is row, row.path
        parts = path.split(".")
        for count in range(1, len(parts)):
            above = ".".join(parts[:count])
            assert f"{above}.**" == row.path or not table.covers(above), (above, row.path)
