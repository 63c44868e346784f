"""A plan that runs out of memory, and the first change that `--fixes` says is enough."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from tests.gpu.seconds import CONFIGS, language_model, verb

_MICRO: Final = {"full": 16, "tiny": 16}


def plan_of(gpu: str, size: str, folder: Path, micro: int | None = None) -> dict[str, Any]:
    """Return a plan whose step needs more than the device has."""
    config = folder / "oom"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps(CONFIGS[size]["1B"]))
    where = {"gpu": gpu} if gpu else {"memory": "2GB"}
    return {
        "version": 1, "model": {"config": str(config)},
        "hardware": {"nodes": 1, "gpus_per_node": 1, **where}, "mesh": {"dp_shard": 1},
        "strategy": "full_shard", "precision": "bf16-mixed", "activation_checkpointing": "none",
        "offload": "none", "loss_chunks": 1,
        "batch": {"micro": micro or _MICRO[size], "accumulate": 1,
                  "seq_len": 4096 if size == "full" else 32},
    }  # fmt: skip


def predicted(gpu: str, size: str, folder: Path) -> dict[str, Any]:
    """Return what `estimate --fixes` says: the total, and the first change that fits."""
    micro = _MICRO[size]
    while True:
        plan = plan_of(gpu, size, folder, micro)
        (folder / "oom.yaml").write_text(json.dumps(plan))
        told = verb("estimate", "-f", str(folder / "oom.yaml"), "--fixes")
        if isinstance(told, str):
            return {"error": told}
        if not told["fits"] or micro > 1024:
            break
        micro *= 2
    first = next((each for each in told["fixes"] if each["fits"]), None)
    (group,) = told["groups"]
    return {"plan": plan, "peak": group["peak"], "band": group["band"], "first": first,
            "limit_bytes": told["limit_bytes"]}  # fmt: skip


def train(plan: dict[str, Any], settings: list[str], device: str) -> dict[str, Any]:
    """Train three steps with settings added to the plan; return the peak or `out_of_memory`."""
    import torch
    import yaml

    import meshplan
    from tests.gpu.models import cross_entropy

    words = json.loads((Path(plan["model"]["config"]) / "config.json").read_text())
    given = {key: value for key, value in plan.items() if key != "model"}
    for line in settings:
        given |= yaml.safe_load(line)
    samples = given["batch"]["micro"] * given["batch"].get("accumulate", 1)
    given["batch"] = {"seq_len": plan["batch"]["seq_len"], **given["batch"]}
    try:
        model = language_model(words, device)
        wrapped = meshplan.parallelize(model, given)
        del model
        optimizer = torch.optim.AdamW(wrapped.parameters())
        tokens = torch.randint(3, 256, (samples, plan["batch"]["seq_len"]), device=device)
        for _ in range(3):
            meshplan.train_step(wrapped, optimizer, {"input_ids": tokens}, tokens, cross_entropy)
    except Exception as error:
        if re.search("out of memory", f"{error!r}{error.__cause__!r}", re.IGNORECASE):
            return {"out_of_memory": True, "message": str(error)[:400]}
        raise
    found: dict[str, Any] = {"out_of_memory": False}
    if device == "cuda":
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found
