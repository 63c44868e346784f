"""The samples of an epoch: each once, in one order, whatever the number of ranks.

Which seeded bug would this catch? Blocks that overlap or leave a gap, a position that counts steps
instead of samples, an order drawn from the rank, a last batch that repeats what counts.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshplan.runtime.train.sample_order import Share, order_of


def shares(ranks, microbatches, times, drops_last):
    unit = ranks * microbatches
    return [Share(unit * times, ranks, i, microbatches, drops_last) for i in range(ranks)]


SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
"""(ranks, microbatches, samples of a microbatch)."""


def taken(split, start, length, most=None):
    """[(places of all ranks that count, in order)] of the next steps, and the position after."""
    steps = []
    for blocks in zip(*(share.blocks(start, length) for share in split), strict=True):
        if most is not None and len(steps) == most:
            break
        assert len({block.end for block in blocks}) == 1
        assert len({len(block.places) for block in blocks}) == 1
        steps.append([p for b in blocks for p in b.places[: len(b.places) - b.padded]])
        start = blocks[0].end
    return steps, start


@given(SHAPES, SHAPES, st.integers(0, 60), st.integers(0, 5), st.booleans())
def test_a_job_that_goes_on_elsewhere_takes_each_sample_once(one, other, length, most, drops_last):
    first, position = taken(shares(*one, drops_last), 0, length, most)
    second, end = taken(shares(*other, drops_last), position, length)
    places = [place for step in first + second for place in step]
    assert places == list(range(len(places)))
    left = length - len(places)
    assert left == length - end
    assert left < np.prod(other) if drops_last else left == 0


@given(SHAPES, st.integers(0, 60))
def test_what_fills_up_is_behind_the_samples_that_count(shape, length):
    split = shares(*shape, False)
    unit = shape[0] * shape[1]
    for blocks in zip(*(share.blocks(0, length) for share in split), strict=True):
        places = [place for block in blocks for place in block.places]
        padded = sum(block.padded for block in blocks)
        assert 0 <= padded < unit
        assert len(places) % unit == 0
        assert places == list(range(places[0], places[0] + len(places)))
        assert [p for p in places if p >= length] == list(range(length, length + padded))


@given(SHAPES, st.integers(0, 60), st.booleans())
def test_steps_are_counted(shape, length, drops_last):
    share = shares(*shape, drops_last)[0]
    assert share.num_steps(length) == len(list(share.blocks(0, length)))


def test_orders_differ_by_epoch_and_seed_and_stay_as_they_are():
    orders = {(s, e): tuple(order_of(10, s, e, shuffles=True)) for s in (0, 1) for e in (0, 1)}
    assert len(set(orders.values())) == 4
    assert all(sorted(order) == list(range(10)) for order in orders.values())
    # Jobs that are resumed under another version of meshplan must find the same order.
    assert orders[0, 0] == FIXED
    assert list(order_of(4, 3, 2, shuffles=False)) == [0, 1, 2, 3]


FIXED = (6, 1, 0, 5, 3, 8, 7, 9, 2, 4)
