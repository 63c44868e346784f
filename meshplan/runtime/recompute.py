"""Activation checkpointing: `module.forward` runs again in backward instead of being stored.

The forward is wrapped on the instance, so names and the module tree stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshplan.errors import ApplyError, Problem
from meshplan.plan import Plan

_OPS: dict[str, tuple[str, ...]] = {
    "mm": ("mm", "addmm", "_grouped_mm"),
    "bmm": ("bmm", "baddbmm"),
    "conv": ("convolution",),
    "sdpa": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
}
"""Words of `save:` and the aten ops they stand for."""

DEFAULT_SAVE = ("mm", "bmm", "conv", "sdpa")
"""What selective keeps: the outputs that cost most to compute per byte.

Source: Korthikanti et al. 2022, section 5, turned round: keep the products, redo the rest.
"""


def apply_recompute(model: nn.Module, plan: Plan) -> None:
    """Wrap the forward of every module that the plan recomputes, in place."""
    for fqn, recompute in plan.assignment.recompute.items():
        module = model.get_submodule(fqn)
        context: dict[str, Any] = {}
        if recompute.policy.mode == "selective":
            saved = _saved_ops(recompute.policy.save or DEFAULT_SAVE, recompute.reason.origin)
            context["context_fn"] = partial(
                create_selective_checkpoint_contexts, partial(_policy, saved)
            )
        module.forward = _recomputed(module.forward, context)


def _recomputed(forward: Callable[..., Any], context: dict[str, Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

    return run


def _saved_ops(words: tuple[str, ...], origin: Any) -> frozenset[Any]:
    out: set[Any] = set()
    for word in words:
        names = _OPS.get(word, (word.removeprefix("aten."),))
        found = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
        if not found:
            raise ApplyError(
                Problem(
                    f"'{word}' is not an op that can be kept",
                    origin,
                    f"use {', '.join(_OPS)} or the name of an aten op",
                )
            )
        out.update(packet.default for packet in found)
    return frozenset(out)


def _policy(saved: frozenset[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    if op in saved:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
