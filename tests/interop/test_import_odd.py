"""Odd files of other tools: a key is refused or honoured rightly, and the plan that comes out runs.

Which seeded bug would this catch? A NeMo file that is read as Lightning's and becomes DDP, a limit
of values that becomes one of the norm, and keys that count as honoured although `check` refuses
what they became.
"""

from __future__ import annotations

import json

import pytest
import yaml

from meshplan.api.configs import import_config
from meshplan.cli.app import main
from meshplan.errors import SpecError
from tests.bench.census import SUFFIXES, written

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 512, "max_position_embeddings": 8192,
}  # fmt: skip
NEMO = {
    "trainer": {"devices": 8, "num_nodes": 2, "precision": "bf16-mixed", "max_steps": 100},
    "model": {
        "micro_batch_size": 1, "global_batch_size": 128, "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2, "sequence_parallel": True, "megatron_amp_O2": True,
        "activations_checkpoint_granularity": "full", "activations_checkpoint_num_layers": 1,
        "optim": {"name": "distributed_fused_adam", "lr": 1e-4},
    },
}  # fmt: skip
DEEPSPEED = {"train_micro_batch_size_per_gpu": 2}
EXPERTS = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 "
    "--expert-model-parallel-size 2 --micro-batch-size 1 "
)


def imported(tmp_path, content, name="theirs.json", **more):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return import_config(path, **more)


def plan_of(result):
    return yaml.safe_load(result.text)


def refused(result):
    return {key.key: key.note for key in result.of("refused")}


def test_a_file_of_nemo_is_no_trainer_of_lightning(tmp_path):
    result = imported(tmp_path, yaml.safe_dump(NEMO), "nemo.yaml")
    assert result.tool == "megatron"
    assert result.is_whole
    plan = plan_of(result)
    assert plan["strategy"] == "zero1"
    assert plan["mesh"] == {"pp": 2, "dp_shard": 2, "tp": 4}
    assert plan["hardware"] == {"nodes": 2, "gpus_per_node": 8}
    assert plan["precision"] == "bf16-mixed"
    assert plan["activation_checkpointing"] == "full"
    assert plan["pipeline"]["microbatches"] == 64
    assert "clip_grad_norm" not in plan  # NeMo clips nothing unless it is told.
    clipped = {**NEMO, "trainer": {**NEMO["trainer"], "gradient_clip_val": 0.5}}
    assert plan_of(imported(tmp_path, yaml.safe_dump(clipped), "n.yaml"))["clip_grad_norm"] == 0.5


def test_a_limit_of_values_is_none_of_the_norm(tmp_path):
    trainer = {"devices": 4, "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    result = imported(tmp_path, yaml.safe_dump({"trainer": trainer}), "cli.yaml")
    assert set(refused(result)) == {"trainer.gradient_clip_val", "trainer.gradient_clip_algorithm"}
    assert "clip_grad_norm" not in plan_of(result)


@pytest.mark.parametrize(
    ("section", "strategy"),
    [(True, "zero1"), (False, "ddp"), ({"stage": 3}, "full_shard"), (None, "ddp"), ({}, "ddp")],
)
def test_zero_of_old_is_a_stage(tmp_path, section, strategy):
    """DeepSpeed still reads true as stage 1: `read_zero_config_deprecated`."""
    result = imported(tmp_path, {**DEEPSPEED, "zero_optimization": section})
    assert result.is_whole
    assert plan_of(result)["strategy"] == strategy


@pytest.mark.parametrize(
    ("more", "what", "fix"),
    [
        ({"zero_optimization": 2}, "be true or false, not 2", 'a section, such as {"stage": 2}'),
        ({"zero_optimization": "3"}, "must be true or false, not '3'", "write a section"),
        ({"zero_optimization": ["stage"]}, "not a list", "write a section"),
        ({"bf16": True}, "bf16 is a section of keys, not true", "such as bf16.enabled"),
        ({"optimizer": "AdamW"}, "not 'AdamW'", "such as optimizer.type"),
        ({"zero_optimization": {"offload_param": "cpu"}}, "offload_param is a section of keys",
         "such as zero_optimization.offload_param.device"),
    ],
)  # fmt: skip
def test_a_section_that_is_a_value_is_told_so(tmp_path, more, what, fix):
    with pytest.raises(SpecError) as error:
        imported(tmp_path, {**DEEPSPEED, **more})
    (problem,) = error.value.problems
    assert what in problem.what
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("tool", "name"),
    [("torchtitan", "t.json"), ("megatron", "t.json"), ("megatron", "run.sh"),
     ("torchtitan", "empty.toml"), ("deepspeed", "empty.json"), ("nanotron", "empty.yaml")],
)  # fmt: skip
def test_a_file_of_another_tool_makes_no_plan_of_defaults(tmp_path, tool, name):
    texts = {"t.json": '{"parallelism": {"tensor_parallel_degree": 2}}',
             "run.sh": "torchrun train.py\n", "empty.toml": "\n", "empty.json": "{}",
             "empty.yaml": "{}"}  # fmt: skip
    with pytest.raises(SpecError, match="the file states nothing that"):
        imported(tmp_path, texts[name], name, tool=tool)


MACHINE = {"compute_environment": "LOCAL_MACHINE", "num_processes": 8}


@pytest.mark.parametrize(
    ("content", "name", "fix"),
    [
        ({**DEEPSPEED, "gradient_accumulation_steps": "4"}, "d.json", "write 4 without quotes"),
        ({**DEEPSPEED, "gradient_clipping": "0.5"}, "d.json", "write 0.5 without quotes"),
        ({**DEEPSPEED, "gradient_accumulation_steps": "-4"}, "d.json", "write a whole number of"),
        ({**DEEPSPEED, "gradient_accumulation_steps": "inf"}, "d.json", "write a whole number of"),
        ({**MACHINE, "distributed_type": "FSPD"}, "a.yaml", "did you mean FSDP?"),
        ({**DEEPSPEED, "fp16": {"enabled": "tru"}}, "d.json", "did you mean true?"),
        ({**DEEPSPEED, "fp16": {"enabled": "yes"}}, "d.json", "write true or false"),
        ({**DEEPSPEED, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, "d.json",
         "keep one: bf16.enabled: true or fp16.enabled: true"),
        ("", "d.json", "looked for a JSON with zero_optimization"),
        ("python -m torch.distributed.launch --nproc_per_node 4 train.py\n", "run.sh",
         "start the program with meshplan launch or torchrun"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_the_right_one(tmp_path, content, name, fix):
    with pytest.raises(SpecError) as error:
        imported(tmp_path, content, name)
    (problem,) = error.value.problems
    assert problem.fix.startswith(fix) or problem.fix.endswith(fix), problem.fix


def test_a_refused_schedule_is_told_with_those_that_there_are(tmp_path):
    text = '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "2F3B"\n'
    result = imported(tmp_path, text + "[training]\nlocal_batch_size = 2\n", "t.toml")
    (note,) = refused(result).values()
    assert note.startswith("no plan has this schedule: write ")
    assert "1F1B" in note


def test_the_launcher_of_old_loses_nothing(tmp_path):
    text = "python -m torch.distributed.launch --nproc_per_node 8 --use_env pretrain_gpt.py "
    result = imported(
        tmp_path, text + "--tensor-model-parallel-size 2 --micro-batch-size 2", "r.sh"
    )
    assert result.is_whole


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_optimizer_alone_on_the_host_is_refused(tmp_path, stage):
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    result = imported(tmp_path, {**DEEPSPEED, "zero_optimization": zero})
    assert "offload" not in plan_of(result)
    (note,) = refused(result).values()
    assert "write offload: params" in note


def test_parameters_on_the_host_take_the_optimizer_along(tmp_path):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    result = imported(tmp_path, {**DEEPSPEED, "zero_optimization": zero})
    assert result.is_whole
    assert plan_of(result)["offload"] == "params"


@pytest.mark.parametrize(("size", "verdict"), [(8, "irrelevant"), (4, "honoured"), (3, "refused")])
def test_nodes_that_gather_are_a_part_of_the_shards(tmp_path, size, verdict):
    zero = {"stage": 3, "zero_hpz_partition_size": size}
    result = imported(tmp_path, {**DEEPSPEED, "zero_optimization": zero}, gpus_per_node=8)
    (key,) = (each for each in result.keys if each.key.endswith("zero_hpz_partition_size"))
    assert key.verdict == verdict


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--use-distributed-optimizer", "write expert_tensor_parallel_size 1"),
        ("--expert-tensor-parallel-size 1", "experts are sharded over ranks of dp_shard"),
        ("--expert-tensor-parallel-size 1 --use-distributed-optimizer", ""),
    ],
)
def test_experts_of_megatron_are_sharded_over_tp_unless_told(tmp_path, flags, words):
    result = imported(tmp_path, EXPERTS + flags, "run.sh")
    assert ("ep" in plan_of(result)["mesh"]) == (not words)
    assert words in "".join(refused(result).values())
    assert result.is_whole == (not words)


def test_a_global_batch_is_whole_microbatches_of_all_ranks(tmp_path):
    batch = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}
    with pytest.raises(SpecError, match="24 is not a multiple of 2 x 8 data ranks = 16"):
        imported(tmp_path, batch, gpus_per_node=8)


@pytest.mark.parametrize(
    "content",
    [
        {"optim": "adafactor", "fsdp": "full_shard", "per_device_train_batch_size": 1},
        {"ddp_bucket_cap_mb": 50, "bf16": True, "per_device_train_batch_size": 1},
        {"fsdp_cpu_offload": True, "fsdp_size": 1, "tp_size": 1, "dp_replicate_size": 8},
    ],
)
def test_what_only_other_layouts_run_is_not_in_the_plan(tmp_path, capsys, content):
    result = imported(tmp_path, content, gpus_per_node=8)
    assert accepted(tmp_path, result.text) == 0, capsys.readouterr().err


def accepted(tmp_path, text):
    """The exit code of `check` of a plan, with a small model."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = tmp_path / "plan.yaml"
    path.write_text(
        text.replace("# model: {config: config.json}", "model: {config: config.json} #")
    )
    return main(["check", "-f", str(path)])


OF_OTHER_MODELS = {
    "lightning/ddp unused": "BatchNorm",
    "lightning/fsdp hybrid": "matches no module of that type",
    "hf/fsdp": "matches no module of that type",
    "hf/experts": "no rule places a module on ep",
    "megatron/experts": "no rule places a module on ep",
}
"""Files that need another model than a small Llama, and what `check` says of that."""


@pytest.mark.parametrize(("tool", "name", "text"), list(written()), ids=lambda each: each[:30])
def test_the_plan_that_comes_out_is_accepted(tmp_path, capsys, tool, name, text):
    path = tmp_path / f"theirs{SUFFIXES[tool]}"
    path.write_text(text)
    for ranks in (None, 8, 16, 32, 64, 4, 2, 128):
        try:
            result = import_config(path, tool=tool, gpus_per_node=ranks)
        except SpecError:
            continue
        if "\nhardware:" in result.text:
            break
    code, words = accepted(tmp_path, result.text), OF_OTHER_MODELS.get(f"{tool}/{name}")
    said = capsys.readouterr()
    assert (code == 0) == (words is None), said.err + said.out
    assert (words or "") in said.err + said.out
