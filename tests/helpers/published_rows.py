"""Rows as published measurements have them, of one run each of four frameworks."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

from tests.bench import row_check

TITAN: dict[str, Any] = {
    "id": "a", "group": "g",
    "model": {"layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 2816,
              "vocab": 32000, "seq_len": 2048},
    "hardware": {"gpu": "H100 SXM 80GB", "mem_gb": 80, "gpus": 8, "nodes": 1},
    "parallel": {"dp_shard": 8, "tp": 1, "pp": 1, "cp": 1, "zero_stage": 3},
    "training": {
        "precision": "bf16 compute, fp32 params/grad-reduce (FSDP2 mixed precision)",
        "local_batch": 2, "grad_accum": 1, "activation_checkpointing": "selective op",
        "compile": False},
    "measured": {"peak_mem_gib": 8.0, "mem_metric": "max_reserved", "fits": True},
}  # fmt: skip
NANOTRON: dict[str, Any] = {
    "id": "b", "group": "h",
    "model": {"layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 4096,
              "vocab": 32768, "seq_len": 1024, "tied": False},
    "hardware": {"gpu": "H100 SXM 80GB", "mem_gb": 80, "gpus": 8, "nodes": 1},
    "parallel": {"dp": 4, "tp": 2, "pp": 1, "cp": 1, "zero_stage": 1,
                 "tp_mode": "REDUCE_SCATTER, async"},
    "training": {
        "precision": "bf16 params, fp32 grad accumulation, fp32 master+AdamW states",
        "micro_batch": 2, "grad_accum": 8, "activation_checkpointing": "none"},
    "measured": {"peak_mem_gib": 8.0, "fits": True,
                 "mem_metric": "peak GiB, allocated or reserved not stated"},
}  # fmt: skip


def changed(row: dict[str, Any], section: str, **fields: Any) -> dict[str, Any]:
    """With other values, on as many GPUs as it then has ranks."""
    row = copy.deepcopy(row)
    row[section] |= fields
    sizes = [row["parallel"].get(name, 1) for name in row_check.RANKS]
    if section == "parallel" and all(isinstance(size, int) for size in sizes):
        row["hardware"]["gpus"] = prod(sizes)
        row["hardware"]["nodes"] = -(-prod(sizes) // 8)
    return row


MEGATRON: dict[str, Any] = {
    "id": "c", "group": "i",
    "model": {"layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 4096,
              "vocab": 32768, "seq_len": 1024},
    "hardware": {"gpu": "A100 SXM 80GB", "mem_gb": 80, "gpus": 8, "nodes": 1, "gpus_per_node": 8,
                 "inter": "8x HDR InfiniBand per node (Selene)"},
    "parallel": {"dp": 2, "tp": 2, "pp": 2, "sp": False, "schedule": "1F1B"},
    "training": {"micro_batch": 1, "global_batch": 16, "grad_accum": 8, "optimizer": "Adam",
                 "precision": "fp16 mixed", "activation_checkpointing": "full"},
    "measured": {"iter_time_s": 0.2, "fits": True},
}  # fmt: skip
FOUNDRY: dict[str, Any] = {
    "id": "d", "group": "j",
    "model": {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32768,
              "seq_len": 1024, "attention": "flash", "position": "learned (table of seq_len rows)"},
    "hardware": {"gpu": "a100_80gb", "mem_gb": 80, "gpus": 8, "nodes": 1, "gpus_per_node": 8},
    "parallel": {"dp_shard": 8, "zero_stage": 3, "fsdp": "FULL_SHARD",
                 "impl": "PyTorch FSDP1 (Composer)"},
    "training": {"micro_batch": 1, "global_batch": 8, "grad_accum": 1, "precision": "amp_bf16",
                 "optimizer": "DecoupledAdamW", "activation_checkpointing": "full"},
    "measured": {"tokens_per_s_per_gpu": 1000, "fits": True},
}  # fmt: skip
TIMED = [
    changed(TITAN | {"id": "e"}, "measured", tokens_per_s_per_gpu=1000),
    changed(NANOTRON | {"id": "f"}, "measured", tokens_per_s_per_gpu=1000),
    MEGATRON,
    FOUNDRY,
]
TIMED[0] = changed(TIMED[0], "hardware", gpu="H100 SXM (HBM2e 96GB, 500W, 2.4TB/s)")
ODD = (-1, 0, 1.5, "many", [], {}, True, 10**12, float("nan"), float("inf"))
