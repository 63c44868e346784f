"""Lightning's arguments, as of 2.6: the YAML of LightningCLI, or a Trainer's or strategy's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshplan.errors import Problem
from meshplan.interop.configs import deepspeed
from meshplan.interop.configs.fsdp import SHARDING, reduce_as_computed, unsettle_fsdp
from meshplan.interop.configs.importing import ConfigTool
from meshplan.interop.configs.statements import Draft, Facts, StatedFact, mixed
from meshplan.interop.configs.table import (
    ABSENT,
    ConfigKey,
    ConfigTable,
    Refusal,
    Translation,
    WrongFormError,
    flag,
    is_number,
    positive,
    refuse,
    say,
    skip,
    whole,
    within,
    words,
)
from meshplan.interop.configs.texts import dump_yaml
from meshplan.spec.values import PlanValue

_T: Final = "trainer."
_S: Final = "trainer.strategy.init_args."
_OWN: Final = "the training program decides it, not the parallelism"
_THREADS: Final = Refusal("nn.DataParallel is one process with threads, slower than ddp: use ddp")
_SPAWN: Final = Refusal("processes are started by torchrun, not by forking a program: use ddp")
_HOST: Final = Refusal("optimizer states are not offloaded alone: use deepspeed_stage_3_offload, "
                       "which offloads parameters, too")  # fmt: skip
_STRATEGIES: Final[Mapping[str, Any]] = {
    "auto": ("ddp", {}), "ddp": ("ddp", {}), "fsdp": ("full_shard", {}),
    "ddp_find_unused_parameters_true": ("ddp", {"ddp.find_unused_parameters": True}),
    "ddp_find_unused_parameters_false": ("ddp", {"ddp.find_unused_parameters": False}),
    "fsdp_cpu_offload": ("full_shard", {"offload.params": True}),
    "deepspeed": ("zero2", {}), "deepspeed_stage_1": ("zero1", {}),
    "deepspeed_stage_2": ("zero2", {}), "deepspeed_stage_2_offload": _HOST,
    "deepspeed_stage_3": ("full_shard", {}),
    "deepspeed_stage_3_offload": ("full_shard", {"offload.params": True,
                                                 "offload.optimizer": True}),
    "deepspeed_stage_3_offload_nvme": Refusal("nothing is kept on NVMe: offload to host memory"),
    "single_device": ("ddp", {}), "dp": _THREADS,
    **dict.fromkeys(("ddp_spawn", "ddp_fork", "ddp_notebook",
                     "ddp_spawn_find_unused_parameters_true",
                     "ddp_spawn_find_unused_parameters_false",
                     "ddp_fork_find_unused_parameters_true",
                     "ddp_fork_find_unused_parameters_false",
                     "ddp_notebook_find_unused_parameters_true",
                     "ddp_notebook_find_unused_parameters_false"), _SPAWN),
    **dict.fromkeys(("xla", "xla_debug", "xla_fsdp", "single_xla", "single_tpu"),
                    Refusal("TPUs are not torch's DeviceMesh of GPUs")),
}  # fmt: skip
"""Strategy and further facts, by the registered name of a strategy."""
_CLASSES: Final[Mapping[str, str]] = {
    "FSDPStrategy": "fsdp", "DDPStrategy": "ddp", "DeepSpeedStrategy": "deepspeed",
    "ModelParallelStrategy": "model_parallel", "SingleDeviceStrategy": "ddp",
}  # fmt: skip


def _strategy_word() -> Translation:
    by_word = words(_STRATEGIES, Refusal("no plan has this strategy: use ddp, fsdp, or "
                                         "ModelParallelStrategy"))  # fmt: skip

    def write(value: Any) -> Any:
        return next((word for word, each in _STRATEGIES.items()
                     if word not in ("auto", "deepspeed") and each == value), ABSENT)  # fmt: skip

    return Translation(by_word.form, by_word.read, write)


def _class_path() -> Translation:
    def read(value: Any) -> Any:
        if not isinstance(value, str):
            raise WrongFormError("the path of a class")
        known = _CLASSES.get(value.rpartition(".")[2])
        return known or Refusal("only FSDPStrategy, DDPStrategy, DeepSpeedStrategy and "
                                "ModelParallelStrategy have a plan")  # fmt: skip

    def write(value: Any) -> Any:
        name = next((name for name, kind in _CLASSES.items() if kind == value), None)
        return ABSENT if name is None else f"lightning.pytorch.strategies.{name}"

    return Translation("the path of a class", read, write)


def _classes() -> Translation:
    def read(value: Any) -> Any:
        paths = [value] if isinstance(value, str) else value
        if not isinstance(paths, list) or not all(isinstance(each, str) for each in paths):
            raise WrongFormError("paths of classes in a list")
        return tuple(path.rpartition(".")[2] for path in paths) or ABSENT

    return Translation("paths of classes in a list", read, lambda value: ABSENT)


def _devices() -> Translation:
    form = "a number of devices, or a list of them"

    def read(value: Any) -> Any:
        if value in ("auto", -1, "-1"):
            return ABSENT
        if isinstance(value, list) and value:
            return len(value)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if not is_number(value) or value != int(value) or value < 1:
            raise WrongFormError(form)
        return int(value)

    return Translation(form, read, lambda value: value)


def _mesh() -> Translation:
    def read(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != 2 or not all(map(is_number, value)):
            raise WrongFormError("two sizes: replicas and shards")
        return tuple(map(int, value))

    return Translation("two sizes: replicas and shards", read, list)


_TRUE: Final = {
    word: {"param": dtype, "reduce": dtype, "master": dtype}
    for word, dtype in (("bf16-true", "bfloat16"), ("16-true", "float16"), ("32-true", "float32"))
}
ROWS: Final[tuple[ConfigKey, ...]] = (
    say("trainer.strategy.class_path", "strategy_class", _class_path()),
    say("trainer.strategy", "strategy_word", _strategy_word()),
    say(f"{_T}devices", "hardware.gpus_per_node", _devices(), "of each node"),
    say(f"{_T}num_nodes", "hardware.nodes", whole()),
    say(f"{_T}precision", "precision", words({
        "bf16-mixed": mixed("bfloat16"), "16-mixed": mixed("float16"), **_TRUE,
        "bf16": mixed("bfloat16"), 16: mixed("float16"), 32: _TRUE["32-true"],
        **dict.fromkeys(("64-true", 64, "transformer-engine", "transformer-engine-float16"),
                        Refusal("a plan computes in float32, bfloat16 or float16"))})),
    say(f"{_T}accelerator", "accelerator", words({
        **dict.fromkeys(("auto", "gpu", "cuda", "cpu"), ABSENT), **dict.fromkeys(
            ("tpu", "hpu", "mps", "ipu"), Refusal("a plan runs on GPUs or CPUs"))}),
        "a plan runs on the devices that torch has"),
    say(f"{_T}accumulate_grad_batches", "batch.accumulate", whole()),
    say(f"{_T}gradient_clip_val", "clip_grad_norm", positive(off=0)),
    say(f"{_T}gradient_clip_algorithm", "clip_by", words({
        "norm": ABSENT, "value": Refusal("call meshplan.clip_grad_value_ in the loop")}),
        "a plan clips by norm"),
    say(f"{_T}sync_batchnorm", "sync_batchnorm", flag()),
    *skip(_OWN, "logger logger.** callbacks callbacks.** fast_dev_run max_epochs min_epochs "
          "max_steps min_steps max_time limit_train_batches limit_val_batches limit_test_batches "
          "limit_predict_batches overfit_batches val_check_interval check_val_every_n_epoch "
          "num_sanity_val_steps log_every_n_steps enable_checkpointing enable_progress_bar "
          "enable_model_summary deterministic benchmark inference_mode profiler profiler.** "
          "detect_anomaly barebones reload_dataloaders_every_n_epochs default_root_dir "
          "enable_autolog_hparams model_registry", _T),
    *skip("meshplan.dataloader reads each rank's part of a batch", "use_distributed_sampler", _T),
    *refuse("precision and clusters have keys of their own", "plugins plugins.**", _T,
            harmless=([],)),
    *skip("the model, the data and the batch size are the program's; state batch.micro in the plan",
          "model.** model data.** data optimizer.** lr_scheduler.** seed_everything ckpt_path "
          "fit.** validate.** test.** predict.** config"),
    # FSDPStrategy
    say(f"{_S}sharding_strategy", "sharding", words(SHARDING),
        "SHARD_GRAD_OP keeps parameters whole after the forward, NO_SHARD is ddp"),
    say(f"{_S}device_mesh", "replicas_and_shards", _mesh()),
    say(f"{_S}cpu_offload", "offload.params", flag()),
    say(f"{_S}auto_wrap_policy", "units", _classes(), "FSDP units"),
    say(f"{_S}activation_checkpointing_policy", "recompute_units", _classes(),
        "recomputed in backward"),
    say(f"{_S}activation_checkpointing", "recompute_units", _classes(), is_written=False),
    *refuse("precision is the Trainer's", "mixed_precision", _S),
    *refuse("write rules: - {match: NAMES, place: replicate}", "ignored_modules "
            "ignored_parameters ignored_states", _S, harmless=([],)),
    *skip("FSDP2 does so, or needs it not", "use_orig_params sync_module_states forward_prefetch "
          "backward_prefetch limit_all_gathers state_dict_type param_init_fn", _S),
    # DDPStrategy
    say(f"{_S}find_unused_parameters", "ddp.find_unused_parameters", flag(True, False)),
    say(f"{_S}gradient_as_bucket_view", "ddp.gradient_as_bucket_view", flag(True, False)),
    say(f"{_S}static_graph", "ddp.static_graph", flag(True, False)),
    say(f"{_S}broadcast_buffers", "ddp.broadcast_buffers", flag(True, False)),
    say(f"{_S}bucket_cap_mb", "ddp.bucket_mb", positive()),
    *refuse("gradients are averaged at every step, as they are", "ddp_comm_state ddp_comm_hook "
            "ddp_comm_wrapper model_averaging_period", _S),
    *refuse("processes are started by torchrun, not by forking a program",
            "start_method", _S, harmless=("popen",)),
    # ModelParallelStrategy
    say(f"{_S}data_parallel_size", "mesh.dp_shard", whole(), "the model's code shards over it",
        is_written=False),
    say(f"{_S}tensor_parallel_size", "mesh.tp", whole(), "the model's code shards over it",
        is_written=False),
    *skip("states are saved in shards that load under any plan", "save_distributed_checkpoint",
          _S),
    # DeepSpeedStrategy
    say(f"{_S}stage", "stage", deepspeed.STAGES, is_written=False),
    say(f"{_S}offload_optimizer", "offload.optimizer", flag(), is_written=False),
    say(f"{_S}offload_parameters", "offload.params", flag(), is_written=False),
    *refuse("nothing is kept on NVMe: offload to the CPU", "offload_params_device "
            "offload_optimizer_device remote_device", _S, harmless=("cpu",)),
    *refuse("stage 0 is ddp", "zero_optimization", _S, harmless=(True,)),
    *refuse("sequence_parallel: true shards activations over tp instead", "partition_activations",
            _S),
    say(f"{_S}cpu_checkpointing", "offload.activations", flag(), is_written=False),
    *skip("there are no buckets and no NVMe to tune", "nvme_path params_buffer_count "
          "params_buffer_size max_in_cpu optimizer_buffer_count block_size queue_depth "
          "single_submit overlap_events thread_count pin_memory sub_group_size "
          "contiguous_gradients overlap_comm allgather_partitions reduce_scatter "
          "allgather_bucket_size reduce_bucket_size contiguous_memory_optimization "
          "synchronize_checkpoint_boundary", _S),
    *skip("it does not change the training", "zero_allow_untested_optimizer "
          "logging_batch_size_per_gpu logging_level loss_scale initial_scale_power "
          "loss_scale_window hysteresis min_loss_scale load_full_weights "
          "exclude_frozen_parameters", _S),
    *within("trainer.strategy.init_args.config", deepspeed.NESTED_ROWS),
    *skip("the Trainer's own parts", "accelerator parallel_devices cluster_environment "
          "checkpoint_io precision_plugin process_group_backend timeout", _S),
)  # fmt: skip


class _LightningTable(ConfigTable):
    """The rows; a strategy is a word, or a class with arguments."""

    def covers(self, path: str) -> bool:
        """Return True as all tables, but look into a strategy that is a mapping."""
        return path != "trainer.strategy" and super().covers(path)


_OF_NEMO: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_KEYS: Final = ("strategy", "devices", "num_nodes", "accumulate_grad_batches")


def recognises(root: PlanValue) -> bool:
    """Return True for LightningCLI's `trainer`, a Trainer's arguments, or a strategy's class."""
    data = root.data
    model = data["model"].data if "model" in data else None
    if isinstance(model, dict) and any(name in model for name in _OF_NEMO):
        return False
    path = data["class_path"].data if "class_path" in data else ""
    is_class = isinstance(path, str) and path.rpartition(".")[2] in _CLASSES
    is_trainer = "devices" in data and ("strategy" in data or "accelerator" in data)
    return "trainer" in data or is_class or is_trainer


def prepare(root: PlanValue) -> None:
    """Put a Trainer's or a strategy's arguments where LightningCLI has them."""
    data = root.data
    if "trainer" in data:
        return
    inner = PlanValue(data=dict(data), origin=root.origin, key=root.key)
    data.clear()
    if "class_path" in inner.data:
        inner = PlanValue(data={"strategy": inner}, origin=root.origin)
    data["trainer"] = inner


def settle(draft: Draft, root: PlanValue) -> None:
    """Find the strategy of a word or of a class and its arguments."""
    word = draft.pop("strategy_word")
    kind = draft.pop("strategy_class")
    sources = "trainer.strategy"
    draft.moved |= {"strategy_word": "strategy", "strategy_class": "strategy", "stage": "strategy",
                    "sharding": "strategy", "replicas_and_shards": "mesh"}  # fmt: skip
    if word is not None:
        strategy, more = word
        text = root.data["trainer"].data["strategy"].text
        source = (f"trainer.strategy: {text}",)
        for name, value in {"strategy": strategy, **more}.items():
            draft.add(name, StatedFact(value, source, root.data["trainer"].data["strategy"].origin))
        kind = "fsdp" if text.startswith("fsdp") else text.partition("_")[0]
    elif kind == "deepspeed":
        stage = draft.facts.get("stage", StatedFact("zero2", ("DeepSpeedStrategy's stage is 2",)))
        if "strategy" not in draft.facts:
            draft.facts["strategy"] = stage
    elif kind == "fsdp":
        sharding = ("FSDPStrategy's sharding_strategy is FULL_SHARD if left out",)
        draft.facts["strategy"] = draft.facts.get("sharding", StatedFact("full_shard", sharding))
        sizes = draft.pop("replicas_and_shards")
        if sizes is not None:
            draft.set("mesh.dp_replicate", sizes[0], f"{_S}device_mesh: {list(sizes)}")
            draft.set("mesh.dp_shard", sizes[1], f"{_S}device_mesh: {list(sizes)}")
    elif kind == "model_parallel":
        _settle_model_parallel(draft)
    elif "strategy" not in draft.facts:
        why = f"{sources}: DDPStrategy" if kind == "ddp" else f"{sources} is auto if left out"
        draft.facts["strategy"] = StatedFact("ddp", (why,))
    draft.pop("stage")
    draft.pop("sharding")
    trainer = root.data["trainer"].data
    if "gradient_clip_algorithm" in trainer and trainer["gradient_clip_algorithm"].data == "value":
        draft.refuse("clip_grad_norm", "a plan clips by norm, and this is the limit of a value")
    if kind == "fsdp":
        reduce_as_computed(draft)
    elif kind == "deepspeed":
        deepspeed.settle(draft, root)
    if draft.get("strategy") != "ddp":
        for name in [each for each in draft.facts if each.startswith("ddp.")]:
            draft.pop(name, "it is an option of DistributedDataParallel only")


def _settle_model_parallel(draft: Draft) -> None:
    """Take tensor parallelism inside a node and FSDP2 across nodes where sizes are left open."""
    tp = draft.get("mesh.tp")
    per_node, nodes = draft.get("hardware.gpus_per_node"), draft.get("hardware.nodes", 1)
    source = "ModelParallelStrategy's tensor_parallel_size is the devices of a node if left out"
    if tp is None and "mesh.dp_shard" not in draft.facts:
        if per_node is None:
            what = "ModelParallelStrategy's sizes are left open, and so is the number of devices"
            draft.problems.append(
                Problem(what, None, "write tensor_parallel_size and data_parallel_size")
            )
            return
        draft.facts["mesh.tp"] = StatedFact(per_node, (source,))
        draft.facts["mesh.dp_shard"] = StatedFact(nodes, (source.replace("tensor", "data"),))
    draft.facts["strategy"] = StatedFact("full_shard", ("trainer.strategy: ModelParallelStrategy",))
    draft.notes.append(
        "ModelParallelStrategy leaves the sharding to the model's configure_model, which is not "
        "read: FSDP2 over the data ranks and derived tensor parallelism are assumed."
    )


def unsettle(facts: Facts) -> Mapping[str, str]:
    """State a strategy by its word, or by the arguments of FSDPStrategy."""
    whys: dict[str, str] = {}
    strategy = facts.get("strategy", "ddp")
    for axis in ("pp", "cp", "ep", "tp"):
        if facts.get(f"mesh.{axis}", 1) > 1:
            whys[f"mesh.{axis}"] = "no strategy of Lightning shards along this axis by itself"
            facts.pop(f"mesh.{axis}")
    if strategy == "ddp":
        facts["strategy_class"] = "ddp"
    elif strategy == "zero1":
        whys["strategy"] = "its FSDP shards gradients too: zero2"
        facts.pop("strategy")
    else:
        facts["strategy_class"] = "fsdp"
        facts["sharding"] = strategy
        if strategy.startswith("hybrid") and "mesh.dp_replicate" in facts:
            facts["replicas_and_shards"] = (
                facts["mesh.dp_replicate"], facts.get("mesh.dp_shard", 1)
            )  # fmt: skip
    precision = facts.get("precision")
    if precision not in _TRUE.values():
        unsettle_fsdp(facts, is_fsdp=strategy != "ddp")
    if "units" in facts:
        whys["units"] = "auto_wrap_policy takes classes, of which only names are known"
        facts.pop("units")
    return whys


TOOL: Final = ConfigTool(
    name="lightning",
    title="Lightning",
    looked_for="a YAML or JSON with trainer, or a strategy's class_path",
    table=_LightningTable(ROWS),
    suffixes=(".yaml", ".yml", ".json"),
    written=("YAML", (".yaml", ".yml")),
    recognises=recognises,
    prepare=prepare,
    settle=settle,
    grafts=("trainer.strategy.init_args.config",),
    unsettle=unsettle,
    dump=dump_yaml,
    implied=("strategy",),
    outside=("batch.micro", "batch.global", "batch.seq_len", "optimizer"),
    counts_microbatches=False,
)
