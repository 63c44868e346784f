"""A wrapped model beside the same model wrapped by hand with FSDP2 and DDP, on one rank."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

KINDS: Final = ("full_shard", "ddp")
_STEPS: Final = 8


def beside(kind: str, size: str, device: str) -> dict[str, Any]:
    """Train by hand, with meshplan, by hand, with meshplan; return losses, seconds and peaks."""
    found: dict[str, Any] = {"by_hand": [], "meshplan": []}
    for _ in range(2):
        found["by_hand"].append(_run(kind, size, device, _by_hand))
        found["meshplan"].append(_run(kind, size, device, _with_meshplan))
    mine, hand = found["meshplan"], found["by_hand"]
    return {
        "loss_difference": max(
            abs(a - b) for a, b in zip(mine[0]["losses"], hand[0]["losses"], strict=True)
        ),
        "seconds_ratio": min(each["seconds"] for each in mine)
        / min(each["seconds"] for each in hand),
        "allocated_ratio": mine[0].get("allocated_bytes", 1) / hand[0].get("allocated_bytes", 1),
        "runs": found,
    }


def _run(kind: str, size: str, device: str, wrap: Callable[..., Any]) -> dict[str, Any]:
    import torch

    from meshplan.runtime.base.mesh import ensure_process_group
    from tests.gpu.models import MODELS

    ensure_process_group()
    given = MODELS["llama"](size)
    model, inputs, targets = given.start(device, 2)
    step = wrap(kind, model, device, inputs, targets, given.loss)
    del model
    losses, times = [], []
    for number in range(_STEPS):
        if device == "cuda":
            torch.cuda.synchronize()
            if number == 2:
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses.append(step())
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    found: dict[str, Any] = {"losses": losses, "seconds": statistics.median(times[3:])}
    if device == "cuda":
        found["allocated_bytes"] = torch.cuda.max_memory_allocated()
    del step
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def _by_hand(
    kind: str, model: Any, device: str, inputs: Any, targets: Any, loss_fn: Any
) -> Callable[[], float]:
    """Wrap as the tutorials of torch do."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if kind == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh(device, (1,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _with_meshplan(
    kind: str, model: Any, device: str, inputs: Any, targets: Any, loss_fn: Any
) -> Callable[[], float]:
    import torch

    import meshplan

    plan: dict[str, Any] = {"version": 1, "mesh": {"dp_shard": 1}, "precision": "bf16-mixed"}
    if kind == "ddp":
        plan = {"version": 1, "mesh": {"dp_replicate": 1}, "strategy": "ddp"}
    wrapped = meshplan.parallelize(model, plan)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    return lambda: meshplan.train_step(wrapped, optimizer, inputs, targets, loss_fn)
