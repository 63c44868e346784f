"""nanotron's YAML, as of 0.4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshplan.interop.configs.importing import ConfigTool
from meshplan.interop.configs.statements import Draft, Facts, mixed
from meshplan.interop.configs.table import (
    ABSENT,
    ConfigKey,
    ConfigTable,
    Refusal,
    flag,
    positive,
    refuse,
    say,
    skip,
    whole,
    words,
)
from meshplan.interop.configs.texts import dump_yaml
from meshplan.spec.values import PlanValue, join

_P: Final = "parallelism."
_OWN: Final = "the training program decides it, not the parallelism"

ROWS: Final[tuple[ConfigKey, ...]] = (
    say(f"{_P}dp", "data_ranks", whole(), "data-parallel ranks"),
    say(f"{_P}pp", "mesh.pp", whole(), none=1),
    say(f"{_P}tp", "mesh.tp", whole(), none=1),
    *refuse("it multiplies the ranks there, and is lent by another axis in a plan: write "
            "mesh: {ep: N in dp_shard}", "expert_parallel_size", _P, harmless=(1,)),
    say(f"{_P}context_parallel_size", "mesh.cp", whole()),
    say(f"{_P}pp_engine", "pipeline.schedule", words({"1f1b": "1F1B", "afab": "GPipe"})),
    say(f"{_P}tp_mode", "sequence_parallel", words({"REDUCE_SCATTER": True, "ALL_REDUCE": ABSENT})),
    *skip("collectives of tp are not overlapped by a setting", "tp_linear_async_communication "
          "tp_recompute_allgather moe_layer_recompute enabled_moe", _P),
    say(f"{_P}recompute_layer", "activation_checkpointing", flag("full")),
    say("tokens.micro_batch_size", "batch.micro", whole()),
    say("tokens.batch_accumulation_per_replica", "batch.accumulate", whole(), none=1),
    say("tokens.sequence_length", "batch.seq_len", whole()),
    *skip(_OWN, "train_steps val_check_interval limit_val_batches limit_test_batches", "tokens."),
    say("optimizer.zero_stage", "strategy", words({0: "ddp", 1: "zero1", **dict.fromkeys(
        (2, 3), Refusal("nanotron has stages 0 and 1 only; write strategy: zero2 or full_shard"))}),
        "1 shards the optimizer state"),
    say("optimizer.clip_grad", "clip_grad_norm", positive(off=0)),
    say("optimizer.accumulate_grad_in_fp32", "keeps_float32", flag(True, False),
        "gradients and master weights in float32", none=True),
    say("optimizer.optimizer_factory.name", "optimizer", words({"adamW": "adamw", "sgd": "sgd"}),
        "for the bytes of its state"),
    *skip("give it to the optimizer that you make", "weight_decay adam_eps adam_beta1 adam_beta2 "
          "torch_adam_is_fused learning_rate_scheduler.** weight_decay_exclude_named_params "
          "optimizer_factory.* muon_config.**", "optimizer."),
    say("model.dtype", "dtype", words({"bfloat16": "bfloat16", "float32": "float32",
                                       "float16": "float16"}),
        default="bfloat16", none="float32"),
    say("model.ddp_bucket_cap_mb", "ddp.bucket_mb", whole()),
    *skip("the model is the program's", "model_config.** init_method.** "
          "make_vocab_size_divisible_by", "model."),
    *skip(_OWN, "general.** tokenizer.** logging.** data.** data_stages profiler.** lighteval.** "
          "metrics_logging.** s3_upload.** kill_switch_path experiment_logger.** profiler "
          "lighteval"),
    *skip("meshplan.save writes states that load under any plan", "checkpoints.**"),
    *refuse("write stages of your own", "pipeline_split", _P),
)  # fmt: skip


def recognises(root: PlanValue) -> bool:
    """Return True for `parallelism` with one-letter axes, beside tokens or optimizer."""
    inner = root.data["parallelism"].data if "parallelism" in root.data else None
    return isinstance(inner, dict) and "dp" in inner


def settle(draft: Draft, root: PlanValue) -> None:
    """Find the axis of the data ranks and the precision."""
    if "strategy" not in draft.facts:
        draft.set("strategy", "ddp", "optimizer.zero_stage is 0 if left out")
    axis = "mesh.dp_shard" if draft.get("strategy") == "zero1" else "mesh.dp_replicate"
    ranks = draft.get("data_ranks", 1)
    draft.set(axis, ranks, after="data_ranks")
    draft.moved["data_ranks"] = axis
    draft.pop("data_ranks")
    if draft.get("strategy") != "ddp":
        draft.pop("ddp.bucket_mb", "it is an option of DistributedDataParallel only")
    dtype, keeps = draft.get("dtype"), draft.pop("keeps_float32")
    draft.moved |= {"dtype": "precision", "keeps_float32": "precision"}
    if dtype is not None:
        whole_ = {"param": dtype, "reduce": dtype, "master": dtype}
        draft.set("precision", mixed(dtype) if keeps else whole_, after="dtype")
        draft.pop("dtype")
    if draft.get("mesh.pp", 1) > 1 and "pipeline.schedule" not in draft.facts:
        draft.set("pipeline.schedule", "GPipe", f"{_P}pp_engine is afab if left out")
    if draft.get("pipeline.schedule") == "1F1B":
        draft.pop("pipeline.schedule", "1F1B is what a plan assumes")


def unsettle(facts: Facts) -> Mapping[str, str]:
    """State data ranks, precision and stages as nanotron does."""
    whys: dict[str, str] = {}
    strategy = facts.get("strategy")
    if strategy not in ("ddp", "zero1"):
        whys["strategy"] = "it shards the optimizer state at most: zero1"
        facts.pop("strategy", None)
    if facts.get("mesh.pp", 1) > 1:
        facts.setdefault("pipeline.schedule", "1F1B")
    if facts.get("mesh.ep", 1) > 1:
        whys["mesh.ep"] = "its expert ranks multiply the others instead of being among them"
    facts["data_ranks"] = facts.get("mesh.dp_shard", 1) * facts.get("mesh.dp_replicate", 1)
    precision = facts.pop("precision", None)
    if precision is not None:
        dtype = precision.get("param")
        facts["dtype"] = dtype
        if precision == mixed(dtype):
            facts["keeps_float32"] = True
        elif precision == {"param": dtype, "reduce": dtype, "master": dtype}:
            facts["keeps_float32"] = False
        else:
            whys["precision"] = "it has one dtype, and float32 for gradients and master weights"
    if facts.get("mesh.cp", 1) > 1 and facts.get("context.attention") == "all_to_all":
        whys["context.attention"] = "its ring attention keeps heads whole"
    facts.pop("context.attention", None)
    if "activation_checkpointing" in facts and facts["activation_checkpointing"] != "full":
        whys["activation_checkpointing"] = "it recomputes whole layers or nothing"
        facts.pop("activation_checkpointing")
    return whys


_OF_MAIN: Final = ("context_parallel_size", "recompute_layer", "optimizer_factory")
_REST: Final = (
    "# Add what the training program states: general, data, tokenizer, the model, train_steps and\n"
    "# the rest of optimizer.\n"
)


def dump(tree: Any) -> str:
    """Return a tree as YAML, under what the file still needs."""
    later = [key for values in tree.values() for key in values if key in _OF_MAIN]
    if not later:
        return _REST + dump_yaml(tree)
    note = f"# Release 0.4 on PyPI has no {join(later)}: install nanotron from its repository.\n"
    return _REST + note + dump_yaml(tree)


TOOL: Final = ConfigTool(
    name="nanotron",
    title="nanotron",
    looked_for="a YAML with parallelism: {dp, pp, tp}",
    table=ConfigTable(ROWS),
    suffixes=(".yaml", ".yml"),
    written=("YAML", (".yaml", ".yml")),
    recognises=recognises,
    settle=settle,
    unsettle=unsettle,
    dump=dump,
    implied=("mesh.dp_shard", "mesh.dp_replicate", "precision", "context.attention"),
)
