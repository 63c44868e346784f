"""The places where modules keep their tensors, and snapshots that show if one was written."""

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
"""Largest difference, relative to the largest element, that counts as rounding. Normalising a
tensor twice differs by less, and values computed from other samples differ by more."""
_SAMPLES: Final = 1024


class TensorPlace(NamedTuple):
    """The entry of a parameter or buffer in the dicts of its module.

    The entry stays while the tensor in it changes: FSDP2 puts a gathered parameter there while a
    unit computes.

    Attributes:
        name: The fqn of the tensor.
        owner: The module that directly contains the tensor.
        table: The owner's dict `_parameters` or `_buffers`.
        leaf: Key of the tensor in `table`, the last part of its fqn.
        is_buffer: True for a buffer, False for a parameter.
        unit: Fqn of the FSDP unit that gathers the tensor; None if no unit does.
    """

    name: str
    owner: nn.Module
    table: dict[str, Any]
    leaf: str
    is_buffer: bool
    unit: str | None

    @property
    def exists(self) -> bool:
        """True if the entry has a tensor; the model's code may have set a buffer to None."""
        return self.table.get(self.leaf) is not None

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = self.table[self.leaf]
        return found

    @property
    def can_be_swapped(self) -> bool:
        """True if another tensor object may replace this one during a forward.

        A gathered parameter is excluded, because its unit keeps a reference to it, and so is a
        tensor that requires a gradient, because autograd would write the gradient elsewhere.
        """
        return self.unit is None and not self.tensor.requires_grad


class TensorSnapshot(NamedTuple):
    """The state of a tensor before a forward.

    Attributes:
        tensor: The tensor itself.
        data: `tensor.data` before the forward: it keeps the old memory if the forward assigns
            `weight.data = ...`. None for a DTensor.
        pointer: Address of the tensor's memory before the forward; 0 for a DTensor.
        version: In-place version counter of the tensor (`Tensor._version`).
        checksum: Checksum of this rank's values; None in a step that does not compare values.
    """

    tensor: torch.Tensor
    data: torch.Tensor | None
    pointer: int
    version: int
    checksum: int | None


class Left(NamedTuple):
    """The values that a forward left in a tensor it wrote, in the last step that compared values.

    Attributes:
        checksum: Checksum of all of this rank's values.
        sample: About 1024 of these values, evenly spread, in one dim.
    """

    checksum: int
    sample: torch.Tensor


def places_of(model: nn.Module, plan: Plan) -> Iterator[TensorPlace]:
    """Yield the place of every parameter and buffer of this rank that has elements.

    A tensor that several modules share has one place, that of its first name.
    """
    has_units = plan.assignment.wrapper == "units"
    for fqn, placed in plan.assignment.tensors.items():
        path, _, leaf = fqn.rpartition(".")
        owner, is_buffer = model.get_submodule(path), placed.info.is_buffer
        table = owner._buffers if is_buffer else owner._parameters
        if placed.info.numel and leaf in table:
            yield TensorPlace(
                fqn, owner, table, leaf, is_buffer, placed.unit if has_units else None
            )


def changes_every_microbatch(place: TensorPlace, plan: Plan) -> bool:
    """Return True if a tensor carries its values over from one microbatch to the next.

    This holds for running statistics of norms, for embeddings with `max_norm`, where each
    microbatch scales the rows that it looks up, and for every buffer if the plan sets
    `batch: {per_rank: true}`.
    """
    if place.is_buffer and plan.spec.batch.per_rank:
        return True
    is_norm = place.is_buffer and plan.graph.tracks_statistics(place.name.rpartition(".")[0])
    return is_norm or getattr(place.owner, "max_norm", None) is not None


def snapshots_of(
    places: Iterable[TensorPlace], has_contents: bool
) -> list[tuple[TensorPlace, TensorSnapshot]]:
    """Return (place, snapshot of its tensor) for each place that has a tensor.

    This runs before every forward, so it must be fast.

    Args:
        places: The places to look at.
        has_contents: If True, the snapshots have checksums of the values, which is slow.
    """
    found = ((place, place.table.get(place.leaf)) for place in places)
    return [(place, snapshot_of(now, has_contents)) for place, now in found if now is not None]


def snapshot_of(tensor: torch.Tensor, has_contents: bool) -> TensorSnapshot:
    found = checksum(local_of(tensor)) if has_contents else None
    version = 0 if tensor.is_inference() else tensor._version
    if isinstance(tensor, DTensor):  # `.data` of a DTensor would go through dispatch for nothing.
        return TensorSnapshot(tensor, None, 0, version, found)
    return TensorSnapshot(tensor, tensor.data, tensor.data_ptr(), version, found)


def is_written(now: torch.Tensor, snapshot: TensorSnapshot) -> bool:
    tensor, data, pointer, version, found = snapshot
    if now is not tensor or (0 if now.is_inference() else now._version) != version:
        return True
    if data is not None and now.data_ptr() != pointer:
        return True
    return found is not None and checksum(local_of(now)) != found


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = local_of(tensor.detach()).flatten()
    return flat[:: max(1, flat.numel() // _SAMPLES)].clone()


def is_close(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Return True if two tensors are equal up to rounding, in shape and dtype too.

    Tensors that are not of a floating-point dtype must be exactly equal.
    """
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    if not now.is_floating_point() or torch.equal(now, before):
        return torch.equal(now, before)
    scale = before.abs().max()
    return bool(((now - before).abs().max() <= _ROUNDING * scale).item())


def frozen(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
