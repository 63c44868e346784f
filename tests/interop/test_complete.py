"""The tables have every key of the installed packages: a new version with a new key fails here.

Which seeded bug would this catch? A key that a tool has and its table lacks, which an import would
refuse as unknown.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import os
from pathlib import Path

import pytest

from meshplan.interop.configs.tools import TOOLS

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def lacking(tool: str, keys, prefix: str = "") -> list[str]:
    table = TOOLS[tool].table
    return [key for key in keys if table.row(prefix + key) is None
            and not any(row.path.startswith(f"{prefix}{key}.") for row in table.rows)]  # fmt: skip


def load(name: str):
    """A module of another tool; without it, the test is skipped."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    try:
        return importlib.import_module(name)
    except Exception as error:  # Whatever the package's own dependencies raise.
        pytest.skip(f"{name} cannot be imported: {type(error).__name__}: {error}")


def fields(kind) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def test_the_trainers_arguments():
    from transformers import TrainingArguments

    assert lacking("hf", fields(TrainingArguments)) == []


def test_transformers_distributed_config():
    from transformers.distributed import DistributedConfig

    assert lacking("hf", fields(DistributedConfig)) == []
    assert lacking("hf", fields(DistributedConfig), "distributed_config.") == []


def test_the_trainers_fsdp_config():
    """The documented keys, as the docstring of TrainingArguments lists them."""
    import re

    from transformers import TrainingArguments

    text = (
        (TrainingArguments.__doc__ or "").partition("fsdp_config (")[2].partition("deepspeed (")[0]
    )
    keys = re.findall(r"^\s+- (\w+) \(`", text, re.MULTILINE)
    assert len(keys) >= 10
    assert lacking("hf", keys, "fsdp_config.") == []


def test_accelerates_configuration():
    config_args = load("accelerate.commands.config.config_args")
    assert lacking("accelerate", fields(config_args.ClusterConfig)) == []


def test_accelerates_flags_of_sections():
    launch = load("accelerate.commands.launch")
    flags = {flag.removeprefix("--") for action in launch.launch_command_parser()._actions
             for flag in action.option_strings}  # fmt: skip
    for section, begins in (("fsdp_config.", "fsdp_"), ("megatron_lm_config.", "megatron_lm_"),
                            ("parallelism_config.", "parallelism_config_")):  # fmt: skip
        keys = [flag for flag in flags if flag.startswith(begins) and flag.islower()]
        assert len(keys) > 5
        assert lacking("accelerate", keys, section) == []
    ours = {"zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_init_flag",
            "gradient_accumulation_steps", "gradient_clipping", "zero3_save_16bit_model",
            "offload_optimizer_nvme_path", "offload_param_nvme_path"}  # fmt: skip
    keys = [flag for flag in flags if flag.startswith("deepspeed_") or flag in ours]
    assert lacking("accelerate", keys, "deepspeed_config.") == []


@pytest.mark.parametrize(
    "name", ["FSDPStrategy", "DDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"]
)
def test_lightnings_strategies(name):
    strategies = load("lightning.pytorch.strategies")
    keys = [key for key in inspect.signature(getattr(strategies, name).__init__).parameters
            if key not in ("self", "kwargs")]  # fmt: skip
    assert lacking("lightning", keys, "trainer.strategy.init_args.") == []


def test_lightnings_trainer_and_its_words():
    pytorch = load("lightning.pytorch")
    keys = [key for key in inspect.signature(pytorch.Trainer.__init__).parameters if key != "self"]
    assert lacking("lightning", keys, "trainer.") == []
    registry = load("lightning.pytorch.strategies").StrategyRegistry
    row = TOOLS["lightning"].table.row("trainer.strategy")
    known = row.values.form
    theirs = set(registry.available_strategies()) - {"meshplan"}  # Another test may register ours.
    assert [name for name in sorted(theirs) if name not in known] == []


DEEPSPEED_SECTIONS = {
    "deepspeed.runtime.zero.config:DeepSpeedZeroConfig": "zero_optimization.",
    "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadParamConfig":
        "zero_optimization.offload_param.",
    "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig":
        "zero_optimization.offload_optimizer.",
    "deepspeed.runtime.zero.leaf_module_config:DeepSpeedZeroLeafModuleConfig":
        "zero_optimization.leaf_module.",
    "deepspeed.runtime.precision_config:DeepSpeedFP16Config": "fp16.",
    "deepspeed.runtime.precision_config:DeepSpeedBF16Config": "bf16.",
    "deepspeed.runtime.tensor_parallel.config:TPTrainingConfig": "tensor_parallel.",
    "deepspeed.runtime.tensor_parallel.config:TPConfig": "tensor_parallel.tp.",
    "deepspeed.monitor.config:DeepSpeedMonitorConfig": "",
    "deepspeed.compile.config:CompileConfig": "compile.",
}  # fmt: skip


@pytest.mark.parametrize("name", DEEPSPEED_SECTIONS)
def test_deepspeeds_models(name):
    module, _, kind = name.partition(":")
    model = getattr(load(module), kind)
    keys = {*model.model_fields, *(field.alias for field in model.model_fields.values())} - {None}
    assert lacking("deepspeed", sorted(keys), DEEPSPEED_SECTIONS[name]) == []


def test_deepspeeds_other_keys():
    """Names of keys are constants of one module, beside those of values and defaults."""
    constants = load("deepspeed.runtime.constants")
    top = ("TRAIN_BATCH_SIZE", "OPTIMIZER", "SCHEDULER", "ZERO_ALLOW_UNTESTED_OPTIMIZER",
           "ZERO_FORCE_DS_CPU_OPTIMIZER", "STEPS_PER_PRINT", "TRAIN_MICRO_BATCH_SIZE_PER_GPU",
           "GRADIENT_ACCUMULATION_STEPS", "MANAGED_GRADIENT_ACCUMULATION", "TORCH_AUTOCAST",
           "COMMUNICATION_DATA_TYPE", "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE",
           "PRESCALE_GRADIENTS", "GRADIENT_PREDIVIDE_FACTOR", "GRADIENT_ALLREDUCE_OP",
           "DISABLE_ALLGATHER", "DUMP_STATE", "DISABLE_PYTHON_GC", "GRADIENT_CLIPPING",
           "WALL_CLOCK_BREAKDOWN", "MEMORY_BREAKDOWN", "CHECKPOINT", "DATA_TYPES",
           "DATALOADER_DROP_LAST", "USE_DATA_BEFORE_EXPERT_PARALLEL", "LOG_LEVEL",
           "SPARSE_GRADIENTS", "VOCABULARY_SIZE")  # fmt: skip
    keys = [getattr(constants, name) for name in top if hasattr(constants, name)]
    assert len(keys) > 20
    assert lacking("deepspeed", keys) == []


def test_torchtitans_sections():
    configs = load("torchtitan.config.configs")
    for section, kind in (("training.", "TrainingConfig"), ("parallelism.", "ParallelismConfig"),
                          ("compile.", "CompileConfig"), ("comm.", "CommConfig"),
                          ("debug.", "DebugConfig")):  # fmt: skip
        assert lacking("torchtitan", fields(getattr(configs, kind)), section) == []


def test_nanotrons_sections():
    """Read from the source: its package cannot be imported without a GPU's libraries."""
    found = importlib.util.find_spec("nanotron")
    if found is None:
        pytest.skip("nanotron is not installed")
    folder = Path(found.submodule_search_locations[0]) / "config"
    classes = {
        node.name: [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]
        for name in ("config.py", "parallelism_config.py")
        for node in ast.walk(ast.parse((folder / name).read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert lacking("nanotron", classes["Config"]) == []
    for section in ("Tokens", "Optimizer", "Model", "Parallelism"):
        assert lacking("nanotron", classes[f"{section}Args"], f"{section.lower()}.") == []


@pytest.mark.parametrize(
    "name", ["model_parallel_config:ModelParallelConfig",
             "distributed.distributed_data_parallel_config:DistributedDataParallelConfig",
             "optimizer.optimizer_config:OptimizerConfig",
             "transformer.transformer_config:TransformerConfig"],
)  # fmt: skip
def test_megatrons_dataclasses(name):
    """Flags are made of their fields; functions and private fields are no flags."""
    module, _, kind = name.partition(":")
    found = load(f"megatron.core.{module}")
    keys = [key for key in fields(getattr(found, kind))
            if not key.startswith("_") and not key.endswith(("_func", "_factory"))]  # fmt: skip
    assert lacking("megatron", keys) == []
