"""The plans that are held against a GPU's allocator, on a Llama of one to eight billion parameters.

Each is one rank of a job of several; what the others would send is not there, and takes no part in
what this rank's allocator hands out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.bench.llama import Shape

SHAPES: Final[Mapping[str, Shape]] = {
    "8b": Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256,
                seq_len=4096),
    "1b": Shape(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256,
                seq_len=4096),
    "tiny": Shape(layers=4, hidden=64, heads=8, kv_heads=4, ffn=128, vocab=256, seq_len=32),
}  # fmt: skip
"""Llama 3.1 8B and Llama 3.2 1B, its head untied; and one for machines without a GPU."""

_TP: Final = [
    {"match": "tok_embeddings", "place": {"tp": "vocab"}},
    {"match": "layers.*.attention.{wq,wk,wv}", "place": {"tp": "colwise"}},
    {"match": "layers.*.attention.wo", "place": {"tp": "rowwise"}},
    {"match": "layers.*.feed_forward.{w1,w3}", "place": {"tp": "colwise"}},
    {"match": "layers.*.feed_forward.w2", "place": {"tp": "rowwise"}},
    {"match": "output", "place": {"tp": "colwise_gather_output"}},
]


def _sharded(ranks: int = 8, **more: Any) -> dict[str, Any]:
    return {"version": 1, "mesh": {"dp_shard": ranks}, "precision": "bf16-mixed", **more}


def _with_tp(**more: Any) -> dict[str, Any]:
    mesh = {"dp_shard": 4, "tp": 2}
    return {"version": 1, "mesh": mesh, "precision": "bf16-mixed", "rules": _TP, **more}


def _stages(schedule: str, **more: Any) -> dict[str, Any]:
    pipeline = {"schedule": schedule, "microbatches": 4}
    return {"version": 1, "mesh": {"pp": 2, "dp_shard": 4}, "precision": "bf16-mixed",
            "pipeline": pipeline, **more}  # fmt: skip


_FULL: Final = {"activation_checkpointing": "full"}
_BATCH2: Final = {"batch": {"accumulate": 2}}

PLANS: Final[Mapping[str, dict[str, Any]]] = {
    "full_shard": _sharded(),
    "full_shard over 64": _sharded(64),
    "full_shard, recomputed": _sharded(**_FULL),
    "full_shard, selective": _sharded(activation_checkpointing="selective"),
    "full_shard, every second block recomputed": _sharded(
        activation_checkpointing={"mode": "full", "every": 2}),
    "full_shard, accumulated": _sharded(**_BATCH2),
    "full_shard, clipped": _sharded(clip_grad_norm=1.0),
    "full_shard, bf16 throughout": _sharded(precision="bf16-true"),
    "full_shard, float16, scaled loss": _sharded(precision="16-mixed", **_FULL),
    "full_shard, float32, recomputed": _sharded(precision="32-true", **_FULL),
    "full_shard, embedding and head apart": _sharded(
        rules=[{"match": ["tok_embeddings", "output"], "unit": True}]),
    "full_shard, kept after forward": _sharded(
        rules=[{"match": "layers.*", "reshard_after_forward": False}]),
    "full_shard, parameters on the host": _sharded(offload="params", **_FULL),
    "full_shard, activations on the host": _sharded(offload={"activations": True}),
    "zero1": _sharded(strategy="zero1"),
    "zero2": _sharded(strategy="zero2"),
    "zero2, accumulated": _sharded(strategy="zero2", **_BATCH2),
    "hybrid_shard": _sharded(mesh={"dp_replicate": 2, "dp_shard": 8}),
    "hybrid_shard, accumulated": _sharded(mesh={"dp_replicate": 2, "dp_shard": 8}, **_BATCH2),
    "ddp": {"version": 1, "mesh": {"dp_replicate": 8}, "strategy": "ddp", **_FULL},
    "ddp, buckets apart": {"version": 1, "mesh": {"dp_replicate": 8}, "strategy": "ddp",
                           "ddp": {"gradient_as_bucket_view": False}, **_FULL},
    "tp x full_shard": _with_tp(),
    "tp x full_shard, recomputed": _with_tp(**_FULL),
    "1F1B x full_shard": _stages("1F1B"),
    "GPipe x full_shard, recomputed": _stages("GPipe", **_FULL),
}  # fmt: skip


def world_of(plan: Mapping[str, Any]) -> int:
    """Ranks of a plan."""
    total = 1
    for size in plan["mesh"].values():
        total *= size
    return total
