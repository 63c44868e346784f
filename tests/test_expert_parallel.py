"""Expert parallelism against one process: every layout, uneven routing, refusals on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import meshplan
from tests import moe, models
from tests.parity import TOLERANCE

EP2 = {"dp_shard": 4, "ep": "2 in dp_shard"}
EP4 = {"dp_shard": 4, "ep": "4 in dp_shard"}
HYBRID = {"dp_replicate": 2, "dp_shard": 2, "ep": "2 in dp_shard"}
TP = {"dp_shard": 2, "tp": 2, "ep": "2 in dp_shard"}
FULL: dict[str, Any] = {"activation_checkpointing": "full"}
CUT_ATTENTION = (
    {"match": "**.{q_proj,k_proj,v_proj}", "place": {"tp": "colwise"}},
    {"match": "**.o_proj", "place": {"tp": "rowwise"}},
)

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "mixtral, ep 2 in 4": (4, "mixtral", moe.plan(EP2)),
    "mixtral, ep takes all of dp_shard": (4, "mixtral grouped", moe.plan(EP4)),
    "mixtral beside tp": (4, "mixtral", moe.plan(TP, *CUT_ATTENTION)),
    "qwen3_moe, clipped": (4, "qwen3_moe", moe.plan(EP2, clip_grad_norm=0.1)),
    "qwen3_moe, replicated experts": (
        4, "qwen3_moe batched", moe.plan(EP2, {"match": "**.experts", "place": {
            "dp_shard": "R", "ep": "ep_dispatch_experts"}}),
    ),
    "deepseek_v3, recomputed": (4, "deepseek_v3", moe.plan(EP2, **FULL)),
    "gpt_oss, hybrid and clipped": (4, "gpt_oss", moe.plan(HYBRID, clip_grad_norm=0.1)),
    "own, recomputed in part, accumulated": (
        4, "stack", moe.plan(EP2, activation_checkpointing="selective", batch={"accumulate": 2}),
    ),
    "own, hybrid, accumulated": (4, "grouped", moe.plan(HYBRID, batch={"accumulate": 2})),
    "own, zero1, accumulated": (
        4, "stack", moe.plan(EP2, strategy="zero1", batch={"accumulate": 2}),
    ),
    "own, cut along another dim": (
        4, "stack", moe.plan(EP2, {"match": "**.experts", "place": {"dp_shard": "S(1)"}}),
    ),
    "own, sizes that divide by nothing": (4, "uneven", moe.plan(EP2)),
    "one rank gets every token": (4, "one rank gets all", moe.plan(EP2)),
    "one rank gets every token, recomputed": (4, "one rank gets all", moe.plan(EP4, **FULL)),
    "one rank gets every token, grouped": (4, "grouped, one rank gets all", moe.plan(HYBRID)),
    "mixtral, ep 2 in 8": (8, "mixtral", moe.plan({"dp_shard": 8, "ep": "2 in dp_shard"})),
    "own, ep 4 in 8": (8, "stack", moe.plan({"dp_shard": 8, "ep": "4 in dp_shard"})),
    "mixtral, hybrid 2 x 4 with ep 2": (
        8, "mixtral grouped", moe.plan({"dp_replicate": 2, "dp_shard": 4, "ep": "2 in dp_shard"}),
    ),
}  # fmt: skip


def train(name: str, plan: dict[str, Any], steps: int = 3) -> dict[str, float]:
    """Train on this rank; the largest differences from one process."""
    model = meshplan.parallelize(moe.build(name), plan)
    sgd = models.optimizer(model)
    losses = []
    for step in range(steps):
        inputs, targets = meshplan.local_batch(model, models.batch(name, step))
        losses.append(meshplan.train_step(model, sgd, inputs, targets, models.loss))
    expected, alone = moe.reference(name, steps, plan.get("clip_grad_norm"))
    apart = {"loss": max(abs(a - b) for a, b in zip(losses, expected, strict=True))}
    live = meshplan.full_state_dict(model)
    if torch.distributed.get_rank() == 0:
        state = alone.state_dict()
        assert live.keys() == state.keys()
        apart |= {n: (live[n] - t).abs().max().item() for n, t in state.items()}
    return apart


@pytest.mark.parametrize("case", CASES)
def test_parity(pool, case):
    world, name, plan = CASES[case]
    for apart in pool(world).run(train, name, plan):
        assert {n: d for n, d in apart.items() if d > TOLERANCE} == {}
