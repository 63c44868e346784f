"""Parity with one process: every recipe's layout on every model of the zoo.

A cell is (model, layout, world size). `cell_plan` spells the plan, `train` runs it on one rank,
`difference` compares with the single process. Used by test_parity (a sample) and by
tests/bench/parity.py (every cell).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

import meshplan
from tests.helpers import models

TOLERANCE: Final = 1e-6

LAYOUTS: Final = (
    "ddp", "zero1", "zero2", "full_shard", "hybrid_shard", "hybrid_shard_zero2",
    "hybrid_mixture", "tp", "tp_ddp", "tp_full_shard", "tp_hybrid",
)  # fmt: skip

_BLOCKS: Final[Mapping[str, tuple[str, str]]] = {
    "own_llama": ("layers.0", "layers.{1..3}"),
    "hf_llama": ("model.layers.0", "model.layers.1"),
    "hf_llama_tied": ("model.layers.0", "model.layers.1"),
    "gpt2": ("transformer.h.0", "transformer.h.1"),
    "qwen3": ("model.layers.0", "model.layers.1"),
    "bert": ("bert.encoder.layer.0", "bert.encoder.layer.1"),
    "vit": ("vit.layers.0", "vit.layers.1"),
    "t5": ("encoder.block.0", "decoder.block.0"),
    "resnet": ("blocks.0", "blocks.{1,2}"),
    "odd": ("head", "blocks.1"),
}
"""Per model: what the mixture replicates, and what it recomputes."""


def cell_plan(model: str, layout: str, world: int) -> dict[str, Any] | str:
    """The plan of a cell, or why there is none."""
    half = world // 2
    rules: list[dict[str, Any]] = []
    if layout.startswith("tp"):
        found = models.tp_rules(model)
        if found is None:
            return "no tensor-parallel rules make sense"
        rules = found
    plan: dict[str, Any] = {"version": 1, "rules": rules}
    match layout:
        case "ddp" | "zero1" | "zero2" | "full_shard":
            plan["strategy"] = layout
        case "hybrid_shard" | "hybrid_shard_zero2":
            plan |= {"strategy": layout, "mesh": [2, half]}
        case "hybrid_mixture":
            replicated, recomputed = _BLOCKS[model]
            plan |= {"strategy": "hybrid_shard", "mesh": [2, half]}
            rules += [
                {"match": replicated, "place": "replicate"},
                {"match": recomputed, "activation_checkpointing": "selective"},
            ]
        case "tp":
            plan["mesh"] = {"tp": min(world, 4)}
            if world > 4:
                return "no more than 4 kv heads"
        case "tp_ddp":
            plan["mesh"] = {"dp_replicate": half, "tp": 2}
        case "tp_full_shard":
            plan["mesh"] = {"dp_shard": half, "tp": 2}
        case "tp_hybrid":
            if world < 8:
                return "needs 8 ranks"
            plan["mesh"] = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    return plan


def train(
    name: str, plan: Any, steps: int = 3, size: int = 8, clip: float | None = None
) -> dict[str, Any]:
    """Train on this rank; compare with one process on rank 0.

    Returns:
        {"loss": largest difference, "state": largest difference, "worst": its name}; on ranks
        other than 0 only the loss.
    """
    example, _ = models.batch(name, 0, 2)
    model = meshplan.parallelize(models.build(name), plan, example_inputs=example)
    sgd = models.optimizer(model)
    losses = []
    for step in range(steps):
        inputs, targets = meshplan.local_batch(model, models.batch(name, step, size))
        losses.append(meshplan.train_step(model, sgd, inputs, targets, models.loss))
    expected, state = models.reference(name, steps, size, clip)
    out: dict[str, Any] = {"loss": max(abs(a - b) for a, b in zip(losses, expected, strict=True))}
    live = meshplan.full_state_dict(model)
    if torch.distributed.get_rank() == 0:
        assert live.keys() == state.keys(), live.keys() ^ state.keys()
        apart = {n: (live[n].double() - t.double()).abs().max().item() for n, t in state.items()}
        out["worst"] = max(apart, key=apart.__getitem__)
        out["state"] = apart[out["worst"]]
    else:
        assert live == {}
    return out
