"""A published run as the cost model takes it, and what rows of all frameworks have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.chain import Chain
from meshplan.cost.grid import GRID, MODES, SCHEDULE_WORDS
from meshplan.layout.hardware import Cluster, Link, find_device
from meshplan.memory.decoder.sizes import Shape
from meshplan.memory.tape.tape import Tape
from meshplan.spec.spec import Precision
from tests.bench.mapping import Row, SkipError

DEVICES: Final[Mapping[str, str]] = {
    "H100 SXM 80GB": "h100-sxm-80gb", "h100_80gb": "h100-sxm-80gb", "H100 80GB": "h100-sxm-80gb",
    "H100 SXM 80GB (700W, HBM3)": "h100-sxm-80gb",
    "H100 SXM (HBM2e 96GB, 500W, 2.4TB/s)": "h100-sxm-96gb",
    "A100 SXM 80GB": "a100-sxm-80gb", "A100 80GB": "a100-sxm-80gb", "a100_80gb": "a100-sxm-80gb",
    "a100_40gb": "a100-sxm-40gb", "H200 SXM": "h200-sxm-141gb",
    "V100 SXM2 16GB": "v100-sxm-16gb", "V100 SXM2 32GB": "v100-sxm-32gb",
}  # fmt: skip
"""By how rows name a GPU. "A100" and "H100" alone say neither the memory nor the link."""

LINKS: Final[Mapping[str, float]] = {
    "RDMA 400 Gb/s per GPU": 50e9,
    "1600 Gb/s RoCE per node": 25e9,
    "8x HDR InfiniBand 200 Gb/s per node (Selene)": 25e9,
    "8x HDR InfiniBand per node (Selene)": 25e9,
    "8x HDR InfiniBand per node": 25e9,
    "400 Gb/s": 6.25e9,
    "800 Gb/s": 12.5e9,
    "Omni-Path 100 Gb/s x4": 12.5e9,
    "4x Omni-Path 100 Gb/s per node (Jean Zay)": 6.25e9,
    "4 x 100 Gb/s RoCE per node": 6.25e9,
    "InfiniBand NDR 400 Gb/s": 50e9,
    "InfiniBand 400 Gb/s per GPU (Eos)": 50e9,
    "InfiniBand 400 Gb/s per GPU": 50e9,
    "400 Gb/s RoCE per GPU": 50e9,
    "400 Gb/s CX-7 per GPU": 50e9,
    "EFA/cluster network (not stated in the table)": 50e9,
}
"""Bytes a second of each GPU, one way. A rate without a word is that of a node of eight, and four
Omni-Path links are those of a node with four V100. Where the table states no network it is taken
for that of the instances that have eight H100: 3,200 Gb/s of EFA."""

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
        sums_whole: Whether ZeRO-1 all-reduces gradients instead of scattering them.
        stall_s: By how much a step is longer in a job whose network stands still; infinite where
            no job of the source did.
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
    sums_whole: bool = False
    stall_s: float = math.inf

    @property
    def gpus(self) -> int:
        return self.cluster.num_gpus

    def is_stalled(self, told_s: float) -> bool:
        """Return whether what the job took is nearer to a job that stalled than to `told_s`."""
        return bool(self.real_s - told_s >= self.stall_s / 2)

    @property
    def shape(self) -> Any:
        """The model, whatever of it one rank has."""
        return self.work[1], self.work[-1]

    @property
    def model(self) -> tuple[int, int]:
        """Layers and width: what makes another model of one with other features as well."""
        return self.work[1].layers, self.work[1].hidden


def shape_of_row(model: Mapping[str, Any], **more: Any) -> Shape:
    heads = model["heads"]
    return Shape(
        layers=model["layers"], hidden=model["hidden"], heads=heads,
        kv_heads=model.get("kv_heads") or heads, head_dim=model["hidden"] // heads,
        mlp=model["ffn"], vocab=model["vocab"], tied=bool(model.get("tied")), **more,
    )  # fmt: skip


def cluster_of(row: Row) -> Cluster:
    h = row["hardware"]
    gpu, nodes, per_node = str(h.get("gpu")), h.get("nodes"), h.get("gpus_per_node")
    if gpu not in DEVICES:
        raise SkipError(f"hardware.gpu {gpu!r} has no profile")
    if not nodes and per_node:
        nodes = -(-h["gpus"] // per_node)
    if not nodes or h["gpus"] % nodes:
        raise SkipError("how GPUs are spread over nodes is not stated")
    inter = LINKS.get(str(h.get("inter")))
    if nodes > 1 and inter is None:
        raise SkipError(f"hardware.inter {h.get('inter')!r} says no bandwidth")
    return Cluster(
        device=find_device(DEVICES[gpu]), nodes=nodes,
        gpus_per_node=per_node or h["gpus"] // nodes,
        inter=Link("stated", inter) if inter else None,
    )  # fmt: skip


def dtype_of(cluster: Cluster) -> str:
    """The 16-bit dtype in which this device computes products."""
    return "bfloat16" if "bfloat16" in cluster.device.peak_flops else "float16"


def grid_of(**sizes: Any) -> NDArray[Any]:
    out = np.ones(1, GRID)
    out["offload"] = out["gathers_kv"] = 0
    out["mode"] = MODES.index(sizes.pop("mode"))
    out["schedule"] = SCHEDULE_WORDS.index(sizes.pop("schedule", ""))
    for name, size in sizes.items():
        out[name] = size
    return out


def real_seconds(row: Row, tokens: int) -> float:
    """Seconds of a step, from whatever was measured."""
    m, gpus = row["measured"], row["hardware"]["gpus"]
    if m.get("tokens_per_s_per_gpu"):
        return float(tokens / (m["tokens_per_s_per_gpu"] * gpus))
    if m.get("iter_time_s"):
        return float(m["iter_time_s"])
    raise SkipError("neither tokens a second nor seconds are measured")


def sizes_of(row: Row) -> dict[str, int]:
    p = row["parallel"]
    return {name: int(p.get(name) or 1) for name in ("dp", "dp_shard", "dp_replicate", "tp", "cp",
                                                     "pp")}  # fmt: skip


def micro_of(row: Row) -> int:
    t = row["training"]
    micro = t.get("micro_batch") or t.get("local_batch")
    if not isinstance(micro, int):
        raise SkipError("the batch of a rank is not stated")
    return micro


def one_stage(chain: Chain) -> tuple[tuple[int, ...], ...]:
    return (tuple(chain.order.count(n) for n in range(len(chain.kinds))),)
