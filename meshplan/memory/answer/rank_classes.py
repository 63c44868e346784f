"""Classes of equal ranks: an estimate of one rank of a class is valid for all of its ranks.

Equal ranks have shards of the same sizes and the same position in the pipeline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshplan.assign import Assignment
from meshplan.layout.layout import Layout
from meshplan.layout.mesh import UNIT_AXES, Mesh


def equal_ranks(assignment: Assignment) -> tuple[tuple[int, ...], ...]:
    """Return the classes of equal ranks, ordered by first rank, each with its ranks in order.

    This assumes that the step of a rank depends only on the sizes of its shards, on its stages and
    on its shard of the sequence, and that tokens are routed to experts evenly.
    """
    mesh, context = assignment.mesh, assignment.context
    # Attention masks over all-gathered keys have a different size on each rank of cp.
    axes = ("cp",) if context is not None and context.attention == "all_gather" else ()
    uneven = tuple(
        (cut, tuple(sorted(places)))
        for cut, places in _cuts(assignment).items()
        if not cut.is_even(mesh)
    )
    return _grouped(mesh, uneven, axes)


@lru_cache(maxsize=64)
def _grouped(
    mesh: Mesh, uneven: tuple[tuple[_ShardPattern, tuple[int, ...]], ...], axes: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return the classes of ranks that have shards of equal sizes for all patterns.

    The result is cached, because the planner asks for many plans with the same patterns.

    Args:
        mesh: The mesh of all ranks.
        uneven: (pattern with unequal shards, positions along pp at which it occurs).
        axes: Further axes along which all ranks differ.
    """
    place = mesh.indices(("pp",))
    # Each column has a value for every rank; ranks that agree in all columns are equal.
    columns: list[Sequence[object]] = [place, *(mesh.indices((axis,)) for axis in axes)]
    turns: dict[tuple[str, ...], dict[int, set[int]]] = {}
    for cut, places in uneven:
        if cut.is_nested(mesh):
            kinds = zip(place, cut.kinds(mesh), strict=True)
            columns.append([kind if at in places else None for at, kind in kinds])
            continue
        for joint, ends in cut.turns(mesh).items():
            for at in places:
                turns.setdefault(joint, {}).setdefault(at, set()).update(ends)
    # Two ranks have shards of equal sizes along an axis if no change of size is between them.
    for joint, by_place in turns.items():
        behind = [_behind(by_place.get(at, ()), mesh.size(*joint)) for at in range(mesh.size("pp"))]
        each = zip(place, mesh.indices(joint), strict=True)
        columns.append([behind[at][position] for at, position in each])
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, own in enumerate(zip(*columns, strict=True)):
        groups.setdefault(own, []).append(rank)
    return tuple(map(tuple, groups.values()))


def _behind(turns: Iterable[int], count: int) -> list[int]:
    """Return, for each position from 0 to `count` - 1, how many of `turns` are at or before it."""
    ends = sorted(turns)
    return [bisect_right(ends, position) for position in range(count)]


@dataclass(frozen=True, slots=True)
class _ShardPattern:
    """The shape and layout of a tensor, on which the size of its shards depends."""

    shape: tuple[int, ...]
    layout: Layout

    def is_even(self, mesh: Mesh) -> bool:
        """Return True if the shards of all ranks have the same shape."""
        return all(
            size % (mesh.size(*axes) * self.layout.pieces(dim)) == 0
            for dim, (size, axes) in enumerate(zip(self.shape, self.layout.cuts, strict=True))
        )

    def is_nested(self, mesh: Mesh) -> bool:
        """Return True if an axis splits shards that another axis has left in different sizes.

        The positions at which the size changes along one axis then depend on the other axis.
        """
        ends = self.layout.turns(self.shape, mesh)
        last = {axes[-1] for axes in self.layout.cuts if axes}
        return any(turns and not last & {*joint} for joint, turns in ends.items())

    def turns(self, mesh: Mesh) -> dict[tuple[str, ...], set[int]]:
        """Return, by axes, the positions at which the size of a shard changes.

        The size is that of the shard, or that of its padded storage.
        """
        padded = self.layout.without(*UNIT_AXES)
        out: dict[tuple[str, ...], set[int]] = {}
        for layout in (self.layout, padded):
            for joint, ends in layout.turns(self.shape, mesh).items():
                out.setdefault(joint, set()).update(ends)
        return out

    def kinds(self, mesh: Mesh) -> list[tuple[tuple[int, ...], int]]:
        """Return (local shape, number of stored elements) of all ranks, in order."""
        columns = []
        for joint, ends in self.turns(mesh).items():
            behind = _behind(ends, mesh.size(*joint))
            columns.append([behind[position] for position in mesh.indices(joint)])
        known: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
        out = []
        for rank, at in enumerate(zip(*columns, strict=True)):
            if at not in known:
                known[at] = self.of_rank(mesh, rank)
            out.append(known[at])
        return out

    def of_rank(self, mesh: Mesh, rank: int) -> tuple[tuple[int, ...], int]:
        """Return (local shape, number of stored elements) of one rank."""
        local = self.layout.local_shape(self.shape, mesh, rank)
        return local, self.layout.padded_numel(self.shape, mesh, UNIT_AXES, rank)


def _cuts(assignment: Assignment) -> Mapping[_ShardPattern, set[int]]:
    """Return the shard patterns of all tensors, each with the positions along pp that have it."""
    stages = assignment.stages
    seen: dict[tuple[object, ...], tuple[_ShardPattern, ...]] = {}
    out: dict[_ShardPattern, set[int]] = {}
    for fqn, placed in assignment.tensors.items():
        layouts = placed.stored, placed.computed, placed.gradient
        # Most tensors share their layout objects, and identity is cheaper to compare than content.
        key = placed.info.shape, *map(id, layouts)
        if key not in seen:
            seen[key] = tuple(_ShardPattern(placed.info.shape, layout) for layout in layouts)
        ranks_of = [0] if stages is None else map(stages.rank_of, stages.tensors[fqn])
        places = {*ranks_of}
        for cut in seen[key]:
            out.setdefault(cut, set()).update(places)
    return out
