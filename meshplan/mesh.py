"""The device mesh: named axes, outermost first, and where each rank stands on them.

Knows sizes and coordinates. Refuses to know devices, links or process groups (`hardware`,
`runtime.mesh`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Every axis name a plan may use, outermost first (torchtitan's and accelerate's names)."""

DATA_AXES: Final = ("dp_replicate", "dp_shard")
"""The axes over which ranks see different samples."""

GRADIENT_AXES: Final = (*DATA_AXES, "cp")
"""The axes over which ranks see different tokens: losses and gradients are averaged over them.
Ranks along cp hold other parts of the same samples."""

SHARD_AXES: Final = ("dp_shard", "cp")
"""The axes that cut a sharded parameter, together and in one go: into pieces of ceil(size /
ranks), as along one axis of all their ranks."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One named direction of the mesh."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes, outermost first; ranks count through the last axis fastest.

    >>> mesh = Mesh.of({"dp_replicate": 2, "dp_shard": 4})
    >>> mesh.world_size, mesh.size("tp"), mesh.coordinates(5)
    (8, 1, {'dp_replicate': 1, 'dp_shard': 1})
    """

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Mesh:
        """A mesh from `{axis: size}` in the order given."""
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
        """Ranks along these axes together; an axis the mesh does not have counts 1."""
        sizes = self.sizes
        return math.prod(sizes.get(name, 1) for name in names)

    def present(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of `names` that this mesh has, outermost first."""
        wanted = set(names)
        return tuple(name for name in self.names if name in wanted)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on every axis."""
        out: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, out[axis.name] = divmod(rank, axis.size)
        return {name: out[name] for name in self.names}

    def index(self, rank: int, names: Iterable[str]) -> int:
        """The position of `rank` among the ranks along `names`, outermost axis slowest.

        Which part of a global batch a rank reads is `index(rank, DATA_AXES)`.
        """
        coordinates = self.coordinates(rank)
        position = 0
        for name in self.present(names):
            position = position * self.size(name) + coordinates[name]
        return position

    def __iter__(self) -> Iterator[Axis]:
        return iter(self.axes)

    def __str__(self) -> str:
        return " x ".join(f"{axis.name} {axis.size}" for axis in self.axes) or "1 device"
