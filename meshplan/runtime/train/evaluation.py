"""`eval_step` and `reduce`: what a model is like on data that it does not train on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import GRADIENT_AXES
from meshplan.plan.plan import Plan
from meshplan.runtime.apply.loss.loss_mode import loss_mode
from meshplan.runtime.apply.loss.loss_weights import (
    not_a_loss,
    pair_of,
    tokens_by_sample,
    uncounted,
)
from meshplan.runtime.apply.loss.vocab_parallel_loss import take_loss
from meshplan.runtime.apply.pipeline.module import PipelinedModule
from meshplan.runtime.apply.wrap import applied
from meshplan.runtime.base.batch import as_arguments, chunked
from meshplan.runtime.base.batch_agreement import check_batches_agree, num_samples
from meshplan.runtime.base.mesh import device, submesh
from meshplan.runtime.base.parallel_models import find_model
from meshplan.runtime.watch.guard import guarded

Value = TypeVar("Value", float, torch.Tensor)

OPS: Final = {
    "mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
}  # fmt: skip
"""Reductions of `reduce`, by name."""


@guarded("eval_step")
def eval_step(
    model: nn.Module, inputs: Any, targets: Any, loss_fn: Callable[[Any, Any], Any]
) -> float:
    """Return the loss of the global batch in evaluation mode, without gradients.

    It suits every plan, pipelines included, and leaves the model as it was: afterwards each module
    is in the mode that it was in before. The samples of a rank are evaluated in the microbatches
    that the plan states, as in training.

    Args:
        model: The module that `parallelize` returned.
        inputs: This rank's inputs, as for `train_step`. Data ranks may have different numbers of
            samples, each of which divides into the microbatches.
        targets: This rank's targets.
        loss_fn: As for `train_step`: it returns a loss of the form that the plan's `loss` states,
            or (sum, count).

    Returns:
        The loss over the samples or tokens of all ranks, equal on all of them: the mean, or the sum
        under `loss: sum`. It is 0 if nothing counts.

    Raises:
        ApplyError: The batches of ranks along tp, pp or cp differ, the samples do not divide into
            microbatches, or the loss has another form.
    """
    state = applied(model)
    plan = state.plan
    check_batches_agree((inputs, targets), plan, state.mesh, state.history.steps + 1)
    count = plan.accumulate
    samples = num_samples((inputs, targets)) / count
    sums = torch.zeros(2, dtype=torch.float64, device=device())
    with torch.no_grad(), evaluation_mode(model), loss_mode(plan):
        for part, target in zip(chunked(inputs, count), chunked(targets, count), strict=True):
            args, kwargs = as_arguments(part)
            given = take_loss(loss_fn, model(*args, **kwargs), target)
            total, counted = _counted(given, target, samples, plan)
            sums += torch.stack([total.double().reshape(()), counted.double().reshape(())])
    if plan.mesh.size(*GRADIENT_AXES) > 1:
        dist.all_reduce(sums, group=submesh(state.mesh, GRADIENT_AXES, flat=True).get_group())
    whole, num = sums.tolist()
    if plan.spec.loss == "sum":
        return whole
    return whole / num if num else 0.0


def _counted(
    given: Any, target: Any, samples: float, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a part's losses, and the number of samples or tokens in it."""
    where = device()
    if isinstance(given, tuple | list):
        total, count = pair_of(given)
        counted = torch.as_tensor(count, device=where)
        return torch.where(counted == 0, torch.zeros_like(total), total).to(where), counted
    if not isinstance(given, torch.Tensor) or given.numel() != 1:
        raise ApplyError(not_a_loss(given))
    counted = torch.tensor(samples, device=where)
    if plan.spec.loss == "sum":
        return given.to(where), counted
    if plan.spec.loss == "tokens":
        tokens = tokens_by_sample(target)
        if tokens is None:
            raise ApplyError(uncounted(target, plan))
        counted = tokens.sum().to(where)
    # The mean over no tokens is NaN.
    total = torch.where(counted == 0, torch.zeros_like(given), given * counted)
    return total.to(where), counted


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and each module back into its own mode afterwards."""
    wholes = [model]
    if isinstance(model, PipelinedModule):
        wholes += [model.skeleton, *model.stage_modules]
    modes = [(module, module.training) for whole in wholes for module in whole.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


@guarded("reduce")
def reduce(value: Value, op: str = "mean", model: nn.Module | None = None) -> Value:
    """Reduce a number over the ranks that have different samples or tokens. All ranks call it.

    These are the ranks along dp_replicate, dp_shard and cp: ranks along tp and pp have the same
    samples, and would count them again.

    Args:
        value: A number or a tensor, of the same shape and dtype on every rank.
        op: "mean", "sum", "max" or "min". The mean is that of the ranks' values: use
            `global_mean`, or two sums, if they cover unequal numbers of samples.
        model: The module that `parallelize` returned; None for the one that ran last.

    Returns:
        The same kind of value, equal on these ranks.

    Raises:
        ApplyError: There is no such op, or no plan was applied to a model.

    Example:
        >>> hits = meshplan.reduce((logits.argmax(-1) == labels).sum(), "sum")
    """
    if op not in OPS:
        what = f"there is no reduction {op!r}"
        raise ApplyError(Problem(what, fix=f"use one of {', '.join(OPS)}"))
    if isinstance(value, DTensor):
        what = "reduce was given a DTensor, which belongs to several ranks already"
        raise ApplyError(Problem(what, fix="call .full_tensor() first"))
    found = find_model(model, "reduce")
    out = torch.as_tensor(value).detach().to(device(), copy=True)
    if not isinstance(value, torch.Tensor) or (op == "mean" and not out.is_floating_point()):
        out = out.double()
    ranks = found.plan.mesh.size(*GRADIENT_AXES)
    if ranks > 1:
        group = submesh(found.mesh, GRADIENT_AXES, flat=True).get_group()
        dist.all_reduce(out, OPS[op], group=group)
    if op == "mean":
        out = out / ranks
    return out if isinstance(value, torch.Tensor) else out.item()
