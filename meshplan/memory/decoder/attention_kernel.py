"""Attention for which torch chooses other kernels than those that the ops stand for.

Source: torch 2.13, aten/native/transformers/cuda/sdp_utils.cpp, `select_sdp_backend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.memory.decoder.cp_all_gather import unmasked
from meshplan.memory.decoder.sizes import shape_of
from meshplan.plan.plan import Plan

_HALVES: Final = frozenset({"bfloat16", "float16"})
_MOST_FLASH: Final = 256
_WITHOUT_FLASH: Final = frozenset({"v100"})


def check_fused(plan: Plan, seq_len: int, *, is_cuda: bool = True, device: str = "") -> None:
    """Refuse attention that pads heads, or looks back over a part of the tokens only.

    Args:
        seq_len: Tokens of one sequence.
        is_cuda: If True, the step runs on CUDA; if False, on CPUs.
        device: A name of `hardware`; "" if unknown.

    Raises:
        PlanError: There are no rules for the kernel that would run.
    """
    problems = [
        Problem(
            f"a step told from a config has no rules for {what}",
            fix="write model: {entry: PKG.MOD:FN} in the plan, to trace the model with torch",
        )
        for what in _unfused(plan, seq_len, is_cuda=is_cuda, device=device)
    ]
    if problems:
        raise PlanError(problems)


def is_fused(plan: Plan) -> bool:
    """Return True if a fused CUDA kernel fits: in float32 none takes queries that share keys."""
    shape = shape_of(plan.graph)
    return _is_half(plan) or shape.kv_heads == shape.heads


def _is_half(plan: Plan) -> bool:
    return plan.assignment.compute_dtypes <= _HALVES


def _unfused(plan: Plan, seq_len: int, *, is_cuda: bool, device: str) -> Iterator[str]:
    shape = shape_of(plan.graph)
    if 0 < shape.window <= seq_len:  # A window of seq_len is masked too.
        yield f"attention over a window of {shape.window} tokens of {seq_len}"
    yield from unmasked(plan, is_cuda=is_cuda, device=device)
    value_dim = shape.head_dim if shape.latent is None else shape.latent.value
    is_even = value_dim == shape.head_dim
    if not is_cuda:
        if not is_even:
            yield f"attention on CPUs with values of {value_dim} features of {shape.head_dim}"
        return
    if not is_even and (shape.head_dim % 8 or value_dim % 8):
        yield f"attention with heads of {shape.head_dim} features, and {value_dim} of values"
    elif not _is_half(plan):
        if shape.kv_heads == shape.heads and shape.head_dim % 4:
            yield f"attention in float32 with heads of {shape.head_dim} features"
    elif _WITHOUT_FLASH & set(device.lower().split("-")):
        yield f"attention in half precision on {device}, which has no flash attention"
    elif shape.head_dim % 8 or (is_even and shape.head_dim > _MOST_FLASH):
        yield f"attention with heads of {shape.head_dim} features"
