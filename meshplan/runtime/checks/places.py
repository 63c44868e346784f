"""Where a model's tensors hang, and what tells that one of them was written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshplan.plan.plan import Plan
from meshplan.runtime.base.digest import checksum
from meshplan.runtime.base.mesh import local_of

_ROUNDING: Final = 1e-4
"""Relative difference that repeating a normalisation makes at most; other samples make more."""
_SAMPLES: Final = 1024


class TensorPlace(NamedTuple):
    """Where a parameter or a buffer hangs; units hang other objects there while they compute."""

    name: str
    owner: nn.Module
    table: dict[str, Any]
    leaf: str
    is_buffer: bool
    unit: str | None

    @property
    def is_there(self) -> bool:
        """Return whether it holds a tensor; the model's code may set a buffer to None."""
        return self.table.get(self.leaf) is not None

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = self.table[self.leaf]
        return found

    @property
    def can_be_swapped(self) -> bool:
        """Return whether another object may hang there during a forward."""
        return self.unit is None and not self.tensor.requires_grad


class TensorSnapshot(NamedTuple):
    """A tensor before a forward.

    Attributes:
        data: The same memory, which `weight.data = ...` leaves to it; None of a DTensor.
        pointer: Where that begins; 0 of a DTensor.
        checksum: Of the contents, where these are compared.
    """

    tensor: torch.Tensor
    data: torch.Tensor | None
    pointer: int
    version: int
    checksum: int | None


class Left(NamedTuple):
    """What the last forward whose contents were looked at left of a written tensor."""

    checksum: int
    sample: torch.Tensor


def places_of(model: nn.Module, plan: Plan) -> Iterator[TensorPlace]:
    """The first name of every tensor that holds numbers."""
    has_units = plan.assignment.wrapper == "units"
    for fqn, placed in plan.assignment.tensors.items():
        path, _, leaf = fqn.rpartition(".")
        owner, is_buffer = model.get_submodule(path), placed.info.is_buffer
        table = owner._buffers if is_buffer else owner._parameters
        if placed.info.numel and leaf in table:
            yield TensorPlace(
                fqn, owner, table, leaf, is_buffer, placed.unit if has_units else None
            )


def goes_on(place: TensorPlace, plan: Plan) -> bool:
    """Return whether a tensor is meant to differ from one microbatch to the next.

    Running statistics, embeddings with `max_norm`, of which each microbatch scales the rows that it
    looks up, and every buffer where the plan lets each rank and microbatch keep its own.
    """
    if place.is_buffer and plan.spec.batch.per_rank:
        return True
    is_norm = place.is_buffer and plan.graph.tracks_statistics(place.name.rpartition(".")[0])
    return is_norm or getattr(place.owner, "max_norm", None) is not None


def marks_of(
    places: Iterable[TensorPlace], has_contents: bool
) -> list[tuple[TensorPlace, TensorSnapshot]]:
    """What is there, each with its mark. In every forward, so it has to be quick."""
    found = ((place, place.table.get(place.leaf)) for place in places)
    return [(place, mark_of(now, has_contents)) for place, now in found if now is not None]


def mark_of(tensor: torch.Tensor, has_contents: bool) -> TensorSnapshot:
    found = checksum(local_of(tensor)) if has_contents else None
    version = 0 if tensor.is_inference() else tensor._version
    if isinstance(tensor, DTensor):  # Whose `.data` would be dispatched, and is not needed.
        return TensorSnapshot(tensor, None, 0, version, found)
    return TensorSnapshot(tensor, tensor.data, tensor.data_ptr(), version, found)


def is_written(now: torch.Tensor, mark: TensorSnapshot) -> bool:
    tensor, data, pointer, version, found = mark
    if now is not tensor or (0 if now.is_inference() else now._version) != version:
        return True
    if data is not None and now.data_ptr() != pointer:
        return True
    return found is not None and checksum(local_of(now)) != found


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = local_of(tensor.detach()).flatten()
    return flat[:: max(1, flat.numel() // _SAMPLES)].clone()


def is_close(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether two tensors are equal but for rounding."""
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    if not now.is_floating_point() or torch.equal(now, before):
        return torch.equal(now, before)
    scale = before.abs().max()
    return bool(((now - before).abs().max() <= _ROUNDING * scale).item())


def frozen(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
