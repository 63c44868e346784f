"""`gather_batch`: the samples of all data ranks, for what looks at more than one of them."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshplan.errors import ApplyError, Problem
from meshplan.mesh import DATA_AXES
from meshplan.runtime.loss_weights import num_parts
from meshplan.runtime.mesh import gather_into, scatter_sum, submesh
from meshplan.runtime.parallel_models import ParallelModel, known_models
from meshplan.runtime.pretend import is_pretending
from meshplan.runtime.private_fakes import is_fake

num_gathered = 0
"""Calls that have gathered something."""


def gather_batch(tensor: torch.Tensor, model: nn.Module | None = None) -> torch.Tensor:
    """The samples that all data ranks hold, in their order, differentiable.

    For what compares samples with one another: in-batch negatives, statistics of a batch. Call it
    in the model's forward or in the loss function, and compute the rest on every rank alike. With
    the averages that the wrappers take, gradients are those of one process.

    Args:
        tensor: This rank's samples, along dim 0; of one shape and dtype on all data ranks.
        model: What `parallelize` returned; the one that ran last by default.

    Returns:
        The samples of all data ranks along dim 0. Without other ranks the tensor itself.

    Raises:
        ApplyError: No plan was applied to a model, samples differ in shape, a step has several
            microbatches, or stages of a pipeline call it in their forward.
    """
    if is_pretending() or is_fake(tensor) or not dist.is_initialized():
        return tensor
    if dist.get_world_size() == 1:
        return tensor
    found = _find(model)
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
        out = _Gather.apply(out, group)
    return out


def _find(model: nn.Module | None) -> ParallelModel:
    models = [each for each in known_models() if model is None or each.model() is model]
    if not models:
        raise ApplyError(
            Problem(
                "gather_batch was called on one rank of several, and no plan was applied to "
                f"{'a model' if model is None else 'this model'}: nothing says which ranks hold "
                "other samples",
                fix="call meshplan.parallelize first",
            )
        )
    return models[-1]


def _check_place(tensor: torch.Tensor, found: ParallelModel) -> None:
    if isinstance(tensor, DTensor) or not tensor.ndim:
        what = "a DTensor" if isinstance(tensor, DTensor) else "a tensor without dims"
        fix = "call .full_tensor() first" if isinstance(tensor, DTensor) else "keep dim 0, samples"
        raise ApplyError(Problem(f"gather_batch was given {what}", fix=fix))
    if found.runs_stage:
        raise ApplyError(
            Problem(
                "gather_batch was called in the forward of a pipelined model, of which each rank "
                "runs some stages only",
                found.plan.spec.origin("mesh.pp"),
                "return the tensor from the model and call gather_batch in the loss function",
            )
        )
    stages = found.plan.assignment.stages
    microbatches = found.plan.accumulate * (stages.microbatches if stages is not None else 1)
    if microbatches > 1 and torch.is_grad_enabled() and not found.plan.spec.batch.per_rank:
        raise ApplyError(
            Problem(
                f"gather_batch sees one of the {microbatches} microbatches of a step, "
                f"and not all {num_parts(found.plan)} parts of the global batch",
                found.plan.spec.origin("batch.accumulate"),
                "take the batch in one microbatch; or say batch: {per_rank: true}, where "
                "each microbatch is meant to stand alone",
            )
        )


def _check_shape(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Refuse what a gather would mix up; every rank of the group comes to the same answer."""
    words = f"{tuple(tensor.shape)} {tensor.dtype}"
    number = zlib.crc32(words.encode())
    both = torch.tensor([number, -number], device=tensor.device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    high, low = both.tolist()
    if high == -low:
        return
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (dist.get_rank(), words), group=group)
    rank, own = told[0]
    other, others = next(each for each in told if each[1] != own)
    raise ApplyError(
        Problem(
            f"gather_batch was given {own} on rank {rank} and {others} on rank {other}",
            fix="give all data ranks equally many samples, padded to one size",
        )
    )


class _Gather(torch.autograd.Function):
    """All ranks' parts along dim 0.

    Each rank's loss depends on every part, and what the wrappers average is the derivative of the
    sum of all losses divided by the number of ranks: so a part's gradient is the sum of what all
    ranks have for it.
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
