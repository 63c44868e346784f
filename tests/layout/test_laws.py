"""Laws of layouts: true for every shape, mesh and order of cuts, and the same as DTensor's."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshplan.layout.layout import Collective, Layout, changes
from meshplan.layout.mesh import Mesh

AXES = ("dp_replicate", "dp_shard", "tp")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Up to three axes in any order, up to 5 ranks each."""
    names = draw(st.permutations(AXES))[: draw(st.integers(1, 3))]
    return Mesh.of({name: draw(st.integers(1, 5)) for name in names})


@st.composite
def layouts(draw: st.DrawFn, ndim: int, axes: tuple[str, ...] = AXES) -> Layout:
    """Any axes cutting any dims, in any order."""
    layout = Layout.whole(ndim)
    for axis in draw(st.permutations(axes)):
        if draw(st.booleans()):
            layout = layout.cut(axis, draw(st.integers(0, ndim - 1)))
    return layout


booleans = st.booleans()
shapes = st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Mesh]:
    shape = draw(shapes)
    return shape, draw(layouts(len(shape))), draw(meshes())


@given(
    blocks=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    tp_dim=st.integers(0, 2),
    fsdp_dim=st.integers(0, 2),
    fsdp_first=st.booleans(),
)
def test_bytes_do_not_depend_on_how_eight_devices_are_cut(blocks, tp_dim, fsdp_dim, fsdp_first):
    shape = tuple(8 * block for block in blocks)
    cuts = [("tp", tp_dim % len(shape)), ("dp_shard", fsdp_dim % len(shape))]
    layout = Layout.whole(len(shape))
    for axis, dim in cuts[::-1] if fsdp_first else cuts:
        layout = layout.cut(axis, dim)
    held = {
        layout.local_numel(shape, mesh, rank)
        for tp in (1, 2, 4, 8)
        for mesh in [Mesh.of({"dp_shard": 8 // tp, "tp": tp})]
        for rank in range(8)
    }
    assert held == {math.prod(shape) // 8}


@given(cases())
def test_all_ranks_together_hold_every_replica_once(case):
    shape, layout, mesh = case
    held = sum(layout.local_numel(shape, mesh, rank) for rank in range(mesh.world_size))
    assert held == math.prod(shape) * layout.num_replicas(mesh)


@given(cases())
def test_the_slices_of_all_ranks_tile_the_tensor(case):
    shape, layout, mesh = case
    times_held = torch.zeros(shape, dtype=torch.int64)
    for rank in range(mesh.world_size):
        times_held[layout.slices(shape, mesh, rank)] += 1
    assert bool((times_held == layout.num_replicas(mesh)).all())


@given(cases())
def test_rank_zero_holds_the_most(case):
    shape, layout, mesh = case
    held = [layout.local_numel(shape, mesh, rank) for rank in range(mesh.world_size)]
    assert held[0] == max(held)


@given(cases(), st.sampled_from(AXES), st.integers(0, 2))
def test_padding_gives_every_rank_what_the_first_one_along_the_axis_holds(case, axis, dim):
    shape, layout, mesh = case
    layout = layout.without(axis).cut(axis, dim % len(shape))
    for rank in range(mesh.world_size):
        group = [
            other
            for other in range(mesh.world_size)
            if mesh.coordinates(other) | {axis: 0} == mesh.coordinates(rank) | {axis: 0}
        ]
        first = layout.local_numel(shape, mesh, group[0])
        assert layout.padded_numel(shape, mesh, (axis,), rank) == first
        assert max(layout.local_numel(shape, mesh, other) for other in group) == first


@st.composite
def moves(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Layout, Mesh]:
    """A tensor that changes its layout; axes that do not cut the source may hold addends."""
    shape, source, mesh = draw(cases())
    source = Layout(source.cuts, tuple(a for a in AXES if a not in source.axes and draw(booleans)))
    target = draw(layouts(len(shape)))
    kept = tuple(a for a in source.partial if a not in target.axes and draw(booleans))
    return shape, source, Layout(target.cuts, kept), mesh


@given(cases(), st.sets(st.sampled_from(AXES)))
def test_staying_costs_nothing(case, partial):
    layout = Layout(case[1].cuts, tuple(partial - set(case[1].axes)))
    assert changes(layout, layout) == ()


@given(moves())
def test_doing_the_collectives_makes_the_target(move):
    shape, source, target, mesh = move
    ranks = range(mesh.world_size)
    full = count_up(shape)
    # Of addends, the first rank along the axes holds the value and the others hold zeros.
    held = [
        full[source.slices(shape, mesh, rank)] * (mesh.index(rank, source.partial) == 0)
        for rank in ranks
    ]
    leaves = {axis: dim for dim, axes in enumerate(source.cuts) for axis in axes}
    for step in changes(source, target):
        held = [perform(step, leaves.get(step.axis, -1), held, mesh, rank) for rank in ranks]
    for rank in ranks:
        value = full[target.slices(shape, mesh, rank)]
        assert torch.equal(held[rank], value * (mesh.index(rank, target.partial) == 0))


def perform(
    step: Collective, leaves: int, held: list[torch.Tensor], mesh: Mesh, rank: int
) -> torch.Tensor:
    """What `rank` holds after the collective, by the textbook."""
    here = mesh.coordinates(rank)
    group = [r for r in range(mesh.world_size) if others(mesh, r, step) == others(mesh, rank, step)]
    pieces = [held[r] for r in group]
    mine = here.get(step.axis, 0)

    def part(tensor: torch.Tensor) -> torch.Tensor:
        size = -(-tensor.shape[step.dim] // len(group))
        return tensor.narrow(
            step.dim,
            min(mine * size, tensor.shape[step.dim]),
            max(0, min(size, tensor.shape[step.dim] - mine * size)),
        )

    match step.kind:
        case "all_gather":
            return torch.cat(pieces, step.dim)
        case "all_reduce":
            return sum(pieces, torch.zeros_like(pieces[0]))
        case "reduce_scatter":
            return part(sum(pieces, torch.zeros_like(pieces[0])))
        case "all_to_all":
            return torch.cat([part(piece) for piece in pieces], leaves)
        case "local":
            return part(held[rank])
        case kind:
            raise AssertionError(f"no collective is called {kind}")


def others(mesh: Mesh, rank: int, step: Collective) -> dict[str, int]:
    return {axis: at for axis, at in mesh.coordinates(rank).items() if axis != step.axis}


@given(cases(), st.sampled_from(AXES), st.integers(0, 2))
def test_undoing_the_innermost_cut_is_one_all_gather(case, axis, dim):
    shape, layout, _ = case
    layout = layout.without(axis)
    inner = layout.cut(axis, dim % len(shape))
    assert inner.without(axis) == layout
    assert changes(inner, layout) == (Collective("all_gather", axis, dim % len(shape)),)


Piece = tuple[tuple[int, ...], Layout, torch.Tensor]
PAIR_OF_PAIRS = {"dp_shard": 2, "tp": 2}


def pieces_held(shapes: list[tuple[int, ...]]) -> list[Piece]:
    """What DTensor and FSDP2 hold on this rank for every pair of dims that the axes can cut."""
    mesh = init_device_mesh("cpu", tuple(PAIR_OF_PAIRS.values()), mesh_dim_names=("dp_shard", "tp"))
    out: list[Piece] = []
    for shape in shapes:
        full = count_up(shape)
        dims = (None, *range(len(shape)))
        for fsdp, tp in itertools.product(dims, dims):
            placements = [Replicate() if dim is None else Shard(dim) for dim in (fsdp, tp)]
            layout = Layout.whole(len(shape))
            for axis, dim in (("dp_shard", fsdp), ("tp", tp)):
                layout = layout if dim is None else layout.cut(axis, dim)
            out.append((shape, layout, distribute_tensor(full, mesh, placements).to_local()))
        # FSDP2 over tensor parallel: the inner axis of the mesh cuts first (_StridedShard).
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(0)]))
        fully_shard(module, mesh=mesh["dp_shard"])
        layout = Layout.whole(len(shape)).cut("tp", 0).cut("dp_shard", 0)
        out.append((shape, layout, module.weight.to_local().detach()))
    return out


def count_up(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).reshape(shape)


def test_every_rank_holds_what_dtensor_and_fsdp_hold(pool):
    mesh = Mesh.of(PAIR_OF_PAIRS)
    shapes = [(8,), (7,), (1,), (5, 3), (6, 2), (3, 10), (12, 4), (2, 3, 5)]
    held = pool(4).run(pieces_held, shapes)
    assert [len(pieces) for pieces in held] == [3 * (4 + 1) + 4 * (9 + 1) + 16 + 1] * 4
    for rank, pieces in enumerate(held):
        for shape, layout, local in pieces:
            ours = count_up(shape)[layout.slices(shape, mesh, rank)]
            assert ours.shape == local.shape == layout.local_shape(shape, mesh, rank)
            assert torch.equal(ours, local), f"rank {rank}, shape {shape}, {layout}"


def test_the_order_of_two_cuts_of_one_dim_matters():
    mesh = Mesh.of(PAIR_OF_PAIRS)
    fsdp_inside = Layout((("tp", "dp_shard"),)).slices((8,), mesh, rank=1)
    tp_inside = Layout((("dp_shard", "tp"),)).slices((8,), mesh, rank=1)
    assert (fsdp_inside, tp_inside) == ((slice(4, 6),), (slice(2, 4),))
