"""What a published row must be before anything is told of it: whole numbers, nothing unheard of.

A field that no rule reads changes what ran, so a row that has one is skipped by its name; so is one
whose ranks do not make its GPUs, or whose microbatches do not make its batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

from meshplan.errors import MeshplanError

Row = Mapping[str, Any]

SECTIONS: Final = ("model", "hardware", "parallel", "training", "measured")

MOST: Final = 10**7
"""Of any whole number."""
SIZES: Final[Mapping[str, Sequence[str]]] = {
    "model": ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len"),
    "hardware": ("gpus", "nodes", "gpus_per_node"),
    "parallel": ("dp", "dp_shard", "dp_replicate", "tp", "pp", "cp", "vpp", "zero1_shard_group"),
    "training": ("micro_batch", "local_batch", "grad_accum", "global_batch"),
}
"""Whole numbers from 1 on, where they are stated."""
MOST_LAYERS: Final = 2000
RANKS: Final = ("dp", "dp_shard", "dp_replicate", "tp", "pp", "cp")
FLAGS: Final[Mapping[str, Sequence[str]]] = {
    "model": ("tied",),
    "parallel": ("async_tp",),
    "training": ("chunked_ce", "optimizer_in_backward", "activation_offload"),
}
POSITIVE: Final[Mapping[str, Sequence[str]]] = {
    "hardware": ("mem_gb", "mem_usable_gib"),
    "measured": ("peak_mem_gib", "tokens_per_s_per_gpu", "iter_time_s", "tflops_per_gpu"),
}

KNOWN: Final[Mapping[str, frozenset[str]]] = {
    "model": frozenset({*SIZES["model"], *FLAGS["model"], "name", "params", "params_b", "params_m",
                        "attention", "position"}),
    "parallel": frozenset({*SIZES["parallel"], *FLAGS["parallel"], "zero_stage", "sp", "note",
                           "impl", "tp_mode", "schedule", "fsdp", "mp_mode", "pp_partition"}),
    "training": frozenset({*SIZES["training"], *FLAGS["training"], "global_batch_tokens",
                           "precision", "optimizer", "fsdp", "activation_checkpointing", "compile",
                           "float8", "loss", "attention", "mixed_precision_mode",
                           "activation_cpu_offload", "max_micro_batch", "kernels", "packed",
                           "finetune", "task"}),
}  # fmt: skip
"""What rules read, or what changes nothing that they tell. What is of hardware or was measured may
be anything: a rule reads what it needs."""

UNFORESEEN: Final = (
    MeshplanError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError,
)  # fmt: skip
"""What a value may raise that no rule thought of: its row is skipped, and says so."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, an object a line. What is none is a row of which nothing is stated."""
    out: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        out.append(row if isinstance(row, Mapping) else {"id": f"line {number}"})
    return out


def named(row: Any) -> dict[str, Any]:
    """How an answer says which row it is of."""
    facts = row if isinstance(row, Mapping) else {}
    return {"id": facts.get("id"), "group": facts.get("group")}


def problems(row: Any) -> Iterator[str]:
    """Why nothing can be told of it."""
    if not isinstance(row, Mapping):
        yield "the row is no object"
        return
    for section in SECTIONS:
        if not isinstance(row.get(section), Mapping):
            yield f"{section} is no object"
            return
    yield from _values(row)
    for section, known in KNOWN.items():
        for name, value in row[section].items():
            if name not in known and value not in (None, False, "", 0, 1, "none"):
                yield f"{section}.{name} {value!r} has no rules"


def disagreements(row: Row) -> Iterator[str]:
    """Of numbers that `problems` found whole."""
    parallel, training, gpus = row["parallel"], row["training"], row["hardware"].get("gpus")
    ranks = prod(parallel.get(name) or 1 for name in RANKS)
    if gpus is None:
        yield "hardware.gpus is not stated"
    elif ranks != gpus:
        yield f"{ranks} ranks are stated, and {gpus} GPUs"
    nodes, per_node = (row["hardware"].get(name) for name in ("nodes", "gpus_per_node"))
    if None not in (gpus, nodes, per_node) and nodes * per_node < gpus:
        yield f"{gpus} GPUs are stated, and {nodes} nodes of {per_node}"
    micro, count = training.get("micro_batch") or training.get("local_batch"), training.get(
        "grad_accum"
    )  # fmt: skip
    data = prod(parallel.get(name) or 1 for name in ("dp", "dp_shard", "dp_replicate"))
    whole = training.get("global_batch")
    if None not in (whole, micro, count) and whole != micro * count * data:
        yield f"global_batch {whole} is not {count} microbatches of {micro} on {data} data ranks"
    layers, stages = row["model"].get("layers"), parallel.get("pp") or 1
    if layers is not None and stages > layers:
        yield f"{stages} stages are stated, and {layers} layers"


def _values(row: Row) -> Iterator[str]:
    for section, names in SIZES.items():
        for name in names:
            value = row[section].get(name)
            if value is not None and not _is_size(value):
                yield f"{section}.{name} {value!r} is not a number from 1 on"
    layers = row["model"].get("layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        yield f"model.layers {layers} is more than any model has"
    for section, names in FLAGS.items():
        for name in names:
            value = row[section].get(name)
            if value is not None and not isinstance(value, bool):
                yield f"{section}.{name} {value!r} is neither true nor false"
    for section, names in POSITIVE.items():
        for name in names:
            value = row[section].get(name)
            if value is not None and not _is_positive(value):
                yield f"{section}.{name} {value!r} is not a number above 0"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < float("inf")
