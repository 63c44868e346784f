"""Parsers of other tools, fed with exported files: `python -m tests.helpers.their_parsers TOOL`.

Reads the files from standard input, `{name: {"text": ..., "ranks": ..., "data_ranks": ...}}` as
JSON, and prints for each what the tool's own configuration then holds, in words of a plan; or
`{"missing": why}` if the tool cannot be imported. A process of its own, because these packages
change what they import: DeepSpeed wraps torch.distributed, and Megatron-LM reads sys.argv.
"""

from __future__ import annotations

import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import types
import typing
from pathlib import Path
from typing import Any
from unittest import mock

STAGES = ("ddp", "zero1", "zero2", "full_shard")


def word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def deepspeed(name: str, text: str, ranks: int, data_ranks: int) -> dict[str, Any]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    config = importlib.import_module("deepspeed.runtime.config")
    comm = importlib.import_module("deepspeed.comm")
    path = Path(f"{name}.json")
    path.write_text(text)
    mpu = mock.Mock(get_data_parallel_world_size=lambda: data_ranks)
    with mock.patch.object(comm, "get_rank", return_value=0):
        held = config.DeepSpeedConfig(str(path), mpu=mpu)
    param = "float32"
    if held.bfloat16_config.enabled or held.float16_config.enabled:
        param = "bfloat16" if held.bfloat16_config.enabled else "float16"
    experts = held.expert_parallel_config
    stages, interval = held.pipeline["stages"], held.pipeline["activation_checkpoint_interval"]
    if stages != "auto" and held.zero_optimization_stage > 1:
        raise ValueError("PipelineEngine takes stages 0 and 1 only")  # No engine is made here.
    return {
        "batch.global": held.train_batch_size,
        "batch.micro": held.train_micro_batch_size_per_gpu,
        "batch.accumulate": held.gradient_accumulation_steps,
        "clip_grad_norm": held.gradient_clipping or None,
        "strategy": STAGES[held.zero_optimization_stage],
        "param": param,
        "reduce": word(held.communication_data_type or param),
        "offload.params": held.zero_config.offload_param is not None,
        "activation_checkpointing": "full" if stages != "auto" and interval == 1 else None,
        "mesh.tp": held.tensor_parallel_config.autotp_size or 1,
        "mesh.pp": 1 if stages == "auto" else stages,
        "mesh.cp": json.loads(text).get("sequence_parallel_size", 1),
        "mesh.ep": experts.autoep_size if experts.enabled else 1,
        "optimizer": held.optimizer_name,
    }


def torchtitan(name: str, text: str, ranks: int, data_ranks: int) -> dict[str, Any]:
    manager = importlib.import_module("torchtitan.config.manager")
    dims = importlib.import_module("torchtitan.distributed.parallel_dims")
    Path(f"{name}.py").write_text(text)
    sys.path[:0] = [] if sys.path[0] == os.getcwd() else [os.getcwd()]
    held = manager.ConfigManager().parse_args(["--module", name, "--config", "from_plan"])
    axes, training = held.parallelism, held.training
    dims.ParallelDims(  # Refuses axes whose product is not the number of ranks.
        dp_replicate=axes.data_parallel_replicate_degree,
        dp_shard=axes.data_parallel_shard_degree, cp=axes.context_parallel_degree,
        tp=axes.tensor_parallel_degree, pp=axes.pipeline_parallel_degree,
        ep=axes.expert_parallel_degree, world_size=ranks,
    )  # fmt: skip
    strategy = "ddp"
    if axes.data_parallel_shard_degree > 1:
        keeps_whole = axes.fsdp_reshard_after_forward == "never"
        strategy = "zero2" if keeps_whole else "full_shard"
        if axes.data_parallel_replicate_degree > 1:
            strategy = {"zero2": "hybrid_shard_zero2", "full_shard": "hybrid_shard"}[strategy]
    recompute = type(held.activation_checkpoint).__qualname__.partition(".")[0]
    schedule = axes.pipeline_parallel_schedule
    return {
        "strategy": strategy,
        "mesh.dp_replicate": axes.data_parallel_replicate_degree,
        "mesh.dp_shard": axes.data_parallel_shard_degree,
        "mesh.tp": axes.tensor_parallel_degree,
        "mesh.pp": axes.pipeline_parallel_degree,
        "mesh.cp": axes.context_parallel_degree,
        "mesh.ep": axes.expert_parallel_degree,
        "sequence_parallel": axes.enable_sequence_parallel,
        "pipeline.schedule": schedule if axes.pipeline_parallel_degree > 1 else None,
        "batch.whole": training.local_batch_size,
        "batch.micro": (
            axes.pipeline_parallel_microbatch_size
            if axes.pipeline_parallel_degree > 1 else training.local_batch_size
        ),
        "batch.global": training.global_batch_size,
        "batch.seq_len": training.seq_len,
        "clip_grad_norm": None if training.max_norm > 1e9 else training.max_norm,
        "param": training.mixed_precision_param,
        "reduce": training.mixed_precision_reduce,
        "master": training.dtype,
        "offload.params": training.enable_cpu_offload,
        "compile": held.compile.enable,
        "activation_checkpointing": {"FullAC": "full", "SelectiveAC": "selective"}.get(recompute),
    }  # fmt: skip


MODEL_OF_MEGATRON = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --max-position-embeddings 256 "
    "--train-iters 10 --lr 1e-3 --vocab-size 100 --tokenizer-type NullTokenizer"
)


def megatron(name: str, text: str, ranks: int, data_ranks: int) -> dict[str, Any]:
    typing.override = getattr(typing, "override", lambda method: method)  # Python before 3.12.
    arguments = importlib.import_module("megatron.training.arguments")
    from torch.distributed.run import parse_args

    # The script is run, with a torchrun that only says how it was called.
    fake = Path("bin/torchrun")
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$CUDA_DEVICE_MAX_CONNECTIONS" "$@"\n')
    fake.chmod(0o755)
    path = Path(f"{name}.sh")
    path.write_text(text)
    env = os.environ | {"PATH": f"{fake.parent.resolve()}:{os.environ['PATH']}"}
    called = subprocess.run(["sh", path], env=env, text=True, capture_output=True, check=True)
    connections, *words = called.stdout.splitlines()
    launched = parse_args(words)
    flags = [*launched.training_script_args, *shlex.split(MODEL_OF_MEGATRON)]
    if "--expert-model-parallel-size" in flags:
        flags += ["--num-experts", "8"]
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(ranks)}
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections or "8"
    hopper = types.SimpleNamespace(major=9, minor=0, name="H100")
    sys.argv = ["pretrain_gpt.py", *flags]
    with mock.patch("torch.cuda.get_device_properties", return_value=hopper):
        held = arguments.parse_args()
        arguments.validate_args(held)
        arguments.core_transformer_config_from_args(held)
    strategy = "zero1" if held.use_distributed_optimizer else "ddp"
    if held.use_megatron_fsdp:
        strategy = {"optim_grads": "zero2", "optim_grads_params": "full_shard"}[
            held.data_parallel_sharding_strategy
        ]
    dtype = word(held.params_dtype)
    attention = {"a2a": "all_to_all"}.get(held.cp_comm_type[0], "all_gather")  # p2p: a ring.
    return {
        "ranks": int(launched.nnodes) * int(launched.nproc_per_node),
        "strategy": strategy,
        "data_ranks": held.data_parallel_size,
        "mesh.tp": held.tensor_model_parallel_size,
        "mesh.pp": held.pipeline_model_parallel_size,
        "mesh.cp": held.context_parallel_size,
        "mesh.ep": held.expert_model_parallel_size,
        "sequence_parallel": held.sequence_parallel,
        "context.attention": attention if held.context_parallel_size > 1 else None,
        "pipeline.virtual": held.virtual_pipeline_model_parallel_size or 1,
        "batch.micro": held.micro_batch_size,
        "batch.global": held.global_batch_size,
        "batch.seq_len": held.seq_length,
        "clip_grad_norm": held.clip_grad or None,
        "param": dtype,
        "reduce": "float32" if held.accumulate_allreduce_grads_in_fp32 else dtype,
        "activation_checkpointing": held.recompute_granularity,
        "loss": "tokens" if held.calculate_per_token_loss else "mean",
        "optimizer": {"adam": "adamw"}.get(held.optimizer),
    }


OTHERS_OF_NANOTRON: dict[str, Any] = {
    "general": {"project": "a"},
    "tokenizer": {},
    "model": {"model_config": {}, "init_method": {"std": 0.02}},
    "tokens": {"train_steps": 10},
    "optimizer": {
        "weight_decay": 0.0, "learning_rate_scheduler": {
            "learning_rate": 1e-3, "lr_warmup_style": "linear", "lr_decay_style": "linear",
        },
    },
}  # fmt: skip
"""What nanotron requires of a file besides its parallelism."""


class _Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand for packages of kernels that need a GPU."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_stubbed = name.partition(".")[0] in ("flash_attn", "grouped_gemm", "functorch")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_stubbed else None

    def create_module(self, spec: Any) -> Any:
        return mock.MagicMock(__spec__=spec, __path__=[], __version__="2.7")

    def exec_module(self, module: Any) -> None:
        pass


def nanotron(name: str, text: str, ranks: int, data_ranks: int) -> dict[str, Any]:
    import yaml

    load = _import_nanotron()
    fields = importlib.import_module("nanotron.config.parallelism_config").ParallelismArgs
    is_release = "context_parallel_size" not in fields.__dataclass_fields__
    tree = copy.deepcopy(OTHERS_OF_NANOTRON)
    written = yaml.safe_load(text)
    for section, keys in written.items():
        tree.setdefault(section, {}).update(keys)
    adam = {"adam_eps": 1e-8, "adam_beta1": 0.9, "adam_beta2": 0.95, "torch_adam_is_fused": True}
    if is_release:
        tree["optimizer"] |= adam
    else:
        tree["optimizer"].setdefault("optimizer_factory", {}).update(adam)
    Path(f"{name}.yaml").write_text(yaml.safe_dump(tree))
    try:
        held = load(f"{name}.yaml")
    except Exception as error:
        later = "context_parallel_size", "recompute_layer", "optimizer_factory"
        if is_release and any(f'"{key}"' in str(error) for key in later):
            return {"later": str(error)}
        raise
    axes = held.parallelism
    engine = type(axes.pp_engine).__name__
    dtype = word(held.model.dtype)
    keeps = held.optimizer.accumulate_grad_in_fp32
    return {
        "strategy": STAGES[held.optimizer.zero_stage],
        "data_ranks": axes.dp,
        "mesh.pp": axes.pp,
        "mesh.tp": axes.tp,
        "mesh.cp": getattr(axes, "context_parallel_size", 1),
        "sequence_parallel": axes.tp_mode.name == "REDUCE_SCATTER",
        "pipeline.schedule": (
            {"OneForwardOneBackwardPipelineEngine": "1F1B"}.get(engine, "GPipe")
            if axes.pp > 1 else None
        ),
        "batch.micro": held.tokens.micro_batch_size,
        "batch.accumulate": held.tokens.batch_accumulation_per_replica,
        "batch.global": held.global_batch_size,
        "batch.seq_len": held.tokens.sequence_length,
        "clip_grad_norm": held.optimizer.clip_grad,
        "param": dtype,
        "reduce": "float32" if keeps else dtype,
        "master": "float32" if keeps else dtype,
        "activation_checkpointing": "full" if getattr(axes, "recompute_layer", False) else None,
    }  # fmt: skip


def _import_nanotron() -> Any:
    if importlib.util.find_spec("flash_attn") is None:
        sys.meta_path.append(_Stub())
    if "nanotron.logging" not in sys.modules:
        # Its logging and its config import one another; either comes first in no release.
        names = ("nanotron.config", "nanotron.config.config")
        sys.modules |= {name: types.ModuleType(name) for name in names}
        sys.modules[names[1]].LoggingArgs = object  # type: ignore[attr-defined]
        try:
            importlib.import_module("nanotron.logging")
        finally:
            for name in names:
                del sys.modules[name]
    return importlib.import_module("nanotron.config").get_config_from_file


IMPORTED = {
    "deepspeed": "deepspeed.runtime.config", "torchtitan": "torchtitan.trainer",
    "megatron": "megatron.training.arguments", "nanotron": "nanotron",
}  # fmt: skip
PARSERS = {each.__name__: each for each in (deepspeed, torchtitan, megatron, nanotron)}


def main(tool: str) -> None:
    files = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # Packages print what they find.
    try:
        typing.override = getattr(typing, "override", lambda method: method)
        importlib.import_module(IMPORTED[tool])
        if tool == "nanotron":
            _import_nanotron()
    except Exception as error:  # Whatever the package's own dependencies raise.
        print(json.dumps({"missing": f"{type(error).__name__}: {error}"}), file=out)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        held: dict[str, Any] = {}
        for name, given in files.items():
            try:
                held[name] = PARSERS[tool](name, **given)
            except (Exception, SystemExit) as error:
                held[name] = {"refused": f"{type(error).__name__}: {error}"}
        os.chdir("/")
    print(json.dumps(held), file=out)


if __name__ == "__main__":
    main(sys.argv[1])
