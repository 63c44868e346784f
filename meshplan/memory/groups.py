"""Which ranks are alike, so that whatever is found out of one is true of all.

They hold parts of the same sizes and stand at the same place of the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshplan.assign import Assignment
from meshplan.layout import Layout
from meshplan.mesh import UNIT_AXES, Mesh

Numbers = NDArray[np.int64]


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
    place = _positions(mesh, ("pp",))
    columns = [place, *(_positions(mesh, (axis,)) for axis in axes)]
    turns: dict[tuple[tuple[str, ...], int], set[int]] = {}
    for cut, held in uneven:
        if cut.is_nested(mesh):
            columns.append(np.where(np.isin(place, held), cut.kinds(mesh), -1))
            continue
        for joint, ends in cut.turns(mesh).items():
            for at in held:
                turns.setdefault((joint, at), set()).update(ends)
    for joint in {joint for joint, _ in turns}:
        column = np.zeros(mesh.world_size, np.int64)
        for at in range(mesh.size("pp")):
            there = place == at
            column[there] = _after(turns.get((joint, at), ()), _positions(mesh, joint)[there])
        columns.append(column)
    _, first, group = np.unique(_joined(columns), return_index=True, return_inverse=True)
    ranks = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1])
    return tuple(tuple(ranks[number].tolist()) for number in np.argsort(first))


def _positions(mesh: Mesh, axes: Sequence[str]) -> Numbers:
    """Where each rank stands along axes."""
    return np.asarray(mesh.indices(axes), np.int64)


def _after(turns: Iterable[int], positions: Numbers) -> Numbers:
    """How many of the turns each position has behind it."""
    return np.searchsorted(np.asarray(sorted(turns), np.int64), positions, side="right")


def _joined(columns: Sequence[Numbers]) -> Numbers:
    """One number per rank that tells rows of these columns apart."""
    out = columns[0]
    for column in columns[1:]:
        both = (out - out.min()) * int(np.ptp(column) + 1) + column - column.min()
        out = np.unique(both, return_inverse=True)[1]
    return out


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

    def is_nested(self, mesh: Mesh) -> bool:
        """Whether an axis cuts parts that another has left of several sizes.

        Then not every turn is one of every rank.
        """
        ends = self.layout.turns(self.shape, mesh)
        last = {axes[-1] for axes in self.layout.cuts if axes}
        return any(turns and not last & {*joint} for joint, turns in ends.items())

    def turns(self, mesh: Mesh) -> dict[tuple[str, ...], set[int]]:
        """Where along which axes a rank holds, or stores, less than the rank before."""
        padded = self.layout.without(*UNIT_AXES)
        out: dict[tuple[str, ...], set[int]] = {}
        for layout in (self.layout, padded):
            for joint, ends in layout.turns(self.shape, mesh).items():
                out.setdefault(joint, set()).update(ends)
        return out

    def kinds(self, mesh: Mesh) -> Numbers:
        """A number for what each rank holds."""
        columns = [_after(ends, _positions(mesh, at)) for at, ends in self.turns(mesh).items()]
        _, first, kind = np.unique(_joined(columns), return_index=True, return_inverse=True)
        held = [self.of_rank(mesh, int(rank)) for rank in first]
        return np.asarray([held.index(each) for each in held])[kind]

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
