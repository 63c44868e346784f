"""Parts of a sequence: the tokens of each rank, and their exchange between ranks of cp.

The functions `gather_sequence`, `to_heads` and `to_parts` are differentiable: their backward is the
opposite exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshplan.assign import ContextParallel
from meshplan.runtime.base.mesh import gather_into, scatter_sum, submesh


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the sequence along one group of cp.

    Args:
        context: The assignment of chunks to ranks.
        group: The ranks that hold the parts.
        rank: This rank's position in the group.
        size: Number of ranks in the group.
    """

    context: ContextParallel
    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, context: ContextParallel, mesh: DeviceMesh) -> Parts:
        """Return the parts of the sequence along the cp axis of a live mesh."""
        cp = submesh(mesh, ("cp",))
        return cls(context, cp.get_group(), cp.get_local_rank(), cp.size())

    @property
    def num_local_chunks(self) -> int:
        return len(self.context.chunks(self.size, self.rank))

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the positions of this rank's tokens in the whole sequence.

        Args:
            length: Tokens in this rank's part.
            device: Device of the result.

        Shape: (length,).
        """
        whole = torch.arange(length * self.size, device=device)
        return self.cut(whole, 0)

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a whole tensor along `dim`."""
        return self._part(whole, dim, self.rank)

    def _part(self, whole: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        chunks = whole.chunk(self.context.num_chunks(self.size), dim)
        own = [chunks[i] for i in self.context.chunks(self.size, rank)]
        return own[0] if len(own) == 1 else torch.cat(own, dim)

    def stack(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Split a whole tensor along `dim`; stack the parts of all ranks along a new dim 0."""
        return torch.stack([self._part(whole, dim, rank) for rank in range(self.size)])

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Reassemble the whole tensor from the parts of all ranks, given in rank order."""
        by_chunk: dict[int, torch.Tensor] = {}
        for rank, part in enumerate(parts):
            numbers = self.context.chunks(self.size, rank)
            by_chunk |= zip(numbers, part.chunk(len(numbers), dim), strict=True)
        return torch.cat([by_chunk[number] for number in sorted(by_chunk)], dim)

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Gather the whole tensor on every rank; not differentiable."""
        every = part.new_empty((self.size, *part.shape))
        gather_into(every, part, self.group)
        return self.join(every.unbind(0), dim)


class _GatherSequence(torch.autograd.Function):
    """Gather parts along dim -2 on every rank; backward sums gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, parts: Parts) -> torch.Tensor:
        ctx.parts = parts
        return parts.gather(part, -2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts: Parts = ctx.parts
        every = parts.stack(gradient, -2)
        own = torch.empty_like(every[0])
        scatter_sum(own, every, parts.group)
        return own, None


class _ToHeads(torch.autograd.Function):
    """Exchange all heads of a part of the sequence for some heads of the whole sequence."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, parts: Parts) -> torch.Tensor:
        ctx.parts = parts
        return _to_heads(part, parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_parts(gradient, ctx.parts), None


class _ToParts(torch.autograd.Function):
    """Exchange some heads of the whole sequence for all heads of a part of the sequence."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, parts: Parts) -> torch.Tensor:
        ctx.parts = parts
        return _to_parts(whole, parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_heads(gradient, ctx.parts), None


def _to_heads(part: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Send each rank its heads of this part.

    Shape: (..., heads, part, dim) -> (..., heads / ranks, whole, dim).
    """
    received = _exchange(torch.stack(part.chunk(parts.size, -3)), parts)
    return parts.join(received.unbind(0), -2)


def _to_parts(whole: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Send each rank its part of this rank's heads.

    Shape: (..., heads / ranks, whole, dim) -> (..., heads, part, dim).
    """
    received = _exchange(parts.stack(whole, -2), parts)
    return torch.cat(received.unbind(0), -3)


def _exchange(pieces: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Send piece i to rank i; the i-th piece of the result comes from rank i."""
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=parts.group)
    return received


def gather_sequence(part: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Gather the whole sequence (dim -2) on every rank, differentiably."""
    whole: torch.Tensor = _GatherSequence.apply(part, parts)
    return whole


def to_heads(part: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Exchange all heads of a part of the sequence for some heads of the whole, differentiably.

    Shape: (..., heads, part, dim) -> (..., heads / ranks, whole, dim).
    """
    out: torch.Tensor = _ToHeads.apply(part, parts)
    return out


def to_parts(whole: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Exchange some heads of the whole sequence for all heads of a part, differentiably.

    Shape: (..., heads / ranks, whole, dim) -> (..., heads, part, dim).
    """
    out: torch.Tensor = _ToParts.apply(whole, parts)
    return out
