"""Which ranks are alike, so that whatever is found out of one is true of all.

They hold parts of the same sizes and stand at the same place of the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshplan.assign import Assignment
from meshplan.layout import Layout
from meshplan.mesh import UNIT_AXES, Mesh


def equal_ranks(assignment: Assignment) -> tuple[tuple[int, ...], ...]:
    """Every rank, in groups of equal ones; each group, and the groups, in order of rank.

    Assumes: What a rank does depends on the sizes of its parts, on its stage and its part of a
        sequence alone. Tokens that are routed to experts are taken to be spread evenly.
    """
    mesh, context = assignment.mesh, assignment.context
    # Masks over what was gathered are of another size on each rank.
    axes = ("cp",) if context is not None and context.attention == "all_gather" else ()
    uneven = tuple(
        (cut, tuple(sorted(places)))
        for cut, places in _cuts(assignment).items()
        if not cut.is_even(mesh)
    )
    return _grouped(mesh, uneven, axes)


@lru_cache(maxsize=64)
def _grouped(
    mesh: Mesh, uneven: tuple[tuple[_Cut, tuple[int, ...]], ...], axes: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    """The groups that these cuts make; the planner asks of many plans that cut the same.

    Args:
        uneven: Each with the places along pp at which something is cut so.
    """
    columns: dict[object, Sequence[object]] = {("pp",): mesh.indices(("pp",))}
    if axes:
        columns[axes] = mesh.indices(axes)
    places: dict[_Cut | _Kind, set[int]] = {}
    for cut, held in uneven:
        kinds = cut.kinds(mesh)
        for key in (cut,) if kinds is None else kinds:
            places.setdefault(key, set()).update(held)
    for key, at in places.items():
        each = zip(columns["pp",], key.by_rank(mesh), strict=True)
        columns[key] = [part if place in at else None for place, part in each]
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, own in enumerate(zip(*columns.values(), strict=True)):
        groups.setdefault(own, []).append(rank)
    return tuple(map(tuple, groups.values()))


class _Kind(NamedTuple):
    """How parts along one axis differ: the first ones are full, one may be shorter, others empty.

    Of 16,384 ranks three need to be looked at.
    """

    axis: str
    num_full: int
    has_shorter: bool

    def by_rank(self, mesh: Mesh) -> list[int]:
        """Of each rank: -1 full, 0 the next part, 1 one behind that which differs from it."""
        most = int(self.has_shorter)
        return [min(max(at - self.num_full, -1), most) for at in mesh.indices((self.axis,))]


@dataclass(frozen=True, slots=True)
class _Cut:
    """One way in which a tensor of some shape lies in parts."""

    shape: tuple[int, ...]
    layout: Layout

    def is_even(self, mesh: Mesh) -> bool:
        """Whether all ranks hold parts of the same shape."""
        return all(
            size % (mesh.size(*axes) * self.layout.pieces(dim)) == 0
            for dim, (size, axes) in enumerate(zip(self.shape, self.layout.cuts, strict=True))
        )

    def kinds(self, mesh: Mesh) -> list[_Kind] | None:
        """How parts differ along each axis that matters. None: not so simple."""
        if self.layout.packed:
            return None
        out = []
        for size, axes in zip(self.shape, self.layout.cuts, strict=True):
            if not axes:
                continue
            *outer, last = axes
            own, rest = divmod(size, mesh.size(*outer))
            if rest:
                return None
            if own % mesh.size(last):
                part = -(-own // mesh.size(last))
                out.append(_Kind(last, own // part, own % part > 0))
        return out

    def by_rank(self, mesh: Mesh) -> list[tuple[tuple[int, ...], int]]:
        """What each rank holds."""
        known: dict[int, tuple[tuple[int, ...], int]] = {}
        out = []
        for rank, at in enumerate(mesh.indices(self.layout.axes)):
            if at not in known:
                known[at] = self.of_rank(mesh, rank)
            out.append(known[at])
        return out

    def of_rank(self, mesh: Mesh, rank: int) -> tuple[tuple[int, ...], int]:
        """(the shape that a rank holds, elements of its storage)."""
        local = self.layout.local_shape(self.shape, mesh, rank)
        return local, self.layout.padded_numel(self.shape, mesh, UNIT_AXES, rank)


def _cuts(assignment: Assignment) -> Mapping[_Cut, set[int]]:
    """Every way in which something is cut, with the places along pp of what is."""
    stages = assignment.stages
    seen: dict[tuple[object, ...], tuple[_Cut, ...]] = {}
    out: dict[_Cut, set[int]] = {}
    for fqn, placed in assignment.tensors.items():
        layouts = placed.stored, placed.computed, placed.gradient
        # Most are the very same as another tensor's; to tell that takes no look at what they say.
        key = placed.info.shape, *map(id, layouts)
        if key not in seen:
            seen[key] = tuple(_Cut(placed.info.shape, layout) for layout in layouts)
        held = [0] if stages is None else map(stages.rank_of, stages.tensors[fqn])
        places = {*held}
        for cut in seen[key]:
            out.setdefault(cut, set()).update(places)
    return out
