"""Boxes of shards: together they are the whole tensor, and each is where the layout says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.layout.layout import Layout
from meshplan.layout.mesh import Axis, Loan, Mesh
from meshplan.state.boxes import TensorBox, are_a_partition, local_boxes

MESHES = [
    Mesh.of({"dp_shard": 3}),
    Mesh.of({"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    Mesh.of({"dp_shard": 2, "cp": 3}),
    Mesh((Axis("dp_shard", 4),), loans=(Loan("ep", 2, "dp_shard"),)),
]


@st.composite
def sharded(draw):
    """A mesh, a layout on it and a shape."""
    mesh = draw(st.sampled_from(MESHES))
    axes = [*mesh.names] if not mesh.loans else ["ep", "efsdp"]
    cuts = [[], []]
    for axis in draw(st.permutations(axes)):
        where = draw(st.sampled_from([0, 1, None]))
        if where is not None:
            cuts[where].append(axis)
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=2, max_size=2)))
    alone = [axes[0] for axes in cuts if len(axes) == 1]
    packed = ()
    if alone and draw(st.booleans()):
        dim = next(d for d, each in enumerate(cuts) if each == [alone[0]])
        packed = ((alone[0], 3),)
        shape = tuple(3 * n if d == dim else n for d, n in enumerate(shape))
    return mesh, Layout(tuple(map(tuple, cuts)), packed=packed), shape


@given(sharded())
def test_shards_are_cut_and_put_together_again(case):
    mesh, layout, shape = case
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    again = np.full(shape, -1)
    distinct = {}
    for rank in range(mesh.world_size):
        parts = layout.ranges(shape, mesh, rank)
        rows = [i for s in parts[0] for i in range(s.start, s.stop)]
        columns = [i for s in parts[1] for i in range(s.start, s.stop)]
        local = whole[np.ix_(rows, columns)]
        for each in local_boxes(layout, shape, mesh, rank):
            assert (whole[each.box.slices] == local[each.local.slices]).all()
            again[each.box.slices] = local[each.local.slices]
            distinct[each.box] = None
    assert (again == whole).all()
    assert are_a_partition(distinct, shape)


def test_a_scalar_is_one_box():
    mesh = Mesh.of({"dp_shard": 2})
    (only,) = local_boxes(Layout.whole(0), (), mesh, 1)
    assert only.box == only.local == TensorBox((), ())
    assert are_a_partition([only.box], ())


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (2, 4)), ((2, 0), (1, 4))],  # a row is missing
        [((0, 0), (2, 4)), ((1, 0), (3, 4))],  # a row is there twice
        [((0, 0), (2, 4)), ((2, 0), (2, 3)), ((2, 2), (2, 1))],  # as many elements, one twice
        [((0, 0), (5, 4))],  # more than there is
        [],
    ],
)
def test_what_is_not_the_whole_tensor_is_seen(boxes):
    assert not are_a_partition([TensorBox(*each) for each in boxes], (4, 4))


def test_pieces_need_not_form_a_grid():
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)),
                ((1, 1), (1, 1))]  # fmt: skip
    assert are_a_partition([TensorBox(*each) for each in pinwheel], (3, 3))


def test_a_false_list_of_pieces_takes_no_memory():
    boxes = [TensorBox((i, i), (1, 1)) for i in range(20_000)]
    assert not are_a_partition(boxes, (20_000, 20_000))


@given(st.data())
def test_an_overlap_has_the_elements_of_both(data):
    def box():
        start = [data.draw(st.integers(0, 5)) for _ in range(2)]
        return TensorBox(tuple(start), tuple(data.draw(st.integers(1, 5)) for _ in range(2)))

    one, other = box(), box()

    def cells(each):
        return set(itertools.product(*(range(s.start, s.stop) for s in each.slices)))

    common = one.overlap(other)
    assert (cells(common) if common else set()) == cells(one) & cells(other)
    if common:
        moved = common.within(one)
        assert all(a + b == c for a, b, c in zip(moved.start, one.start, common.start, strict=True))
