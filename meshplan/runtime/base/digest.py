"""Numbers that show whether ranks have the same batch, without sending the batch itself."""

from __future__ import annotations

import zlib
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from meshplan.runtime.base.pytree import tensors_in

_SAMPLED: Final = 1024
"""Elements of a tensor that are read in every step."""
_PIECE: Final = 1 << 22
"""Bytes of a tensor on a device that are added up at a time."""
_SUMMED: Final = 1 << 18
"""Elements that a checksum processes at a time: 2 MiB of int64 on top of a forward's memory."""
_MARK: Final = "meshplan_whole"
"""Attribute on a rank's part that identifies the global batch it was cut from, 0 if unknown."""


def digest(batch: Any, *, is_whole: bool) -> tuple[int, torch.Tensor | None]:
    """Return a number for the contents of a batch.

    Args:
        batch: Any pytree of tensors.
        is_whole: If True, every element counts; else some, evenly spread over each tensor.

    Returns:
        A CRC of the tensors on the CPU, and a scalar int64 tensor for those on a device (None if
        there are none), which stays on the device.
    """
    here, there = 0, None
    for _, tensor in tensors_in(batch):
        found = elements(tensor, is_whole=is_whole)
        if found is None:
            continue
        if found.device.type == "cpu":
            here = zlib.crc32(memoryview(found.numpy()), here)
        else:
            added = _added_up(found)
            there = added if there is None else there * 31 + added
    return here, there


def elements(tensor: torch.Tensor, *, is_whole: bool) -> torch.Tensor | None:
    """Return the bytes of a tensor, in order; None if it is not strided, is nested or on meta."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if own.layout != torch.strided or own.is_nested or own.is_meta:
        return None
    flat = own.detach().reshape(-1)
    step = 1 if is_whole else max(1, flat.numel() // _SAMPLED)
    return flat[::step].contiguous().view(torch.uint8)


def _added_up(data: torch.Tensor) -> torch.Tensor:
    """Return an order-dependent sum of bytes, below 2**40.

    Shape: data (bytes,) -> ()
    """
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for piece in data.split(_PIECE):
        # Weights are odd and differ from their neighbours', so that swapping two elements shows.
        weights = torch.arange(len(piece), device=data.device) * 2654435761 % 65521 * 2 + 1
        total = total * 31 + (piece.long() * weights).sum()
    return total % (1 << 40)


def mark(part: torch.Tensor, whole: int | None) -> torch.Tensor:
    """Mark a tensor as a part of a global batch; `whole` identifies the batch, None if unknown."""
    setattr(part, _MARK, whole or 0)
    return part


def is_marked(batch: Any) -> bool:
    """Return True if `local_batch` has cut any tensor of this batch."""
    return any(hasattr(tensor, _MARK) for _, tensor in tensors_in(batch))


def marks(batch: Any) -> int:
    """Return a number for the global batches that the tensors of this batch were cut from."""
    told = [getattr(tensor, _MARK, 0) for _, tensor in tensors_in(batch)]
    return zlib.crc32(repr(told).encode())


def checksum(tensor: torch.Tensor) -> int:
    """Return a sum of the tensor's bits, weighted by position so that a permutation shows.

    The sum runs over segments, because a large embedding does not fit in memory a second time
    as int64.
    """
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if bits.numel() % 4 == 0:
        bits = bits.view(torch.int32)
    total = 0
    for piece in bits.split(_SUMMED):
        weight = torch.arange(1, piece.numel() + 1, device=piece.device)
        # Overflow wraps around, in the same way on every rank.
        total = (total * 1_000_003 + int((piece * weight).sum())) % 2**62
    return total
