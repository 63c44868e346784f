"""torchtitan's configurations: TOML up to 0.2, flags, and the Python of 0.3 and later."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from meshplan.errors import Problem
from meshplan.interop.configs.flags import parse_flags
from meshplan.interop.configs.importing import ConfigTool
from meshplan.interop.configs.python_files import parse_python
from meshplan.interop.configs.statements import Draft, Facts, StatedFact, mixed, world_of
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
    words,
)
from meshplan.interop.configs.texts import parse_toml
from meshplan.layout.schedules import SCHEDULES
from meshplan.spec.values import PlanValue

_P: Final = "parallelism."
_T: Final = "training."
_A: Final = "activation_checkpoint."
_UNCLIPPED: Final = 1e10
"""torchtitan always clips: at a norm that no gradient has."""
_OWN: Final = "the training program decides it, not the parallelism"
_BUDGET: Final = Refusal("a memory budget is not available: use selective, full, or meshplan plan")
_FP8: Final = "no plan trains in fp8 or below yet"


def _split() -> Translation:
    form = "a list of module names for each stage"

    def read(value: Any) -> Any:
        is_nested = isinstance(value, list) and all(isinstance(each, list) for each in value)
        if not is_nested:
            raise WrongFormError(form)
        return tuple(tuple(map(str, each)) for each in value) or ABSENT

    return Translation(form, read, lambda value: [list(each) for each in value])


def _recompute_option() -> Translation:
    def read(value: Any) -> Any:
        if value == "op":
            return "op"
        if str(value).isdecimal() and int(value) > 0:
            return int(value)
        raise WrongFormError("op, or every how many blocks")

    return Translation("op, or every how many blocks", read, str)


def _degrees(prefix: str, *, is_written: bool) -> tuple[ConfigKey, ...]:
    """Return the rows of the axes under a section."""
    default = -1 if is_written else ABSENT
    return (
        say(f"{prefix}data_parallel_replicate_degree", "mesh.dp_replicate", whole(),
            is_written=is_written),
        say(f"{prefix}data_parallel_shard_degree", "mesh.dp_shard", whole(1, off=(-1,)),
            "-1 is the ranks that are left", default=default, none=1 if is_written else ABSENT,
            is_written=is_written),
        say(f"{prefix}tensor_parallel_degree", "mesh.tp", whole(), is_written=is_written),
        say(f"{prefix}context_parallel_degree", "mesh.cp", whole(), is_written=is_written),
        say(f"{prefix}pipeline_parallel_degree", "mesh.pp", whole(), is_written=is_written),
        say(f"{prefix}expert_parallel_degree", "mesh.ep", whole(), is_written=is_written),
        say(f"{prefix}pipeline_parallel_schedule", "pipeline.schedule",
            words({name: name for name in SCHEDULES},
                  Refusal(f"no plan has this schedule: write {', '.join(SCHEDULES)}")),
            is_written=is_written),
        say(f"{prefix}pipeline_parallel_microbatch_size", "pipeline_micro", whole(),
            "samples of one microbatch of the pipeline", is_written=is_written),
        say(f"{prefix}context_parallel_rotate_method", "context.attention", words({
            "allgather": "all_gather", "alltoall": Refusal(
                "it rotates keys and values around a ring; use allgather")}), is_written=False),
    )  # fmt: skip


ROWS: Final[tuple[ConfigKey, ...]] = (
    *_degrees(_P, is_written=True),
    say(f"{_P}fsdp_reshard_after_forward", "reshard", words({
        "default": "default", "always": "always", "never": "never"}),
        "never keeps parameters whole after the forward; default does so under a pipeline"),
    say(f"{_P}enable_sequence_parallel", "sequence_parallel", flag(True, False),
        "true if left out", default=True, none=False),
    say(f"{_P}context_parallel_load_balancer", "context.balance", words({
        "headtail": True, "none": False, "ptrr": Refusal("use headtail")}), default="headtail"),
    say(f"{_P}num_pp_microbatches", "pipeline.microbatches", whole(), is_written=False),
    say(f"{_P}module_fqns_per_model_part", "pipeline.split", _split()),
    say(f"{_P}disable_loss_parallel", "loss_parallel", flag(False, True),
        "the loss is computed over shards of the vocabulary unless this is true",
        is_written=False),
    *refuse("state pipeline.virtual, and pipeline.split for uneven stages",
            "pipeline_parallel_layers_per_stage pipeline_parallel_split_points "
            "pipeline_parallel_schedule_csv", _P, harmless=("", [])),
    *skip("stages are balanced by parameters, with embedding and head counted",
          "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers", _P),
    *refuse("experts are not sharded over tp", "expert_tensor_parallel_degree", _P, harmless=(1,)),
    *refuse("use headtail", "context_parallel_ptrr_mask_key", _P),
    *refuse("async tensor parallelism is not available", "enable_async_tensor_parallel", _P),
    *skip("it does not change what is sharded", "spmd_backend enable_fsdp_symm_mem "
          "expert_parallel_comm_backend enable_compiled_autograd", _P),
    # Batch and precision
    say(f"{_T}local_batch_size", "batch.micro", whole(), "of one data rank", default=8),
    say(f"{_T}batch_size", "batch.micro", whole(), is_written=False),
    say(f"{_T}global_batch_size", "batch.global", whole(1, off=(-1,))),
    say(f"{_T}seq_len", "batch.seq_len", whole(), default=2048),
    say(f"{_T}max_context_length", "batch.seq_len", whole(), is_written=False),
    say(f"{_T}num_tokens_per_microbatch_per_dp_rank", "tokens.micro", whole(), is_written=False),
    say(f"{_T}num_tokens_per_train_step", "tokens.global", whole(1, off=(-1,)), is_written=False),
    say(f"{_T}max_norm", "clip_grad_norm", positive(off=_UNCLIPPED), default=1.0,
        none=_UNCLIPPED),
    say(f"{_T}mixed_precision_param", "precision", words({
        "bfloat16": mixed("bfloat16"), "float32": mixed("float32")}), default="bfloat16",
        none="float32"),
    say(f"{_T}mixed_precision_reduce", "precision.reduce", words({"float32": "float32"})),
    say(f"{_T}dtype", "precision.master", words({"float32": "float32", "bfloat16": "bfloat16"}),
        "of the parameters that the optimizer updates"),
    say(f"{_T}enable_cpu_offload", "offload.params", flag()),
    *skip(_OWN, "steps gc_freq gc_debug disable_cuda_graphs dataset dataset_path data_parallel "
          "deterministic seed warmup_steps", _T),
    *refuse(_FP8, "enable_fp8_linear", _T),
    say(f"{_T}compile", "compile", flag(), is_written=False),
    *_degrees(_T, is_written=False),
    *_degrees("experimental.", is_written=False),
    *skip(_OWN, "custom_import custom_args_module enable_compiled_autograd", "experimental."),
    *refuse("async tensor parallelism is not available", "enable_async_tensor_parallel",
            "experimental."),
    # Recomputation
    say(f"{_A}class", "recompute", words({
        "none": "none", "FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": _BUDGET})),
    say(f"{_A}mode", "recompute", words({
        "full": "full", "selective": "selective", "none": "none", "memory_budget": _BUDGET}),
        "selective keeps matrix products and attention", is_written=False),
    say(f"{_A}selective_ac_option", "recompute_option", _recompute_option(), is_written=False),
    *skip("what is recomputed gives the same numbers", "force_recompute_mm_shapes_by_fqns "
          "preserve_rng_state determinism_check debug early_stop "
          "per_op_sac_force_recompute_mm_shapes_by_fqns visualize_memory_budget_pareto", _A),
    *refuse("a memory budget is not available", "memory_budget", _A, harmless=(0.5,)),
    say("compile.enable", "compile", flag()),
    *skip("each block is compiled, not the loss", "components", "compile."),
    *refuse("blocks are compiled with inductor", "backend", "compile.", harmless=("inductor",)),
    *refuse("async tensor parallelism is not available", "enable_async_tensor_parallel",
            "compile."),
    say("optimizer.name", "optimizer", words({"AdamW": "adamw", "Adam": "adam", "Muon": "muon"},
        Refusal("no plan has a word for the state of this optimizer; use AdamW")),
        "for the bytes of its state", is_written=False),
    say("optimizer.implementation", "is_fused", words({
        "foreach": False, "for-loop": False, "fused": True, "fused_opt_states_bf16": Refusal(
            "no plan keeps optimizer state in bfloat16 beside parameters in float32")}),
        is_written=False),
    *skip("give it to the optimizer that you make", "optimizer optimizer.**"),
    # The rest
    *refuse(_FP8, "float8.** mx.** quantize.**"),
    *refuse(_FP8, "converters", "model.", harmless=([],)),
    *skip("ranks are watched, and end together, without it", "comm.** fault_tolerance.**"),
    *skip("meshplan.save writes states that load under any plan", "checkpoint.**"),
    *skip("meshplan estimate does so without a GPU", "memory_estimation.**"),
    *skip(_OWN, "job.** profiling.** profiler.** metrics.** model.** lr_scheduler lr_scheduler.** "
          "dataloader dataloader.** validation.** validator validator.** debug.** tokenizer "
          "tokenizer.** override.** loss loss.** model_spec hf_assets_path "
          "dump_folder module config metrics profiler checkpoint comm"),
    *skip("meshplan launch, or torchrun, starts the ranks", "rdzv_backend rdzv_endpoint "
          "local_ranks_filter role tee log_dir m job.config_file"),
    say("nproc_per_node", "hardware.gpus_per_node", whole(), "of torchrun", is_written=False),
    say("nnodes", "hardware.nodes", whole(), "of torchrun", is_written=False),
)  # fmt: skip

_STATED: Final = {row.path for row in ROWS if row.verdict == "honoured"}
_SECTIONS: Final = ("parallelism", "activation_checkpoint", "training")


def parse(text: str, name: str) -> PlanValue:
    """Return the values of a TOML, a Python file or flags such as `--training.steps 5`."""
    if name.endswith(".toml"):
        return parse_toml(text, name)
    if name.endswith(".py"):
        root = parse_python(text, name)
        recompute = root.data.get("activation_checkpoint")
        if recompute is not None and recompute.data is None:  # As `mode` of older files.
            none = PlanValue(data="none", origin=recompute.origin, text="none", key=recompute.key)
            root.data["activation_checkpoint"] = replace(recompute, data={"class": none})
        return root
    root = parse_flags(text, name, _STATED)
    for path in [path for path in root.data if "." in path]:
        value, here = root.data.pop(path), root
        *parents, last = path.split(".")
        for part in parents:
            empty = PlanValue(data={}, origin=value.origin, key=value.key)
            here = here.data.setdefault(part, empty)
        here.data[last] = value
    return root


def recognises(root: PlanValue) -> bool:
    """Return True for sections of torchtitan's configuration."""
    found = [name for name in _SECTIONS if name in root.data]
    is_section = all(isinstance(root.data[name].data, dict) for name in found)
    return bool(found) and is_section and "trainer" not in root.data


def settle(draft: Draft, root: PlanValue) -> None:
    """Find the strategy of the degrees, the pipeline's microbatches, and what is recomputed."""
    _settle_tokens(draft)
    pp = draft.get("mesh.pp", 1)
    size, micro = draft.pop("pipeline_micro", "it has no effect on one stage"), "batch.micro"
    if pp > 1 and "pipeline.microbatches" not in draft.facts:
        count, rest = divmod(draft.get(micro), size or 1)
        if rest:
            what = f"{draft.get(micro)} samples are no multiple of microbatches of {size}"
            draft.problems.append(Problem(what, draft.origin(micro), "make it a multiple"))
        stated = f"{_P}pipeline_parallel_microbatch_size"
        because = f"{stated}: {size}" if size else f"{stated} is 1 if left out"
        draft.set("pipeline.microbatches", count, because)
        draft.moved["pipeline_micro"] = "pipeline.microbatches"
    _settle_recompute(draft, root)
    reshard = draft.pop("reshard") or "default"
    is_kept = reshard == "never" or (reshard == "default" and pp > 1)
    shards, world = draft.get("mesh.dp_shard"), world_of(draft)
    replicas = draft.get("mesh.dp_replicate", 1)
    if shards is None and world is not None:
        model = pp * draft.get("mesh.tp", 1) * draft.get("mesh.cp", 1)
        shards = world // (model * replicas)
    after = "mesh.dp_shard" if "mesh.dp_shard" in draft.facts else "mesh.dp_replicate"
    source = f"{_P}data_parallel_shard_degree: {'-1' if shards is None else shards}"
    cp = draft.get("mesh.cp", 1)
    if shards == 1 and cp > 1:
        what = f"{source} beside context_parallel_degree {cp}: parameters are sharded over cp alone"
        origin = draft.origin("mesh.dp_shard") or draft.origin("mesh.cp")
        fix = f"a plan shards over dp_shard: state the degree {cp} there and remove that of cp"
        draft.problems.append(Problem(what, origin, fix))
    if shards == 1:
        draft.set("strategy", "ddp", source, after)
        draft.pop("mesh.dp_shard", "1 is what a plan assumes of dp_shard")
    else:
        word = "zero2" if is_kept else "full_shard"
        hybrid = {"zero2": "hybrid_shard_zero2", "full_shard": "hybrid_shard"}
        draft.set("strategy", hybrid[word] if replicas > 1 else word, source, after)
    draft.moved["reshard"] = "strategy"
    is_fused = draft.pop("is_fused")
    if is_fused and draft.get("optimizer") in ("adamw", "adam"):
        draft.set("optimizer", f"{draft.get('optimizer')}_fused")
    draft.moved["is_fused"] = "optimizer"
    because = "the summed loss is divided by the targets of all ranks"
    draft.facts["loss"] = StatedFact("tokens", (because,))
    if draft.get("mesh.tp", 1) == 1:
        draft.pop("loss_parallel")


def _settle_tokens(draft: Draft) -> None:
    """Turn batches that are counted in tokens into samples."""
    seq_len = draft.get("batch.seq_len")
    for part in ("micro", "global"):
        tokens = draft.get(f"tokens.{part}")
        if tokens is None:
            continue
        count, rest = divmod(tokens, seq_len)
        if rest:
            what = f"{tokens} tokens are no multiple of {seq_len} tokens of a sample"
            origin = draft.origin(f"tokens.{part}")
            draft.problems.append(Problem(what, origin, "make it a multiple"))
        draft.set(f"batch.{part}", count, after=f"tokens.{part}")
        draft.moved[f"tokens.{part}"] = f"batch.{part}"
        draft.pop(f"tokens.{part}")


def _settle_recompute(draft: Draft, root: PlanValue) -> None:
    mode, option = draft.get("recompute"), draft.pop("recompute_option")
    is_toml = root.origin.file.endswith(".toml")
    source = draft.facts.get(
        "recompute", StatedFact(None, ("selective is what it does if left out",))
    )
    if mode is None:
        mode = "selective"
    if mode == "selective" and is_toml and option != "op":
        every = option or 2
        value: Any = {"mode": "full", "every": every} if every > 1 else "full"
    else:
        value = mode
    draft.pop("recompute")
    draft.moved |= {"recompute": "activation_checkpointing",
                    "recompute_option": "activation_checkpointing"}  # fmt: skip
    if value != "none":
        draft.facts["activation_checkpointing"] = StatedFact(value, source.sources, source.origin)
    else:
        draft.without_effect["recompute"] = "none is what a plan assumes"
        draft.moved.pop("recompute")


def unsettle(facts: Facts) -> Mapping[str, str]:
    """State a strategy by degrees and by what stays gathered."""
    whys: dict[str, str] = {}
    strategy = facts.get("strategy", "ddp")
    if strategy == "zero1":
        whys["strategy"] = "its FSDP shards gradients too: zero2"
        facts.pop("strategy")
    elif strategy != "ddp":
        facts["reshard"] = "never" if strategy.endswith("zero2") else "always"
    elif facts.get("mesh.cp", 1) > 1:
        whys["strategy"] = "it shards parameters over cp even with one rank of dp_shard"
    if facts.setdefault("loss", "mean") != "tokens":
        whys["loss"] = "it divides the summed loss by the targets of all ranks: tokens"
    if facts.get("mesh.cp", 1) > 1 and facts.get("context.attention") == "all_to_all":
        whys["context.attention"] = "its context parallelism gathers keys and values"
    facts.pop("context.attention", None)
    recompute = facts.pop("activation_checkpointing", "none")
    if recompute in ("full", "selective"):
        facts["recompute"] = recompute
    else:
        facts["recompute"] = "none"
        if recompute != "none":
            whys["activation_checkpointing"] = "it recomputes all blocks, or matrix products not"
    count, micro = facts.pop("pipeline.microbatches", None), facts.get("batch.micro")
    if count and micro and micro % count == 0:
        facts["pipeline_micro"] = micro // count
    elif count:
        whys["pipeline.microbatches"] = "it states samples of a microbatch: state batch.micro"
    _unsettle_precision(facts, whys)
    return whys


def _unsettle_precision(facts: Facts, whys: dict[str, str]) -> None:
    precision = facts.get("precision")
    if isinstance(precision, dict) and precision.get("master") == "bfloat16":
        facts["precision"] = {**precision, "master": "float32"}
        facts["precision.master"] = "bfloat16"
    if isinstance(precision, dict) and precision.get("reduce") != "float32":
        whys["precision"] = "it reduces gradients in float32"
        facts.pop("precision")
    elif precision == {}:
        facts.pop("precision")


_CLASSES: Final[Mapping[str, str]] = {
    "training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig",
}  # fmt: skip


def dump(tree: Any) -> str:
    """Return a Python module with one function, and the same as flags."""
    recompute = tree.pop("activation_checkpoint", {}).get("class")
    if "pipeline_parallel_degree" in tree.get("parallelism", {}):
        # Torchtitan captures CUDA graphs unless it is told not to, and refuses to in pipelines.
        tree.setdefault("training", {})["disable_cuda_graphs"] = True
    lines = [f"        {section}={_CLASSES[section]}({_call(values)}),"
             for section, values in tree.items()]  # fmt: skip
    recompute = None if recompute == "none" else recompute
    if recompute:
        lines.append(f"        activation_checkpoint={recompute}.Config(),")
    else:
        lines.append("        activation_checkpoint=None,")
    flags = shlex.join(f"--{section}.{key}={value}" for section, values in tree.items()
                       for key, value in values.items())  # fmt: skip
    imports = f"from torchtitan.distributed.activation_checkpoint import {recompute}\n"
    names = ", ".join(sorted(_CLASSES[section] for section in tree))
    return (
        '"""The parallelism of a plan, for torchtitan 0.3: --module NAME --config from_plan."""\n\n'
        f"from torchtitan.config import {names}\n{imports if recompute else ''}"
        "from torchtitan.trainer import Trainer\n\n\n"
        "def from_plan() -> Trainer.Config:\n"
        '    """Add the model, its data and its optimizer from your recipe."""\n'
        "    return Trainer.Config(\n" + "\n".join(lines) + "\n    )\n\n\n"
        f"# The same as flags: {flags}\n"
    )


def _call(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())


TOOL: Final = ConfigTool(
    name="torchtitan",
    title="torchtitan",
    looked_for="TOML, Python or flags with parallelism and training",
    table=ConfigTable(ROWS),
    suffixes=(".toml", ".py", ".sh", ".txt", ".args"),
    written=("Python", (".py",)),
    parse=parse,
    recognises=recognises,
    settle=settle,
    always=("training", "parallelism"),
    unsettle=unsettle,
    dump=dump,
    implied=("strategy", "loss"),
    outside=("optimizer",),
    counts_microbatches=False,
)
