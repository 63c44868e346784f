"""The cases whose memory is compared with a GPU's allocator: models, plans, optimizers, batches.

Each is rank 0 of a job of several ranks. What the others would send is missing, and has no part in
what this rank's allocator hands out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TP: Final = [
    {"match": "tok_embeddings", "place": {"tp": "vocab"}},
    {"match": "layers.*.attention.{wq,wk,wv}", "place": {"tp": "colwise"}},
    {"match": "layers.*.attention.wo", "place": {"tp": "rowwise"}},
    {"match": "layers.*.feed_forward.{w1,w3}", "place": {"tp": "colwise"}},
    {"match": "layers.*.feed_forward.w2", "place": {"tp": "rowwise"}},
    {"match": "output", "place": {"tp": "colwise_gather_output"}},
]


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    Args:
        plan: The plan.
        model: Name in `models.MODELS`.
        samples: Samples of a microbatch.
    """

    plan: Mapping[str, Any]
    model: str = "llama"
    samples: int = 1

    @property
    def world(self) -> int:
        """Number of ranks of the job."""
        total = 1
        for size in self.plan["mesh"].values():
            total *= size
        return total


def _sharded(ranks: int = 8, **more: Any) -> dict[str, Any]:
    return {"version": 1, "mesh": {"dp_shard": ranks}, "precision": "bf16-mixed", **more}


def _with_tp(**more: Any) -> dict[str, Any]:
    mesh = {"dp_shard": 4, "tp": 2}
    return {"version": 1, "mesh": mesh, "precision": "bf16-mixed", "rules": TP, **more}


def _stages(schedule: str, **more: Any) -> dict[str, Any]:
    pipeline = {"schedule": schedule, "microbatches": 4}
    return {"version": 1, "mesh": {"pp": 2, "dp_shard": 4}, "precision": "bf16-mixed",
            "pipeline": pipeline, **more}  # fmt: skip


def _replicated(**more: Any) -> dict[str, Any]:
    return {"version": 1, "mesh": {"dp_replicate": 8}, "strategy": "ddp", **more}


_FULL: Final = {"activation_checkpointing": "full"}
_BATCH2: Final = {"batch": {"accumulate": 2}}

_LLAMA: Final[Mapping[str, dict[str, Any]]] = {
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
    "full_shard, loss in 8 chunks": _sharded(loss_chunks=8),
    "full_shard, expandable segments": _sharded(allocator="expandable"),
    "full_shard, fused AdamW": _sharded(optimizer="adamw_fused"),
    "full_shard, SGD": _sharded(optimizer="sgd"),
    "full_shard, SGD with momentum": _sharded(optimizer="sgd_momentum"),
    "full_shard, Adagrad": _sharded(optimizer="adagrad"),
    "full_shard, RMSprop": _sharded(optimizer="rmsprop"),
    "full_shard, compiled": _sharded(compile=True),
    "zero1": _sharded(strategy="zero1"),
    "zero2": _sharded(strategy="zero2"),
    "zero2, accumulated": _sharded(strategy="zero2", **_BATCH2),
    "hybrid_shard": _sharded(mesh={"dp_replicate": 2, "dp_shard": 8}),
    "hybrid_shard, accumulated": _sharded(mesh={"dp_replicate": 2, "dp_shard": 8}, **_BATCH2),
    "ddp": _replicated(**_FULL),
    "ddp, bf16-mixed": _replicated(precision="bf16-mixed"),
    "ddp, buckets apart": _replicated(ddp={"gradient_as_bucket_view": False}, **_FULL),
    "tp x full_shard": _with_tp(),
    "tp x full_shard, recomputed": _with_tp(**_FULL),
    "1F1B x full_shard": _stages("1F1B"),
    "GPipe x full_shard, recomputed": _stages("GPipe", **_FULL),
    "Interleaved1F1B x full_shard": _stages("Interleaved1F1B"),
}  # fmt: skip

_OTHERS: Final[Mapping[str, Case]] = {
    "Qwen2, full_shard": Case(_sharded(), "qwen2", 2),
    "Qwen2, full_shard, recomputed": Case(_sharded(**_FULL), "qwen2", 4),
    "Qwen2, tp x full_shard, sequence parallel": Case(
        {
            "version": 1,
            "mesh": {"dp_shard": 4, "tp": 2},
            "precision": "bf16-mixed",
            "tp_plan": "auto",
            "sequence_parallel": True,
        },
        "qwen2",
        2,
    ),
    "GPT-2, full_shard": Case(_sharded(), "gpt2", 4),
    "GPT-2, ddp, float32": Case(_replicated(), "gpt2", 2),
    "BERT, full_shard": Case(_sharded(), "bert", 8),
    "BERT, zero1": Case(_sharded(strategy="zero1"), "bert", 8),
    "T5, full_shard": Case(_sharded(), "t5", 8),
    "ViT, full_shard": Case(_sharded(), "vit", 32),
    "ViT, ddp, bf16-mixed": Case(_replicated(precision="bf16-mixed"), "vit", 32),
    "ResNet-50, ddp": Case(_replicated(), "resnet", 64),
}

CASES: Final[Mapping[str, Case]] = {name: Case(plan) for name, plan in _LLAMA.items()} | _OTHERS
"""By the name of a row."""
