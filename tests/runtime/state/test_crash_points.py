"""A rank that ends while it saves leaves a whole state, and the others do not wait for it in vain.

`python -m tests.bench.crash_points` tries every moment; two of them are tried here.
"""

from __future__ import annotations

import random

import pytest

from tests.bench.crash_points import Point, points_of, save_until, step_left, uninterrupted
from tests.helpers.pool import Pool


@pytest.fixture
def ending():
    """Ranks of which one ends; the others have time to notice."""
    pool = Pool(4, grace_s=30.0)
    yield pool
    pool.close()


def test_a_whole_state_is_left_wherever_a_rank_of_four_ends(pool, ending, tmp_path):
    expected = pool(4).run(uninterrupted)[0]
    points = points_of(pool(4).run(save_until, tmp_path, None))
    draw = random.Random(0)
    alone = draw.choice([each for each in points if each.rank and each.is_alone])
    assert step_left(ending, pool(4), alone, expected) == 1
    last = max(each.number for each in points if not each.rank)
    at_the_end = Point(0, draw.randint(last - 6, last), is_torn=False, is_alone=False)
    assert step_left(ending, pool(4), at_the_end, expected) == 2
