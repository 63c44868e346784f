"""FSDP's keys as accelerate and the Trainer write them, for both of its versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshplan.errors import Problem
from meshplan.interop.configs.statements import Draft, Facts
from meshplan.interop.configs.table import (
    ConfigKey,
    Refusal,
    flag,
    names,
    refuse,
    say,
    skip,
    words,
)

SHARDING: Final[Mapping[Any, Any]] = {
    "FULL_SHARD": "full_shard", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hybrid_shard", "HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
    1: "full_shard", 2: "zero2", 3: "ddp", 4: "hybrid_shard", 5: "hybrid_shard_zero2",
    "_HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
}  # fmt: skip
"""Words and numbers of torch's `ShardingStrategy`."""
RESHARD: Final[Mapping[Any, Any]] = {True: "full_shard", False: "zero2"}
HYBRID: Final[Mapping[str, str]] = {
    "full_shard": "hybrid_shard", "zero2": "hybrid_shard_zero2",
    "hybrid_shard": "hybrid_shard", "hybrid_shard_zero2": "hybrid_shard_zero2",
}  # fmt: skip
"""A strategy with replicas of its shards, by strategy."""
_KEPT: Final = "FSDP2 always does so"


def fsdp_rows(prefix: str, *, is_version_2: bool) -> tuple[ConfigKey, ...]:
    """Return the rows of FSDP's keys; each begins with `prefix`.

    Args:
        prefix: The section, and the beginning of its keys, as in `fsdp_config.fsdp_`.
        is_version_2: True if the tool means FSDP2 where no version is stated.
    """
    return (
        say(f"{prefix}version", "fsdp_version", words({1: 1, 2: 2}),
            "which of torch's two FSDP the file is written for; a plan runs FSDP2",
            default=2 if is_version_2 else 1),
        say(f"{prefix}reshard_after_forward", "strategy", words({**RESHARD, **SHARDING}),
            "false keeps parameters whole after the forward", default=True),
        say(f"{prefix}sharding_strategy", "strategy", words(SHARDING),
            "SHARD_GRAD_OP keeps parameters whole after the forward, NO_SHARD is ddp",
            is_written=False),
        say(f"{prefix}offload_params", "offload.params", flag(),
            "parameters, gradients and optimizer state in host memory",
            is_written=not is_version_2),
        say(f"{prefix}cpu_offload", "offload.params", flag(), is_written=is_version_2),
        say(f"{prefix}activation_checkpointing", "activation_checkpointing", flag("full"),
            "each block is recomputed in backward"),
        say(f"{prefix}activation_checkpointing_offload", "offload.activations", flag(),
            "what backward needs is kept in host memory"),
        say(f"{prefix}transformer_layer_cls_to_wrap", "units", names(as_list=is_version_2),
            "classes whose modules FSDP2 gathers one at a time"),
        say(f"{prefix}transformer_cls_to_wrap", "units", names(), is_written=False),
        say(f"{prefix}auto_wrap_policy", "wrap", words({
            "TRANSFORMER_BASED_WRAP": "blocks",
            "SIZE_BASED_WRAP": Refusal("blocks are units, whatever their size: name classes with "
                                       "TRANSFORMER_BASED_WRAP, or write rules with unit: true"),
            "NO_WRAP": Refusal("without units the whole model is gathered at once: leave it out, "
                               "so that blocks are gathered one at a time")}),
            "blocks are FSDP units of their own"),
        *refuse("blocks are units, whatever their size: name classes with "
                "transformer_layer_cls_to_wrap", "min_num_params", prefix, harmless=(0, "0")),
        *refuse("write rules: - {match: NAMES, place: replicate}", "ignored_modules", prefix),
        *skip("states are saved in shards that load under any plan: meshplan.save, or "
              "save_pretrained for whole files", "state_dict_type state_dict_config "
              "optim_state_dict_config", prefix),
        *skip("the next unit is gathered while one computes", "backward_prefetch "
              "backward_prefetch_policy forward_prefetch limit_all_gathers", prefix),
        *skip(_KEPT, "use_orig_params", prefix),
        *skip("ranks are compared, or given rank 0's weights by load_pretrained, whatever it says",
              "sync_module_states cpu_ram_efficient_loading", prefix),
        *refuse("dtypes are under precision in a plan", "mixed_precision_policy", prefix),
        *refuse("write rules with apply", "param_init_fn", prefix),
    )  # fmt: skip


def settle_fsdp(draft: Draft) -> None:
    """Say what FSDP's version changes, and reduce in the dtype that it computes in."""
    version = draft.pop("fsdp_version", "a plan runs FSDP2 in any case")
    draft.pop("wrap", "blocks are FSDP units of a plan in any case")
    statement = draft.facts.get("strategy")
    words_of = " ".join(statement.sources) if statement else ""
    strategy = "" if statement is None else statement.value
    is_hybrid = strategy.startswith("hybrid")
    is_stated = "sharding_strategy" in words_of or words_of.startswith("fsdp: ")
    if version == 2 and is_hybrid and is_stated:
        what = f"{words_of}: version 2 ignores HYBRID_SHARD and runs plain FSDP on all ranks"
        fix = "state dp_replicate and dp_shard sizes, write version 1, or remove the key"
        draft.problems.append(Problem(what, draft.origin("strategy"), fix))
    elif version == 2 and "sharding_strategy" in words_of and strategy != "full_shard":
        what = f"{words_of}: version 2 ignores it and shards parameters, gradients and state"
        way = {"zero2": "write reshard_after_forward: false instead",
               "ddp": "train without FSDP for replicas"}[strategy]  # fmt: skip
        draft.problems.append(Problem(what, draft.origin("strategy"), f"{way}, or version 1"))
    elif is_hybrid and is_stated:
        draft.notes.append(
            "HYBRID_SHARD is kept: shards within a node, replicas across nodes. (accelerate "
            "to-fsdp2 turns it into plain FSDP on all ranks unless parallelism_config has "
            "dp_replicate_size.)"
        )
    elif strategy == "ddp" and is_stated:
        draft.notes.append("NO_SHARD is ddp: whole parameters on every rank.")
    reduce_as_computed(draft)


def reduce_as_computed(draft: Draft) -> None:
    """Reduce gradients in the dtype of the forward, as accelerate and Lightning tell FSDP."""
    precision = draft.get("precision")
    if isinstance(precision, Mapping) and draft.get("strategy") != "ddp":
        draft.set("precision", {**precision, "reduce": precision["param"]})


def unsettle_fsdp(facts: Facts, *, is_fsdp: bool) -> None:
    """Undo `reduce_as_computed`, for a file in which FSDP's reduction follows from the dtype."""
    precision = facts.get("precision")
    if is_fsdp:
        facts["wrap"] = "blocks"
    if isinstance(precision, dict) and is_fsdp:
        if precision.get("reduce") == precision.get("param"):
            facts["precision"] = {**precision, "reduce": "float32"}
        elif precision.get("reduce") == "float32" != precision.get("param"):
            facts["precision"] = {**precision, "reduce": "unsaid"}
