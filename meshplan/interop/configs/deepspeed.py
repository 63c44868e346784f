"""DeepSpeed's JSON, as of 0.19: every key of its schema and of the sections that engines read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from meshplan.errors import Problem
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
    names,
    positive,
    refuse,
    say,
    skip,
    whole,
    words,
)
from meshplan.spec.values import PlanValue

DEVICES: Final = words(
    {
        "none": ABSENT,
        "cpu": True,
        "nvme": Refusal(
            "nothing is kept on NVMe: use offload to host memory, or shard over more ranks"
        ),
    }
)
STAGES: Final = words({0: "ddp", 1: "zero1", 2: "zero2", 3: "full_shard"})
DTYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16",
                 "float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}  # fmt: skip
_NO_STATE_WORD: Final = Refusal("no plan has a word for the state of this optimizer; use AdamW")


def _old_zero(value: Any) -> str:
    """Return the strategy of a value that is no section: DeepSpeed takes true for stage 1."""
    if isinstance(value, bool):
        return "zero1" if value else "ddp"
    stage = value if value in range(4) else 3
    raise WrongFormError(f'a section, such as {{"stage": {stage}}}')


_OPTIMIZERS: Final = words(
    {
        "AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Lion": "lion", "Adagrad": "adagrad",
        "Muon": "muon",
        **dict.fromkeys(("Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW",
                         "MuSGD"), _NO_STATE_WORD),
    },
    _NO_STATE_WORD,
)  # fmt: skip
_BUFFERS: Final = "FSDP2 sizes its buffers by its units: there is no bucket to choose"
_OWN: Final = "the training program decides it, not the parallelism"
_MONITOR: Final = "meshplan.Run writes metrics and profiles"
_ZERO: Final = "zero_optimization."

ROWS: Final[tuple[ConfigKey, ...]] = (
    # The batch
    say("train_batch_size", "batch.global", whole()),
    say("train_micro_batch_size_per_gpu", "batch.micro", whole()),
    say("gradient_accumulation_steps", "batch.accumulate", whole()),
    say("gradient_clipping", "clip_grad_norm", positive(off=0), none=0.0),
    # Precision
    say("bf16.enabled", "precision", flag(mixed("bfloat16", "bfloat16"))),
    say("bfloat16.enabled", "precision", flag(mixed("bfloat16", "bfloat16")), is_written=False),
    say("fp16.enabled", "precision", flag(mixed("float16", "float16"))),
    say("communication_data_type", "precision.reduce", words(DTYPES),
        "the dtype in which gradients are reduced"),
    *skip("the loss scale starts at 2**16 and follows overflows, as torch's GradScaler does",
          "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
          "min_loss_scale auto_cast", "fp16."),
    *refuse("no plan keeps half-precision master weights beside other state; write precision: "
            "16-true or bf16-true", "fp16_master_weights_and_grads", "fp16."),
    *[row for name in ("bf16.", "bfloat16.") for row in (
        *refuse("write precision: bf16-true for parameters, gradients and state in bfloat16",
                "bf16_master_weights_and_grads bf16_optimizer_states", name),
        *skip("it changes when gradients are added, not what is added",
              "immediate_grad_update check_grad_overflow", name))],
    *refuse("use bf16 or fp16: autocast runs with whole parameters in float32, which "
            "FSDP2 gathers in the lower precision", "torch_autocast.**"),
    *refuse("apex is gone: use bf16 or fp16", "amp.**"),
    *refuse("precision in a plan has roles for parameters and reductions; state them there",
            "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules", "data_types."),
    *refuse("activations of sequence parallelism are sent in the dtype that they have",
            "seq_parallel_communication_data_type", harmless=("fp32",)),
    # ZeRO
    say("zero_optimization", "strategy", Translation("true or false", _old_zero, lambda _: ABSENT),
        "as files of old write it: stage 1 or 0", is_written=False),
    say(f"{_ZERO}stage", "strategy", STAGES, "0 replicates, 3 shards everything"),
    say(f"{_ZERO}offload_optimizer.device", "offload.optimizer", DEVICES),
    say(f"{_ZERO}offload_param.device", "offload.params", DEVICES,
        "parameters, gradients and optimizer state in host memory"),
    say(f"{_ZERO}zero_hpz_partition_size", "reshard_after_forward", whole(2, off=(0, 1)),
        "ranks that keep a second shard after the forward"),
    say(f"{_ZERO}mics_shard_size", "mesh.dp_shard", whole(2, off=(-1, 0, 1)),
        "ranks of one shard group; groups are replicas", is_written=False),
    say(f"{_ZERO}leaf_module.classes", "units", names(), "classes that are gathered as a whole"),
    *refuse("name classes under leaf_module.classes, or write rules with unit: true",
            "leaf_module.names leaf_module.name_suffixes", _ZERO, harmless=([],)),
    *skip(_BUFFERS, "overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size "
          "allgather_partitions allgather_bucket_size use_multi_rank_bucket_allreduce "
          "round_robin_gradients sub_group_size stage3_prefetch_bucket_size prefetch_bucket_size "
          "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance "
          "max_reuse_distance stage3_module_granularity_threshold module_granularity_threshold "
          "stage3_param_persistence_threshold param_persistence_threshold "
          "stage3_model_persistence_threshold model_persistence_threshold parameter_alignment "
          "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params "
          "stage3_allgather_sequential allgather_sequential override_module_apply "
          "memory_efficient_linear legacy_stage1", _ZERO),
    *skip(_BUFFERS, "allgather_size"),
    *skip("states are saved as whole tensors or shards whatever the strategy: meshplan.save and "
          "save_pretrained", "stage3_gather_16bit_weights_on_model_save "
          "gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
          "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint "
          "save_muon_momentum_buffer_in_memory mics_hierarchical_params_gather", _ZERO),
    *skip("parameters without a gradient are allowed", "ignore_unused_parameters", _ZERO),
    *skip("it only checks or logs", "log_trace_cache_warnings enable_sanity_checks "
          "compute_grad_norm", _ZERO),
    *refuse("quantized collectives change the numbers, and no plan has them",
            "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights",
            _ZERO),
    *refuse("its selective updates change the training", "zenflow.**", _ZERO),
    *refuse("write offload_optimizer and offload_param with a device: these keys are deprecated",
            "cpu_offload cpu_offload_param cpu_offload_use_pin_memory", _ZERO),
    *skip("host memory is pinned by FSDP2's offload policy; how it is copied follows from it",
          "pin_memory buffer_count buffer_size max_in_cpu nvme_path",
          f"{_ZERO}offload_param."),
    *skip("host memory is pinned by FSDP2's offload policy; how it is copied follows from it",
          "pin_memory buffer_count nvme_path pipeline_read pipeline_write fast_init "
          "cpuadam_cores_perc", f"{_ZERO}offload_optimizer."),
    *refuse("the optimizer state is in host memory as a whole or not at all: write ratio 1",
            "ratio", f"{_ZERO}offload_optimizer.", harmless=(1, 1.0)),
    *refuse("use plain offload_optimizer", "super_offload", f"{_ZERO}offload_optimizer."),
    # Model parallelism
    say("tensor_parallel.autotp_size", "mesh.tp", whole(1, off=(0,)),
        "styles are derived from the model's recorded forward, and proved"),
    say("tensor_parallel.tp.tp_size", "mesh.tp", whole(), is_written=False),
    say("tensor_parallel.tensor_parallel.tp_size", "mesh.tp", whole(), is_written=False),
    *skip("shards are whole multiples of heads, which are known here",
          "tp_grain_size mpu tp_group", "tensor_parallel.tp."),
    *skip("shards are whole multiples of heads, which are known here",
          "tp_grain_size mpu tp_group", "tensor_parallel.tensor_parallel."),
    *skip("it is derived from the model", "preset_model dtype keep_module_on_host "
          "tp_overlap_comm vocab_parallel_ce_backend", "tensor_parallel."),
    *refuse("write loss_parallel: true and a rule for the head, or leave it out",
            "vocab_parallel_lm_head", "tensor_parallel."),
    *refuse("write rules: - {match: NAMES, place: {tp: colwise}}; row is rowwise, column is "
            "colwise, shape is packed_colwise", "partition_config.** injection_policy_tuple "
            "replace_with_kernel_inject kernel_inject", "tensor_parallel."),
    say("sequence_parallel_size", "mesh.cp", whole(), "Ulysses: all_to_all over heads"),
    say("pipeline.stages", "mesh.pp", whole()),
    *refuse("stages are balanced by parameters; write pipeline.split for others", "partition",
            "pipeline.", harmless=("best", "parameters", "auto")),
    say("pipeline.activation_checkpoint_interval", "activation_checkpointing",
        words({0: ABSENT, 1: "full", **dict.fromkeys(
            range(2, 65), Refusal("layers are recomputed one by one: write 1, or "
                                  "activation_checkpointing: {mode: full, every: N}"))})),
    *skip("stages send whole activations", "seed_layers pipe_partitioned grad_partitioned",
          "pipeline."),
    say("expert_parallel.enabled", "has_autoep", flag(), "without it the section has no effect"),
    say("expert_parallel.autoep_size", "mesh.ep", whole()),
    *skip("the router and the experts are found in the model", "preset_model "
          "moe_layer_pattern expert_pattern router_pattern comm_backend use_grouped_mm "
          "disable_triton_grouped_mm route_norm route_scale score_apply combine_impl "
          "row_weighting_impl gate_up_impl comm_num_sm comm_qp_margin comm_max_tokens_per_rank "
          "num_expert_groups num_limited_groups score_func top_k routed_scaling_factor expert_w1 "
          "expert_w2 expert_w3 num_experts_attr top_k_attr has_shared_experts "
          "shared_experts_pattern shared_experts_gate_pattern expert_activation async_split_plan "
          "validate_folding_routing load_balance_coeff", "expert_parallel."),
    *refuse("experts are not sharded over tp", "expert_tensor_parallel_size", "expert_parallel.",
            harmless=(1,)),
    *skip("expert ranks are borrowed from dp_shard", "use_data_before_expert_parallelism"),
    # Recomputation
    say("activation_checkpointing.cpu_checkpointing", "offload.activations", flag(),
        "blocks are recomputed from inputs in host memory"),
    *refuse("sequence_parallel: true shards activations over tp instead",
            "partition_activations", "activation_checkpointing."),
    *skip("the model's code calls DeepSpeed's checkpoint function; write "
          "activation_checkpointing: full if it does", "number_checkpoints "
          "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
          "activation_checkpointing."),
    # What the training program does
    say("optimizer.type", "optimizer", _OPTIMIZERS, "for the bytes of its state"),
    *skip("give it to the optimizer that you make", "params.** legacy_fusion", "optimizer."),
    *skip("make the scheduler of torch.optim.lr_scheduler yourself", "type params.**",
          "scheduler."),
    *skip(_OWN, "steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level "
          "disable_python_gc dataloader_drop_last vocabulary_size managed_gradient_accumulation "
          "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer check_overflow "
          "disable_allgather nebula.** datastates_ckpt.** datastates.** checkpoint_engine.** "
          "data_parallel_group global_rank"),
    *skip(_MONITOR, "tensorboard.** wandb.** csv_monitor.** comet.** flops_profiler.** "
          "comms_logger.**"),
    *skip("nothing has to be tried: meshplan plan searches with a model of memory and time",
          "autotuning.**"),
    *skip("meshplan.save writes whole tensors in shards that load under any plan",
          "checkpoint.**"),
    *skip("it is about NVMe, which is not used", "aio.**"),
    *skip("gradients are divided before or after the reduction with the same result up to "
          "rounding", "prescale_gradients gradient_predivide_factor"),
    *refuse("gradients are averaged over ranks: the learning rate of a sum has to be multiplied",
            "gradient_allreduce_op", harmless=("mean",)),
    *refuse("gradients of embeddings are dense", "sparse_gradients"),
    *refuse("compile: true compiles each block; DeepCompile's passes have no word",
            "compile.**", harmless=({"deepcompile": False},)),
    *refuse("meshplan's states load on any number of ranks; the batch stays what the plan says",
            "elasticity.**"),
    *refuse("it changes the data or the model in training, which a plan cannot say",
            "data_efficiency.** curriculum_learning.** progressive_layer_drop.** eigenvalue.** "
            "quantize_training.** compression_training.** weight_quantization.** "
            "sparse_attention.** msamp.**"),
    *refuse("generation while training is for programs: model.generate works under a plan",
            "hybrid_engine.**"),
)  # fmt: skip


NESTED_ROWS: Final = tuple(
    replace(row, values=flag(mixed("float16" if row.path.startswith("fp16") else "bfloat16")))
    if row.plan == "precision" else row for row in ROWS
)  # fmt: skip
"""Rows of a section of another file, which states the precision too and settles the reduction."""


def recognises(root: PlanValue) -> bool:
    """Return True for a mapping with keys that only DeepSpeed has."""
    own = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
    return any(key in root.data for key in own)


def _settle_own(draft: Draft, root: PlanValue) -> None:
    """Settle a file of DeepSpeed's own, whose releases differ in what they clip at."""
    settle(draft, root)
    if "gradient_clipping" not in root.data:
        draft.notes.append(
            "gradient_clipping is left out: this plan does not clip. DeepSpeed 0.19.4 and later "
            "releases clip at 1.0 then, 0.19.0 and earlier ones do not: write clip_grad_norm: 1.0 "
            "if the file was trained with one that does."
        )


def settle(draft: Draft, root: PlanValue) -> None:
    """Relate offload, MiCS, Ulysses, experts and pipelines; reduce in the dtype of the forward."""
    precision = draft.get("precision")
    if precision is not None:
        draft.set("precision", {**precision, "reduce": precision["param"]})
    if "strategy" not in draft.facts:
        draft.facts["strategy"] = StatedFact("ddp", ("zero_optimization.stage is 0 if left out",))
    stage = draft.get("strategy")
    if draft.get("offload.params") and not draft.get("offload.optimizer"):
        what = "offload_param without offload_optimizer: a plan's params take the optimizer along"
        fix = "set offload_optimizer.device to cpu too, or neither"
        draft.problems.append(Problem(what, draft.origin("offload.params"), fix))
    if draft.get("offload.params") and stage != "full_shard":
        what = f"offload_param needs stage 3, and the stage makes the strategy {stage}"
        draft.problems.append(Problem(what, draft.origin("offload.params"), "set stage to 3"))
    if "mesh.dp_shard" in draft.facts:
        if stage != "full_shard":
            what = "mics_shard_size needs stage 3"
            draft.problems.append(Problem(what, draft.origin("mesh.dp_shard"), "set stage to 3"))
        draft.set("strategy", "hybrid_shard")
    draft.moved["has_autoep"] = "mesh.ep"
    experts = draft.facts.get("mesh.ep", StatedFact(1))
    if not draft.pop("has_autoep") and any("autoep_size" in each for each in experts.sources):
        draft.pop("mesh.ep", "it has no effect unless expert_parallel.enabled is true")
    if draft.get("mesh.cp", 1) > 1:
        draft.set("context.attention", "all_to_all", after="mesh.cp")
    if draft.get("offload.activations"):
        draft.set("activation_checkpointing", "full", after="offload.activations")


def unsettle(facts: Facts) -> Mapping[str, str]:
    """Split facts as DeepSpeed's keys state them."""
    whys: dict[str, str] = {}
    precision = facts.get("precision")
    if isinstance(precision, dict) and "param" in precision:
        if precision.get("reduce") != precision["param"] and precision != mixed("float32"):
            facts["precision"] = {**precision, "reduce": precision["param"]}
            facts["precision.reduce"] = precision.get("reduce")
        if facts["precision"] == mixed("float32"):
            facts.pop("precision")
            facts["precision.reduce"] = "float32"
    is_pipeline = facts.get("mesh.pp", 1) > 1
    if is_pipeline and facts.get("strategy") in ("zero2", "full_shard"):
        whys["strategy"] = "its pipelines take stages 0 and 1 of ZeRO only"
        facts.pop("strategy")
    if facts.get("mesh.ep", 1) > 1:
        facts["has_autoep"] = True
    if facts.get("strategy", "").startswith("hybrid"):
        whys["strategy"] = "its schema has no replicas of shards (MiCS is not in 0.19): full_shard"
        facts.pop("strategy")
    if facts.get("context.attention") == "all_to_all":
        facts.pop("context.attention")
    elif facts.get("mesh.cp", 1) > 1:
        whys["mesh.cp"] = "its sequence parallelism is all_to_all only"
        facts.pop("mesh.cp")
    if facts.get("offload.params"):
        facts["offload.optimizer"] = True
    if facts.get("offload.activations") and facts.get("activation_checkpointing") != "full":
        whys["offload.activations"] = "it offloads the inputs of recomputed blocks only"
        facts.pop("offload.activations")
    if facts.get("activation_checkpointing") == "full" and not is_pipeline:
        facts.pop("activation_checkpointing")
        if not facts.get("offload.activations"):
            whys["activation_checkpointing"] = (
                "outside of its pipelines the model's code calls DeepSpeed's checkpoint function"
            )
    return whys


def dump(tree: Any) -> str:
    """Return a tree as JSON."""
    return json.dumps(tree, indent=2) + "\n"


TOOL: Final = ConfigTool(
    name="deepspeed",
    title="DeepSpeed",
    looked_for="a JSON with zero_optimization or train_batch_size",
    table=ConfigTable(ROWS),
    suffixes=(".json", ".hjson"),
    written=("JSON", (".json", ".hjson")),
    recognises=recognises,
    settle=_settle_own,
    unsettle=unsettle,
    dump=dump,
    implied=("context.attention",),
    assumed={"precision": mixed("float32"), "pipeline.schedule": "1F1B"},
)
