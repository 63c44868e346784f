"""Resident state of one rank, exactly: parameters, gradients and optimizer state, from the layouts.

The closed forms of `formulas` say how much an idealised model needs; this reads the layout of
every tensor of the real one, with uneven shards, padding, frozen and tied parameters. It does
not know activations, gathered parameters or communication buffers.
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
from meshplan.spec.spec import OPTIMIZER_STATES

STEP_COUNTERS: Final[Mapping[str, int]] = MappingProxyType(
    {"adamw": 1, "adam": 1, "adamw_fused": 1, "adam_fused": 1, "adagrad": 1, "rmsprop": 1}
)
"""torch keeps the step count of these as one float32 scalar per parameter."""

READ_BY_KERNELS: Final = frozenset({"adamw_fused", "adam_fused"})
"""Whose step counts lie on the device, where others keep them on the host."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that one rank holds between two steps, gradients still there.

    Attributes:
        host_bytes: Of all these, what the plan keeps in the host's memory.

    Units: bytes of tensor storage, before any rounding by an allocator.
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
    """What `rank` holds right after backward of the last microbatch, before the optimizer step.

    Args:
        optimizer: A word of `spec.OPTIMIZER_STATES` or `optimizers.SHAPED_STATES`; its state is
            counted as it is from the second step on.
    """
    return _sum(_kinds(assignment), assignment.mesh, optimizer, rank)


def state_bytes_by_rank(assignment: Assignment, optimizer: str) -> tuple[StateBytes, ...]:
    """`state_bytes` of every rank of the mesh, of which there may be very many."""
    kinds, mesh = _kinds(assignment), assignment.mesh
    by_rank: dict[int, StateBytes] = {}
    for ranks in equal_ranks(assignment):
        by_rank |= dict.fromkeys(ranks, _sum(kinds, mesh, optimizer, ranks[0]))
    return tuple(by_rank[rank] for rank in range(mesh.world_size))


@dataclass(frozen=True, slots=True)
class _TensorKind:
    """What the bytes of a tensor depend on: the hundreds of tensors of a model are of few kinds."""

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
    """Where along pp a tensor lies, once for each copy."""
    stages = assignment.stages
    if stages is None:
        return (0,)
    places = [stages.rank_of(stage) for stage in stages.tensors[fqn]]
    placed = assignment.tensors[fqn]
    # A parameter that nothing wraps is one tensor in all stages of a rank.
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
    """Of one tensor."""
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
    # FSDP2 reduces gradients into the padded shard whatever the strategy calls itself. Where
    # parameters lie on the host, their gradients and states do too.
    return StateBytes(stored, stored, kept, 0, (2 * stored + kept) * kind.on_host)


def _stored_numel(kind: _TensorKind, mesh: Mesh, rank: int) -> int:
    """Elements of storage: FSDP2 pads what it cuts to equal pieces."""
    return kind.stored.padded_numel(kind.shape, mesh, UNIT_AXES, rank)
