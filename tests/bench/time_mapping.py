"""From a published row with a throughput to a step that the cost model can tell, by its fields.

A row is of a framework, whose code says which operations run and what waits for what; what none of
them knows is skipped with the field that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.chain import Chain, chain_of_tapes
from meshplan.cost.grid import GRID, MODES, OPTIONS, SCHEDULE_WORDS
from meshplan.cost.reading import is_chosen
from meshplan.cost.tapes import decoder_tape
from meshplan.hardware import Cluster, Link, find_device
from meshplan.memory.analytic import Run
from meshplan.memory.frameworks import nanotron, torchtitan
from meshplan.memory.shape import Shape
from meshplan.memory.tape import Row as TapeRow
from meshplan.memory.tape import Tape
from meshplan.spec import Precision
from tests.bench.mapping import Row, SkipError
from tests.bench.time_tapes import CORE, megatron_tape

DEVICES: Final[Mapping[str, str]] = {
    "H100 SXM 80GB": "h100-sxm-80gb", "h100_80gb": "h100-sxm-80gb", "H100 80GB": "h100-sxm-80gb",
    "H100 SXM 80GB (700W, HBM3)": "h100-sxm-80gb",
    "H100 SXM (HBM2e 96GB, 500W, 2.4TB/s)": "h100-sxm-96gb",
    "A100 SXM 80GB": "a100-sxm-80gb", "A100 80GB": "a100-sxm-80gb", "a100_80gb": "a100-sxm-80gb",
    "a100_40gb": "a100-sxm-40gb", "H200 SXM": "h200-sxm-141gb",
}  # fmt: skip
"""By how rows name a GPU. "A100" and "H100" alone say neither the memory nor the link."""

LINKS: Final[Mapping[str, float]] = {
    "RDMA 400 Gb/s per GPU": 50e9,
    "1600 Gb/s RoCE per node": 25e9,
    "8x HDR InfiniBand 200 Gb/s per node (Selene)": 25e9,
    "8x HDR InfiniBand per node (Selene)": 25e9,
    "8x HDR InfiniBand per node": 25e9,
    "4x Omni-Path 100 Gb/s per node (Jean Zay)": 6.25e9,
    "4 x 100 Gb/s RoCE per node": 6.25e9,
    "InfiniBand NDR 400 Gb/s": 50e9,
    "InfiniBand 400 Gb/s per GPU (Eos)": 50e9,
    "InfiniBand 400 Gb/s per GPU": 50e9,
    "400 Gb/s RoCE per GPU": 50e9,
    "400 Gb/s CX-7 per GPU": 50e9,
    "EFA/cluster network (not stated in the table)": 50e9,
}
"""Bytes a second of each GPU, one way. Where the table states no network it is taken for that of
the instances that have eight H100: 3,200 Gb/s of EFA."""

Write = Callable[[int, int], Tape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run.

    Args:
        key: (framework, device, dtype), whose constants it takes.
        work: Equal for runs of equal chains.
        stages: By pipeline rank, how many places of each kind it holds.
        options: (place in `grid.OPTIONS`, share of the blocks).
        awaited: Places whose unit nothing hides.
        tokens: Of a step, of all GPUs.
        real_s: Of a step.
    """

    id: str
    group: str
    key: tuple[str, str, str]
    work: tuple[Any, ...]
    chain: Chain
    cluster: Cluster
    grid: NDArray[Any]
    stages: tuple[tuple[int, ...], ...]
    options: tuple[tuple[int, float], ...]
    awaited: frozenset[int]
    precision: Precision
    dtype: str
    tokens: int
    real_s: float

    @property
    def gpus(self) -> int:
        return self.cluster.num_gpus

    @property
    def shape(self) -> Any:
        """The model, whatever of it one rank has."""
        return self.work[1], self.work[-1]


def case_of(row: Row) -> Case:
    """What ran, and how long a step took.

    Raises:
        SkipError: Something that the time depends on is not modelled, or not stated.
    """
    for key in ("layers", "hidden", "heads", "ffn", "vocab", "seq_len"):
        if not isinstance(row["model"].get(key), int):
            raise SkipError(f"model.{key} is not a number")
    if row["training"].get("finetune") not in (None, "full"):
        raise SkipError("fine-tuning of adapters is not modelled")
    framework = _framework(row)
    return framework(row)


def _framework(row: Row) -> Callable[[Row], Case]:
    parallel, training = row["parallel"], row["training"]
    impl, precision = parallel.get("impl"), str(training.get("precision", ""))
    if parallel.get("tp_mode"):
        return _nanotron
    if impl == "PyTorch FSDP1 (Composer)":
        return _foundry
    if impl == "Megatron-DeepSpeed":
        return partial(_megatron, framework="megatron-deepspeed")
    if precision.startswith("bf16 compute, fp32 params/grad-reduce (FSDP2"):
        if impl in (None, "FSDP2", "FSDP2 eager"):
            return _titan
        raise SkipError(f"parallel.impl {impl!r} is not modelled")
    if precision.startswith("PURE bf16") and impl == "FSDP2 + DTensor TP":
        return partial(_titan, is_kempner=True)
    is_half = precision in ("fp16 mixed", "fp16/bf16 mixed", "mixed")
    if is_half and impl is None and "Adam" in str(training.get("optimizer")):
        return partial(_megatron, framework="megatron")
    raise SkipError(f"no profile is of {impl!r} with precision {precision!r}")


def _shape(model: Mapping[str, Any], **more: Any) -> Shape:
    heads = model["heads"]
    return Shape(
        layers=model["layers"], hidden=model["hidden"], heads=heads,
        kv_heads=model.get("kv_heads") or heads, head_dim=model["hidden"] // heads,
        mlp=model["ffn"], vocab=model["vocab"], tied=bool(model.get("tied")), **more,
    )  # fmt: skip


def _cluster(row: Row) -> Cluster:
    h = row["hardware"]
    gpu, nodes = str(h.get("gpu")), int(h.get("nodes") or 1)
    if gpu not in DEVICES:
        raise SkipError(f"hardware.gpu {gpu!r} has no profile")
    inter = LINKS.get(str(h.get("inter")))
    if nodes > 1 and inter is None:
        raise SkipError(f"hardware.inter {h.get('inter')!r} says no bandwidth")
    return Cluster(
        device=find_device(DEVICES[gpu]), nodes=nodes,
        gpus_per_node=int(h.get("gpus_per_node") or h["gpus"]),
        inter=Link("stated", inter) if inter else None,
    )  # fmt: skip


def _grid(**sizes: Any) -> NDArray[Any]:
    out = np.ones(1, GRID)
    out["mode"] = MODES.index(sizes.pop("mode"))
    out["schedule"] = SCHEDULE_WORDS.index(sizes.pop("schedule", ""))
    for name, size in sizes.items():
        out[name] = size
    return out


def _real_s(row: Row, tokens: int) -> float:
    """Seconds of a step, from whatever was measured."""
    m, gpus = row["measured"], row["hardware"]["gpus"]
    if m.get("tokens_per_s_per_gpu"):
        return float(tokens / (m["tokens_per_s_per_gpu"] * gpus))
    if m.get("iter_time_s"):
        return float(m["iter_time_s"])
    raise SkipError("neither tokens a second nor seconds are measured")


def _sizes(row: Row) -> dict[str, int]:
    p = row["parallel"]
    return {name: int(p.get(name) or 1) for name in ("dp", "dp_shard", "dp_replicate", "tp", "cp",
                                                     "pp")}  # fmt: skip


def _micro(row: Row) -> int:
    t = row["training"]
    micro = t.get("micro_batch") or t.get("local_batch")
    if not isinstance(micro, int):
        raise SkipError("the batch of a rank is not stated")
    return micro


def _one_stage(chain: Chain) -> tuple[tuple[int, ...], ...]:
    return (tuple(chain.order.count(n) for n in range(len(chain.kinds))),)


@cache
def _chain(key: tuple[Any, ...], layers: int, seq_len: int) -> Chain:
    """Chains are dear to read; `key` begins with the name of a writer."""
    write, keeps = _WRITERS[key[0]](*key[1:], seq_len)
    return chain_of_tapes(write, num_blocks=layers, seq_len=seq_len, element_bytes=2, keeps=keeps)


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


def _titan(row: Row, *, is_kempner: bool = False) -> Case:
    """Args: is_kempner: KempnerForge: pure bf16, whole logits, gradients summed at the last."""
    training, parallel, model = row["training"], row["parallel"], row["model"]
    for where, key in ((training, "float8"), (parallel, "async_tp")):
        if where.get(key):
            raise SkipError(f"{key} is not modelled")
    if training.get("compile") not in (True, False):
        raise SkipError(f"training.compile {training.get('compile')!r} is not modelled")
    recompute = training.get("activation_checkpointing")
    if recompute not in _TITAN_RECOMPUTE:
        raise SkipError(f"training.activation_checkpointing {recompute!r} is not modelled")
    sizes, cluster, micro = _sizes(row), _cluster(row), _micro(row)
    if sizes["pp"] > 1 or sizes["dp"] > 1:
        raise SkipError("torchtitan's pipeline is not modelled")
    chunks = 8 if str(training.get("loss", "")).startswith("chunked") else 1
    compiled = bool(training["compile"])
    key = ("titan", _shape(model), sizes["tp"], compiled, chunks, not is_kempner)
    chain = _chain(key, model["layers"], model["seq_len"])
    count = int(training.get("grad_accum") or 1)
    ranks = sizes["dp_shard"] * sizes["dp_replicate"]
    tokens = micro * count * ranks * model["seq_len"]
    return Case(
        id=str(row["id"]), group=str(row["group"]),
        key=("kempnerforge" if is_kempner else _TITAN_NAMES[parallel.get("impl")]
             + "-compiled" * compiled, cluster.device.name, "bfloat16"),
        work=key + (model["seq_len"],), chain=chain, cluster=cluster,
        grid=_grid(mode="zero1" if is_kempner else "shard", dp_shard=sizes["dp_shard"],
                   dp_replicate=sizes["dp_replicate"], cp=sizes["cp"], tp=sizes["tp"],
                   micro=micro, microbatches=count),
        stages=_one_stage(chain),
        options=tuple((OPTIONS.index((again, 1)), share)
                      for again, share in _TITAN_RECOMPUTE[recompute]),
        awaited=frozenset({chain.order[0]}),
        precision=Precision(param="bfloat16", reduce="float32"),
        dtype="bfloat16" if is_kempner else "float32",
        tokens=tokens, real_s=_real_s(row, tokens),
    )  # fmt: skip


# llm-foundry: MPT under PyTorch's FSDP1


def _write_foundry(shape: Shape, seq_len: int) -> tuple[Write, Callable[[TapeRow], bool]]:
    def write(layers: int, batch: int) -> Tape:
        run = Run(batch=batch, seq_len=seq_len, element_bytes=2)
        return decoder_tape(replace(shape, layers=layers), run)

    return write, is_chosen


_FOUNDRY_PRECISION: Final = {
    "amp_bf16": Precision(param="bfloat16", reduce="float32"),
    "bf16": Precision(param="bfloat16", reduce="bfloat16"),
}


def _foundry(row: Row) -> Case:
    training, parallel, model = row["training"], row["parallel"], row["model"]
    precision = training.get("precision")
    if precision not in _FOUNDRY_PRECISION:
        raise SkipError(f"training.precision {precision!r} is not modelled")
    if training.get("activation_cpu_offload") or training.get("compile"):
        raise SkipError("offload and compilation are not modelled for Composer")
    recompute = {"none": 0, "full": 2}[training["activation_checkpointing"]]
    reshard = {"FULL_SHARD": 1, "SHARD_GRAD_OP": 0}[parallel["fsdp"]]
    cluster, sizes, micro = _cluster(row), _sizes(row), _micro(row)
    shape = _shape(model, positions=model["seq_len"], activation="gelu")
    key = ("foundry", shape)
    chain = _chain(key, model["layers"], model["seq_len"])
    count = int(training.get("grad_accum") or 1)
    tokens = micro * count * sizes["dp_shard"] * model["seq_len"]
    return Case(
        id=str(row["id"]), group=str(row["group"]),
        key=("llm-foundry", cluster.device.name, "bfloat16"), work=key + (model["seq_len"],),
        chain=chain, cluster=cluster,
        grid=_grid(mode="shard", dp_shard=sizes["dp_shard"], micro=micro, microbatches=count),
        stages=_one_stage(chain), options=((OPTIONS.index((recompute, reshard)), 1.0),),
        awaited=frozenset({chain.order[0], chain.order[-1]}),
        precision=_FOUNDRY_PRECISION[precision], dtype="float32",
        tokens=tokens, real_s=_real_s(row, tokens),
    )  # fmt: skip


# Megatron


def _write_megatron(
    shape: Shape, tp: int, is_sequence: bool, seq_len: int
) -> tuple[Write, Callable[[TapeRow], bool]]:
    def write(layers: int, batch: int) -> Tape:
        return megatron_tape(replace(shape, layers=layers), batch=batch, seq_len=seq_len, tp=tp,
                             is_sequence=is_sequence)  # fmt: skip

    return write, lambda row: row.op not in CORE


_MEGATRON_RECOMPUTE: Final = {"none": 0, "selective (attention core)": 1, "full": 2}


def _megatron(row: Row, framework: str) -> Case:
    training, parallel, model = row["training"], row["parallel"], row["model"]
    cluster, sizes, micro = _cluster(row), _sizes(row), _micro(row)
    recompute = training.get("activation_checkpointing")
    if recompute not in _MEGATRON_RECOMPUTE:
        raise SkipError(f"training.activation_checkpointing {recompute!r} is not modelled")
    if model["layers"] < 2 or parallel.get("zero_stage") == 3:
        raise SkipError("a single layer, or DeepSpeed's ZeRO-3, is not modelled")
    if model["layers"] % sizes["pp"]:
        raise SkipError("how blocks are spread over stages is not stated")
    tp, pp, dp = sizes["tp"], sizes["pp"], sizes["dp"]
    virtual = int(parallel.get("vpp") or 1)
    vocab = -(-model["vocab"] // (128 * tp)) * 128 * tp
    shape = replace(_shape(model), vocab=vocab, tied=True)
    key = ("megatron", shape, tp, bool(parallel.get("sp")))
    chain = _chain(key, model["layers"], model["seq_len"])
    samples = training["global_batch"]
    count = samples // (micro * dp)
    tokens = samples * model["seq_len"]
    each = model["layers"] // pp
    first, block, last = chain.order[0], chain.order[1], chain.order[-1]
    stages = []
    for rank in range(pp):
        held = [0] * len(chain.kinds)
        held[block] += each
        held[first] += rank == 0
        held[last] += rank == pp - 1
        stages.append(tuple(held))
    is_zero = parallel.get("zero_stage") == 1
    schedule = ("Interleaved1F1B" if virtual > 1 else "1F1B") if pp > 1 else ""
    return Case(
        id=str(row["id"]), group=str(row["group"]),
        key=(framework, cluster.device.name, "bfloat16"), work=key + (model["seq_len"],),
        chain=chain, cluster=cluster,
        grid=_grid(mode="zero1" if is_zero else "ddp", tp=tp, pp=pp, micro=micro,
                   microbatches=count, virtual=virtual, schedule=schedule,
                   **({"dp_shard": dp} if is_zero else {"dp_replicate": dp})),
        stages=tuple(stages), options=((OPTIONS.index((_MEGATRON_RECOMPUTE[recompute], 0)), 1.0),),
        awaited=frozenset(),
        precision=Precision(param="bfloat16", reduce="bfloat16"), dtype="bfloat16",
        tokens=tokens, real_s=_real_s(row, tokens) if not _flops(row) else _flops_s(row, samples),
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


def _write_nanotron(shape: Shape, tp: int, seq_len: int) -> tuple[Write, Callable[[TapeRow], bool]]:
    def write(layers: int, batch: int) -> Tape:
        stage = nanotron.Stage(layers, True, True)
        tape = nanotron.tape_of(replace(shape, layers=layers), stage, batch, seq_len, tp)
        for number in range(layers):
            name = f"model.decoder.{number}"
            rows = [n for n, row in enumerate(tape.rows) if f"{row.module}.".startswith(f"{name}.")]
            tape.units.append((name, rows[0], rows[-1] + 1))
        return tape

    return write, _kept


def _nanotron(row: Row) -> Case:
    training, parallel, model = row["training"], row["parallel"], row["model"]
    cluster, sizes, micro, shape = _cluster(row), _sizes(row), _micro(row), _shape(row["model"])
    if parallel.get("zero_stage") not in (0, 1):
        raise SkipError(f"parallel.zero_stage {parallel.get('zero_stage')!r} is not modelled")
    if training.get("activation_checkpointing") != "none" or sizes["cp"] > 1:
        raise SkipError("recomputation and cp are not modelled for nanotron")
    tp, pp, dp = sizes["tp"], sizes["pp"], sizes["dp"]
    if shape.heads % tp or shape.kv_heads % tp:
        raise SkipError(f"tp {tp} does not divide the heads")
    key = ("nanotron", shape, tp)
    chain = _chain(key, model["layers"], model["seq_len"])
    first, block, last = chain.order[0], chain.order[1], chain.order[-1]
    stages = []
    for stage in nanotron.stages(shape, pp):
        held = [0] * len(chain.kinds)
        held[block] += stage.layers
        held[first] += stage.first
        held[last] += stage.last
        stages.append(tuple(held))
    is_zero = parallel["zero_stage"] == 1
    count = int(training.get("grad_accum") or 1)
    tokens = micro * count * dp * model["seq_len"]
    return Case(
        id=str(row["id"]), group=str(row["group"]),
        key=("nanotron", cluster.device.name, "bfloat16"), work=key + (model["seq_len"],),
        chain=chain, cluster=cluster,
        grid=_grid(mode="zero1" if is_zero else "ddp", tp=tp, pp=pp, micro=micro,
                   microbatches=count, schedule="1F1B" if pp > 1 else "",
                   **({"dp_shard": dp} if is_zero else {"dp_replicate": dp})),
        stages=tuple(stages), options=((0, 1.0),), awaited=frozenset(),
        precision=Precision(param="bfloat16", reduce="float32"), dtype="float32",
        tokens=tokens, real_s=_real_s(row, tokens),
    )  # fmt: skip


_WRITERS: Final[Mapping[str, Callable[..., tuple[Write, Callable[[TapeRow], bool]]]]] = {
    "titan": _write_titan,
    "foundry": _write_foundry,
    "megatron": _write_megatron,
    "nanotron": _write_nanotron,
}
