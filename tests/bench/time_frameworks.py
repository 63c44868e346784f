"""What the frameworks of published runs compute and send, one function for each.

Source: pytorch/torchtitan, torchtitan/models/llama3/infra/parallelize.py; mosaicml/llm-foundry with
Composer's FSDP; NVIDIA/Megatron-LM; huggingface/nanotron; KempnerForge, distributed/parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

from meshplan.cost.chain import Chain, chain_of_tapes
from meshplan.cost.grid import OPTIONS
from meshplan.cost.reading import is_chosen
from meshplan.cost.tapes import decoder_tape
from meshplan.memory.decoder.microbatch import MicrobatchSpec
from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.tape.tape import Tape
from meshplan.memory.tape.tape import TapeOp as TapeRow
from meshplan.spec.spec import Precision
from tests.bench.frameworks import nanotron, torchtitan
from tests.bench.frameworks.megatron import CORE, megatron_tape
from tests.bench.frameworks.megatron_job import even_stages
from tests.bench.frameworks.nanotron_job import Job
from tests.bench.mapping import (
    ADAMW,
    COUNTS_ENDS,
    NANOTRON_PRECISION,
    Row,
    SkipError,
    nanotron_only,
    only,
)
from tests.bench.time_case import (
    Case,
    Write,
    cluster_of,
    dtype_of,
    grid_of,
    micro_of,
    one_stage,
    real_seconds,
    shape_of_row,
    sizes_of,
)
from tests.bench.time_nanotron import stall_seconds, write_nanotron


@cache
def _chain(key: tuple[Any, ...], layers: int, seq_len: int) -> Chain:
    """Chains are dear to read; `key` begins with the name of a writer."""
    write, keeps = _WRITERS[key[0]](*key[1:], seq_len)
    is_compiled = key[0] == "titan" and key[3]
    return chain_of_tapes(
        write, num_blocks=layers, seq_len=seq_len, element_bytes=2, keeps=keeps,
        is_compiled=is_compiled,
    )  # fmt: skip


def _kept(row: TapeRow) -> bool:
    return row.is_kept


# torchtitan


def _write_titan(
    shape: Shape, tp: int, is_compiled: bool, chunks: int, cuts_loss: bool, seq_len: int
) -> tuple[Write, Callable[[TapeRow], bool]]:
    def write(layers: int, batch: int) -> Tape:
        how = torchtitan.Training(
            batch=batch, tokens=seq_len, tp=tp,
            is_compiled=is_compiled, chunks=chunks,
            cuts_loss=cuts_loss,
        )  # fmt: skip
        return torchtitan.tape_of(replace(shape, layers=layers), how)

    return write, _kept


_TITAN_NAMES: Final = {
    None: "torchtitan", "FSDP2": "torchtitan", "FSDP2 eager": "torchtitan-2025",
}  # fmt: skip
"""As `mapping` tells memory: the kernels of autumn 2025 are others."""

_TITAN_RECOMPUTE: Final[Mapping[str, tuple[tuple[int, float], ...]]] = {
    "none": ((0, 1.0),),
    "full": ((2, 1.0),),
    "selective": ((1, 1.0),),
    "selective op": ((1, 1.0),),
    "selective op (config default)": ((1, 1.0),),
    "selective op (per-op SAC)": ((1, 1.0),),
    "selective op (config default; PR does not state)": ((1, 1.0),),
    "selective layer (every 2nd)": ((0, 0.5), (2, 0.5)),
}


def titan_case(row: Row, *, is_kempner: bool = False) -> Case:
    """Args: is_kempner: KempnerForge: pure bf16, whole logits, gradients summed at the last."""
    training, parallel, model = row["training"], row["parallel"], row["model"]
    for where, key in ((training, "float8"), (parallel, "async_tp")):
        if where.get(key):
            raise SkipError(f"{key} is not modelled")
    only(row, "training.compile", True, False)
    recompute = training.get("activation_checkpointing")
    only(row, "training.activation_checkpointing", *_TITAN_RECOMPUTE)
    only(row, "training.optimizer", None, *ADAMW)
    only(row, "model.position", None)
    only(row, "training.attention", None, "flash-attn 2")
    for name in ("chunked_ce", "activation_offload", "optimizer_in_backward"):
        only(row, f"training.{name}", None, False)
    if (parallel.get("tp") or 1) > 1:
        only(row, "parallel.sp", None, True)
    is_cut = (parallel.get("dp_shard") or 1) > 1
    only(row, "parallel.zero_stage", *((None, 3) if is_cut else (None, 0, 3)))
    sizes, cluster, micro = sizes_of(row), cluster_of(row), micro_of(row)
    if sizes["pp"] > 1 or sizes["dp"] > 1:
        raise SkipError("torchtitan's pipeline is not modelled")
    chunks = 8 if str(training.get("loss", "")).startswith("chunked") else 1
    compiled = bool(training["compile"])
    key = ("titan", shape_of_row(model), sizes["tp"], compiled, chunks, not is_kempner)
    chain = _chain(key, model["layers"], model["seq_len"])
    count = int(training.get("grad_accum") or 1)
    ranks = sizes["dp_shard"] * sizes["dp_replicate"]
    tokens = micro * count * ranks * model["seq_len"]
    return Case(
        id=str(row["id"]), group=str(row["group"]),
        key=("kempnerforge" if is_kempner else _TITAN_NAMES[parallel.get("impl")]
             + "-compiled" * compiled, cluster.device.name, "bfloat16"),
        work=key + (model["seq_len"],), chain=chain, cluster=cluster,
        grid=grid_of(mode="zero1" if is_kempner else "shard", dp_shard=sizes["dp_shard"],
                   dp_replicate=sizes["dp_replicate"], cp=sizes["cp"], tp=sizes["tp"],
                   micro=micro, microbatches=count),
        stages=one_stage(chain),
        options=tuple((OPTIONS.index((again, 1)), share)
                      for again, share in _TITAN_RECOMPUTE[recompute]),
        awaited=frozenset({chain.order[0]}),
        precision=Precision(param="bfloat16", reduce="float32"),
        dtype="bfloat16" if is_kempner else "float32",
        tokens=tokens, real_s=real_seconds(row, tokens),
    )  # fmt: skip


# Frameworks without runs to fit constants to


_MODES: Final[Mapping[int, tuple[str, int]]] = {
    0: ("ddp", 0), 1: ("zero1", 0), 2: ("shard", 0), 3: ("shard", 1),
}  # fmt: skip
"""By ZeRO stage, the grid's mode and whether parameters are resharded after the forward."""
_GENERIC_RECOMPUTE: Final = {
    "none": 0,
    "full": 2,
    "labelled selective; HFU/MFU 0.74/0.55 = 4/3 means effectively every block": 2,
}


def generic_case(row: Row) -> Case:
    """A dense decoder under data parallelism, told as `plan` tells it without a `profile:`."""
    training, parallel, model = row["training"], row["parallel"], row["model"]
    only(row, "training.precision", "bf16")
    only(row, "training.optimizer", None, *ADAMW, "Adam", "Adam (hybrid ZeRO-1)")
    only(row, "training.activation_checkpointing", *_GENERIC_RECOMPUTE)
    only(row, "training.compile", None, True, False)
    only(row, "parallel.zero_stage", *_MODES)
    only(row, "parallel.fsdp", None, "FSDP", "HSDP", "FULL_SHARD")
    for name in ("float8", "chunked_ce", "activation_offload", "activation_cpu_offload",
                 "optimizer_in_backward", "loss"):  # fmt: skip
        only(row, f"training.{name}", None, False)
    only(row, "training.kernels", None, "HF")
    for name in ("tp", "pp", "cp"):
        only(row, f"parallel.{name}", None, 1)
    cluster, sizes, micro = cluster_of(row), sizes_of(row), micro_of(row)
    mode, reshard = _MODES[parallel["zero_stage"]]
    ranks = sizes["dp"] * sizes["dp_shard"] * sizes["dp_replicate"]
    cut = sizes["dp_shard"] if mode == "shard" else ranks
    if mode == "zero1":
        cut = parallel.get("zero1_shard_group") or ranks
    elif mode == "ddp":
        cut = 1
    if (sizes["dp"] > 1 and sizes["dp_shard"] * sizes["dp_replicate"] > 1) or ranks % cut:
        raise SkipError("how many ranks shard is not stated")
    compiled = bool(training.get("compile"))
    key = ("titan", shape_of_row(model), 1, compiled, 1, False)
    chain = _chain(key, model["layers"], model["seq_len"])
    count = int(training.get("grad_accum") or 1)
    tokens = micro * count * ranks * model["seq_len"]
    return Case(
        id=str(row["id"]), group=str(row["group"]),
        key=("generic", cluster.device.name, "bfloat16"), work=key + (model["seq_len"],),
        chain=chain, cluster=cluster,
        grid=grid_of(mode=mode, dp_shard=cut, dp_replicate=ranks // cut, micro=micro,
                   microbatches=count),
        stages=one_stage(chain),
        options=((OPTIONS.index((_GENERIC_RECOMPUTE[training["activation_checkpointing"]],
                                 reshard)), 1.0),),
        awaited=frozenset({chain.order[0]}) if reshard else frozenset(),
        precision=Precision(param="bfloat16", reduce="bfloat16"), dtype="bfloat16",
        tokens=tokens, real_s=real_seconds(row, tokens),
    )  # fmt: skip


# llm-foundry: MPT under PyTorch's FSDP1


def _write_foundry(shape: Shape, seq_len: int) -> tuple[Write, Callable[[TapeRow], bool]]:
    def write(layers: int, batch: int) -> Tape:
        run = MicrobatchSpec(batch=batch, seq_len=seq_len, element_bytes=2)
        return decoder_tape(replace(shape, layers=layers), run)

    return write, is_chosen


_FOUNDRY_PRECISION: Final = {
    "amp_bf16": Precision(param="bfloat16", reduce="float32"),
    "bf16": Precision(param="bfloat16", reduce="bfloat16"),
}


def foundry_case(row: Row) -> Case:
    training, parallel, model = row["training"], row["parallel"], row["model"]
    precision = training.get("precision")
    only(row, "training.precision", *_FOUNDRY_PRECISION)
    for name in ("training.activation_cpu_offload", "training.compile", "training.float8"):
        only(row, name, None, False)
    only(row, "training.optimizer", None, "DecoupledAdamW")
    only(row, "training.activation_checkpointing", "none", "full")
    only(row, "parallel.fsdp", "FULL_SHARD", "SHARD_GRAD_OP")
    only(row, "model.attention", None, "flash")
    for name in ("dp", "dp_replicate", "tp", "pp", "cp"):
        only(row, f"parallel.{name}", None, 1)
    recompute = {"none": 0, "full": 2}[training["activation_checkpointing"]]
    reshard = {"FULL_SHARD": 1, "SHARD_GRAD_OP": 0}[parallel["fsdp"]]
    cluster, sizes, micro = cluster_of(row), sizes_of(row), micro_of(row)
    shape = shape_of_row(model, positions=model["seq_len"], activation="gelu")
    key = ("foundry", shape)
    chain = _chain(key, model["layers"], model["seq_len"])
    count = int(training.get("grad_accum") or 1)
    tokens = micro * count * sizes["dp_shard"] * model["seq_len"]
    return Case(
        id=str(row["id"]), group=str(row["group"]),
        key=("llm-foundry", cluster.device.name, "bfloat16"), work=key + (model["seq_len"],),
        chain=chain, cluster=cluster,
        grid=grid_of(mode="shard", dp_shard=sizes["dp_shard"], micro=micro, microbatches=count),
        stages=one_stage(chain), options=((OPTIONS.index((recompute, reshard)), 1.0),),
        awaited=frozenset({chain.order[0], chain.order[-1]}),
        precision=_FOUNDRY_PRECISION[precision], dtype="float32",
        tokens=tokens, real_s=real_seconds(row, tokens),
    )  # fmt: skip


# Megatron


def _write_megatron(
    shape: Shape, tp: int, is_sequence: bool, seq_len: int
) -> tuple[Write, Callable[[TapeRow], bool]]:
    def write(layers: int, batch: int) -> Tape:
        return megatron_tape(replace(shape, layers=layers), batch=batch, seq_len=seq_len, tp=tp,
                             is_sequence=is_sequence)  # fmt: skip

    return write, lambda row: row.op not in CORE


ALIGNED: Final = 8
"""Elements of 16 bits in whose multiples tensor cores are fed. Source: NVIDIA, Matrix
Multiplication Background User's Guide, section 4.1. 182B with 128 heads of 108 features takes 1.4
times as long as with 64 or 96 heads (bigscience, chronicles-prequel)."""
_MEGATRON_RECOMPUTE: Final = {"none": 0, "selective (attention core)": 1, "full": 2}


def megatron_case(row: Row, framework: str) -> Case:
    training, parallel, model = row["training"], row["parallel"], row["model"]
    cluster, sizes, micro = cluster_of(row), sizes_of(row), micro_of(row)
    recompute = training.get("activation_checkpointing")
    only(row, "training.activation_checkpointing", *_MEGATRON_RECOMPUTE)
    only(row, "training.attention", None, "unfused (fused softmax)")
    for name in ("compile", "float8"):
        only(row, f"training.{name}", None, False)
    for name in ("cp", "dp_shard", "dp_replicate"):
        only(row, f"parallel.{name}", None, 1)
    only(row, "parallel.zero_stage", None, 0, 1)
    is_interleaved = "nterleaved" in str(parallel.get("schedule"))
    if is_interleaved != ((parallel.get("vpp") or 1) > 1):
        raise SkipError("how many virtual stages there are is not stated")
    if model["layers"] < 2:
        raise SkipError("a single layer is not modelled")
    if model["hidden"] // model["heads"] % ALIGNED:
        features = model["hidden"] // model["heads"]
        raise SkipError(f"16-bit products with heads of {features} features have no rules")
    only(row, "parallel.pp_partition", *COUNTS_ENDS)
    partition = parallel.get("pp_partition")
    if partition is None and model["layers"] % sizes["pp"]:
        raise SkipError("how blocks are spread over stages is not stated")
    tp, pp, dp = sizes["tp"], sizes["pp"], sizes["dp"]
    virtual = int(parallel.get("vpp") or 1)
    vocab = -(-model["vocab"] // (128 * tp)) * 128 * tp
    shape = replace(shape_of_row(model), vocab=vocab, tied=True)
    key = ("megatron", shape, tp, bool(parallel.get("sp")))
    chain = _chain(key, model["layers"], model["seq_len"])
    if tp * pp * dp != row["hardware"]["gpus"]:
        raise SkipError(f"{tp * pp * dp} ranks are stated, and {row['hardware']['gpus']} GPUs")
    samples = training.get("global_batch")
    if samples is None:
        raise SkipError("training.global_batch is not stated")
    if samples % (micro * dp):
        raise SkipError(f"{dp} ranks cannot cut {samples} samples into microbatches of {micro}")
    count = samples // (micro * dp)
    tokens = samples * model["seq_len"]
    first, block, last = chain.order[0], chain.order[1], chain.order[-1]
    stages = []
    for stage in even_stages(model["layers"], pp, counts_ends=COUNTS_ENDS[partition]):
        held = [0] * len(chain.kinds)
        held[block] += stage.layers
        held[first] += stage.first
        held[last] += stage.last
        stages.append(tuple(held))
    is_zero = parallel.get("zero_stage") == 1
    # DeepSpeed, runtime/bf16_optimizer.py, adds gradients up in fp32, and reduces these.
    is_fp32 = "BF16 optimizer" in str(training.get("precision"))
    reduce = "float32" if is_fp32 else "bfloat16"
    schedule = ("Interleaved1F1B" if virtual > 1 else "1F1B") if pp > 1 else ""
    return Case(
        id=str(row["id"]), group=str(row["group"]),
        key=(framework, cluster.device.name, dtype_of(cluster)), work=key + (model["seq_len"],),
        chain=chain, cluster=cluster,
        grid=grid_of(mode="zero1" if is_zero else "ddp", tp=tp, pp=pp, micro=micro,
                   microbatches=count, virtual=virtual, schedule=schedule,
                   **({"dp_shard": dp} if is_zero else {"dp_replicate": dp})),
        stages=tuple(stages), options=((OPTIONS.index((_MEGATRON_RECOMPUTE[recompute], 0)), 1.0),),
        awaited=frozenset(),
        precision=Precision(param="bfloat16", reduce=reduce), dtype="bfloat16",
        tokens=tokens,
        real_s=_flops_s(row, samples) if _flops(row) else real_seconds(row, tokens),
    )  # fmt: skip


def _flops(row: Row) -> bool:
    m = row["measured"]
    return bool(m.get("tflops_per_gpu")) and not m.get("iter_time_s")


def _flops_s(row: Row, samples: int) -> float:
    """Source: Narayanan et al. 2021, equation 3: with full recomputation."""
    m = row["model"]
    s, layers, h, v = m["seq_len"], m["layers"], m["hidden"], m["vocab"]
    if row["training"].get("activation_checkpointing") != "full":
        raise SkipError("of what its TFLOP/s count is not stated")
    flops = 96 * samples * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    return float(flops / (row["measured"]["tflops_per_gpu"] * 1e12 * row["hardware"]["gpus"]))


# nanotron


def nanotron_case(row: Row) -> Case:
    training, parallel, model = row["training"], row["parallel"], row["model"]
    cluster, sizes, micro, shape = (
        cluster_of(row),
        sizes_of(row),
        micro_of(row),
        shape_of_row(row["model"]),
    )
    nanotron_only(row)
    only(row, "training.precision", NANOTRON_PRECISION)
    tp, pp, dp = sizes["tp"], sizes["pp"], sizes["dp"]
    if shape.heads % tp or shape.kv_heads % tp:
        raise SkipError(f"tp {tp} does not divide the heads")
    key = ("nanotron", shape, tp)
    chain = _chain(key, model["layers"], model["seq_len"])
    first, block, last = chain.order[0], chain.order[1], chain.order[-1]
    stages = []
    zero, count = parallel["zero_stage"], int(training.get("grad_accum") or 1)
    held_by = nanotron.stages(shape, pp)
    job = Job(stage=held_by[0], rank=0, batch=micro, seq_len=model["seq_len"], accumulate=count,
              dp=dp, tp=tp, pp=pp, zero=zero)  # fmt: skip
    for stage in held_by:
        held = [0] * len(chain.kinds)
        held[block] += stage.layers
        held[first] += stage.first
        held[last] += stage.last
        stages.append(tuple(held))
    is_zero = zero == 1
    tokens = micro * count * dp * model["seq_len"]
    return Case(
        id=str(row["id"]), group=str(row["group"]),
        key=("nanotron", cluster.device.name, "bfloat16"), work=key + (model["seq_len"],),
        chain=chain, cluster=cluster,
        grid=grid_of(mode="zero1" if is_zero else "ddp", tp=tp, pp=pp, micro=micro,
                   microbatches=count, schedule="1F1B" if pp > 1 else "",
                   **({"dp_shard": dp} if is_zero else {"dp_replicate": dp})),
        stages=tuple(stages), options=((0, 1.0),),
        awaited=frozenset(range(len(chain.kinds))) if is_zero else frozenset(),
        precision=Precision(param="bfloat16", reduce="float32"), dtype="float32",
        sums_whole=is_zero,  # nanotron, trainer.py, `sync_gradients_across_dp`: not scattered.
        tokens=tokens, real_s=real_seconds(row, tokens),
        stall_s=stall_seconds(job, shape),
    )  # fmt: skip


_WRITERS: Final[Mapping[str, Callable[..., tuple[Write, Callable[[TapeRow], bool]]]]] = {
    "titan": _write_titan,
    "foundry": _write_foundry,
    "megatron": _write_megatron,
    "nanotron": write_nanotron,
}
