"""Hugging Face's `TrainingArguments` as JSON, and `DistributedConfig`, as of transformers 5.23."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from meshplan.errors import Problem, SpecError
from meshplan.interop.configs import deepspeed
from meshplan.interop.configs.fsdp import HYBRID, SHARDING, fsdp_rows, settle_fsdp, unsettle_fsdp
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
    positive,
    refuse,
    say,
    skip,
    whole,
    within,
    words,
)
from meshplan.spec.values import PlanValue

_OWN: Final = "the training program decides it, not the parallelism"
_FSDP_FORM: Final = "words such as full_shard, shard_grad_op, hybrid_shard, offload, auto_wrap"
_NO_STATE_WORD: Final = Refusal("no plan has a word for the state of this optimizer; use AdamW")
_TP_STYLES: Final[Mapping[str, str]] = {
    "colwise": "colwise", "rowwise": "rowwise", "packed_colwise": "packed_colwise",
    "colwise_gather_output": "colwise_gather_output", "colwise_rep": "colwise_gather_output",
    "rowwise_split_input": "rowwise_split_input", "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "vocab", "sequence_parallel": "sequence_parallel",
    "replicated_with_grad_allreduce": "replicated_with_grad_allreduce",
}  # fmt: skip
"""Styles of a plan by those of transformers."""


def _fsdp_words() -> Translation:
    known = {word.lower() for word in SHARDING if isinstance(word, str)} | {"offload", "auto_wrap"}

    def read(value: Any) -> Any:
        if value in (True, False):
            return ("full_shard",) if value else ABSENT
        parts = value.replace(",", " ").split() if isinstance(value, str) else value
        parts = ["full_shard"] if parts == ["true"] else parts
        if not isinstance(parts, list) or not {str(part).lower() for part in parts} <= known:
            raise WrongFormError(_FSDP_FORM)
        return tuple(str(part).lower() for part in parts) or ABSENT

    return Translation(_FSDP_FORM, read, lambda value: " ".join(value))


def _tp_plan() -> Translation:
    form = "'auto', or styles by module"

    def read(value: Any) -> Any:
        if value == "auto":
            return "hf"
        if value == {}:
            return "none"
        if not isinstance(value, dict):
            raise WrongFormError(form)
        odd = next((style for style in value.values() if style not in _TP_STYLES), None)
        if odd is not None:
            return Refusal(f"no style of a plan is {odd!r}; see the styles of the plan reference")
        return tuple((name, _TP_STYLES[style]) for name, style in value.items())

    return Translation(form, read, lambda value: "auto" if value == "hf" else ABSENT)


DISTRIBUTED_ROWS: Final[tuple[ConfigKey, ...]] = (
    say("tp_size", "mesh.tp", whole()),
    say("tp_plan", "tp_plan", _tp_plan(), "the model's own plan, or styles by module"),
    *skip("transformers reserves it and does nothing with it; write sequence_parallel: true",
          "enable_sequence_parallel"),
    *refuse("write ep_size", "enable_expert_parallel"),
    say("fsdp_size", "mesh.dp_shard", whole()),
    say("dp_replicate_size", "mesh.dp_replicate", whole()),
    *refuse("write rules with unit and reshard_after_forward", "fsdp_plan", harmless=({},)),
    say("fsdp_cpu_offload", "offload.params", flag()),
    say("fsdp_mixed_precision", "precision", flag(mixed("bfloat16")),
        "computed in bfloat16, reduced in float32"),
    say("pp_size", "mesh.pp", whole(), "transformers has no backward schedule; 1F1B here"),
    say("ep_size", "mesh.ep", whole()),
    *refuse("write rules with place: {ep: ep_dispatch_experts}", "ep_plan", harmless=({},)),
    *skip("tokens are sent to the ranks of their experts", "ep_implementation"),
)  # fmt: skip

ROWS: Final[tuple[ConfigKey, ...]] = (
    say("per_device_train_batch_size", "batch.micro", whole(), default=8),
    say("per_gpu_train_batch_size", "batch.micro", whole(), is_written=False),
    say("gradient_accumulation_steps", "batch.accumulate", whole()),
    say("max_grad_norm", "clip_grad_norm", positive(off=0), default=1.0, none=0.0),
    say("bf16", "precision", flag(mixed("bfloat16"))),
    say("fp16", "precision", flag(mixed("float16"))),
    say("optim", "optimizer", words({
        "adamw_torch": "adamw", "adamw_torch_fused": "adamw_fused", "adamw_hf": "adamw",
        "adafactor": "adafactor", "adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit",
        "sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop", "lion_32bit": "lion"},
        _NO_STATE_WORD), "for the bytes of its state", default="adamw_torch_fused"),
    say("gradient_checkpointing", "activation_checkpointing", flag("full")),
    say("activation_checkpointing", "activation_checkpointing", flag("full"), is_written=False),
    *skip("blocks are recomputed without reentrance, as torch advises",
          "activation_checkpointing_kwargs gradient_checkpointing_kwargs"),
    say("torch_compile", "compile", flag()),
    *refuse("blocks are compiled with inductor and its defaults",
            "torch_compile_backend torch_compile_mode", harmless=("inductor", "default")),
    say("average_tokens_across_devices", "loss", flag("tokens", "mean"),
        "the mean over the targets of all ranks", default=True, none=False),
    say("ddp_find_unused_parameters", "ddp.find_unused_parameters", flag(True, False)),
    say("ddp_bucket_cap_mb", "ddp.bucket_mb", whole()),
    say("ddp_broadcast_buffers", "ddp.broadcast_buffers", flag(True, False)),
    say("ddp_static_graph", "ddp.static_graph", flag(True, False)),
    # FSDP, DeepSpeed, axes
    say("fsdp", "fsdp_words", _fsdp_words(), "the strategy, and offload"),
    *fsdp_rows("fsdp_config.", is_version_2=True),
    *within("fsdp_config", fsdp_rows("fsdp_", is_version_2=True)),
    *refuse("TPUs are not torch's DeviceMesh of GPUs",
            "xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt", "fsdp_config.",
            harmless=(False, {})),
    *refuse("blocks are units, whatever their size", "fsdp_min_num_params", harmless=(0,)),
    *refuse("write it under fsdp_config: transformer_layer_cls_to_wrap",
            "fsdp_transformer_layer_cls_to_wrap"),
    *within("deepspeed", deepspeed.NESTED_ROWS),
    say("parallelism_config.dp_replicate_size", "mesh.dp_replicate", whole()),
    say("parallelism_config.dp_shard_size", "mesh.dp_shard", whole()),
    say("parallelism_config.tp_size", "mesh.tp", whole()),
    say("parallelism_config.cp_size", "mesh.cp", whole()),
    *refuse("write context.attention: all_to_all in the plan for Ulysses", "sp_size",
            "parallelism_config.", harmless=(1,)),
    *skip("torch's context parallelism is what a plan runs", "cp_backend sp_backend cp_handler.** "
          "sp_handler.** tp_handler.**", "parallelism_config."),
    *within("distributed_config", DISTRIBUTED_ROWS),
    *(replace(row, is_written=False) for row in DISTRIBUTED_ROWS),
    # What has nothing to do with a plan
    *refuse("its kernels are not modelled: write loss_chunks for logits in parts",
            "use_liger_kernel"),
    *refuse("apex is gone: use bf16 or fp16", "half_precision_backend fp16_backend fp16_opt_level",
            harmless=("auto", "O1", "cuda_amp")),
    *refuse("TPUs and other devices are not torch's DeviceMesh of GPUs", "tpu_num_cores use_ipex "
            "use_mps_device", harmless=(False, 0)),
    *skip("meshplan.find_batch_size finds it by the memory model", "auto_find_batch_size"),
    *skip("torch decides it for the whole process", "tf32 full_determinism seed data_seed "
          "ddp_backend ddp_timeout"),
    *skip("a plan runs on the devices that torch has", "use_cpu no_cuda local_rank"),
    *skip("meshplan.dataloader reads each rank's part of a batch", "dataloader_drop_last "
          "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
          "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
          "accelerator_config accelerator_config.** remove_unused_columns label_names "
          "train_sampling_strategy length_column_name group_by_length ignore_data_skip "
          "dispatch_batches"),
    *refuse("per_device_train_batch_size is then of all ranks together: set it to false, and "
            "divide the batch by the number of ranks", "accelerator_config.split_batches "
            "split_batches"),
    *skip("meshplan.save writes states that load under any plan", "save_only_model save_strategy "
          "save_steps save_on_each_node save_total_limit save_safetensors enable_jit_checkpoint "
          "resume_from_checkpoint load_best_model_at_end metric_for_best_model greater_is_better "
          "restore_callback_states_from_checkpoint overwrite_output_dir"),
    *skip(_OWN, "output_dir num_train_epochs max_steps learning_rate lr_scheduler_type "
          "lr_scheduler_kwargs lr_scheduler_kwargs.** warmup_steps warmup_ratio optim_args "
          "weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules "
          "label_smoothing_factor bf16_full_eval fp16_full_eval liger_kernel_config.** "
          "liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps "
          "logging_strategy logging_steps logging_first_step log_on_each_node "
          "logging_nan_inf_filter logging_dir include_num_input_tokens_seen log_level "
          "log_level_replica disable_tqdm report_to run_name project trackio_space_id "
          "trackio_bucket_id trackio_static_space_id eval_strategy evaluation_strategy eval_steps "
          "eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start "
          "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
          "include_for_metrics batch_eval_metrics push_to_hub hub_token hub_private_repo "
          "hub_model_id hub_strategy hub_always_push hub_revision debug skip_memory_metrics "
          "do_train do_eval do_predict past_index jit_mode_eval torchdynamo ray_scope "
          "include_inputs_for_metrics include_tokens_per_second mp_parameters model_type"),
)  # fmt: skip
_FIELDS: Final = {row.path for row in DISTRIBUTED_ROWS}
_ARGUMENTS: Final = ("per_device_train_batch_size", "output_dir", "fsdp_config",
                     "gradient_accumulation_steps", "num_train_epochs")  # fmt: skip


def recognises(root: PlanValue) -> bool:
    """Return True for TrainingArguments, a DistributedConfig, or a config.json with one."""
    data = root.data
    is_alone = bool(data) and set(data) <= _FIELDS
    return is_alone or "distributed_config" in data or any(key in data for key in _ARGUMENTS)


def prepare(root: PlanValue) -> None:
    """Read only the DistributedConfig of a model's config.json; refuse two strategies.

    Raises:
        SpecError: Both fsdp and deepspeed are set.
    """
    if all(name in root.data and root.data[name].data for name in ("fsdp", "deepspeed")):
        what = "fsdp and deepspeed both choose a strategy"
        raise SpecError(Problem(what, root.data["fsdp"].key, "remove one of them"))
    if "distributed_config" in root.data and "model_type" in root.data:
        for key in [key for key in root.data if key != "distributed_config"]:
            del root.data[key]


def settle(draft: Draft, root: PlanValue) -> None:
    """Find the strategy: of fsdp, deepspeed, axes, or replicas; two of them are refused."""
    fsdp_words = draft.pop("fsdp_words")
    data = root.data
    is_deepspeed = "deepspeed" in data and bool(data["deepspeed"].data)
    if "distributed_config" in data or set(data) <= _FIELDS:
        for name in ("batch.micro", "clip_grad_norm", "optimizer", "loss"):  # Those of the Trainer.
            if name in draft.facts and draft.facts[name].is_default:
                draft.pop(name)
    if is_deepspeed:
        deepspeed.settle(draft, root)
    elif fsdp_words:
        _settle_words(draft, fsdp_words, data["fsdp"])
        settle_fsdp(draft)
    else:
        draft.pop("strategy", "fsdp is not set, and only then fsdp_config counts")
        draft.pop("fsdp_version", "fsdp is not set, and only then fsdp_config counts")
        _settle_axes(draft)
    if draft.get("mesh.tp", 1) > 1 and "tp_plan" not in draft.facts:
        draft.set("tp_plan", "hf", after="mesh.tp")
    if isinstance(draft.get("tp_plan"), tuple):
        draft.set("tp_rules", draft.get("tp_plan"), after="tp_plan")
        draft.moved["tp_plan"] = "rules.place"
        draft.facts.pop("tp_plan")
    if draft.get("strategy") != "ddp":
        for name in [each for each in draft.facts if each.startswith("ddp.")]:
            draft.pop(name, "it is an option of DistributedDataParallel only")


def _settle_words(draft: Draft, fsdp_words: tuple[str, ...], value: PlanValue) -> None:
    source = (f"fsdp: {value.text or ' '.join(fsdp_words)}",)
    kinds = [word for word in fsdp_words if word not in ("offload", "auto_wrap")]
    old = draft.facts.get("strategy")
    if kinds:
        by_lower = {str(word).lower(): strategy for word, strategy in SHARDING.items()}
        strategy = by_lower[kinds[0]]
        is_stated = old is not None and not old.is_default
        if not is_stated or strategy != "full_shard":
            draft.facts["strategy"] = StatedFact(strategy, source, value.origin)
    elif old is None:
        draft.facts["strategy"] = StatedFact("full_shard", source, value.origin)
    if "offload" in fsdp_words:
        draft.add("offload.params", StatedFact(True, source, value.origin))
    draft.moved["fsdp_words"] = "strategy"
    _with_replicas(draft)


def _settle_axes(draft: Draft) -> None:
    shards = draft.get("mesh.dp_shard", 1)
    if shards > 1:
        draft.set("strategy", "full_shard", after="mesh.dp_shard")
        _with_replicas(draft)
    else:
        draft.facts["strategy"] = StatedFact("ddp", ("neither fsdp nor deepspeed is set",))


def _with_replicas(draft: Draft) -> None:
    if draft.get("mesh.dp_replicate", 1) > 1:
        strategy = draft.get("strategy")
        draft.set("strategy", HYBRID.get(strategy, strategy))


def unsettle(facts: Facts) -> Mapping[str, str]:
    """State a strategy by `fsdp` and `fsdp_config`, and axes by a ParallelismConfig."""
    whys: dict[str, str] = {}
    strategy = facts.get("strategy", "ddp")
    for axis in ("pp", "ep"):
        if facts.get(f"mesh.{axis}", 1) > 1:
            whys[f"mesh.{axis}"] = "the Trainer cannot train along this axis"
            facts.pop(f"mesh.{axis}")
    if facts.get("mesh.cp", 1) > 1 and facts.get("context.attention") == "all_to_all":
        whys["context.attention"] = "its context parallelism gathers keys and values"
    if facts.get("mesh.tp", 1) > 1 and facts.get("tp_plan") != "hf":
        whys["tp_plan"] = "it takes the model's own plan of transformers: tp_plan: hf"
    facts.pop("tp_plan", None)
    if strategy == "zero1":
        whys["strategy"] = "its FSDP shards gradients too: zero2"
        facts.pop("strategy")
    elif strategy == "ddp":
        facts.pop("strategy", None)
    else:
        facts["fsdp_words"] = ("full_shard", "auto_wrap")
        facts["fsdp_version"] = 2
    if strategy.startswith("hybrid"):
        facts["strategy"] = {"hybrid_shard": "full_shard"}.get(strategy, "zero2")
    elif facts.get("mesh.tp", 1) == 1 and facts.get("mesh.cp", 1) == 1:
        facts.pop("mesh.dp_shard", None)
        facts.pop("mesh.dp_replicate", None)
    if strategy == "ddp" and "mesh.dp_replicate" in facts:
        facts.pop("mesh.dp_replicate")
    unsettle_fsdp(facts, is_fsdp=strategy != "ddp")
    return whys


def dump(tree: Any) -> str:
    """Return a tree as JSON, as `TrainingArguments` are read by HfArgumentParser."""
    return json.dumps({"output_dir": "out", **tree}, indent=2) + "\n"


TOOL: Final = ConfigTool(
    name="hf",
    title="the Trainer",
    looked_for="a JSON with per_device_train_batch_size, fsdp_config or fsdp_size",
    table=ConfigTable(ROWS),
    suffixes=(".json", ".yaml", ".yml"),
    written=("JSON", (".json",)),
    recognises=recognises,
    prepare=prepare,
    settle=settle,
    always=("",),
    grafts=("deepspeed", "fsdp_config", "accelerator_config"),
    unsettle=unsettle,
    dump=dump,
    tp_plan="hf",
    implied=("strategy", "context.attention", "context.balance"),
)
