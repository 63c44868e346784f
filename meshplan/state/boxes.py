"""Boxes: rectangular parts of a tensor, in which a shard is saved and loaded.

A rank's shard of a tensor is one box of it, or several if a dim is packed: of a fused QKV weight, a
rank has its part of q, of k and of v, concatenated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.layout.layout import Layout
from meshplan.layout.mesh import Mesh
from meshplan.shown import shown


@shown
@dataclass(frozen=True, slots=True)
class TensorBox:
    """A rectangular part of a tensor.

    Args:
        start: Index of its first element, one number per dim; () for a scalar.
        shape: Its size along each dim.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorBox:
        """Return the box that is the whole of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the tensor that it is a part of."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def overlap(self, other: TensorBox) -> TensorBox | None:
        """Return the elements that are in both boxes; None if there are none."""
        pairs = list(zip(self.start, self.shape, other.start, other.shape, strict=True))
        start = tuple(max(a, b) for a, _, b, _ in pairs)
        stop = tuple(min(a + n, b + m) for a, n, b, m in pairs)
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return TensorBox(start, shape) if all(n > 0 for n in shape) else None

    def within(self, other: TensorBox) -> TensorBox:
        """Return this box in the coordinates of `other`, which contains it."""
        return TensorBox(
            tuple(a - b for a, b in zip(self.start, other.start, strict=True)), self.shape
        )


@shown
@dataclass(frozen=True, slots=True)
class LocalBox:
    """One box of a rank's shard.

    Args:
        box: Where it lies in the whole tensor.
        local: Where it lies in the rank's local tensor.
    """

    box: TensorBox
    local: TensorBox


def local_boxes(
    layout: Layout, shape: Sequence[int], mesh: Mesh, rank: int
) -> tuple[LocalBox, ...]:
    """Return the boxes of the shard that `rank` has of a tensor, without empty ones.

    >>> mesh = Mesh.of({"tp": 2})
    >>> for each in local_boxes(Layout((("tp",),), packed=(("tp", 3),)), (12,), mesh, 1):
    ...     print(each.box.start, each.local.start, each.box.shape)
    (2,) (0,) (2,)
    (6,) (2,) (2,)
    (10,) (4,) (2,)
    """
    dims = []
    for slices in layout.ranges(shape, mesh, rank):
        sizes = [each.stop - each.start for each in slices]
        starts = itertools.accumulate(sizes, initial=0)
        dims.append([(s.start, at, n) for s, at, n in zip(slices, starts, sizes, strict=False)])
    out = []
    for parts in itertools.product(*dims):
        size = tuple(n for _, _, n in parts)
        if all(size):
            box, local = tuple(a for a, _, _ in parts), tuple(at for _, at, _ in parts)
            out.append(LocalBox(TensorBox(box, size), TensorBox(local, size)))
    return tuple(out)


def are_a_partition(boxes: Iterable[TensorBox], shape: Sequence[int]) -> bool:
    """Return True if every element of a tensor of this shape is in exactly one of the boxes."""
    found = list(boxes)
    if not math.prod(shape):
        return all(not each.numel for each in found)
    # The boundaries of all boxes divide the tensor into cells. A box holds whole cells only.
    edges = [
        np.unique([0, size, *(a for b in found for a in (b.start[d], b.start[d] + b.shape[d]))])
        for d, size in enumerate(shape)
    ]
    if any(at[0] < 0 or at[-1] > size for at, size in zip(edges, shape, strict=True)):
        return False
    # A partition into boxes has as many cells as boxes unless its boxes are not aligned. The limit
    # keeps a false manifest from taking all memory.
    if math.prod(len(at) - 1 for at in edges) > 64 * len(found) + 4096:
        return False
    counts = np.zeros([len(at) - 1 for at in edges], dtype=np.int32)
    for each in found:
        first = [int(np.searchsorted(at, a)) for at, a in zip(edges, each.start, strict=True)]
        last = [
            int(np.searchsorted(at, a + n))
            for at, a, n in zip(edges, each.start, each.shape, strict=True)
        ]
        counts[tuple(slice(a, b) for a, b in zip(first, last, strict=True))] += 1
    return bool((counts == 1).all())
