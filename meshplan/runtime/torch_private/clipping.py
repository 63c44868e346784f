"""Torch's own clipping of gradients, refused where it would see one pipeline stage only."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from meshplan.errors import ApplyError, Problem
from meshplan.runtime.base.parallel_models import known_models


@functools.cache
def refuse_norms_of_stages() -> None:
    """Make `torch.nn.utils.clip_grad_norm_` raise for the gradients of a pipeline stage.

    The norm of one stage's gradients is smaller than that of all, and differs between the ranks.
    The norms of all stages cannot be summed here, because ranks whose stages have other parameters
    may call it for each of them, and would wait for each other. Private, because `clip_grad_norm_`,
    which programs import by name, takes the norm by a function that has a private name in its
    module.
    """
    inner: Any = clip_grad._get_total_norm

    @functools.wraps(inner)
    def norm_of(tensors: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        _check(given)
        return inner(given, *args, **kwargs)

    clip_grad._get_total_norm = norm_of
    if getattr(torch.nn.utils, "get_total_norm", None) is inner:
        torch.nn.utils.get_total_norm = norm_of


def _check(tensors: list[torch.Tensor]) -> None:
    """Raise ApplyError if a tensor is a gradient of a model with pipeline stages."""
    for each in known_models():
        model = each.model()
        if model is not None and each.plan.mesh.size("pp") > 1:
            own = {id(p.grad) for p in model.parameters() if p.grad is not None}
            if any(id(tensor) in own for tensor in tensors):
                raise ApplyError(
                    Problem(
                        "torch's norm of gradients was taken on one pipeline stage, which has a "
                        "part of the model's gradients",
                        each.plan.spec.origin("mesh.pp"),
                        "set clip_grad_norm in the plan, or call meshplan.clip_grad_norm_(model, "
                        "max_norm) on all ranks",
                    )
                )
