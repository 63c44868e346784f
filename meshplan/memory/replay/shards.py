"""Sizes of the tensors that an FSDP unit gathers and reduces, from its parameters' layouts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshplan.assign import Assignment, Placed, Unit
from meshplan.layout.dtypes import DTYPE_BYTES
from meshplan.layout.layout import Layout
from meshplan.layout.mesh import UNIT_AXES, Mesh
from meshplan.model.graph import ModelGraph


class Numels(NamedTuple):
    """Numbers of elements of a parameter on one rank.

    Attributes:
        padded: Elements of the stored shard, padding included.
        local: Elements of the stored shard without padding.
        whole: Elements that the rank computes with, after the all-gather.
    """

    padded: int
    local: int
    whole: int


@lru_cache(maxsize=1 << 12)
def numels_of(shape: tuple[int, ...], stored: Layout, mesh: Mesh, rank: int) -> Numels:
    """Return the numbers of elements of a parameter of this shape and layout on one rank.

    The result is cached, because the many parameters of a model have few shapes and layouts.
    """
    return Numels(
        padded=stored.padded_numel(shape, mesh, UNIT_AXES, rank),
        local=stored.local_numel(shape, mesh, rank),
        whole=stored.without(*UNIT_AXES).local_numel(shape, mesh, rank),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One parameter of a unit on one rank. Two shards are equal only if they are the same object.

    Args:
        fqn: Fqn of the parameter.
        padded_numel: Elements of all shards together, each padded to the size of the first shard.
        stored_bytes: Bytes of this rank's shard in the stored dtype, padding included.
        local_bytes: Bytes of this rank's shard in the stored dtype, without padding.
        grad_numel: Elements of the gradient, as many as the gathered parameter has without padding.
        itemsize: Bytes of an element in the compute dtype.
        dim: The tensor dim along which the unit shards the parameter.
        is_cast: If True, the stored dtype is not the compute dtype.
        is_trained: If True, the parameter gets a gradient.
    """

    fqn: str
    padded_numel: int
    stored_bytes: int
    local_bytes: int
    grad_numel: int
    itemsize: int
    dim: int
    is_cast: bool
    is_trained: bool

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gathered parameter, padding included."""
        return self.padded_numel * self.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradient as autograd computes it."""
        return self.grad_numel * self.itemsize


@dataclass(frozen=True, slots=True)
class UnitShards:
    """The parameters of one unit on one rank.

    Args:
        fqn: Fqn of the unit's module.
        params: The parameters of the unit, in FSDP2's order.
        trained: The subset of `params` that gets a gradient.
        num_ranks: Number of ranks over which the parameters are sharded; 1 if they are replicated
            only.
        is_sharded: If True, the unit is one of `fully_shard`, be it over one rank only; otherwise
            one of `replicate`.
        is_replicated: If True, the unit's gradients are all-reduced over replicas.
        reshard_after_forward: If True, the parameters are resharded after forward.
        fewer_ranks: Number of ranks over which the parameters are sharded after forward; 0 for
            `num_ranks`.
        itemsize: Bytes of an element of the stored parameters.
        grad_itemsize: Bytes of an element of the gradients as autograd computes them.
        reduce_itemsize: Bytes of an element of the gradients while they are reduced.
        is_recast: If True, the reduced gradients are cast to the dtype of the stored parameters.
        on_host: If True, shards and reduced gradients are in host memory.
    """

    fqn: str
    params: tuple[Shard, ...]
    trained: tuple[Shard, ...]
    num_ranks: int
    is_sharded: bool
    is_replicated: bool
    reshard_after_forward: bool
    fewer_ranks: int
    itemsize: int
    grad_itemsize: int
    reduce_itemsize: int
    is_recast: bool
    on_host: bool

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the output buffer of an all-gather, in compute dtypes."""
        return sum(param.whole_bytes for param in self.params)

    @property
    def cast_bytes(self) -> int:
        """Bytes of the casts made before the all-gather, summed over the unit's ranks."""
        return sum(param.whole_bytes for param in self.params if param.is_cast)


def unit_shards(assignment: Assignment, graph: ModelGraph, rank: int) -> list[UnitShards]:
    """Return the sizes of each unit of a plan on one rank, in the order of the modules."""
    inner_first, places = graph.inner_first(), graph.order()
    owned: dict[str, list[Placed]] = {fqn: [] for fqn in assignment.units}
    for placed in assignment.tensors.values():
        if placed.unit is not None:
            owned[placed.unit].append(placed)
    known: _Known = {}
    return [
        _unit(
            assignment.units[fqn],
            sorted(owned[fqn], key=lambda p: inner_first[p.info.module]),
            assignment.mesh,
            rank,
            known,
        )
        for fqn in sorted(assignment.units, key=places.__getitem__)
    ]


def _unit(unit: Unit, tensors: list[Placed], mesh: Mesh, rank: int, known: _Known) -> UnitShards:
    ranks = mesh.size(*unit.shard_axes)
    fewer = unit.reshard_after_forward
    trained = [p for p in tensors if p.info.trainable]
    stored = trained[0].dtype if trained else "float32"
    computed = trained[0].compute_dtype if trained else "float32"
    reduced = unit.precision.reduce or computed
    params = tuple(_shard(placed, unit, mesh, rank, known) for placed in tensors)
    return UnitShards(
        fqn=unit.fqn,
        params=params,
        trained=tuple(param for param in params if param.is_trained),
        num_ranks=ranks,
        is_sharded=unit.is_sharded,
        is_replicated=not unit.is_sharded or mesh.size(*unit.replicate_axes) > 1,
        reshard_after_forward=bool(fewer),
        fewer_ranks=0 if isinstance(fewer, bool) or fewer == ranks else fewer,
        itemsize=DTYPE_BYTES[stored],
        grad_itemsize=DTYPE_BYTES[computed],
        reduce_itemsize=DTYPE_BYTES[reduced],
        is_recast=reduced != stored,
        on_host=unit.on_host,
    )


_Known = dict[tuple[tuple[int, ...], int, tuple[str, ...]], tuple[Numels, int, int]]
"""Maps (shape, id of the layout, axes of the unit) to (numbers of elements, number of ranks over
which the unit shards, sharded dim)."""


def _shard(placed: Placed, unit: Unit, mesh: Mesh, rank: int, known: _Known) -> Shard:
    layout, axes = placed.stored, unit.shard_axes
    key = placed.info.shape, id(layout), axes
    if key not in known:
        dim = (layout.dim_of(axes[0]) or 0) if axes else 0
        known[key] = numels_of(placed.info.shape, layout, mesh, rank), mesh.size(*axes), dim
    numels, ranks, dim = known[key]
    return Shard(
        fqn=placed.info.fqn,
        padded_numel=numels.padded * ranks,
        stored_bytes=numels.padded * DTYPE_BYTES[placed.dtype],
        local_bytes=numels.local * DTYPE_BYTES[placed.dtype],
        grad_numel=numels.whole,
        itemsize=DTYPE_BYTES[placed.compute_dtype],
        dim=dim,
        is_cast=placed.compute_dtype != placed.dtype,
        is_trained=placed.info.trainable,
    )
