"""Parts of a sequence: where each lies, and how ranks of cp exchange them.

Every exchange is an autograd function whose backward is the opposite exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshplan.assign import ContextParallel
from meshplan.runtime.base.mesh import gather_into, scatter_sum


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the sequence along one group of cp.

    Args:
        context: Which chunks each rank holds.
        group: The ranks that hold the parts.
        rank: This rank's place in the group.
        size: How many ranks it has.
    """

    context: ContextParallel
    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def num_local_chunks(self) -> int:
        return len(self.context.chunks(self.size, self.rank))

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Where the tokens of this rank stand in the whole sequence.

        Args:
            length: Of this rank's part.
        """
        whole = torch.arange(length * self.size, device=device)
        return self.cut(whole, 0)

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of something whole."""
        return self._part(whole, dim, self.rank)

    def _part(self, whole: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        chunks = whole.chunk(self.context.num_chunks(self.size), dim)
        own = [chunks[i] for i in self.context.chunks(self.size, rank)]
        return own[0] if len(own) == 1 else torch.cat(own, dim)

    def stack(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """The parts of every rank, stacked along a new dim 0."""
        return torch.stack([self._part(whole, dim, rank) for rank in range(self.size)])

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The whole from the parts of every rank."""
        by_chunk: dict[int, torch.Tensor] = {}
        for rank, part in enumerate(parts):
            numbers = self.context.chunks(self.size, rank)
            by_chunk |= zip(numbers, part.chunk(len(numbers), dim), strict=True)
        return torch.cat([by_chunk[number] for number in sorted(by_chunk)], dim)

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole, on every rank; without gradient."""
        every = part.new_empty((self.size, *part.shape))
        gather_into(every, part, self.group)
        return self.join(every.unbind(0), dim)


class _GatherSequence(torch.autograd.Function):
    """Parts along dim -2 to the whole on every rank; the gradients of the whole are added up."""

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
    """A part of the sequence of all heads to the whole sequence of a part of the heads."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, parts: Parts) -> torch.Tensor:
        ctx.parts = parts
        return _to_heads(part, parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_parts(gradient, ctx.parts), None


class _ToParts(torch.autograd.Function):
    """The whole sequence of a part of the heads to a part of the sequence of all heads."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, parts: Parts) -> torch.Tensor:
        ctx.parts = parts
        return _to_parts(whole, parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_heads(gradient, ctx.parts), None


def _to_heads(part: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Shape: (..., heads, part, dim) -> (..., heads / ranks, whole, dim)."""
    received = _exchange(torch.stack(part.chunk(parts.size, -3)), parts)
    return parts.join(received.unbind(0), -2)


def _to_parts(whole: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Shape: (..., heads / ranks, whole, dim) -> (..., heads, part, dim)."""
    received = _exchange(parts.stack(whole, -2), parts)
    return torch.cat(received.unbind(0), -3)


def _exchange(pieces: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Piece i of this rank goes to rank i; the i-th received is from rank i."""
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=parts.group)
    return received


def gather_sequence(part: torch.Tensor, parts: Parts) -> torch.Tensor:
    """The whole sequence (dim -2) on every rank, with gradient."""
    whole: torch.Tensor = _GatherSequence.apply(part, parts)
    return whole


def to_heads(part: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Exchange a part of the sequence for a part of the heads, with gradient."""
    out: torch.Tensor = _ToHeads.apply(part, parts)
    return out


def to_parts(whole: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Exchange a part of the heads for a part of the sequence, with gradient."""
    out: torch.Tensor = _ToParts.apply(whole, parts)
    return out
