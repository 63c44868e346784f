"""accelerate's YAML, as `accelerate config` of 1.15 writes it: FSDP, DeepSpeed, Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from meshplan.errors import Problem, SpecError
from meshplan.interop.configs import deepspeed
from meshplan.interop.configs.fsdp import HYBRID, fsdp_rows, settle_fsdp, unsettle_fsdp
from meshplan.interop.configs.importing import ConfigTool
from meshplan.interop.configs.statements import Draft, Facts, StatedFact, mixed
from meshplan.interop.configs.table import (
    ABSENT,
    ConfigKey,
    ConfigTable,
    Refusal,
    flag,
    names,
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

_BLOCKS: Final = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config",
                  "MEGATRON_LM": "megatron_lm_config"}  # fmt: skip
"""The section that each distributed_type reads."""
_NO_GPU: Final = Refusal("a plan runs on GPUs or CPUs by torch's DeviceMesh, not on this device")
_LAUNCH: Final = "meshplan launch, or torchrun, starts the ranks"
_P: Final = "parallelism_config.parallelism_config_"
_D: Final = "deepspeed_config."
_M: Final = "megatron_lm_config.megatron_lm_"

ROWS: Final[tuple[ConfigKey, ...]] = (
    say("distributed_type", "distributed_type", words({
        "FSDP": "FSDP", "DEEPSPEED": "DEEPSPEED", "MEGATRON_LM": "MEGATRON_LM",
        "MULTI_GPU": "MULTI_GPU", "MULTI_CPU": "MULTI_GPU", "NO": "MULTI_GPU", "TP": "TP",
        **dict.fromkeys(("XLA", "TPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
                         "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON"), _NO_GPU)}),
        "which section of the file counts"),
    say("num_processes", "world_size", whole(), "ranks on all machines together"),
    say("num_machines", "hardware.nodes", whole()),
    say("mixed_precision", "precision", words({
        "bf16": mixed("bfloat16"), "fp16": mixed("float16"), "no": ABSENT, False: ABSENT,
        "fp8": Refusal("no plan trains in fp8 yet; use bf16")})),
    *refuse("run on machines of your own, or write the plan for the instance's GPUs",
            "compute_environment", harmless=("LOCAL_MACHINE",)),
    *skip(_LAUNCH, "machine_rank gpu_ids main_process_ip main_process_port rdzv_backend "
          "same_network main_training_function enable_cpu_affinity mpirun_config.** debug "
          "ipex_config.** num_cpu_threads_per_process"),
    *skip("a plan runs on the devices that torch has", "use_cpu"),
    *refuse("TPUs are not torch's DeviceMesh of GPUs", "downcast_bf16 tpu_name tpu_zone "
            "tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env",
            harmless=(False, "no", [], "")),
    *refuse("no plan trains in fp8 yet; use bf16", "fp8_config.**"),
    say("dynamo_config.dynamo_backend", "compile", words({
        "NO": ABSENT, "INDUCTOR": True, **dict.fromkeys(
            ("EAGER", "AOT_EAGER", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI",
             "FX2TRT", "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE",
             "IPEX", "TVM", "HPU_BACKEND"), Refusal("blocks are compiled with inductor"))})),
    *refuse("blocks are compiled with torch's defaults", "dynamo_mode dynamo_use_fullgraph "
            "dynamo_use_dynamic", "dynamo_config.", harmless=(False, "default")),
    *skip("blocks are compiled one by one", "dynamo_use_regional_compilation", "dynamo_config."),
    *fsdp_rows("fsdp_config.fsdp_", is_version_2=False),
    # Axes
    say(f"{_P}dp_replicate_size", "mesh.dp_replicate", whole()),
    say(f"{_P}dp_shard_size", "mesh.dp_shard", whole()),
    say(f"{_P}tp_size", "mesh.tp", whole(), "the model's own tensor-parallel plan"),
    say(f"{_P}cp_size", "mesh.cp", whole()),
    say(f"{_P}cp_comm_strategy", "context.attention", words({
        "allgather": "all_gather", "alltoall": Refusal(
            "it rotates keys and values around a ring; use allgather, or sp_size for Ulysses")})),
    say(f"{_P}sp_size", "ulysses", whole(), "Ulysses: all_to_all over heads"),
    *skip("torch's context parallelism is what a plan runs", "cp_backend sp_backend", _P),
    *skip("sequences are cut evenly, and checked when a batch comes", "sp_seq_length "
          "sp_seq_length_is_variable sp_attn_implementation", _P),
)  # fmt: skip


_OTHERS: Final[tuple[ConfigKey, ...]] = (
    # DeepSpeed
    *within(f"{_D}deepspeed_config_file", deepspeed.NESTED_ROWS),
    say(f"{_D}zero_stage", "strategy", deepspeed.STAGES, "0 replicates, 3 shards everything"),
    say(f"{_D}offload_optimizer_device", "offload.optimizer", deepspeed.DEVICES),
    say(f"{_D}offload_param_device", "offload.params", deepspeed.DEVICES),
    say(f"{_D}gradient_accumulation_steps", "batch.accumulate", whole()),
    say(f"{_D}gradient_clipping", "clip_grad_norm", positive(off=0)),
    say(f"{_D}deepspeed_moe_layer_cls_names", "units", names(), "gathered as a whole"),
    *skip("parameters are made on the meta device and sharded, whatever it says",
          "zero3_init_flag", _D),
    *skip("meshplan.save_pretrained writes whole files", "zero3_save_16bit_model", _D),
    *skip(_LAUNCH, "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter "
          "deepspeed_inclusion_filter", _D),
    *skip("nothing is kept on NVMe", "offload_optimizer_nvme_path offload_param_nvme_path", _D),
    *refuse("no plan trains in fp8 yet; use bf16", "enable_msamp msamp_opt_level", _D),
    # Megatron-LM
    say(f"{_M}tp_degree", "mesh.tp", whole()),
    say(f"{_M}pp_degree", "mesh.pp", whole()),
    say(f"{_M}num_micro_batches", "batch.accumulate", whole(), "microbatches of a step"),
    say(f"{_M}context_parallel_size", "mesh.cp", whole()),
    say(f"{_M}expert_model_parallel_size", "mesh.ep", whole()),
    say(f"{_M}sequence_parallelism", "sequence_parallel", flag()),
    say(f"{_M}gradient_clipping", "clip_grad_norm", positive(off=0), default=1.0),
    say(f"{_M}use_distributed_optimizer", "strategy", flag("zero1"),
        "optimizer state is sharded over the data ranks"),
    say(f"{_M}recompute_activations", "activation_checkpointing", flag("selective")),
    say(f"{_M}recompute_granularity", "activation_checkpointing",
        words({"full": "full", "selective": "selective"})),
    *refuse("every block is recomputed: leave it out, or write a rule for some of them",
            "recompute_method recompute_num_layers", _M, harmless=("uniform", 1)),
    say(f"{_M}optimizer_cpu_offload", "offload.optimizer", flag()),
    *refuse("shards of experts over tp, and other splits of stages, have no word here: see rules "
            "and pipeline.split", "expert_tensor_parallel_size decoder_last_pipeline_num_layers "
            "use_custom_fsdp use_precision_aware_optimizer", _M, harmless=(False, 1)),
    *skip("the training program decides it, not the parallelism", "no_load_optim no_save_optim "
          "eod_mask_loss attention_backend attention_dropout hidden_dropout "
          "attention_softmax_in_fp32 calculate_per_token_loss use_rotary_position_embeddings "
          "overlap_cpu_optimizer_d2h_h2d", _M),
)  # fmt: skip
"""Sections that export does not write, because FSDP and its axes say the same."""


def recognises(root: PlanValue) -> bool:
    """Return True for a mapping with keys that `accelerate config` writes."""
    data = root.data
    return "distributed_type" in data or ("compute_environment" in data and "fsdp_config" in data)


def prepare(root: PlanValue) -> None:
    """Refuse a file with sections of several strategies.

    Raises:
        SpecError: A section does not belong to the distributed_type.
    """
    kind = root.data["distributed_type"].data if "distributed_type" in root.data else ""
    sections = [name for name in _BLOCKS.values() if name in root.data and root.data[name].data]
    foreign = [name for name in sections if name != _BLOCKS.get(kind)]
    if foreign:
        what = f"distributed_type is {kind}, and the file configures {foreign[0]} too"
        fix = "keep one strategy: remove the section, or change distributed_type"
        raise SpecError(Problem(what, root.data[foreign[0]].key, fix))


def settle(draft: Draft, root: PlanValue) -> None:
    """Say what the keys of the section that counts mean together."""
    kind = draft.get("distributed_type", "MULTI_GPU")
    stated = draft.facts.get("distributed_type", StatedFact(kind)).sources
    draft.pop("distributed_type", "it says which section counts")
    if kind == "FSDP":
        if "strategy" not in draft.facts:
            draft.facts["strategy"] = StatedFact("full_shard", ("distributed_type: FSDP",))
        settle_fsdp(draft)
    elif kind == "DEEPSPEED":
        if "strategy" not in draft.facts:
            words_of = "deepspeed_config.zero_stage is 2 if left out"
            draft.facts["strategy"] = StatedFact("zero2", (words_of,))
        deepspeed.settle(draft, root)
    elif "strategy" not in draft.facts:
        sources = stated or ("distributed_type is MULTI_GPU if left out",)
        draft.facts["strategy"] = StatedFact("ddp", sources)
    if draft.get("mesh.tp", 1) > 1 and kind != "MEGATRON_LM":
        draft.set("tp_plan", "hf", after="mesh.tp")
    if draft.get("ulysses", 1) > 1:
        draft.set("mesh.cp", draft.get("ulysses"), after="ulysses")
        draft.set("context.attention", "all_to_all", after="ulysses")
    draft.pop("ulysses", "1 is what a plan assumes of cp")
    replicas = draft.get("mesh.dp_replicate", 1)
    if kind == "FSDP" and replicas > 1:
        if draft.get("mesh.dp_shard", 1) == 1:
            draft.set("strategy", "ddp", after="mesh.dp_replicate")
        else:
            draft.set("strategy", HYBRID.get(draft.get("strategy"), draft.get("strategy")))


def unsettle(facts: Facts) -> Mapping[str, str]:
    """Split facts as accelerate's sections state them: replicas, or FSDP2 with axes."""
    whys: dict[str, str] = {}
    strategy = facts.get("strategy", "ddp")
    facts["distributed_type"] = "MULTI_GPU" if strategy == "ddp" else "FSDP"
    facts["compute_environment"] = "LOCAL_MACHINE"
    if facts.get("mesh.pp", 1) > 1 or facts.get("mesh.ep", 1) > 1:
        axis = "pp" if facts.get("mesh.pp", 1) > 1 else "ep"
        whys[f"mesh.{axis}"] = "its ParallelismConfig has no such axis"
        facts.pop(f"mesh.{axis}")
    if facts.get("mesh.cp", 1) > 1 and facts.get("context.attention") == "all_to_all":
        facts["ulysses"] = facts.pop("mesh.cp")
    if facts.get("mesh.tp", 1) > 1 and facts.get("tp_plan") != "hf":
        whys["tp_plan"] = "it takes the model's own plan of transformers: tp_plan: hf"
    if strategy == "ddp":
        facts.pop("strategy", None)
        for name in ("activation_checkpointing", "offload.activations", "units"):
            if facts.pop(name, None) is not None:
                whys[name] = "only its FSDP section has a key for it"
        if facts.get("mesh.dp_replicate", 1) > 1:
            for axis in ("tp", "cp"):
                if facts.get(f"mesh.{axis}", 1) > 1:
                    whys[f"mesh.{axis}"] = "it has no replicas beside this axis without shards"
    if strategy == "zero1":
        whys["strategy"] = "its FSDP shards gradients too: zero2"
        facts.pop("strategy")
    if strategy != "ddp":
        facts["fsdp_version"] = 2
    if strategy.startswith("hybrid"):
        facts["strategy"] = {"hybrid_shard": "full_shard"}.get(strategy, "zero2")
    elif facts.get("mesh.tp", 1) == 1 and facts.get("mesh.cp", 1) == 1:
        facts.pop("mesh.dp_shard", None)
        facts.pop("mesh.dp_replicate", None)
    unsettle_fsdp(facts, is_fsdp=strategy != "ddp")
    return whys


TOOL: Final = ConfigTool(
    name="accelerate",
    title="accelerate",
    looked_for="a YAML with distributed_type",
    table=ConfigTable((*ROWS, *(replace(row, is_written=False) for row in _OTHERS))),
    suffixes=(".yaml", ".yml", ".json"),
    written=("YAML", (".yaml", ".yml")),
    recognises=recognises,
    prepare=prepare,
    settle=settle,
    grafts=("deepspeed_config.deepspeed_config_file",),
    unsettle=unsettle,
    dump=dump_yaml,
    tp_plan="hf",
    implied=("strategy", "context.attention"),
    outside=("batch.", "optimizer", "clip_grad_norm"),
)
