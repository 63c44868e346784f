"""From a published row with a throughput to a step that the cost model can tell, by its fields.

A row is of a framework, whose code says which operations run and what waits for what; what none of
them knows is skipped with the field that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.bench.mapping import Row, SkipError, only
from tests.bench.time_case import Case as Case
from tests.bench.time_frameworks import (
    foundry_case,
    generic_case,
    megatron_case,
    nanotron_case,
    titan_case,
)


def case_of(row: Row) -> Case:
    """What ran, and how long a step took.

    Raises:
        SkipError: Something that the time depends on is not modelled, or not stated.
    """
    for key in ("layers", "hidden", "heads", "ffn", "vocab", "seq_len"):
        if row["model"].get(key) is None:
            raise SkipError(f"model.{key} is not stated")
    only(row, "training.finetune", None, "full")
    only(row, "training.task", None)
    if not {"tokens_per_s_per_gpu", "iter_time_s", "tflops_per_gpu"} & row["measured"].keys():
        raise SkipError("neither tokens a second nor seconds are measured")
    framework = _framework(row)
    return framework(row)


def _framework(row: Row) -> Callable[[Row], Case]:
    parallel, training = row["parallel"], row["training"]
    impl, precision = parallel.get("impl"), str(training.get("precision", ""))
    if parallel.get("tp_mode"):
        return nanotron_case
    if impl == "PyTorch FSDP1 (Composer)":
        return foundry_case
    if impl == "Megatron-DeepSpeed":
        return partial(megatron_case, framework="deepspeed")
    if precision.startswith("bf16 compute, fp32 params/grad-reduce (FSDP2"):
        if impl in (None, "FSDP2", "FSDP2 eager"):
            return titan_case
        raise SkipError(f"parallel.impl {impl!r} is not modelled")
    if precision.startswith("PURE bf16") and impl == "FSDP2 + DTensor TP":
        return partial(titan_case, is_kempner=True)
    is_half = precision in ("fp16 mixed", "fp16/bf16 mixed", "mixed")
    if is_half and impl is None and "Adam" in str(training.get("optimizer")):
        return partial(megatron_case, framework="megatron")
    if impl is None and precision == "bf16":
        return generic_case
    raise SkipError(f"no profile is of {impl!r} with precision {precision!r}")
