"""Bytes of state that a rank keeps in memory: the storages of its live tensors, each once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from meshplan.memory import StateBytes
from meshplan.runtime.base.mesh import local_of


def live_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateBytes:
    """Return the bytes of state on this rank, to compare with `memory.state_bytes`.

    Call it between steps, when no unit is gathered.

    A storage shared by several tensors, such as the shards of one reduced gradient, counts once,
    in the first category that contains it.

    Units: bytes of tensor storage, before any rounding by an allocator.
    """
    seen: set[int] = set()
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return StateBytes(
        parameters_bytes=_storage_bytes(parameters, seen),
        gradients_bytes=_storage_bytes(gradients, seen),
        optimizer_bytes=_storage_bytes(_tensors(optimizer.state), seen),
        buffers_bytes=_storage_bytes(model.buffers(), seen),
    )


def _storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = local_of(tensor.detach()).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _tensors(state: Any) -> Iterable[torch.Tensor]:
    return (
        value
        for of_parameter in state.values()
        for value in of_parameter.values()
        if isinstance(value, torch.Tensor)
    )
