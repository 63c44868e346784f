"""Numbers that show whether ranks have the same batch, without sending the batch itself."""

from __future__ import annotations

import zlib
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from meshplan.runtime.base.pytree import tensors_in

_SAMPLED: Final = 1024
"""About how many elements of a tensor `digest` reads if `is_whole` is False."""
_PIECE: Final = 1 << 22
"""Bytes that `_added_up` processes at a time, to bound its temporary int64 tensors."""
_SUMMED: Final = 1 << 18
"""Elements that `checksum` processes at a time: as int64 they take 2 MiB of device memory."""
_MARK: Final = "meshplan_whole"
"""Name of the attribute that `local_batch` sets on a tensor it cuts: a number that identifies the
global batch, 0 if unknown."""


def digest(batch: Any, *, is_whole: bool) -> tuple[int, torch.Tensor | None]:
    """Return two numbers that depend on the contents of a batch.

    Args:
        batch: Any pytree of tensors.
        is_whole: If True, every element counts; else about 1024, evenly spread over each tensor.

    Returns:
        A CRC of the tensors on the CPU, and a checksum of those on an accelerator: a scalar int64
        tensor that stays there, so that nothing waits for the device; None without such tensors.
    """
    here, there = 0, None
    for _, tensor in tensors_in(batch):
        found = elements(tensor, is_whole=is_whole)
        if found is None:
            continue
        if _is_on_host(found):
            here = zlib.crc32(memoryview(found.numpy()), here)
        else:
            added = _added_up(found)
            there = added if there is None else there * 31 + added
    return here, there


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def elements(tensor: torch.Tensor, *, is_whole: bool) -> torch.Tensor | None:
    """Return the bytes of a tensor's elements, in order; None for a tensor without readable bytes.

    Such a tensor is not strided, is nested, or is on the meta device. With `is_whole` False, about
    1024 evenly spread elements are read in place of all.

    Shape: (bytes,), uint8
    """
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
    """Mark a tensor as a part of a global batch, and return it.

    Args:
        part: The tensor that was cut from the global batch.
        whole: Number that identifies the global batch; None if unknown.
    """
    setattr(part, _MARK, whole or 0)
    return part


def is_marked(batch: Any) -> bool:
    """Return True if `local_batch` has cut any tensor of this batch."""
    return any(hasattr(tensor, _MARK) for _, tensor in tensors_in(batch))


def marks(batch: Any) -> int:
    """Return a number that identifies the global batches from which the tensors were cut."""
    ids = [getattr(tensor, _MARK, 0) for _, tensor in tensors_in(batch)]
    return zlib.crc32(repr(ids).encode())


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the tensor's bits, which depends on the order of the elements.

    It is computed in segments, because the memory may not suffice for an int64 copy of a large
    embedding.
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
