"""From a published row to what was run: by its fields only, never by its id or source.

What no profile knows is not guessed: the row is skipped, and the reason says which field it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from meshplan.memory.frameworks import native
from meshplan.memory.frameworks.nanotron import stages
from meshplan.memory.frameworks.nanotron_job import Job
from meshplan.memory.frameworks.nanotron_pace import stalls
from meshplan.memory.frameworks.torchtitan import Training
from meshplan.memory.shape import Shape

Row = Mapping[str, Any]

METRICS: Final = (
    ("nvidia-smi", None),
    ("occupancy", None),
    ("XLA", None),
    ("Alpa", None),
    ("printed (allocated or reserved not stated)", None),
    ("chart", None),
    ("reserved", "reserved"),
    ("max_memory_allocated", "allocated"),
    ("max_allocated", "allocated"),
    ("active", "active"),
)
"""By a word of `mem_metric`, who counts; None where that is not said well enough."""

USABLE: Final = {
    ("H100", 80): 79.11, ("A100", 80): 79.25, ("A100", 40): 39.39, ("H100", 96): 95.04,
    ("H200", None): 139.8, ("B200", None): 178.3,
}  # fmt: skip
"""GiB that torch reports as the device's. Source: get_device_properties in published logs."""


class SkipError(Exception):
    """A row is not scored; its text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nanotron:
    shape: Shape
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Native:
    config: Mapping[str, Any]
    mesh: Mapping[str, int]
    how: Training
    profile: native.Profile
    accumulate: int


def metric_of(row: Row) -> str:
    """allocated, active or reserved."""
    stated = row["measured"].get("mem_metric") or ""
    for word, kind in METRICS:
        if word in stated:
            if kind is None:
                raise SkipError(f"mem_metric {stated!r} has no rules")
            return kind
    if is_nanotron(row):
        return "reserved"  # Its benchmark prints what the allocator reserved on the first rank.
    if stated:
        raise SkipError(f"mem_metric {stated!r} is not known")
    return "reserved"


def usable_gib(row: Row) -> float:
    """Of the device."""
    h = row["hardware"]
    if h.get("mem_usable_gib"):
        return float(h["mem_usable_gib"])
    gpu, size = str(h.get("gpu", "")), h.get("mem_gb")
    for (name, stated), usable in USABLE.items():
        if name in gpu.upper() and stated in (None, size):
            return usable
    if not isinstance(size, int | float):
        raise SkipError("the device's memory is not stated")
    return 0.98 * float(size) * 1e9 / 2**30


def case_of(row: Row) -> Nanotron | Native:
    """What was run.

    Raises:
        SkipError: No profile knows it.
    """
    model, parallel, training = row["model"], row["parallel"], row["training"]
    for key in ("layers", "hidden", "heads", "ffn", "vocab", "seq_len"):
        if not isinstance(model.get(key), int):
            raise SkipError(f"model.{key} {model.get(key)!r} is not a number")
    if not {"dp", "dp_shard", "tp"} & parallel.keys():
        raise SkipError("how the run was parallelised is not stated")
    if training.get("finetune") not in (None, "full"):
        raise SkipError(f"training.finetune {training['finetune']!r} has no rules")
    impl = parallel.get("impl")
    if is_nanotron(row):
        return _nanotron(row)
    if str(training.get("attention", "flash")).startswith("unfused"):
        raise SkipError("attention without a fused kernel has no profile")
    precision = training.get("precision", "")
    if precision.startswith("bf16 compute, fp32 params/grad-reduce (FSDP2"):
        profiles = {
            None: native.TITAN_2024_12,
            "FSDP2": native.TITAN_2024_04,
            "FSDP2 eager": native.TITAN_2025_10,
        }
    elif precision.startswith("PURE bf16"):
        profiles = {"FSDP2 + DTensor TP": native.KEMPNER}
    elif precision == "bf16 params and optimizer states":
        profiles = {None: native.TORCHTUNE}
    else:
        raise SkipError(f"training.precision {precision!r} with {impl!r} has no profile")
    if impl not in profiles:
        raise SkipError(f"parallel.impl {impl!r} has no profile")
    return _native(row, profiles[impl])


def is_nanotron(row: Row) -> bool:
    return row["training"].get(
        "precision"
    ) == "bf16 params, fp32 grad accumulation, fp32 master+AdamW states" and str(
        row["parallel"].get("tp_mode", "")
    ).startswith("REDUCE_SCATTER, async")


def _shape(model: Mapping[str, Any]) -> Shape:
    heads = model["heads"]
    return Shape(
        layers=model["layers"], hidden=model["hidden"], heads=heads,
        kv_heads=model.get("kv_heads") or heads, head_dim=model["hidden"] // heads,
        mlp=model["ffn"], vocab=model["vocab"], tied=bool(model.get("tied")),
    )  # fmt: skip


def _nanotron(row: Row) -> Nanotron:
    parallel, training, shape = row["parallel"], row["training"], _shape(row["model"])
    if parallel.get("zero_stage") not in (0, 1):
        raise SkipError(f"parallel.zero_stage {parallel.get('zero_stage')!r} has no rules here")
    if training.get("activation_checkpointing") != "none":
        raise SkipError("recomputation has no rules in this profile")
    if parallel.get("cp", 1) != 1:
        raise SkipError("cp has no rules in this profile")
    dp, tp, pp = (parallel.get(key, 1) for key in ("dp", "tp", "pp"))
    if shape.heads % tp or shape.kv_heads % tp:
        raise SkipError(f"tp {tp} does not divide the heads")
    zero, batch = parallel["zero_stage"], training["micro_batch"]
    is_past = stalls(dp=dp, tp=tp, pp=pp, zero=zero, batch=batch)
    return Nanotron(
        shape=shape,
        job=Job(
            stage=stages(shape, pp, is_past=is_past)[0], rank=0, batch=batch,
            seq_len=row["model"]["seq_len"], accumulate=training.get("grad_accum", 1),
            dp=dp, tp=tp, pp=pp, zero=zero,
        ),
    )  # fmt: skip


_RECOMPUTE: Final = {
    "none": "none",
    "full": "full",
    "selective": "ops",
    "selective op": "ops",
    "selective op (config default)": "ops",
    "selective op (per-op SAC)": "ops",
    "selective op (config default; PR does not state)": "ops",
    "selective layer (every 2nd)": "second",
}


def _native(row: Row, profile: native.Profile) -> Native:
    model, parallel, training = row["model"], row["parallel"], row["training"]
    if parallel.get("pp", 1) != 1:
        raise SkipError("a pipeline has no rules in this profile")
    for key in ("optimizer_in_backward", "activation_offload", "async_tp"):
        if training.get(key) or parallel.get(key):
            raise SkipError(f"{key} has no rules in this profile")
    compiled, recompute = training.get("compile", False), training.get("activation_checkpointing")
    if not isinstance(compiled, bool):
        raise SkipError(f"training.compile {compiled!r} has no rules")
    if recompute not in _RECOMPUTE:
        raise SkipError(f"training.activation_checkpointing {recompute!r} has no rules")
    if training.get("loss", "plain CE") != "plain CE" or training.get("kernels", "HF") != "HF":
        raise SkipError("its loss or its kernels have no rules")
    batch = training.get("local_batch", training.get("micro_batch"))
    if not isinstance(batch, int):
        raise SkipError("the batch of a rank is not stated")
    tp, cp = parallel.get("tp", 1), parallel.get("cp", 1)
    shard = parallel.get("dp_shard", 1) * cp
    replicate = parallel.get("dp_replicate", 1)
    if parallel.get("dp", 1) != 1:
        raise SkipError("replicas by DDP have no rules in this profile")
    if model["seq_len"] % cp:
        raise SkipError(f"cp {cp} does not divide the sequence")
    mesh = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp}
    config = {
        "model_type": "llama", "vocab_size": model["vocab"], "hidden_size": model["hidden"],
        "intermediate_size": model["ffn"], "num_hidden_layers": model["layers"],
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model.get("kv_heads") or model["heads"],
        "tie_word_embeddings": bool(model.get("tied")),
    }  # fmt: skip
    how = Training(
        batch=batch, tokens=model["seq_len"] // cp, tp=tp, recompute=_RECOMPUTE[recompute],
        is_compiled=compiled, chunks=8 if training.get("chunked_ce") else 1,
    )  # fmt: skip
    return Native(
        config=config,
        mesh={axis: size for axis, size in mesh.items() if size > 1 or axis == "dp_shard"},
        how=how,
        profile=profile,
        accumulate=training.get("grad_accum", 1),
    )
