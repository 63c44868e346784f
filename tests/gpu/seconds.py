"""Seconds and memory of a step on one rank: what `plan` and `estimate` say beside a real run.

`calibrate` measures the device first. The plans are for one GPU of this machine, and the models are
of transformers, made from a config, so that the prediction is the one a user gets.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_LLAMA: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "tie_word_embeddings": False, "max_position_embeddings": 16384,
}  # fmt: skip


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int
) -> dict[str, Any]:
    return {**_LLAMA, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "intermediate_size": ffn, "vocab_size": vocab}  # fmt: skip


CONFIGS: Final[Mapping[str, Mapping[str, dict[str, Any]]]] = {
    "full": {
        "1B": _llama(2048, 16, 32, 8, 8192, 32000),
        "125M": _llama(768, 12, 12, 12, 2048, 32000),
        "wide": _llama(5120, 6, 40, 8, 13824, 32000),
    },
    "tiny": {
        "1B": _llama(64, 2, 4, 2, 128, 256),
        "125M": _llama(32, 2, 4, 4, 64, 256),
        "wide": _llama(128, 2, 4, 2, 256, 256),
    },
}
WARM: Final = 3
TIMED: Final = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a model of `CONFIGS`, samples of a microbatch, their length, words of the plan."""

    config: str
    micro: int
    length: int
    words: Mapping[str, Any]
    strategy: str = "full_shard"

    def plan(self, gpu: str, size: str) -> dict[str, Any]:
        """Return the plan for one device of this machine; "" stands for a CPU."""
        axis = "dp_replicate" if self.strategy == "ddp" else "dp_shard"
        where = {"gpu": gpu} if gpu else {"memory": "8GB"}
        length = self.length if size == "full" else 32
        return {
            "version": 1, "hardware": {"nodes": 1, "gpus_per_node": 1, **where},
            "mesh": {axis: 1}, "strategy": self.strategy,
            "precision": "bf16-mixed" if gpu else "32-true",
            "activation_checkpointing": "none", "offload": "none",
            "batch": {"micro": self.micro, "accumulate": self.words.get("accumulate", 1),
                      "seq_len": length},
            **{key: value for key, value in self.words.items() if key != "accumulate"},
        }  # fmt: skip


CASES: Final[Mapping[str, Case]] = {
    "1B": Case("1B", 4, 4096, {}),
    "1B, one sample": Case("1B", 1, 4096, {}),
    "1B, recomputed": Case("1B", 8, 4096, {"activation_checkpointing": "full"}),
    "1B, selective": Case("1B", 4, 4096, {"activation_checkpointing": "selective"}),
    "1B, accumulated 4 times": Case("1B", 2, 4096, {"accumulate": 4}),
    "1B, sequences of 16,384": Case("1B", 1, 16384, {}),
    "1B, sequences of 1,024": Case("1B", 16, 1024, {}),
    "1B, loss in 8 chunks": Case("1B", 4, 4096, {"loss_chunks": 8}),
    "1B, fused AdamW": Case("1B", 4, 4096, {"optimizer": "adamw_fused"}),
    "1B, SGD": Case("1B", 4, 4096, {"optimizer": "sgd"}),
    "1B, bf16 throughout": Case("1B", 4, 4096, {"precision": "bf16-true"}),
    "1B, float32": Case("1B", 2, 4096, {"precision": "32-true"}),
    "1B, zero2": Case("1B", 4, 4096, {}, "zero2"),
    "1B, ddp": Case("1B", 4, 4096, {}, "ddp"),
    "1B, parameters on the host": Case("1B", 4, 4096, {"offload": "params"}),
    "125M": Case("125M", 16, 1024, {}),
    "125M, one sample": Case("125M", 1, 1024, {}),
    "wide": Case("wide", 4, 4096, {}),
    "wide, recomputed": Case("wide", 8, 4096, {"activation_checkpointing": "full"}),
}


def calibrated(path: str) -> dict[str, Any]:
    """Time this device and write its profile; return the timings and the fitted constants."""
    from meshplan.cost.calibration import profile_from, write_profile
    from meshplan.errors import MeshplanError
    from meshplan.runtime.calibrate import measure, together

    with together():
        timings = measure()
    found: dict[str, Any] = {"dtype": timings.dtype, "launch_s": timings.launch_s}
    for kind in ("products", "attention", "moves", "copies"):
        found[kind] = [(each.amount, each.seconds) for each in getattr(timings, kind)]
    try:
        write_profile(profile_from(timings), Path(path))
    except MeshplanError as error:
        return found | {"refused": str(error)}
    return found | {"profile": json.loads(Path(path).read_text())}


def predictions(gpu: str, size: str, folder: Path, profile: str | None) -> dict[str, Any]:
    """Return what the command line says of each case, by name: seconds and bytes, or an error."""
    for name, config in CONFIGS[size].items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))

    def ask(name: str) -> dict[str, Any]:
        case = CASES[name]
        path = folder / f"{name}.json"
        plan = {**case.plan(gpu, size), "model": {"config": str(folder / case.config)}}
        path.write_text(json.dumps(plan))
        flags = ["--profile", profile] if profile else []
        found = verb("plan", "-f", str(path), "--dry-run", *flags)
        told = verb("estimate", "-f", str(path))
        if isinstance(told, str):
            return {"error": told}
        (group,) = told["groups"]
        memory = {**group["peak"], "band": group["band"]}
        if isinstance(found, str):
            return {"refused": found, **memory}
        return {"seconds": found["step_s"], "planned_bytes": found["expected_bytes"], **memory}

    with ThreadPoolExecutor(4) as threads:
        return dict(zip(CASES, threads.map(ask, CASES), strict=True))


def verb(*words: str) -> Any:
    """Return the result of a command of meshplan, or a string that says why there is none."""
    line = [sys.executable, "-m", "meshplan", *words, "--json", "-q"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return (done.stdout + done.stderr)[-600:]
    result = found["result"]
    return result["problems"][0]["what"] if "problems" in result else result


def language_model(words: Mapping[str, Any], device: str) -> Any:
    """Return the model of a config.json."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**words)
    config.use_cache = False
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config).train()


def all_measured(send: Any, gpu: str, size: str, device: str) -> None:
    """Train all cases in one process; call `send` with (name, what was measured or an error)."""
    for name in CASES:
        try:
            send((name, measured(name, gpu, size, device)))
        except Exception:
            send((name, traceback.format_exc()))


def measured(name: str, gpu: str, size: str, device: str) -> dict[str, Any]:
    """Train a case on this device, in the process group of this one rank."""
    import torch

    import meshplan
    from meshplan.runtime.fake_step.optimizers import OPTIMIZERS
    from tests.gpu.models import cross_entropy

    case = CASES[name]
    plan = case.plan(gpu, size)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    torch.manual_seed(0)
    model = language_model(CONFIGS[size][case.config], device)
    wrapped = meshplan.parallelize(model, plan)
    del model
    make, _ = OPTIMIZERS[plan.get("optimizer", "adamw")]
    optimizer = make(list(wrapped.parameters()))
    samples = case.micro * plan["batch"]["accumulate"]
    tokens = torch.randint(3, 256, (samples, plan["batch"]["seq_len"]), device=device)
    times, losses = [], []
    for number in range(WARM + TIMED):
        if device == "cuda":
            torch.cuda.synchronize()
            if number == 1:
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        inputs = {"input_ids": tokens}
        losses.append(meshplan.train_step(wrapped, optimizer, inputs, tokens, cross_entropy))
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    found = {"seconds": statistics.median(times[WARM:]), "fastest_s": min(times[WARM:]),
             "first_loss": losses[0], "last_loss": losses[-1]}  # fmt: skip
    if device == "cuda":
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        found |= {
            "requested_bytes": stats["requested_bytes.all.peak"],
            "allocated_bytes": stats["allocated_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
            "held_before": held,
            "retries": stats["num_alloc_retries"],
            "driver_bytes": total - free - torch.cuda.memory_reserved(),
        }
    return found
