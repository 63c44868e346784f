"""Files of other tools become plans: every key has a verdict, and mistakes have a place and a fix.

Which seeded bug would this catch? A key that is dropped, a word that is translated into another, a
default of the tool that is forgotten, two statements of which one wins silently.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from meshplan.api.configs import import_config
from meshplan.cli.app import main
from meshplan.errors import SpecError
from meshplan.spec.reader import load_spec

DEEPSPEED = {
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 3},
}  # fmt: skip
ACCELERATE = {"distributed_type": "FSDP", "num_machines": 2, "num_processes": 16,
              "mixed_precision": "bf16", "fsdp_config": {
                  "fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD"}}  # fmt: skip


def imported(tmp_path: Path, content, name: str = "theirs.json", **more):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return import_config(path, **more)


def plan_of(result) -> dict:
    return yaml.safe_load(result.text)


def with_key(base: dict, path: str, value) -> dict:
    out = json.loads(json.dumps(base))
    here = out
    *parents, last = path.split(".")
    for part in parents:
        here = here.setdefault(part, {})
    here[last] = value
    return out


@pytest.mark.parametrize(
    ("stage", "strategy"), list(enumerate(["ddp", "zero1", "zero2", "full_shard"]))
)
def test_a_stage_of_zero_is_a_strategy(tmp_path, stage, strategy):
    result = imported(tmp_path, with_key(DEEPSPEED, "zero_optimization.stage", stage))
    assert plan_of(result)["strategy"] == strategy
    assert f"# zero_optimization.stage: {stage}" in result.text


@pytest.mark.parametrize(
    ("word", "strategy"),
    [("FULL_SHARD", "full_shard"), ("SHARD_GRAD_OP", "zero2"), ("NO_SHARD", "ddp"),
     ("HYBRID_SHARD", "hybrid_shard"), ("HYBRID_SHARD_ZERO2", "hybrid_shard_zero2")],
)  # fmt: skip
def test_a_sharding_strategy_of_fsdp_is_a_strategy(tmp_path, word, strategy):
    content = with_key(ACCELERATE, "fsdp_config.fsdp_sharding_strategy", word)
    result = imported(tmp_path, content)
    plan = plan_of(result)
    assert plan["strategy"] == strategy
    axes = {"ddp": {"dp_replicate": 16}, "full_shard": {"dp_shard": 16}, "zero2": {"dp_shard": 16}}
    assert plan["mesh"] == axes.get(strategy, {"dp_replicate": 2, "dp_shard": 8})
    assert any("to-fsdp2" in note for note in result.notes) == word.startswith("HYBRID")
    assert any("is ddp" in note for note in result.notes) == (word == "NO_SHARD")


def test_the_batch_triangle_gives_the_data_ranks(tmp_path):
    assert plan_of(imported(tmp_path, DEEPSPEED))["mesh"] == {"dp_shard": 8}


def test_a_batch_triangle_that_contradicts_itself_names_the_three_numbers(tmp_path):
    with pytest.raises(SpecError, match=r"65.*2.*4") as caught:
        imported(tmp_path, with_key(DEEPSPEED, "train_batch_size", 65))
    (problem,) = caught.value.problems
    assert problem.origin.line == 1
    assert "leave out one of the three" in problem.fix
    with pytest.raises(SpecError, match="imply 8 data-parallel ranks, but there are 4"):
        imported(tmp_path, DEEPSPEED, gpus_per_node=4)


def test_a_pipeline_takes_all_its_microbatches_at_once(tmp_path):
    content = DEEPSPEED | {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}
    plan = plan_of(imported(tmp_path, content))
    assert plan["mesh"] == {"pp": 2, "dp_shard": 8}
    assert plan["batch"] == {"global": 64, "micro": 8}
    assert plan["pipeline"] == {"microbatches": 4}


def test_experts_of_deepspeed_are_sharded_only_if_that_is_enabled(tmp_path):
    content = with_key(DEEPSPEED, "expert_parallel.autoep_size", 2)
    (key,) = imported(tmp_path, content).of("irrelevant")
    assert "unless expert_parallel.enabled is true" in key.note
    content = with_key(content, "expert_parallel.enabled", True)
    assert plan_of(imported(tmp_path, content))["mesh"]["ep"] == "2 in dp_shard"


def test_a_default_that_differs_between_releases_is_told(tmp_path):
    """DeepSpeed clips at 1 if the key is left out, but only in newer releases."""
    result = imported(tmp_path, DEEPSPEED)
    assert "0.19.4 and later" in " ".join(result.notes)
    assert "clip_grad_norm" not in plan_of(result)
    assert imported(tmp_path, with_key(DEEPSPEED, "gradient_clipping", 0)).notes == ()


def test_nanotron_computes_in_bfloat16_if_left_out(tmp_path):
    content = "parallelism: {dp: 8, pp: 1, tp: 1}\nmodel: {ddp_bucket_cap_mb: 25}\n"
    content += "optimizer: {accumulate_grad_in_fp32: true}\n"
    plan = plan_of(imported(tmp_path, content, "t.yaml"))
    assert plan["precision"] == "bf16-mixed"


@pytest.mark.parametrize(
    ("path", "value", "verdict", "words"),
    [
        ("zero_optimisation.stage", 3, "refused", "did you mean zero_optimization.stage"),
        ("zero_optimization.stgae", 3, "refused", "did you mean zero_optimization.stage"),
        ("zero_optimization.offload_param.device", "nvme", "refused", "NVMe"),
        ("zero_optimization.zero_quantized_weights", True, "refused", "change the numbers"),
        ("zero_optimization.zero_quantized_weights", False, "irrelevant", "switched off"),
        ("autotuning", {"enabled": True, "fast": True}, "irrelevant", "meshplan plan searches"),
        ("gradient_allreduce_op", "sum", "refused", "averaged"),
        ("compression_training", {"enabled": False}, "irrelevant", "switched off"),
        ("gradient_accumulation_steps", "auto", "irrelevant", "filled in"),
        ("zero_optimization.zero_hpz_partition_size", 4, "honoured", "second shard"),
        ("zero_optimization.zero_hpz_partition_size", 8, "irrelevant", "as many ranks as shards"),
    ],
)
def test_each_key_has_a_verdict_with_a_reason(tmp_path, path, value, verdict, words):
    result = imported(tmp_path, with_key(DEEPSPEED, path, value))
    key = next(key for key in result.keys if key.key == path)
    assert (key.verdict, key.value) == (verdict, value)
    assert words in key.note
    assert result.is_whole == (verdict != "refused")


def test_reductions_have_the_dtype_of_the_tool(tmp_path):
    """DeepSpeed reduces bf16 in bf16 unless told otherwise, DDP under accelerate in float32."""
    bf16 = with_key(DEEPSPEED, "bf16.enabled", True)
    roles = {"param": "bf16", "reduce": "bf16", "master": "fp32"}
    assert plan_of(imported(tmp_path, bf16))["precision"] == roles
    fp32 = bf16 | {"communication_data_type": "fp32"}
    assert plan_of(imported(tmp_path, fp32))["precision"] == "bf16-mixed"
    ddp = {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"}
    assert plan_of(imported(tmp_path, ddp))["precision"] == "bf16-mixed"
    assert plan_of(imported(tmp_path, ACCELERATE))["precision"] == roles


def test_two_strategies_at_once_are_refused(tmp_path):
    both = ACCELERATE | {"deepspeed_config": {"zero_stage": 2}}
    with pytest.raises(SpecError, match="the file configures deepspeed_config too"):
        imported(tmp_path, both)
    both = {"per_device_train_batch_size": 1, "fsdp": "full_shard", "deepspeed": DEEPSPEED}
    with pytest.raises(SpecError, match="both choose a strategy"):
        imported(tmp_path, both)


def test_fsdp2_with_a_word_that_it_ignores_is_refused(tmp_path):
    with pytest.raises(SpecError, match="version 2 ignores HYBRID_SHARD"):
        imported(tmp_path, with_key(ACCELERATE, "fsdp_config.fsdp_version", 2))


def test_the_trainer_has_defaults_that_a_plan_has_not(tmp_path):
    plan = plan_of(imported(tmp_path, {"output_dir": "out", "fsdp": "full_shard offload"}))
    assert plan["batch"] == {"micro": 8}
    assert plan["clip_grad_norm"] == 1
    assert plan["offload"] == "params"
    off = {"output_dir": "out", "max_grad_norm": 0, "per_device_train_batch_size": 2}
    plan = plan_of(imported(tmp_path, off))
    assert "clip_grad_norm" not in plan
    assert plan["strategy"] == "ddp"


def test_the_trainer_fills_in_what_deepspeed_leaves_to_it(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(
        DEEPSPEED | {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    ))  # fmt: skip
    content = {"per_device_train_batch_size": 3, "deepspeed": "ds.json"}
    result = imported(tmp_path, content)
    plan = plan_of(result)
    assert plan["strategy"] == "full_shard"
    assert plan["batch"] == {"micro": 3, "accumulate": 4}
    with pytest.raises(SpecError, match="which is not there"):
        imported(tmp_path, content | {"deepspeed": "gone.json"})


@pytest.mark.parametrize(
    ("strategy", "words"),
    [("dp", "use ddp"), ("ddp_spawn", "torchrun"), ("deepspeed_stage_3_offload_nvme", "NVMe"),
     ("horovod", "use ddp, fsdp")],
)  # fmt: skip
def test_strategies_of_lightning_without_a_plan_say_the_better_way(tmp_path, strategy, words):
    result = imported(tmp_path, {"trainer": {"devices": 4, "strategy": strategy}})
    (refused,) = result.of("refused")
    assert words in refused.note


def test_lightning_model_parallel_defaults_to_tensor_parallelism_inside_a_node(tmp_path):
    strategy = {"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}
    content = {"trainer": {"devices": 4, "num_nodes": 2, "strategy": strategy}}
    plan = plan_of(imported(tmp_path, content))
    assert plan["mesh"] == {"dp_shard": 2, "tp": 4}
    assert plan["tp_plan"] == "auto"


TITAN = """
[training]
local_batch_size = 8
seq_len = 4096
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""
TITAN_PY = """
def llama3_8b() -> Trainer.Config:
    import os; os.system("touch executed")
    return Trainer.Config(
        model_spec=model_registry("8B"),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=8, seq_len=4096),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )
"""
TITAN_FLAGS = (
    "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b "
    "--training.local_batch_size 8 --training.seq_len=4096 "
    "--parallelism.tensor_parallel_degree 2 --activation_checkpoint.mode full\n"
)


@pytest.mark.parametrize(("name", "content"), [("t.toml", TITAN), ("t.py", TITAN_PY),
                                               ("t.sh", TITAN_FLAGS)])  # fmt: skip
def test_torchtitans_three_spellings_say_the_same(tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    result = imported(tmp_path, content, name, nodes=1, gpus_per_node=8)
    assert result.tool == "torchtitan"
    assert result.is_whole
    plan = plan_of(result)
    del plan["hardware"]
    assert plan == {
        "version": 1, "strategy": "full_shard", "mesh": {"dp_shard": 4, "tp": 2},
        "tp_plan": "auto", "sequence_parallel": True, "precision": "bf16-mixed",
        "activation_checkpointing": "full", "batch": {"micro": 8, "seq_len": 4096},
        "clip_grad_norm": 1, "loss": "tokens",
    }  # fmt: skip
    assert not (tmp_path / "executed").exists()


def test_what_a_python_file_computes_is_refused(tmp_path):
    content = TITAN_PY.replace("tensor_parallel_degree=2", "tensor_parallel_degree=world // 4")
    (key,) = imported(tmp_path, content, "t.py").of("refused")
    assert key.key == "parallelism.tensor_parallel_degree"
    assert key.origin.line == 8
    with pytest.raises(SpecError, match="2 functions return a configuration"):
        imported(tmp_path, TITAN_PY + TITAN_PY.replace("8b", "70b"), "t.py")
    starred = TITAN_PY.replace("TrainingConfig(", "TrainingConfig(**more, ")
    assert starred != TITAN_PY
    with pytest.raises(SpecError, match=r"\*\*more has arguments that are not in the call"):
        imported(tmp_path, starred, "t.py")


def test_torchtitans_batch_in_tokens(tmp_path):
    content = TITAN.replace("local_batch_size = 8\nseq_len", "max_context_length")
    tokens = "num_tokens_per_microbatch_per_dp_rank = "
    many = content.replace("[parallelism]", f"{tokens}8192\n[parallelism]")
    assert plan_of(imported(tmp_path, many, "t.toml"))["batch"] == {"micro": 2, "seq_len": 4096}
    odd = content.replace("[parallelism]", f"{tokens}8193\n[parallelism]")
    with pytest.raises(SpecError, match="no multiple of 4096") as caught:
        imported(tmp_path, odd, "t.toml")
    assert caught.value.problems[0].origin.line == 4


MEGATRON = """#!/bin/bash
GPUS_PER_NODE=8   # of each node
NUM_NODES=${2:-2}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL_ARGS="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
rm -rf "$(whoami)"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    $MODEL_ARGS --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 \\
    --num-layers 32 --num-layers-per-virtual-pipeline-stage 8 --hidden-size 4096 \\
    --bf16 --use-distributed-optimizer --recompute-granularity full --lr 3.0e-4 --min-lr 1e-5
"""


def test_flags_of_megatron_in_a_script(tmp_path):
    result = imported(tmp_path, MEGATRON, "train.sh", nodes=2)
    assert result.is_whole
    plan = plan_of(result)
    assert plan["hardware"] == {"nodes": 2, "gpus_per_node": 8}
    assert plan["strategy"] == "zero1"
    assert plan["mesh"] == {"pp": 2, "dp_shard": 4, "tp": 2}
    assert plan["pipeline"] == {"schedule": "Interleaved1F1B", "virtual": 2, "microbatches": 16}
    assert plan["batch"] == {"global": 64, "micro": 16, "seq_len": 4096}
    assert plan["precision"] == "bf16-mixed"
    assert plan["sequence_parallel"] is True
    assert plan["clip_grad_norm"] == 1  # Megatron's default
    (key,) = (key for key in result.keys if key.key == "bf16")
    assert key.origin.line >= 10


def test_bridges_sections_have_the_names_of_flags(tmp_path):
    content = {"model": {"tensor_model_parallel_size": 2, "num_layers": 4},
               "train": {"micro_batch_size": 1, "global_batch_size": 16},
               "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
               "mixed_precision": "bf16_mixed", "optimizer": {"clip_grad": 0.5}}  # fmt: skip
    result = imported(tmp_path, yaml.safe_dump(content), "t.yaml", nodes=1, gpus_per_node=8)
    assert (result.tool, result.is_whole) == ("megatron", True)
    plan = plan_of(result)
    assert plan["strategy"] == "zero1"
    assert plan["mesh"] == {"dp_shard": 4, "tp": 2}
    assert plan["precision"] == "bf16-mixed"
    assert plan["clip_grad_norm"] == 0.5


NANOTRON = {
    "general": {"project": "x", "seed": 1},
    "parallelism": {"dp": 4, "pp": 2, "tp": 2, "pp_engine": "afab", "tp_mode": "REDUCE_SCATTER"},
    "tokens": {"sequence_length": 2048, "micro_batch_size": 2,
               "batch_accumulation_per_replica": 4, "train_steps": 9},
    "optimizer": {"zero_stage": 1, "clip_grad": None, "accumulate_grad_in_fp32": True},
    "model": {"dtype": "bfloat16", "ddp_bucket_cap_mb": 25},
}  # fmt: skip


def test_nanotrons_sizes_are_a_mesh(tmp_path):
    result = imported(tmp_path, yaml.safe_dump(NANOTRON), "t.yaml")
    assert (result.tool, result.is_whole) == ("nanotron", True)
    assert plan_of(result) == {
        "version": 1, "strategy": "zero1", "mesh": {"pp": 2, "dp_shard": 4, "tp": 2},
        "tp_plan": "auto", "sequence_parallel": True, "pipeline": {
            "schedule": "GPipe", "microbatches": 4}, "precision": "bf16-mixed",
        "batch": {"micro": 8, "seq_len": 2048},
    }  # fmt: skip


def test_a_distributed_config_is_read_alone_or_in_a_models_config(tmp_path):
    content = {"tp_size": 2, "tp_plan": "auto", "fsdp_size": 4}
    want = {"version": 1, "strategy": "full_shard", "mesh": {"dp_shard": 4, "tp": 2},
            "tp_plan": "hf"}  # fmt: skip
    assert plan_of(imported(tmp_path, content)) == want
    inside = {"model_type": "llama", "hidden_size": 64, "distributed_config": content}
    assert plan_of(imported(tmp_path, inside)) == want
    named = {"up_proj": "colwise", "down_proj": "rowwise"}
    styles = content | {"tp_plan": {f"model.layers.*.mlp.{name}": style
                                    for name, style in named.items()}}  # fmt: skip
    assert plan_of(imported(tmp_path, styles))["rules"] == [
        {"match": f"model.layers.*.mlp.{name}", "place": {"tp": style}}
        for name, style in named.items()
    ]


FLAGS = "--tensor-model-parallel-size 2 --micro-batch-size 1 --use-distributed-optimizer --bf16"
LAUNCH = "torchrun --nproc_per_node 8 pretrain.py"
SAME_FLAGS = {
    "appended array": f'A=(--tensor-model-parallel-size 2 --micro-batch-size 1)\n'
                      f'A+=(--use-distributed-optimizer\n --bf16)\n{LAUNCH} "${{A[@]}}"\n',
    "appended text": f'A="--tensor-model-parallel-size 2 --micro-batch-size 1"\n'
                     f'A="$A --use-distributed-optimizer --bf16"\n{LAUNCH} $A\n',
    "another launcher": f"nsys profile --trace=cuda -o x {LAUNCH} {FLAGS} 2>&1 | tee log\n",
    "environment": f"OMP_NUM_THREADS=1 {LAUNCH} {FLAGS}\nARGS=(--tensor-model-parallel-size 4)\n",
    "another program": f"python prepare.py --input x --vocab-file y\n{LAUNCH} {FLAGS}\n",
    "a shell": f'CMD="{LAUNCH} {FLAGS}"\nsrun bash -c "$CMD"\n',
    "last of two": f"TP=4\nTP=2\n{LAUNCH} {FLAGS.replace('size 2', 'size $TP')}\n",
    "printed": f"N=$(scontrol show --x | head --y)\n{LAUNCH} {FLAGS} --master-addr $N\n",
}  # fmt: skip


@pytest.mark.parametrize("kind", SAME_FLAGS)
def test_scripts_with_the_same_flags_are_the_same_plan(tmp_path, kind):
    result = imported(tmp_path, SAME_FLAGS[kind], "t.sh")
    assert result.is_whole, result.of("refused")
    plan = plan_of(result)
    assert (plan["mesh"], plan["strategy"]) == ({"dp_shard": 4, "tp": 2}, "zero1")
    assert (plan["precision"], plan["batch"]) == ("bf16-mixed", {"micro": 1})
    assert plan["hardware"]["gpus_per_node"] == 8
    assert "vocab_file" not in {key.key for key in result.keys}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"{LAUNCH} {FLAGS}\npython convert.py --tensor-model-parallel-size 4\n",
         "two commands have flags of a training: one in line 1, one in line 2"),
        (f"if [ $1 ]; then\n  A=--sequence-parallel\nfi\n{LAUNCH} {FLAGS} --lr 1 $A\n",
         r"which flags are in \$A"),
        (f"A={FLAGS!r}\n[ -n $1 ] && A+=' --sequence-parallel'\n{LAUNCH} --lr 1 $A\n",
         r"which flags are in \$A"),
        (f"A={FLAGS!r}\n[ -n $1 ] && A+=' --sequence-parallel'\n", r"which flags are in \$A"),
        (f'{LAUNCH} {FLAGS} --lr 1 "$@"\n', r"which flags are in \$@"),
    ],
)  # fmt: skip
def test_flags_that_only_a_run_would_tell_are_refused(tmp_path, content, words):
    with pytest.raises(SpecError, match=words):
        imported(tmp_path, content, "t.sh")


def test_a_size_that_depends_on_a_condition_is_refused(tmp_path):
    content = f"TP=2\nif [ $1 ]; then\n  TP=4\nfi\n{LAUNCH} {FLAGS.replace('size 2', 'size $TP')}"
    (key,) = imported(tmp_path, content, "t.sh").of("refused")
    assert (key.key, key.note) == (
        "tensor_model_parallel_size", "the program computes it: state mesh.tp")  # fmt: skip


@pytest.mark.parametrize(
    ("section", "line", "key", "verdict"),
    [
        ("experimental", "pipeline_parallel_degree = 2", "pipeline_parallel_degree", "honoured"),
        ("experimental", "context_parallel_degree = 2", "context_parallel_degree", "honoured"),
        ("experimental", "enable_async_tensor_parallel = true", "enable_async_tensor_parallel",
         "refused"),
        ("optimizer", "name = 'SGD'", "name", "refused"),
        ("optimizer", "name = 'Adam'", "name", "honoured"),
        ("optimizer", "implementation = 'fused_opt_states_bf16'", "implementation", "refused"),
        ("optimizer", "lr = 0.1", "lr", "irrelevant"),
        ("model", "converters = ['float8']", "converters", "refused"),
        ("model", "converters = []", "converters", "irrelevant"),
        ("model", "flavor = '8B'", "flavor", "irrelevant"),
        ("training", "enable_fp8_linear = true", "enable_fp8_linear", "refused"),
        ("training", "enable_fp8_linear = false", "enable_fp8_linear", "irrelevant"),
    ],
)  # fmt: skip
def test_keys_of_torchtitan_below_a_section_are_read(tmp_path, section, line, key, verdict):
    head = f"[{section}]\n"
    content = TITAN if head in TITAN else f"{TITAN}{head}"
    result = imported(tmp_path, content.replace(head, f"{head}{line}\n"), "t.toml",
                      nodes=1, gpus_per_node=8)  # fmt: skip
    verdicts = {each.key: each.verdict for each in result.keys}
    assert verdicts[f"{section}.{key}"] == verdict


def test_context_ranks_alone_shard_parameters_in_torchtitan(tmp_path):
    content = TITAN.replace("shard_degree = -1", "shard_degree = 1\ncontext_parallel_degree = 2")
    with pytest.raises(SpecError, match="sharded over cp alone"):
        imported(tmp_path, content, "t.toml", nodes=1, gpus_per_node=4)


@pytest.mark.parametrize(
    "more",
    [
        "\n\ndef more():\n    config = llama3_8b()\n    config.parallelism.x = 8\n",
        "\n\nconfig = llama3_8b()\nconfig.training.steps: int = 8\n",
    ],
)
def test_changes_of_a_configuration_elsewhere_are_refused(tmp_path, more):
    with pytest.raises(SpecError, match="is not simply assigned"):
        imported(tmp_path, TITAN_PY + more, "t.py")


@pytest.mark.parametrize(
    ("lines", "is_read"),
    [("config.training.seq_len = 1024", True), ("config.training.seq_len *= 2", False),
     ("if big:\n        config.training.seq_len = 1024", False)],
)  # fmt: skip
def test_only_plain_assignments_of_python_are_read(tmp_path, lines, is_read):
    content = TITAN_PY.replace("return Trainer", "config = Trainer") + f"    {lines}\n"
    if is_read:
        assert plan_of(imported(tmp_path, content, "t.py"))["batch"]["seq_len"] == 1024
        return
    with pytest.raises(SpecError, match=r"config\.training\.seq_len is not simply assigned"):
        imported(tmp_path, content, "t.py")


@pytest.mark.parametrize(("value", "loss"), [(None, "tokens"), (True, "tokens"), (False, "mean")])
def test_the_trainers_loss_is_of_all_ranks_unless_told_otherwise(tmp_path, value, loss):
    content = {"output_dir": "out"}
    content |= {} if value is None else {"average_tokens_across_devices": value}
    assert plan_of(imported(tmp_path, content))["loss"] == loss


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"output_dir": "o", "accelerator_config": {"split_batches": True}},
         "accelerator_config.split_batches"),
        ({"output_dir": "o", "split_batches": True}, "split_batches"),
        (with_key(DEEPSPEED, "optimizer.type", "RMSprop"), "optimizer.type"),
    ],
)  # fmt: skip
def test_what_changes_the_batch_or_the_state_is_refused(tmp_path, content, key):
    assert [each.key for each in imported(tmp_path, content).of("refused")] == [key]


def test_one_precision_in_two_places_is_one(tmp_path):
    inner = with_key(DEEPSPEED, "bf16.enabled", True)
    content = {"output_dir": "out", "bf16": True, "per_device_train_batch_size": 2}
    roles = {"param": "bf16", "reduce": "bf16", "master": "fp32"}
    assert plan_of(imported(tmp_path, content | {"deepspeed": inner}))["precision"] == roles
    strategy = {"class_path": "lightning.pytorch.strategies.DeepSpeedStrategy",
                "init_args": {"config": with_key(inner, "zero_optimization.stage", 0)}}  # fmt: skip
    trainer = {"trainer": {"precision": "bf16-mixed", "devices": 8, "strategy": strategy}}
    assert plan_of(imported(tmp_path, trainer))["precision"] == roles
    half = with_key(DEEPSPEED, "fp16.enabled", True)
    with pytest.raises(SpecError, match="state two different precision"):
        imported(tmp_path, content | {"deepspeed": half})


@pytest.mark.parametrize("word", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp2_ignores_every_sharding_strategy(tmp_path, word):
    content = with_key(ACCELERATE, "fsdp_config.fsdp_version", 2)
    with pytest.raises(SpecError, match=f"{word}: version 2 ignores it"):
        imported(tmp_path, with_key(content, "fsdp_config.fsdp_sharding_strategy", word))


@pytest.mark.parametrize(
    ("flags", "dtypes"),
    [
        ("--fp16", ("fp16", "fp16")),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", ("fp16", "fp32")),
        ("--bf16", ("bf16", "fp32")),
        ("--bf16 --grad-reduce-in-fp32 false", ("bf16", "bf16")),
    ],
)
def test_megatrons_gradients_have_a_dtype(tmp_path, flags, dtypes):
    content = f"{LAUNCH} --micro-batch-size 1 {flags}\n"
    precision = plan_of(imported(tmp_path, content, "t.sh"))["precision"]
    words = {"bf16-mixed": ("bf16", "fp32"), "16-mixed": ("fp16", "fp32")}
    found = words[precision] if isinstance(precision, str) else tuple(precision.values())[:2]
    assert found == dtypes


def test_a_sharding_of_megatron_needs_its_fsdp(tmp_path):
    content = f"{LAUNCH} --micro-batch-size 1 --data-parallel-sharding-strategy optim_grads_params"
    result = imported(tmp_path, content, "t.sh")
    key = next(key for key in result.keys if key.key == "data_parallel_sharding_strategy")
    assert (key.verdict, plan_of(result)["strategy"]) == ("irrelevant", "ddp")
    result = imported(tmp_path, f"{content} --use-megatron-fsdp", "t.sh")
    assert plan_of(result)["strategy"] == "full_shard"
    assert result.of("irrelevant") == ()


def test_nanotron_runs_gpipe_unless_told_otherwise(tmp_path):
    content = with_key(NANOTRON, "parallelism.pp_engine", None)
    assert plan_of(imported(tmp_path, yaml.safe_dump(content), "t.yaml"))["pipeline"] == {
        "schedule": "GPipe", "microbatches": 4}  # fmt: skip
    del content["parallelism"]["pp_engine"]
    plan = plan_of(imported(tmp_path, yaml.safe_dump(content), "t.yaml"))
    assert plan["pipeline"]["schedule"] == "GPipe"
    content = with_key(NANOTRON, "parallelism.pp_engine", "1f1b")
    plan = plan_of(imported(tmp_path, yaml.safe_dump(content), "t.yaml"))
    assert "schedule" not in plan["pipeline"]
    experts = with_key(NANOTRON, "parallelism.expert_parallel_size", 2)
    (key,) = imported(tmp_path, yaml.safe_dump(experts), "t.yaml").of("refused")
    assert key.key == "parallelism.expert_parallel_size"


BAD = {
    "wrong type": (json.dumps(with_key(DEEPSPEED, "zero_optimization.stage", "three")),
                   "zero_optimization.stage must be 0, 1, 2 or 3, not 'three'"),
    "number in words": (json.dumps(DEEPSPEED | {"train_batch_size": [1]}),
                        "train_batch_size must be a whole number of at least 1, not a list"),
    "binary": (b"\x7fELF\0\0", "this is a binary file"),
    "not a tool's": (json.dumps({"a": 1}), "no tool has a configuration file like this"),
    "a list": ("[1, 2]", "no tool has a configuration file like this"),
    "not closed": ('{"zero_optimization": {', "is never closed"),
    "key twice": ('{"zero_optimization": {}, "zero_optimization": {}}', "given twice"),
    "anchors": ('{"zero_optimization": &a {"x": *a}}', "anchors such as '&a' are not supported"),
    "bomb": ("distributed_type: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "anchors"),
    "tags": ("distributed_type: !!python/object/apply:os.system [true]\n", "tags such as"),
    "huge": ("x" * 10**7, "a configuration file has at most 1,000,000"),
    "deep": ('{"train_batch_size":' + "[" * 5000 + "]" * 5000 + "}", "nested more than 32"),
    "a plan": ("version: 1\nstrategy: ddp\n", "this is a plan already"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_have_one_clear_error_and_write_nothing(tmp_path, capsys, kind):
    content, words = BAD[kind]
    name = "theirs.yaml" if kind in ("bomb", "tags", "a plan") else "theirs.json"
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["import", str(path), "-o", str(tmp_path / "plan.yaml"), "--partial"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert str(path) in error
    assert "fix: " in error
    assert not (tmp_path / "plan.yaml").exists()


def test_a_refused_key_writes_nothing_without_partial(tmp_path, capsys):
    path, out = tmp_path / "theirs.json", tmp_path / "plan.yaml"
    path.write_text(json.dumps(DEEPSPEED | {"zero_optimise": 1}))
    assert main(["import", str(path), "-o", str(out)]) == 1
    assert "refused" in capsys.readouterr().out
    assert not out.exists()
    assert main(["import", str(path), "-o", str(out), "--partial"]) == 1
    assert "# - zero_optimise: 1" in out.read_text()
    assert load_spec(out).strategy == "full_shard"
    assert main(["import", str(path), "-o", str(out), "--partial"]) == 2
    assert "nothing is replaced" in capsys.readouterr().err


def test_json_has_every_key(tmp_path, capsys):
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(DEEPSPEED | {"odd": 1, "steps_per_print": 5}))
    assert main(["import", str(path), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "import/1"
    result = answer["result"]
    assert result["from"] == "deepspeed"
    assert result["plan"] is None
    assert [key["key"] for key in result["refused"]] == ["odd"]
    assert [key["key"] for key in result["irrelevant"]] == ["steps_per_print"]
    stage = next(key for key in result["honoured"] if key["key"] == "zero_optimization.stage")
    note = "0 replicates, 3 shards everything"
    assert stage == {"key": "zero_optimization.stage", "value": 3, "plan_key": "strategy",
                     "note": note, "line": 1}  # fmt: skip


def test_a_folder_has_one_configuration_or_names_them(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SpecError, match="has no configuration files"):
        import_config(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    assert import_config(tmp_path).tool == "deepspeed"
    (tmp_path / "acc.yaml").write_text(yaml.safe_dump(ACCELERATE))
    with pytest.raises(SpecError, match="has 2 configuration files") as caught:
        import_config(tmp_path)
    assert "acc.yaml" in caught.value.problems[0].fix
    assert import_config(tmp_path, "accelerate").tool == "accelerate"


def test_a_strangers_text_stays_in_a_comment(tmp_path):
    name = "x\nmodel: {entry: evil:run}\x1b[2J"
    result = imported(tmp_path, with_key(DEEPSPEED, f"odd {name}", name))
    assert set(plan_of(result)) == {"version", "strategy", "mesh", "batch"}
    assert result.text.isprintable() or set("\n") == {c for c in result.text if not c.isprintable()}


def test_flags_state_the_machine_and_contradictions_are_found(tmp_path):
    content = {"train_batch_size": 64, "zero_optimization": {"stage": 3}}
    result = imported(tmp_path, content, nodes=2, gpus_per_node=4, gpu="h100-sxm-80gb")
    plan = plan_of(result)
    assert plan["hardware"] == {"nodes": 2, "gpus_per_node": 4, "gpu": "h100-sxm-80gb"}
    assert plan["mesh"] == {"dp_shard": 8}
    with pytest.raises(SpecError, match="state two different hardware"):
        imported(tmp_path, ACCELERATE, nodes=3)
    with pytest.raises(SpecError, match="h100"):
        imported(tmp_path, content, gpus_per_node=4, gpu="h1000")


def test_the_room_of_configurations_knows_no_torch():
    script = (
        "import sys, meshplan.interop.configs.tools\n"
        "sys.exit(f'{known}' if (known := {'torch', 'numpy'} & set(sys.modules)) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
