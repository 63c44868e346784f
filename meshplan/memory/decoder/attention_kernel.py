"""Check that there are rules for the attention kernel that torch would choose.

Source: torch 2.13, aten/native/transformers/cuda/sdp_utils.cpp, `select_sdp_backend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.memory.decoder.cp_all_gather import unmasked
from meshplan.memory.decoder.sizes import BY_TRACE, shape_of
from meshplan.plan.plan import Plan

_HALVES: Final = frozenset({"bfloat16", "float16"})
_MOST_FLASH: Final = 256
_WITHOUT_FLASH: Final = frozenset({"v100"})


def check_fused(plan: Plan, seq_len: int, *, is_cuda: bool = True, device: str = "") -> None:
    """Check that there are rules for the attention kernel that torch would choose.

    There are none for heads that have to be padded, for sliding windows, and for some devices.

    Args:
        plan: A plan for a graph of `blueprint`.
        seq_len: Tokens of one sequence.
        is_cuda: If True, the step runs on CUDA; if False, on CPUs.
        device: A device name of `hardware`; "" if unknown.

    Raises:
        PlanError: There are no rules for the kernel that would run.
    """
    if whats := list(_unfused(plan, seq_len, is_cuda=is_cuda, device=device)):
        raise PlanError(map(no_rules, whats))


def no_rules(what: str) -> Problem:
    """Return the problem of something in a plan that only a trace of the model knows."""
    return Problem(f"the estimate from a config has no rules for {what}", fix=BY_TRACE)


def is_fused(plan: Plan) -> bool:
    """Return True if there is a fused CUDA kernel: none supports grouped queries in float32."""
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
            yield f"attention on CPUs: heads of {shape.head_dim} features, {value_dim} for values"
        return
    if not is_even and (shape.head_dim % 8 or value_dim % 8):
        yield f"attention with heads of {shape.head_dim} features, {value_dim} for values"
    elif not _is_half(plan):
        if shape.kv_heads == shape.heads and shape.head_dim % 4:
            yield f"attention in float32 with heads of {shape.head_dim} features"
    elif _WITHOUT_FLASH & set(device.lower().split("-")):
        yield f"attention in half precision on {device}, which has no flash attention"
    elif shape.head_dim % 8 or (is_even and shape.head_dim > _MOST_FLASH):
        yield f"attention with heads of {shape.head_dim} features"
