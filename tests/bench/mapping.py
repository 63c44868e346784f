"""From a published row to what was run: by its fields only, never by its id or source.

What no profile knows is not guessed: the row is skipped, and the reason says which field it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from meshplan.memory.decoder.sizes import Shape
from tests.bench.frameworks import native
from tests.bench.frameworks.megatron_job import MegatronJob, States, even_stages
from tests.bench.frameworks.nanotron import stages
from tests.bench.frameworks.nanotron_job import Job
from tests.bench.frameworks.nanotron_pace import stalls
from tests.bench.frameworks.torchtitan import Training
from tests.bench.row_check import Row, disagreements, problems

METRICS: Final = (
    ("nvidia-smi", "total"),
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
    ("H200", None): 139.8, ("B200", None): 178.3, ("V100", 32): 31.75, ("V100", 16): 15.78,
}  # fmt: skip
"""GiB that torch reports as the device's. Source: get_device_properties in published logs."""


NANOTRON_PRECISION: Final = "bf16 params, fp32 grad accumulation, fp32 master+AdamW states"


class SkipError(Exception):
    """A row is not scored; its text says why."""


def checked(row: Any) -> Row:
    """A row whose numbers are numbers, and of which nothing is unheard of.

    Raises:
        SkipError: It is not.
    """
    for reason in problems(row):
        raise SkipError(reason)
    for reason in disagreements(row):
        raise SkipError(reason)
    return dict(row)


def only(row: Row, field: str, *values: Any) -> None:
    """Raises: SkipError: The field says something else, for which there are no rules."""
    section, name = field.split(".")
    stated = row[section].get(name)
    if not any(stated == value and type(stated) is type(value) for value in values):
        raise SkipError(f"{field} {stated!r} has no rules in this profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nanotron:
    shape: Shape
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    shape: Shape
    job: MegatronJob
    device: str
    on_first_node: range


@dataclass(frozen=True, slots=True, kw_only=True)
class Native:
    config: Mapping[str, Any]
    mesh: Mapping[str, int]
    how: Training
    profile: native.Profile
    accumulate: int


def metric_of(row: Row) -> str:
    """allocated, active, reserved, or total: with what is outside of torch's allocator."""
    stated = row["measured"].get("mem_metric") or ""
    if not isinstance(stated, str):
        raise SkipError(f"mem_metric {stated!r} is not known")
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


def measured_gib(row: Row) -> float | None:
    """The peak that was measured; None if none was. nvidia-smi's GB are GiB."""
    measured = row["measured"]
    if measured.get("peak_mem_gib") is None and metric_of(row) == "total":
        return measured.get("peak_mem_gb")
    return measured.get("peak_mem_gib")


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


def case_of(row: Row) -> Nanotron | Megatron | Native:
    """What was run.

    Raises:
        SkipError: No profile knows it.
    """
    parallel, training = row["parallel"], row["training"]
    for key in ("layers", "hidden", "heads", "ffn", "vocab", "seq_len"):
        if row["model"].get(key) is None:
            raise SkipError(f"model.{key} is not stated")
    if not {"dp", "dp_shard", "tp"} & parallel.keys():
        raise SkipError("how the run was parallelised is not stated")
    only(row, "training.finetune", None, "full")
    only(row, "training.task", None)
    impl = parallel.get("impl")
    is_mpt = impl == "PyTorch FSDP1 (Composer)"
    only(row, "model.position", *(("learned (table of seq_len rows)",) if is_mpt else (None,)))
    if is_nanotron(row):
        return _nanotron(row)
    if (states := states_of(row)) is not None:
        return _megatron(row, states)
    if str(training.get("attention", "flash")).startswith("unfused"):
        raise SkipError("attention without a fused kernel has no profile")
    precision = str(training.get("precision", ""))
    if precision.startswith("bf16 compute, fp32 params/grad-reduce (FSDP2"):
        profiles = {
            None: native.TITAN_2024_12,
            "FSDP2": native.TITAN_2024_04,
            "FSDP2 eager": native.TITAN_2025_10,
        }
    elif is_mpt:
        only(row, "training.precision", *_FOUNDRY)
        profiles = {impl: _FOUNDRY[precision]}
    elif precision == "bf16" and parallel.get("zero_stage") == 3:
        profiles = {None: native.FMS}
    elif precision.startswith("PURE bf16"):
        profiles = {"FSDP2 + DTensor TP": native.KEMPNER}
    elif precision == "bf16 params and optimizer states":
        profiles = {None: native.TORCHTUNE}
    else:
        raise SkipError(f"training.precision {precision!r} with {impl!r} has no profile")
    if not isinstance(impl, str | None) or impl not in profiles:
        raise SkipError(f"parallel.impl {impl!r} has no profile")
    return _native(row, profiles[impl])


def is_nanotron(row: Row) -> bool:
    is_it = row["training"].get("precision") == NANOTRON_PRECISION
    return is_it and row["parallel"].get("tp_mode") == "REDUCE_SCATTER, async"


def nanotron_only(row: Row) -> None:
    """Raises: SkipError: Something differs from how the profile's runs were made."""
    if "H100" not in str(row["hardware"].get("gpu", "")).upper():
        raise SkipError("nanotron's profile is of H100 only")
    only(row, "parallel.zero_stage", 0, 1)
    only(row, "parallel.schedule", None, "1F1B")
    only(row, "parallel.cp", None, 1)
    only(row, "parallel.vpp", None, 1)
    only(row, "parallel.dp_shard", None, 1)
    only(row, "parallel.dp_replicate", None, 1)
    if (row["parallel"].get("tp") or 1) > 1:
        only(row, "parallel.sp", None, True)
    for name in ("async_tp", "impl"):
        only(row, f"parallel.{name}", None, False)
    only(row, "training.activation_checkpointing", "none")
    only(row, "training.optimizer", None, "AdamW (fused)")
    only(row, "training.attention", None, "flash-attn 2")
    for name in ("compile", "float8", "chunked_ce", "activation_offload", "optimizer_in_backward"):
        only(row, f"training.{name}", None, False)


def _shape(model: Mapping[str, Any]) -> Shape:
    heads = model["heads"]
    if model["hidden"] % heads:
        raise SkipError(f"{heads} heads do not divide hidden {model['hidden']}")
    return Shape(
        layers=model["layers"], hidden=model["hidden"], heads=heads,
        kv_heads=model.get("kv_heads") or heads, head_dim=model["hidden"] // heads,
        mlp=model["ffn"], vocab=model["vocab"], tied=bool(model.get("tied")),
    )  # fmt: skip


def _nanotron(row: Row) -> Nanotron:
    parallel, training, shape = row["parallel"], row["training"], _shape(row["model"])
    nanotron_only(row)
    dp, tp, pp = (parallel.get(key) or 1 for key in ("dp", "tp", "pp"))
    if shape.heads % tp or shape.kv_heads % tp:
        raise SkipError(f"tp {tp} does not divide the heads")
    zero, batch = parallel["zero_stage"], training.get("micro_batch")
    if batch is None:
        raise SkipError("the batch of a rank is not stated")
    is_past = stalls(dp=dp, tp=tp, pp=pp, zero=zero, batch=batch)
    return Nanotron(
        shape=shape,
        job=Job(
            stage=stages(shape, pp, is_past=is_past)[0], rank=0, batch=batch,
            seq_len=row["model"]["seq_len"], accumulate=training.get("grad_accum") or 1,
            dp=dp, tp=tp, pp=pp, zero=zero,
        ),
    )  # fmt: skip


_MIXED: Final = ("fp16 mixed", "fp16/bf16 mixed", "mixed")
"""Precision of Megatron-LM's runs, which keep a copy of parameters in fp32."""
_HYBRID: Final = "Adam (hybrid ZeRO-1)"
"""InternEvo's optimizer."""
_MEGATRON_RECOMPUTE: Final = {
    "none": "none", "none (flag absent)": "none", "full": "full",
    "selective (attention core)": "core",
}  # fmt: skip
COUNTS_ENDS: Final = {None: False, "type:transformer": False, "type:transformer|embed": True}
"""By how DeepSpeed cuts stages: whether the embedding counts as a block, on both ends."""


def states_of(row: Row) -> States | None:
    """Which optimizer keeps copies of 16-bit parameters; None if none of those known."""
    impl, training = row["parallel"].get("impl"), row["training"]
    precision = str(training.get("precision", ""))
    if impl == "Megatron-DeepSpeed":
        is_bf16 = precision.startswith("bf16")
        return States.DEEPSPEED_BF16 if is_bf16 else States.DEEPSPEED_FP16
    if impl is None and precision == "bf16" and training.get("optimizer") == _HYBRID:
        return States.INTERNEVO
    return States.MEGATRON if impl is None and precision in _MIXED else None


def _megatron(row: Row, states: States) -> Megatron:
    model, parallel, training = row["model"], row["parallel"], row["training"]
    only(row, "parallel.zero_stage", *((None, 0) if states is States.MEGATRON else (1,)))
    if states is States.INTERNEVO:
        only(row, "parallel.tp", None, 1)
        only(row, "parallel.pp", None, 1)
    only(row, "parallel.schedule", None, "1F1B")
    for name in ("cp", "vpp", "dp_shard", "dp_replicate"):
        only(row, f"parallel.{name}", None, 1)
    only(row, "parallel.pp_partition", *COUNTS_ENDS)
    only(row, "parallel.sp", None, True, False)
    only(row, "training.attention", None, "unfused (fused softmax)")
    only(row, "training.activation_checkpointing", *_MEGATRON_RECOMPUTE)
    if "Adam" not in str(training.get("optimizer")):
        raise SkipError(f"training.optimizer {training.get('optimizer')!r} has no rules")
    for name in ("compile", "float8", "chunked_ce", "activation_offload", "optimizer_in_backward"):
        only(row, f"training.{name}", None, False)
    dp, tp, pp = (parallel.get(key) or 1 for key in ("dp", "tp", "pp"))
    if model["heads"] % tp or model["hidden"] % model["heads"]:
        raise SkipError(f"tp {tp} and heads {model['heads']} do not divide")
    is_llama = states is States.INTERNEVO
    if (model.get("kv_heads") or model["heads"]) != model["heads"] and not is_llama:
        raise SkipError("grouped queries have no rules in this profile")
    if parallel.get("pp_partition") is None and model["layers"] % pp:
        raise SkipError("how blocks are spread over stages is not stated")
    batch, samples = training.get("micro_batch"), training.get("global_batch")
    if batch is None:
        raise SkipError("the batch of a rank is not stated")
    count = training.get("grad_accum") or -(-(samples or batch * dp) // (batch * dp))
    shape, shards = _shape(model), parallel.get("zero1_shard_group") or dp
    if not is_llama:
        padded = -(-model["vocab"] // (128 * tp)) * 128 * tp
        shape = replace(shape, vocab=padded, tied=True)
    stages = even_stages(model["layers"], pp, counts_ends=COUNTS_ENDS[parallel.get("pp_partition")])
    if min(stage.layers for stage in stages) < 1:
        raise SkipError("a stage without blocks has no rules")
    job = MegatronJob(
        stages=stages, batch=batch, seq_len=model["seq_len"], accumulate=count, dp=dp, tp=tp,
        shards=1 if states is States.MEGATRON else shards, states=states,
        is_sequence=parallel.get("sp") is True,
        recompute=_MEGATRON_RECOMPUTE[training["activation_checkpointing"]],
    )  # fmt: skip
    per_node = row["hardware"].get("gpus_per_node") or row["hardware"]["gpus"]
    return Megatron(
        shape=shape, job=job,
        device=str(row["hardware"].get("gpu", "")).replace(" ", "-"),
        on_first_node=job.on_first_node(per_node),
    )  # fmt: skip


_FOUNDRY: Final = {"amp_bf16": native.FOUNDRY, "bf16": native.FOUNDRY_PURE}
ADAMW: Final = (
    "AdamW", "AdamW (fp32 states)", "AdamW (fused)", "AdamW fused", "AdamW fused=True",
    "AdamW fused fp32",
)  # fmt: skip
_EVERY_BLOCK: Final = "labelled selective; HFU/MFU 0.74/0.55 = 4/3 means effectively every block"
_RECOMPUTE: Final = {
    "none": "none",
    "full": "full",
    "selective": "ops",
    "selective op": "ops",
    "selective op (config default)": "ops",
    "selective op (per-op SAC)": "ops",
    "selective op (config default; PR does not state)": "ops",
    "selective layer (every 2nd)": "second",
    _EVERY_BLOCK: "full",
}


def _native(row: Row, profile: native.Profile) -> Native:
    model, parallel, training = row["model"], row["parallel"], row["training"]
    if (parallel.get("pp") or 1) != 1:
        raise SkipError("a pipeline has no rules in this profile")
    is_mpt, recompute = profile.is_mpt, training.get("activation_checkpointing")
    if is_mpt or profile is native.FMS:
        only(row, "training.activation_checkpointing", "none", "full", _EVERY_BLOCK)
    only(row, "training.optimizer", *(("DecoupledAdamW",) if is_mpt else (None, *ADAMW)))
    is_cut = (parallel.get("dp_shard") or 1) > 1
    stays = is_mpt and parallel.get("fsdp") == "SHARD_GRAD_OP"
    if not stays:
        only(row, "parallel.zero_stage", *((None, 3) if is_cut else (None, 0, 3)))
    only(row, "model.attention", None, "flash")
    _shape(model)
    for key in ("optimizer_in_backward", "activation_offload", "activation_cpu_offload",
                "async_tp"):  # fmt: skip
        if training.get(key) or parallel.get(key):
            raise SkipError(f"{key} has no rules in this profile")
    compiled = training.get("compile", False)
    if not isinstance(compiled, bool):
        raise SkipError(f"training.compile {compiled!r} has no rules")
    if not isinstance(recompute, str) or recompute not in _RECOMPUTE:
        raise SkipError(f"training.activation_checkpointing {recompute!r} has no rules")
    if training.get("loss", "plain CE") != "plain CE" or training.get("kernels", "HF") != "HF":
        raise SkipError("its loss or its kernels have no rules")
    batch = training.get("local_batch") or training.get("micro_batch")
    if batch is None:
        raise SkipError("the batch of a rank is not stated")
    tp, cp = parallel.get("tp") or 1, parallel.get("cp") or 1
    if tp > 1:
        only(row, "parallel.sp", None, True)
    shard = (parallel.get("dp_shard") or 1) * cp
    replicate = parallel.get("dp_replicate") or 1
    if (parallel.get("dp") or 1) != 1:
        raise SkipError("replicas by DDP have no rules in this profile")
    if model["seq_len"] % cp:
        raise SkipError(f"cp {cp} does not divide the sequence")
    mesh = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp}
    config = _mpt(model) if is_mpt else _llama(model)
    how = Training(
        batch=batch, tokens=model["seq_len"] // cp, tp=tp, recompute=_RECOMPUTE[recompute],
        is_compiled=compiled, chunks=8 if training.get("chunked_ce") else 1,
    )  # fmt: skip
    return Native(
        config=config,
        mesh={axis: size for axis, size in mesh.items() if size > 1 or axis == "dp_shard"},
        how=how,
        profile=replace(profile, all_stay=stays),
        accumulate=training.get("grad_accum") or 1,
    )


def _llama(model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": model["vocab"], "hidden_size": model["hidden"],
        "intermediate_size": model["ffn"], "num_hidden_layers": model["layers"],
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model.get("kv_heads") or model["heads"],
        "tie_word_embeddings": bool(model.get("tied")),
    }  # fmt: skip


def _mpt(model: Mapping[str, Any]) -> dict[str, Any]:
    """MPT with learned positions has GPT-2's parameters, and no dropout."""
    return {
        "model_type": "gpt2", "vocab_size": model["vocab"], "n_embd": model["hidden"],
        "n_inner": model["ffn"], "n_layer": model["layers"], "n_head": model["heads"],
        "n_positions": model["seq_len"], "activation_function": "gelu", "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": bool(model.get("tied")),
    }  # fmt: skip
