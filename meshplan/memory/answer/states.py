"""Resident state of one rank: parameters, gradients and optimizer state, exact to the byte.

The closed formulas of `textbook.formulas` give the size for an idealised model. This module reads
the layout of every tensor of the actual model, with uneven shards, padding, frozen and tied
parameters. Activations, gathered parameters and communication buffers are not included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from meshplan.assign import Assignment
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.layout import Layout
from meshplan.layout.mesh import UNIT_AXES, Mesh
from meshplan.layout.optimizers import SHAPED_STATES
from meshplan.memory.answer.rank_classes import equal_ranks
from meshplan.shown import shown
from meshplan.spec.spec import OPTIMIZER_STATES

STEP_COUNTERS: Final[Mapping[str, int]] = MappingProxyType(
    {"adamw": 1, "adam": 1, "adamw_fused": 1, "adam_fused": 1, "adagrad": 1, "rmsprop": 1}
)
"""Float32 scalars per parameter in which torch keeps the step count, by optimizer."""

READ_BY_KERNELS: Final = frozenset({"adamw_fused", "adam_fused"})
"""Optimizers whose step counts are on the device; all other optimizers keep them on the host."""


@shown
@dataclass(frozen=True, slots=True)
class StateBytes:
    """Resident bytes of one rank without activations, while gradients exist.

    Attributes:
        parameters_bytes: Bytes of the stored parameters.
        gradients_bytes: Bytes of the reduced gradients.
        optimizer_bytes: Bytes of the optimizer's state.
        buffers_bytes: Bytes of the model's buffers.
        host_bytes: Those of the bytes above that the plan offloads to host memory.

    All sizes are bytes of tensor storage, before any rounding by an allocator.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    host_bytes: int = field(default=0, compare=False)

    @property
    def total_bytes(self) -> int:
        return (
            self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.buffers_bytes
        )


def state_bytes(assignment: Assignment, optimizer: str, rank: int = 0) -> StateBytes:
    """Return the resident bytes of `rank` after the last backward, before the optimizer step.

    Args:
        assignment: The decisions of the plan, with the layout of every tensor.
        optimizer: A name of `spec.OPTIMIZER_STATES` or `optimizers.SHAPED_STATES`. Its state is
            counted as after the first step, in which the optimizer creates it.
        rank: The rank to count for.
    """
    return _sum(_kinds(assignment), assignment.mesh, optimizer, rank)


def state_bytes_by_rank(assignment: Assignment, optimizer: str) -> tuple[StateBytes, ...]:
    """Return `state_bytes` of all ranks in order, computed once for each class of equal ranks."""
    kinds, mesh = _kinds(assignment), assignment.mesh
    by_rank: dict[int, StateBytes] = {}
    for ranks in equal_ranks(assignment):
        by_rank |= dict.fromkeys(ranks, _sum(kinds, mesh, optimizer, ranks[0]))
    return tuple(by_rank[rank] for rank in range(mesh.world_size))


@dataclass(frozen=True, slots=True)
class _TensorKind:
    """The properties on which a tensor's bytes depend; `places` are positions of copies along pp.

    A model has many tensors, but only few kinds.
    """

    shape: tuple[int, ...]
    dtype: str
    stored: Layout
    trainable: bool
    is_buffer: bool
    places: tuple[int, ...]
    on_host: bool


def _kinds(assignment: Assignment) -> Counter[_TensorKind]:
    return Counter(
        _TensorKind(p.info.shape, p.dtype, p.stored, p.info.trainable, p.info.is_buffer,
              _places(assignment, fqn), assignment.is_on_host(p))
        for fqn, p in assignment.tensors.items()
    )  # fmt: skip


def _places(assignment: Assignment, fqn: str) -> tuple[int, ...]:
    """Return the position along pp of each copy of a tensor."""
    stages = assignment.stages
    if stages is None:
        return (0,)
    places = [stages.rank_of(stage) for stage in stages.tensors[fqn]]
    placed = assignment.tensors[fqn]
    # Without a wrapper, the stages on one rank share a parameter as one tensor.
    is_copied = placed.info.is_buffer or placed.stored.axes or assignment.wrapper != "none"
    return tuple(places if is_copied else dict.fromkeys(places))


def _sum(kinds: Mapping[_TensorKind, int], mesh: Mesh, optimizer: str, rank: int) -> StateBytes:
    place = mesh.index(rank, ("pp",))
    parameters = gradients = states = buffers = there = 0
    for kind, tensors in kinds.items():
        if count := tensors * kind.places.count(place):
            one = _of_kind(kind, mesh, optimizer, rank)
            parameters += count * one.parameters_bytes
            gradients += count * one.gradients_bytes
            states += count * one.optimizer_bytes
            buffers += count * one.buffers_bytes
            there += count * one.host_bytes
    return StateBytes(parameters, gradients, states, buffers, there)


def _of_kind(kind: _TensorKind, mesh: Mesh, optimizer: str, rank: int) -> StateBytes:
    """Return the bytes of one tensor of this kind on `rank`."""
    stored = _stored_numel(kind, mesh, rank) * DTYPE_BYTES[kind.dtype]
    if kind.is_buffer:
        return StateBytes(0, 0, 0, stored)
    if not kind.trainable:
        return StateBytes(stored, 0, 0, 0, stored * kind.on_host)
    shaped = SHAPED_STATES.get(optimizer)
    local = kind.stored.local_numel(kind.shape, mesh, rank)
    if shaped:
        kept = shaped(kind.shape, local, DTYPE_BYTES[kind.dtype])
    else:
        kept = OPTIMIZER_STATES.get(optimizer, 0) * local * DTYPE_BYTES[kind.dtype]
        kept += 4 * STEP_COUNTERS.get(optimizer, 0)
    # FSDP2 reduces gradients into padded shards under every strategy. The gradients and states
    # of offloaded parameters are on the host too.
    return StateBytes(stored, stored, kept, 0, (2 * stored + kept) * kind.on_host)


def _stored_numel(kind: _TensorKind, mesh: Mesh, rank: int) -> int:
    """Return the number of stored elements, with padding: FSDP2 pads shards to equal sizes."""
    return kind.stored.padded_numel(kind.shape, mesh, UNIT_AXES, rank)
