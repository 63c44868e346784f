"""Layouts: which mesh axes shard which dim of a tensor, in order.

This is the central idea of meshplan: data parallel, ZeRO, hybrid sharding and tensor parallel
are all layouts, and shapes, bytes and collectives follow from them. In this module a tensor is
only its shape. Layouts are chosen in `assign` and translated to torch in `runtime.base.mesh`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshplan.layout.mesh import SHARD_AXES, Mesh
from meshplan.shown import shown, view


@shown
@dataclass(frozen=True, slots=True)
class Layout:
    """The axes that shard each tensor dim, in the order in which they are applied.

    Along an axis that shards no dim, all ranks have the same values, unless the axis is in
    `partial`: then every rank has one addend of the value.

    Args:
        cuts: One tuple of axis names per tensor dim; `()` for a dim that is not sharded.
        partial: Axes along which the true value is the sum over the ranks.
        packed: (axis, n) for an axis whose dim consists of n equal pieces (projections fused in one
            weight) and that shards each piece: a rank's shard is its part of every piece,
            concatenated. No other axis may shard that dim.

    >>> mesh = Mesh.of({"dp_shard": 4, "tp": 2})
    >>> Layout((("tp", "dp_shard"), ())).local_shape((9600, 3200), mesh)
    (1200, 3200)
    """

    cuts: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    packed: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        used = [axis for axes in self.cuts for axis in axes] + list(self.partial)
        assert len(used) == len(set(used)), f"an axis is used twice in {self.cuts}"
        alone = [axis for axis, _ in self.packed if (axis,) in self.cuts]
        assert len(alone) == len(self.packed), f"a packed dim is sharded by two axes in {self.cuts}"

    @classmethod
    def whole(cls, ndim: int) -> Layout:
        """Return the layout in which every rank has the full tensor of `ndim` dims."""
        return _whole(ndim)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard a dim, ordered by tensor dim, then as they are applied."""
        return tuple(axis for axes in self.cuts for axis in axes)

    def dim_of(self, axis: str) -> int | None:
        """Return the tensor dim that `axis` shards; None if it shards none."""
        return next((dim for dim, axes in enumerate(self.cuts) if axis in axes), None)

    def pieces(self, dim: int) -> int:
        """Return into how many pieces a packed dim is divided before each is sharded; else 1."""
        return next((n for axis, n in self.packed if axis in self.cuts[dim]), 1)

    def cut(self, axis: str, dim: int, pieces: int = 1) -> Layout:
        """Return this layout with `axis` added as the last axis that shards `dim`.

        If `pieces` > 1, the dim is packed: `axis` shards each of that many equal pieces of it.
        """
        return _cut(self, axis, dim, pieces)

    def without(self, *axes: str) -> Layout:
        """Return this layout with `axes` removed; along them the result is replicated."""
        cuts = tuple(tuple(a for a in dim if a not in axes) for dim in self.cuts)
        packed = tuple((axis, n) for axis, n in self.packed if axis not in axes)
        return Layout(cuts, tuple(a for a in self.partial if a not in axes), packed)

    def num_shards(self, mesh: Mesh) -> int:
        """Return the number of shards into which the axes divide the tensor."""
        return mesh.size(*self.axes)

    def num_replicas(self, mesh: Mesh) -> int:
        """Return the number of ranks that hold each shard."""
        return mesh.world_size // self.num_shards(mesh)

    def slices(self, shape: Sequence[int], mesh: Mesh, rank: int = 0) -> tuple[slice, ...]:
        """Return which part of the global tensor is the shard of `rank`, one slice per dim.

        A dim of size d sharded n ways gives shards of ceil(d / n), the last ones shorter or
        empty: `torch.chunk`'s rule, which DTensor follows. If several axes shard a dim, each
        shards the result of the axis before it, except that neighbouring axes of
        `mesh.SHARD_AXES` act as one axis.
        """
        assert not self.packed, "a packed dim has several slices per rank: use `ranges`"
        out = []
        for size, axes in zip(shape, self.cuts, strict=True):
            start, stop = 0, size
            for joint in _joint(axes):
                piece = -(-(stop - start) // mesh.size(*joint))
                start = min(start + piece * mesh.index(rank, joint), stop)
                stop = min(start + piece, stop)
            out.append(slice(start, stop))
        return tuple(out)

    def ranges(
        self, shape: Sequence[int], mesh: Mesh, rank: int = 0
    ) -> tuple[tuple[slice, ...], ...]:
        """Return which part of the global tensor is the shard of `rank`, also if a dim is packed.

        Returns:
            For each dim, the slices whose concatenation is the shard: one per piece.
        """
        plain = Layout(self.cuts)
        counts = [self.pieces(dim) for dim in range(len(self.cuts))]
        pieces = tuple(size // n for size, n in zip(shape, counts, strict=True))
        return tuple(
            tuple(slice(s.start + i * piece, s.stop + i * piece) for i in range(n))
            for s, piece, n in zip(plain.slices(pieces, mesh, rank), pieces, counts, strict=True)
        )

    def local_shape(self, shape: Sequence[int], mesh: Mesh, rank: int = 0) -> tuple[int, ...]:
        """Return the shape of the shard that `rank` has of a tensor of this global shape."""
        return _local_shape(self, tuple(shape), mesh, rank)

    def least_local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of the smallest shard that any rank has.

        This need not be the last rank's shard if two axes shard one dim. The minimum is taken dim
        by dim: an axis shards one dim only, so some rank has the minimum of every dim. Sharding a
        size gives at most three sizes (full, shorter, empty), so no loop over ranks is needed.
        """
        out = []
        for dim, (size, axes) in enumerate(zip(shape, self.cuts, strict=True)):
            pieces = self.pieces(dim)
            sizes = {size // pieces}
            for joint in _joint(axes):
                sizes = {part for each in sizes for part in _parts(each, mesh.size(*joint))}
            out.append(pieces * min(sizes))
        return tuple(out)

    def turns(self, shape: Sequence[int], mesh: Mesh) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Return at which positions along the axes of a dim the shards become smaller.

        Ranks between two such positions have shards of equal size, so few of many ranks need to be
        looked at. Axes that divide a dim into equal shards have no such positions.

        Returns:
            Positions along the axes (`Mesh.index`), by axes; axes that act as one have one entry.

        >>> mesh = Mesh.of({"dp_shard": 1000, "tp": 8})
        >>> Layout((("tp", "dp_shard"), ())).turns((32000, 4096), mesh)
        {('tp',): (), ('dp_shard',): ()}
        >>> Layout((("tp", "dp_shard"), ())).turns((11008, 4096), mesh)
        {('tp',): (), ('dp_shard',): (688,)}
        """
        out = {}
        for dim, (size, axes) in enumerate(zip(shape, self.cuts, strict=True)):
            sizes = {size // self.pieces(dim)}
            for joint in _joint(axes):
                count = mesh.size(*joint)
                out[tuple(joint)] = tuple(sorted({n for s in sizes for n in _turns(s, count)}))
                sizes = {part for each in sizes for part in _parts(each, count)}
        return out

    def local_numel(self, shape: Sequence[int], mesh: Mesh, rank: int = 0) -> int:
        """Return the number of elements of the shard of `rank`."""
        return math.prod(self.local_shape(shape, mesh, rank))

    def padded_numel(
        self, shape: Sequence[int], mesh: Mesh, axes: Sequence[str], rank: int = 0
    ) -> int:
        """Return the number of elements of the shard of `rank` after FSDP2 has padded it.

        FSDP2 pads the shards along the dim that it shards to the size of the first rank's shard,
        so that one all-gather can move equal shards. `axes` are the axes over which it shards;
        those of them that shard no dim of this layout are ignored.

        Source: `torch.distributed.fsdp`, FSDPParam._init_sharded_param.
        """
        cutting = [axis for axis in axes if axis in self.axes]
        if not cutting:
            return self.local_numel(shape, mesh, rank)
        dim = self.dim_of(cutting[0])
        assert dim is not None
        local = list(self.without(*cutting).local_shape(shape, mesh, rank))
        local[dim] = -(-local[dim] // mesh.size(*cutting))
        return math.prod(local)

    def spell(self, mesh: Mesh | None = None) -> str:
        """Return the layout in placement words: `S(0)@tp,dp_shard`, `R`, `P@tp`, `S(0)@tp(3)`.

        The 3 in `S(0)@tp(3)` is the number of pieces of a packed dim. If a mesh is given, axes of
        size 1 are left out.
        """
        words = []
        for dim, axes in enumerate(self.cuts):
            kept = [a for a in axes if mesh is None or mesh.size(a) > 1]
            if kept:
                pieces = f"({self.pieces(dim)})" if self.pieces(dim) > 1 else ""
                words.append(f"S({dim})@{','.join(kept)}{pieces}")
        partial = [a for a in self.partial if mesh is None or mesh.size(a) > 1]
        if partial:
            words.append(f"P@{','.join(partial)}")
        return " ".join(words) or "R"

    def _repr_html_(self) -> str:
        html: str = view("layout_html")(self)
        return html

    def __str__(self) -> str:
        return self.spell()


@dataclass(frozen=True, slots=True)
class Piece:
    """One projection of a fused weight, such as q of QKV, and into how many parts it is divided.

    Args:
        size: Number of elements along the dim on which the projections are concatenated.
        parts: Number of equal parts. There are fewer parts than ranks if neighbouring ranks compute
            with the same part, for example if their query heads share a kv head.
    """

    size: int
    parts: int

    @property
    def part(self) -> int:
        """The number of elements of one part along the dim."""
        return self.size // self.parts


def own_parts(pieces: Sequence[Piece], rank: int, num_ranks: int) -> tuple[slice, ...]:
    """Return the slices of a fused dim that `rank` computes with: one part of every piece.

    >>> own_parts([Piece(8, 4), Piece(4, 2)], 3, 4)
    (slice(6, 8, None), slice(10, 12, None))
    """
    out, start = [], 0
    for piece in pieces:
        at = start + rank * piece.parts // num_ranks * piece.part
        out.append(slice(at, at + piece.part))
        start += piece.size
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that changes a layout along one axis.

    Args:
        kind: all_gather, all_reduce, reduce_scatter, all_to_all or local (a slice: no bytes).
        axis: The mesh axis whose ranks communicate.
        dim: The tensor dim that is gathered or scattered; for all_to_all, the dim that `axis`
            shards afterwards; -1 for all_reduce.
    """

    kind: str
    axis: str
    dim: int = -1


def changes(source: Layout, target: Layout) -> tuple[Collective, ...]:
    """Return the collectives that turn `source` into `target`, in the order in which they run.

    | from | to   | collective     |
    |------|------|----------------|
    | S(d) | R    | all_gather     |
    | P    | R    | all_reduce     |
    | P    | S(d) | reduce_scatter |
    | R    | S(d) | local          |
    | S(d) | S(e) | all_to_all     |

    Only the innermost axis of a dim can be undone. So for each dim, the leading axes that both
    layouts share are kept, the axes after these are undone, innermost first, and only then are
    new axes applied. All-reduces come last, when the shards are smallest.
    """
    assert set(target.partial) <= set(source.partial), "no collective makes a tensor partial"
    both = set(source.axes) & set(target.axes)
    assert not any(axis in both for axis, _ in set(source.packed) ^ set(target.packed))
    pairs = list(zip(source.cuts, target.cuts, strict=True))
    kept = [_common(old, new) for old, new in pairs]
    undone = [(d, axis) for d, (old, _) in enumerate(pairs) for axis in reversed(old[kept[d] :])]
    made = [(d, axis) for d, (_, new) in enumerate(pairs) for axis in new[kept[d] :]]
    moved = {
        axis: dim
        for dim, axis in made
        if pairs[dim][0] == pairs[dim][1][: kept[dim]]  # nothing is undone in its new dim,
        and pairs[dim][1][kept[dim]] == axis  # it is applied first there,
        and any(old[-1:] == (axis,) for old in source.cuts)  # and it is innermost in its old dim
    }
    moves = [Collective("all_to_all", axis, dim) for axis, dim in moved.items()]
    gathers = [Collective("all_gather", axis, dim) for dim, axis in undone if axis not in moved]
    cuts = [
        Collective("reduce_scatter" if axis in source.partial else "local", axis, dim)
        for dim, axis in made
        if axis not in moved
    ]
    added = set(source.partial) - set(target.partial) - set(target.axes)
    sums = [Collective("all_reduce", axis) for axis in source.partial if axis in added]
    return (*moves, *gathers, *cuts, *sums)


# Cached: the thousands of tensors of a model have only a handful of different layouts.


@lru_cache(maxsize=64)
def _whole(ndim: int) -> Layout:
    return Layout(((),) * ndim)


@lru_cache(maxsize=1 << 10)
def _cut(layout: Layout, axis: str, dim: int, pieces: int) -> Layout:
    dim = range(len(layout.cuts))[dim]
    cuts = tuple(axes + (axis,) if d == dim else axes for d, axes in enumerate(layout.cuts))
    packed = layout.packed + (((axis, pieces),) if pieces > 1 else ())
    return Layout(cuts, layout.partial, packed)


@lru_cache(maxsize=1 << 12)
def _local_shape(layout: Layout, shape: tuple[int, ...], mesh: Mesh, rank: int) -> tuple[int, ...]:
    if not layout.packed:
        return tuple(s.stop - s.start for s in layout.slices(shape, mesh, rank))
    ranges = layout.ranges(shape, mesh, rank)
    return tuple(sum(s.stop - s.start for s in each) for each in ranges)


def _parts(size: int, count: int) -> set[int]:
    """Return the different sizes of `count` shards of a dim, divided as `torch.chunk` does."""
    piece = -(-size // count)
    whole, rest = divmod(size, piece) if piece else (0, 0)
    parts = {piece} if whole else set()
    parts |= {rest} if rest else set()
    return parts | ({0} if whole + bool(rest) < count else set())


def _turns(size: int, count: int) -> set[int]:
    """Return the indices of those of `count` shards that are smaller than the shard before them."""
    piece = -(-size // count)
    whole, rest = divmod(size, piece) if piece else (0, 0)
    return {whole, whole + bool(rest)} - {0, *range(count, whole + 2)}


def _joint(axes: Sequence[str]) -> list[list[str]]:
    """Return the axes of a dim in order, in groups; the axes of a group shard as one axis."""
    out: list[list[str]] = []
    for axis in axes:
        if out and axis in SHARD_AXES and out[-1][-1] in SHARD_AXES:
            out[-1].append(axis)
        else:
            out.append([axis])
    return out


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    """Return how many leading items of the two sequences are equal."""
    same = [a == b for a, b in zip(left, right, strict=False)]
    return (same + [False]).index(False)
