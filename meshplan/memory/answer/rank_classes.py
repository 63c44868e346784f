"""Which ranks are alike, so that whatever is found out of one is true of all.

They hold parts of the same sizes and stand at the same place of the pipeline.
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
    mesh: Mesh, uneven: tuple[tuple[_ShardPattern, tuple[int, ...]], ...], axes: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    """The groups that these cuts make; the planner asks of many plans that cut the same.

    Args:
        uneven: Each with the places along pp at which something is cut so.
    """
    place = mesh.indices(("pp",))
    columns: list[Sequence[object]] = [place, *(mesh.indices((axis,)) for axis in axes)]
    turns: dict[tuple[str, ...], dict[int, set[int]]] = {}
    for cut, held in uneven:
        if cut.is_nested(mesh):
            kinds = zip(place, cut.kinds(mesh), strict=True)
            columns.append([kind if at in held else None for at, kind in kinds])
            continue
        for joint, ends in cut.turns(mesh).items():
            for at in held:
                turns.setdefault(joint, {}).setdefault(at, set()).update(ends)
    for joint, by_place in turns.items():
        behind = [_behind(by_place.get(at, ()), mesh.size(*joint)) for at in range(mesh.size("pp"))]
        each = zip(place, mesh.indices(joint), strict=True)
        columns.append([behind[at][position] for at, position in each])
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, own in enumerate(zip(*columns, strict=True)):
        groups.setdefault(own, []).append(rank)
    return tuple(map(tuple, groups.values()))


def _behind(turns: Iterable[int], count: int) -> list[int]:
    """Count, for each of so many positions, the turns that lie behind it."""
    ends = sorted(turns)
    return [bisect_right(ends, position) for position in range(count)]


@dataclass(frozen=True, slots=True)
class _ShardPattern:
    """One way in which a tensor of some shape lies in parts."""

    shape: tuple[int, ...]
    layout: Layout

    def is_even(self, mesh: Mesh) -> bool:
        """Whether all ranks hold parts of the same shape."""
        return all(
            size % (mesh.size(*axes) * self.layout.pieces(dim)) == 0
            for dim, (size, axes) in enumerate(zip(self.shape, self.layout.cuts, strict=True))
        )

    def is_nested(self, mesh: Mesh) -> bool:
        """Tell whether an axis cuts parts that another has left of several sizes.

        Then not every turn is one of every rank.
        """
        ends = self.layout.turns(self.shape, mesh)
        last = {axes[-1] for axes in self.layout.cuts if axes}
        return any(turns and not last & {*joint} for joint, turns in ends.items())

    def turns(self, mesh: Mesh) -> dict[tuple[str, ...], set[int]]:
        """The positions by axes at which a rank holds, or stores, less than the rank before."""
        padded = self.layout.without(*UNIT_AXES)
        out: dict[tuple[str, ...], set[int]] = {}
        for layout in (self.layout, padded):
            for joint, ends in layout.turns(self.shape, mesh).items():
                out.setdefault(joint, set()).update(ends)
        return out

    def kinds(self, mesh: Mesh) -> list[tuple[tuple[int, ...], int]]:
        """What each rank holds."""
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
        """(the shape that a rank holds, elements of its storage)."""
        local = self.layout.local_shape(self.shape, mesh, rank)
        return local, self.layout.padded_numel(self.shape, mesh, UNIT_AXES, rank)


def _cuts(assignment: Assignment) -> Mapping[_ShardPattern, set[int]]:
    """Every way in which something is cut, with the places along pp of what is."""
    stages = assignment.stages
    seen: dict[tuple[object, ...], tuple[_ShardPattern, ...]] = {}
    out: dict[_ShardPattern, set[int]] = {}
    for fqn, placed in assignment.tensors.items():
        layouts = placed.stored, placed.computed, placed.gradient
        # Most are the very same as another tensor's; to tell that takes no look at what they say.
        key = placed.info.shape, *map(id, layouts)
        if key not in seen:
            seen[key] = tuple(_ShardPattern(placed.info.shape, layout) for layout in layouts)
        held = [0] if stages is None else map(stages.rank_of, stages.tensors[fqn])
        places = {*held}
        for cut in seen[key]:
            out.setdefault(cut, set()).update(places)
    return out
