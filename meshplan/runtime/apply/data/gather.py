"""`gather_batch` and `global_mean`: values computed from the samples of all data ranks."""

from __future__ import annotations

import math
import zlib
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshplan.errors import ApplyError, Problem
from meshplan.layout.mesh import DATA_AXES, GRADIENT_AXES
from meshplan.runtime.apply.loss.loss_weights import is_weighed, num_parts
from meshplan.runtime.base.fake_mode import is_fake_execution
from meshplan.runtime.base.mesh import extremes, gather_into, gathered, scatter_sum, submesh
from meshplan.runtime.base.parallel_models import ParallelModel, find_model
from meshplan.runtime.torch_private.fakes import is_fake

num_gathered = 0
"""Number of `gather_batch` calls so far that communicated."""


def gather_batch(tensor: torch.Tensor, model: nn.Module | None = None) -> torch.Tensor:
    """Gather the samples of all data ranks, in rank order, differentiably.

    For code that compares samples with one another: in-batch negatives, statistics of a batch. Call
    it in the model's forward or in the loss function, and compute the rest identically on every
    rank. Since the wrappers average gradients over ranks, the gradients equal those of one process.

    Args:
        tensor: This rank's samples along dim 0, of one shape and dtype on all data ranks.
        model: The module that `parallelize` returned; None for the one that ran last.

    Returns:
        The samples of all data ranks along dim 0; `tensor` itself if there is only one.

    Raises:
        ApplyError: No plan was applied to a model, samples differ in shape, a step has several
            microbatches, or stages of a pipeline call it in their forward.
    """
    if is_fake_execution() or is_fake(tensor) or not dist.is_initialized():
        return tensor
    if dist.get_world_size() == 1:
        return tensor
    found = find_model(model, "gather_batch")
    axes = [axis for axis in found.plan.mesh.present(DATA_AXES) if found.plan.mesh.size(axis) > 1]
    _check_place(tensor, found)
    if not axes:
        return tensor
    global num_gathered
    num_gathered += 1
    out = tensor
    for axis in reversed(axes):  # Innermost first: ranks count through the last axis fastest.
        group = submesh(found.mesh, (axis,)).get_group()
        _check_shape(out, group)
        out = _GatherBatch.apply(out, group)
    return out


def global_mean(
    total: torch.Tensor, count: float | torch.Tensor, model: nn.Module | None = None
) -> torch.Tensor:
    """Return the mean loss of the global batch, from the sum and the count of every rank.

    For training loops written by hand whose losses cover unequal numbers of tokens, where the mean
    of the ranks' means is not the global mean. The backward gives the gradients of one process:
    wrappers average gradients over the ranks of dp_replicate, dp_shard and cp, so the gradient of
    `total` is that number of ranks divided by the sum of all counts. In `train_step` a loss
    function returns (sum, count) instead.

    Args:
        total: The sum over this rank's tokens or samples: one element.
        count: The number of tokens or samples in `total`: a number or a tensor of one element.
            If a step accumulates gradients over microbatches, which this function cannot know,
            pass in each call the count over all microbatches of the step, and add the results up.
        model: The module that `parallelize` returned; None for the one that ran last.

    Returns:
        The mean, shape (), in float32 at least, the same number on every rank; 0 with gradients of
        zero if nothing was counted. Every rank must call it equally often.

    Raises:
        ApplyError: The call is inside `train_step` or for a model in pipeline stages, no plan was
            applied to a model, `total` or `count` is more than one number, or the counts add up to
            a negative number.

    Example:
        >>> logits = model(tokens).flatten(0, 1)
        >>> total = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        >>> meshplan.global_mean(total, (targets != -100).sum()).backward()
    """
    _check_terms(total, count)
    if is_weighed():
        fix = "return (sum, count) from the loss function, or set loss: tokens in the plan"
        what = "global_mean was called inside train_step, which averages over the ranks itself"
        raise ApplyError(Problem(what, fix=fix))
    if is_fake(total):
        return total.reshape(()).to(torch.promote_types(total.dtype, torch.float32))
    terms = [total.detach().reshape(()), torch.as_tensor(count, device=total.device).reshape(())]
    sums = torch.stack([each.double() for each in terms])
    ranks = 1
    if not is_fake_execution() and dist.is_initialized() and dist.get_world_size() > 1:
        found = find_model(model, "global_mean")
        ranks = found.plan.mesh.size(*GRADIENT_AXES)
        if found.plan.assignment.stages is not None:
            raise ApplyError(
                Problem(
                    "global_mean does not support pipelined models, where only the last stage has "
                    "a loss",
                    found.plan.spec.origin("mesh.pp"),
                    "train with train_step, whose loss function may return (sum, count)",
                )
            )
        if ranks > 1:
            dist.all_reduce(sums, group=submesh(found.mesh, GRADIENT_AXES, flat=True).get_group())
    whole, num = sums.tolist()
    if not math.isfinite(num) or num < 0:
        what = f"the counts given to global_mean add up to {num:g}"
        raise ApplyError(Problem(what, fix="pass the number of tokens or samples that were summed"))
    mean: torch.Tensor = _Mean.apply(total, whole, num, ranks)
    return mean


class _Mean(torch.autograd.Function):
    """The sum over all ranks divided by the count over all ranks; 0 if the count is 0.

    Backward multiplies by the number of ranks, so that FSDP2's or DDP's average over ranks is the
    derivative of the mean.
    """

    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, whole: float, num: float, ranks: int
    ) -> torch.Tensor:
        """Shape: one element -> ()."""
        ctx.shape, ctx.dtype, ctx.factor = total.shape, total.dtype, ranks / num if num else 0.0
        dtype = torch.promote_types(total.dtype, torch.float32)
        return total.new_full((), whole / num if num else 0.0, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part = (gradient * ctx.factor).to(ctx.dtype).reshape(ctx.shape)
        return part, None, None, None


def _check_terms(total: Any, count: Any) -> None:
    """Raise an ApplyError unless the arguments are a scalar sum and a scalar count."""
    is_number = isinstance(count, Real) and not isinstance(count, bool)
    is_scalar = isinstance(count, torch.Tensor) and count.numel() == 1
    what = fix = ""
    if isinstance(total, DTensor) or isinstance(count, DTensor):
        what, fix = "a DTensor", "call .full_tensor() first"
    elif not isinstance(total, torch.Tensor) or not total.is_floating_point():
        what, fix = "a sum that is not a floating-point tensor", "pass the summed loss"
    elif total.numel() != 1:
        what = f"a sum of shape {list(total.shape)}"
        fix = "sum the losses first: losses.sum()"
    elif not is_number and not is_scalar:
        what = "a count that is not one number"
        fix = "pass the number of tokens or samples that were summed"
    if what:
        raise ApplyError(Problem(f"global_mean was given {what}", fix=fix))


def _check_place(tensor: torch.Tensor, found: ParallelModel) -> None:
    if isinstance(tensor, DTensor) or not tensor.ndim:
        what = "a DTensor" if isinstance(tensor, DTensor) else "a tensor without dims"
        fix = (
            "call .full_tensor() first" if isinstance(tensor, DTensor) else "keep samples in dim 0"
        )
        raise ApplyError(Problem(f"gather_batch was given {what}", fix=fix))
    if found.runs_stage:
        raise ApplyError(
            Problem(
                "gather_batch was called in the forward of a pipelined model, where each rank "
                "runs only some stages",
                found.plan.spec.origin("mesh.pp"),
                "return the tensor from the model and call gather_batch in the loss function",
            )
        )
    stages = found.plan.assignment.stages
    microbatches = found.plan.accumulate * (stages.microbatches if stages is not None else 1)
    if microbatches > 1 and torch.is_grad_enabled() and not found.plan.spec.batch.per_rank:
        raise ApplyError(
            Problem(
                f"gather_batch sees only one of the {microbatches} microbatches of a step, "
                f"not all {num_parts(found.plan)} microbatches of the global batch",
                found.plan.spec.origin("batch.accumulate"),
                "run the batch as one microbatch, or set batch: {per_rank: true} if each "
                "microbatch is meant to stand alone",
            )
        )


def _check_shape(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Raise an ApplyError if shapes or dtypes differ between ranks of the group.

    The result is all-reduced, so that either every rank of the group raises or none does.
    """
    words = f"{tuple(tensor.shape)} {tensor.dtype}"
    number = zlib.crc32(words.encode())
    low, high = extremes(torch.tensor(number, device=tensor.device), group)
    if low == high:
        return
    shapes = gathered((dist.get_rank(), words), group)
    rank, own = shapes[0]
    other, others = next(each for each in shapes if each[1] != own)
    raise ApplyError(
        Problem(
            f"gather_batch was given {own} on rank {rank} and {others} on rank {other}",
            fix="give all data ranks the same number of samples, padded to the same shape",
        )
    )


class _GatherBatch(torch.autograd.Function):
    """The samples of all ranks of a group, concatenated along dim 0.

    Each rank's loss depends on the samples of every rank, and FSDP2 or DDP computes the derivative
    of the sum of all losses divided by the number of ranks. The gradient of a rank's own samples is
    therefore the sum of the gradients that all ranks compute for these samples.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Shape: (samples, ...) -> (ranks * samples, ...)."""
        ctx.group, ctx.shape = group, tensor.shape
        every = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
        gather_into(every, tensor, group)
        return every.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        part = gradient.new_empty(ctx.shape)
        every = gradient.reshape(dist.get_world_size(ctx.group), *ctx.shape)
        scatter_sum(part, every, ctx.group)
        return part, None
