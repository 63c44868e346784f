"""Which ranks are alike, so that whatever is found out of one is true of all.

They hold parts of the same sizes and stand at the same place of the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from meshplan.assign import Assignment
from meshplan.layout import Layout
from meshplan.mesh import UNIT_AXES, Mesh


def equal_ranks(assignment: Assignment) -> tuple[tuple[int, ...], ...]:
    """Every rank, in groups of equal ones; each group, and the groups, in order of rank.

    Assumes: What a rank does depends on the sizes of its parts and on its stage alone. Tokens that
        are routed to experts are taken to be spread evenly.
    """
    cuts = dict.fromkeys(_cuts(assignment))
    return _grouped(assignment.mesh, tuple(cut for cut in cuts if not cut.is_even(assignment.mesh)))


@lru_cache(maxsize=64)
def _grouped(mesh: Mesh, uneven: tuple[_Cut, ...]) -> tuple[tuple[int, ...], ...]:
    """The groups that these cuts make; the planner asks of many plans that cut the same."""
    full = [cut.num_full(mesh) for cut in uneven]
    sizes: list[dict[int, tuple[tuple[int, ...], int]]] = [{} for _ in uneven]
    spread = dict.fromkeys([("pp",), *(cut.layout.axes for cut in uneven)])
    groups: dict[tuple[object, ...], list[int]] = {}
    index = {axes: mesh.indices(axes) for axes in spread}
    for rank in range(mesh.world_size):
        key: list[object] = [index["pp",][rank]]
        for cut, num, known in zip(uneven, full, sizes, strict=True):
            at = index[cut.layout.axes][rank]
            if num is not None:
                at = min(max(at - num, -1), 1)
            if at not in known:
                known[at] = cut.of_rank(mesh, rank)
            key.append(known[at])
        groups.setdefault(tuple(key), []).append(rank)
    return tuple(map(tuple, groups.values()))


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

    def num_full(self, mesh: Mesh) -> int | None:
        """How many parts are full; then one is shorter, then they are empty. None: not so simple.

        Of 16,384 ranks three need to be looked at.
        """
        if len(self.layout.axes) > 1 or self.layout.packed:
            return None
        dim = self.layout.dim_of(self.layout.axes[0])
        assert dim is not None
        return self.shape[dim] // -(-self.shape[dim] // mesh.size(*self.layout.axes))

    def of_rank(self, mesh: Mesh, rank: int) -> tuple[tuple[int, ...], int]:
        """(the shape that a rank holds, elements of its storage)."""
        local = self.layout.local_shape(self.shape, mesh, rank)
        return local, self.layout.padded_numel(self.shape, mesh, UNIT_AXES, rank)


def _cuts(assignment: Assignment) -> Iterator[_Cut]:
    for placed in assignment.tensors.values():
        for layout in (placed.stored, placed.computed, placed.gradient):
            yield _Cut(placed.info.shape, layout)
