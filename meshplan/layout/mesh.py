"""The device mesh: named axes, outermost first, and the coordinates of each rank.

This module handles sizes and coordinates. Devices and links are in `hardware`, process groups in
`runtime.base.mesh`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from meshplan.shown import shown

AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Every axis name that a plan may use, outermost first (torchtitan's and accelerate's names)."""

DATA_AXES: Final = ("dp_replicate", "dp_shard")
"""The axes over which ranks read different samples."""

GRADIENT_AXES: Final = (*DATA_AXES, "cp")
"""The axes over which ranks process different tokens, and so average losses and gradients: the data
axes, and cp, whose ranks process different parts of the same samples.
"""

SHARD_AXES: Final = ("dp_shard", "cp")
"""The axes that together shard a parameter as one axis of all their ranks: into shards of
ceil(size / ranks), where `ranks` is the product of their sizes.
"""

EXPERT_SHARD: Final = "efsdp"
"""The other factor of the axis that lends its ranks to ep: dp_shard = efsdp x ep. Expert parameters
are sharded over it (torchtitan's name).
"""

UNIT_AXES: Final = (*SHARD_AXES, EXPERT_SHARD)
"""The axes over which FSDP2 units are sharded: parameters are all-gathered over them for use."""


def order_of(stated: object) -> tuple[str, ...]:
    """Return all axis names, outermost first: stated axes in the order in which they are stated.

    The other axes have one rank, so their places do not matter.

    Args:
        stated: Sizes by axis, as in a plan; anything else states no order.

    >>> order_of({"tp": 2, "dp_shard": "auto"})
    ('tp', 'dp_shard', 'pp', 'dp_replicate', 'cp', 'ep')
    """
    names = tuple(stated) if isinstance(stated, Mapping) else ()
    return (*names, *(axis for axis in AXES if axis not in names))


@shown
@dataclass(frozen=True, slots=True)
class Axis:
    """One named axis of the mesh."""

    name: str
    size: int


@shown
@dataclass(frozen=True, slots=True)
class Loan:
    """A borrowed axis, whose ranks are those of another axis: `ep: 2 in dp_shard`.

    Args:
        name: The axis that borrows; its coordinate varies fastest along the lending axis.
        size: Number of ranks along the borrowing axis.
        within: The axis that lends its ranks.
        rest: Name of the other factor of the lending axis: `within` = `rest` x `name`.
    """

    name: str
    size: int
    within: str
    rest: str = EXPERT_SHARD


@shown
@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, outermost first; ranks are numbered with the last axis fastest.

    A borrowed axis is not in `axes`, `names` and `sizes`, because its ranks already count in the
    axis that lends them. `size`, `coordinates` and `index` accept and return borrowed axes too.

    >>> mesh = Mesh.of({"dp_replicate": 2, "dp_shard": 4})
    >>> mesh.world_size, mesh.size("tp"), mesh.coordinates(5)
    (8, 1, {'dp_replicate': 1, 'dp_shard': 1})
    >>> mesh = Mesh((Axis("dp_shard", 4),), loans=(Loan("ep", 2, "dp_shard"),))
    >>> mesh.world_size, mesh.size("ep"), mesh.coordinates(3)
    (4, 2, {'dp_shard': 3, 'efsdp': 1, 'ep': 1})
    """

    axes: tuple[Axis, ...]
    loans: tuple[Loan, ...] = ()

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Mesh:
        """Return a mesh from `{axis: size}`, outermost axis first."""
        return cls(tuple(Axis(name, size) for name, size in sizes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.axes}

    @property
    def world_size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def size(self, *names: str) -> int:
        """Return the product of the sizes of these axes; an axis that the mesh lacks counts 1."""
        if not self.loans:
            found = (axis.size for name in names for axis in self.axes if axis.name == name)
            return math.prod(found)
        sizes = self.sizes
        for loan in self.loans:
            sizes |= {loan.name: loan.size, loan.rest: sizes[loan.within] // loan.size}
        return math.prod(sizes.get(name, 1) for name in names)

    def present(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return which of `names` are axes of this mesh, not borrowed ones, outermost first."""
        wanted = set(names)
        return tuple(name for name in self.names if name in wanted)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` by axis; of a borrowed axis, also that of its `rest`."""
        out: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, out[axis.name] = divmod(rank, axis.size)
        at = {name: out[name] for name in self.names}
        for loan in self.loans:
            at[loan.rest], at[loan.name] = divmod(at[loan.within], loan.size)
        return at

    def index(self, rank: int, names: Iterable[str]) -> int:
        """Return the position of `rank` among the ranks along `names`, outermost axis slowest.

        For example, `index(rank, DATA_AXES)` is the index of the shard of a global batch that
        `rank` reads.
        """
        wanted = set(names)
        position = 0
        for name, coordinate in self.coordinates(rank).items():
            if name in wanted:
                position = position * self.size(name) + coordinate
        return position

    def indices(self, names: Iterable[str]) -> list[int]:
        """Return `index(rank, names)` for every rank, computed at once: ranks can be many."""
        wanted, weight, weights = set(names), 1, {}
        for name in reversed(self.coordinates(0)):
            if name in wanted:
                weights[name] = weight
                weight *= self.size(name)
        out = [0]
        for axis in self.axes:
            steps = [c * weights.get(axis.name, 0) for c in range(axis.size)]
            for loan in self.loans:
                if loan.within == axis.name:
                    step = weights.get(loan.rest, 0), weights.get(loan.name, 0)
                    parts = (divmod(c, loan.size) for c in range(axis.size))
                    here = [rest * step[0] + own * step[1] for rest, own in parts]
                    steps = [one + more for one, more in zip(steps, here, strict=True)]
            out = [at + step for at in out for step in steps]
        return out

    def spread(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the axes among `names` that have more than one rank, outermost first.

        Borrowed axes count. If `names` has the axis that lends its ranks, or all factors of it
        (`ep` and `efsdp`), the lending axis is returned in their place.

        >>> mesh = Mesh((Axis("dp_shard", 4), Axis("tp", 1)), (Loan("ep", 2, "dp_shard"),))
        >>> mesh.spread(("tp", "ep")), mesh.spread(("ep", "efsdp"))
        (('ep',), ('dp_shard',))
        """
        wanted = set(names)
        out: list[str] = []
        for axis in self.names:
            parts = [
                p for loan in self.loans if loan.within == axis for p in (loan.rest, loan.name)
            ]
            parts = [part for part in parts if self.size(part) > 1]
            asked = [part for part in parts if part in wanted]
            if axis in wanted or (parts and asked == parts):
                out += [axis] if self.size(axis) > 1 else []
            else:
                out += asked
        return tuple(out)

    def __iter__(self) -> Iterator[Axis]:
        return iter(self.axes)

    def __str__(self) -> str:
        lent = {loan.within: f" ({loan.name} {loan.size})" for loan in self.loans}
        words = (f"{axis.name} {axis.size}{lent.get(axis.name, '')}" for axis in self.axes)
        return " x ".join(words) or "1 device"
