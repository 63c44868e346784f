"""Changes of an activation's layout over tp on local tensors, with those of its gradient.

DTensor's `redistribute` calls the same collectives, but a DTensor costs the host several times as
much as the tensor inside it, operator by operator. DTensors are for parameters, which their
optimizer and checkpoints take in a known layout, and for modules of unknown code.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3, operators f and g; Korthikanti et al. 2022,
section 4.2, for those of sequence parallelism.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshplan.runtime.torch_private.ops import as_dtensor, below_autograd


class Redistribution(NamedTuple):
    """A change of layout on one mesh axis, forward and backward.

    Attributes:
        old: Layout of the input.
        new: Layout of the result.
        new_gradient: Layout of the result's gradient.
        old_gradient: Layout that the input's gradient must have.
    """

    old: Placement
    new: Placement
    new_gradient: Placement
    old_gradient: Placement

    @property
    def is_nothing(self) -> bool:
        """True if neither the tensor nor its gradient changes."""
        return self.old == self.new and self.new_gradient == self.old_gradient

    @property
    def is_known(self) -> bool:
        """True if `redistributed` can do it: shards of one dim do not become shards of another."""
        pairs = (self[:2], self[2:])
        return all(a == b or not (isinstance(a, Shard) and isinstance(b, Shard)) for a, b in pairs)

    @property
    def backward(self) -> Redistribution:
        """The redistribution of the gradients."""
        return Redistribution(self.new_gradient, self.old_gradient, self.old, self.new)


def redistributed(x: torch.Tensor, tp: DeviceMesh, change: Redistribution) -> torch.Tensor:
    """Return this rank's part of a tensor in another layout.

    Args:
        x: This rank's part of the tensor. Its shards are of equal sizes.
        tp: The mesh of tp, of one axis.
        change: The change, for which `is_known` holds.
    """
    if change.is_nothing:
        return x
    if torch.compiler.is_compiling():  # torch.compile traces DTensor, and pays for it once.
        laid = as_dtensor(x, tp, change.old, change.old_gradient)
        if change.old != change.new:
            laid = laid.redistribute(placements=[change.new])
        return laid.to_local(grad_placements=[change.new_gradient])
    changed: torch.Tensor = _Redistribute.apply(x, tp, change)
    return changed


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: DeviceMesh, change: Redistribution) -> torch.Tensor:
        ctx.tp, ctx.change = tp, change
        with below_autograd():  # Their own rules of autograd, in Python, would only cost time.
            return _changed(x, tp.get_group(), change.old, change.new)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return redistributed(gradient, ctx.tp, ctx.change.backward), None, None


def _changed(
    x: torch.Tensor, tp: dist.ProcessGroup, old: Placement, new: Placement
) -> torch.Tensor:
    """Return a new tensor, or a view if only the gradient's layout changes.

    Private, because torch has no public collective that returns a new tensor, which selective
    activation checkpointing can keep. torch 2.13 renamed two of them.
    """
    if old == new:
        return x.view_as(x)
    if isinstance(new, Shard):
        dim = new.dim % x.ndim
        if isinstance(old, Replicate):
            return x.chunk(tp.size(), dim)[tp.rank()].clone()
        scatter = (
            getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
        )
        return _waited(scatter(x.contiguous(), "sum", dim, tp))
    if isinstance(old, Shard):
        gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
        return _waited(gather(x.contiguous(), old.dim % x.ndim, tp))
    if isinstance(old, Partial):
        # The operators themselves: the function around them makes a tensor that waits at its use.
        total = torch.ops._c10d_functional.all_reduce.default(x, "sum", tp.group_name)
        waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor.default(total)
        return waited
    return x / tp.size()


def _waited(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x


def local_part(parameter: DTensor, gradient: Placement | None = None) -> torch.Tensor:
    """Return this rank's part of a parameter on a mesh of one axis, as `DTensor.to_local` does.

    Its backward makes the gradient's DTensor from the parameter's own layout, where torch computes
    that layout anew from the sizes of the shards.

    Args:
        parameter: The parameter.
        gradient: Placement of the part's gradient; None for that of the parameter.
    """
    if torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=None if gradient is None else [gradient])
    part: torch.Tensor = _LocalPart.apply(parameter, gradient)
    return part


class _LocalPart(torch.autograd.Function):
    """Private, because a DTensor's layout, its local tensor and its constructor are."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, gradient: Placement | None) -> torch.Tensor:
        local, ctx.layout = parameter._local_tensor, parameter._spec
        ctx.stride = local.stride()
        ctx.placements = parameter.placements if gradient is None else (gradient,)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[DTensor, None]:
        layout = ctx.layout
        is_alike = gradient.stride() == ctx.stride and ctx.placements == layout.placements
        if is_alike and not torch.is_grad_enabled():
            new: Any = DTensor
            return new(gradient, copy(layout), requires_grad=False), None
        laid = DTensor.from_local(
            gradient.contiguous(), layout.mesh, ctx.placements, run_check=False,
            shape=layout.shape, stride=torch.empty(layout.shape, device="meta").stride(),
        )  # fmt: skip
        return laid, None
