"""Places of a model's tensors, and snapshots that show whether a tensor was written."""

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
"""Largest relative difference from repeating a normalisation; other samples differ by more."""
_SAMPLES: Final = 1024


class TensorPlace(NamedTuple):
    """The place of a parameter or buffer in its module.

    While a unit computes, other objects are in the places of its parameters.

    Attributes:
        name: The fqn of the tensor.
        owner: The module that has it.
        table: The owner's `_parameters` or `_buffers`.
        leaf: Key in `table`.
        is_buffer: True for a buffer, False for a parameter.
        unit: The unit of sharding that gathers the tensor; None if no unit does.
    """

    name: str
    owner: nn.Module
    table: dict[str, Any]
    leaf: str
    is_buffer: bool
    unit: str | None

    @property
    def is_there(self) -> bool:
        """True if there is a tensor; the model's code may set a buffer to None."""
        return self.table.get(self.leaf) is not None

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = self.table[self.leaf]
        return found

    @property
    def can_be_swapped(self) -> bool:
        """True if another object may take the tensor's place during a forward."""
        return self.unit is None and not self.tensor.requires_grad


class TensorSnapshot(NamedTuple):
    """The state of a tensor before a forward.

    Attributes:
        tensor: The tensor itself.
        data: Another tensor on its memory, which `weight.data = ...` leaves alone; None for a
            DTensor.
        pointer: Address of that memory; 0 for a DTensor.
        version: In-place version counter of the tensor.
        checksum: Checksum of the values; None if values are not compared.
    """

    tensor: torch.Tensor
    data: torch.Tensor | None
    pointer: int
    version: int
    checksum: int | None


class Left(NamedTuple):
    """The values that a forward left in a written tensor, at the last comparison of values."""

    checksum: int
    sample: torch.Tensor


def places_of(model: nn.Module, plan: Plan) -> Iterator[TensorPlace]:
    """Yield the place of every tensor that has elements, under its first name."""
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
    """Return True if a tensor is meant to differ from one microbatch to the next.

    This holds for running statistics, for embeddings with `max_norm`, where each microbatch scales
    the rows that it looks up, and for every buffer if the plan sets `batch: {per_rank: true}`.
    """
    if place.is_buffer and plan.spec.batch.per_rank:
        return True
    is_norm = place.is_buffer and plan.graph.tracks_statistics(place.name.rpartition(".")[0])
    return is_norm or getattr(place.owner, "max_norm", None) is not None


def marks_of(
    places: Iterable[TensorPlace], has_contents: bool
) -> list[tuple[TensorPlace, TensorSnapshot]]:
    """Return the places that have a tensor, with snapshots. Must be fast, for every forward."""
    found = ((place, place.table.get(place.leaf)) for place in places)
    return [(place, mark_of(now, has_contents)) for place, now in found if now is not None]


def mark_of(tensor: torch.Tensor, has_contents: bool) -> TensorSnapshot:
    found = checksum(local_of(tensor)) if has_contents else None
    version = 0 if tensor.is_inference() else tensor._version
    if isinstance(tensor, DTensor):  # Its `.data` would be dispatched, and is not needed.
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
    """Return True if two tensors are equal up to rounding."""
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    if not now.is_floating_point() or torch.equal(now, before):
        return torch.equal(now, before)
    scale = before.abs().max()
    return bool(((now - before).abs().max() <= _ROUNDING * scale).item())


def frozen(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
