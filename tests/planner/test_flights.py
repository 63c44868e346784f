"""What is in flight on each rank, in closed form, against the schedules as they are played."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshplan.cost.grid import GRID, SCHEDULE_WORDS
from meshplan.layout.schedules import SCHEDULES
from meshplan.planner.tables.in_flight import (
    fewest_in_flight,
    in_flight,
    in_flight_of,
    outputs_in_flight,
    sent_in_flight,
    usual_blocks,
    usual_in_flight,
)
from tests.helpers.brute import HALVED, handed_by, kept_by


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_what_is_kept_is_what_the_schedule_has_done(ranks):
    grid = np.zeros(1, GRID)
    grid["pp"] = ranks
    every = itertools.product((1, 2, 3, 5), range(1, 5 * ranks), ("Interleaved1F1B", HALVED))
    for virtual, count, word in every:
        word = "1F1B" if virtual == 1 else word
        if SCHEDULES[word].problem(ranks, count) or (virtual > 1 and count < ranks):
            continue
        grid["virtual"], grid["microbatches"] = virtual, count
        grid["schedule"] = SCHEDULE_WORDS.index(word)
        kept, handed = (by(word, ranks, virtual, count) for by in (kept_by, handed_by))
        assert tuple(in_flight_of(grid[0], rank) for rank in range(ranks)) == kept
        assert tuple(outputs_in_flight(grid[0], rank) for rank in range(ranks)) == handed
        assert sent_in_flight(grid)[0] == sum(map(sum, handed)) - handed[0][0] - handed[-1][-1]
        assert fewest_in_flight(grid)[0] == min(map(min, kept))
        assert usual_in_flight(grid)[0] <= min(min((*each[:-1], np.inf)) for each in kept)


def test_so_many_blocks_are_of_stages_that_keep_as_much_as_usual():
    grid = np.zeros(1, GRID)
    for ranks, virtual, blocks in itertools.product((2, 3), (2, 3), range(4, 14)):
        grid["pp"], grid["virtual"] = ranks, virtual
        evaluated_plans = [
            sum(n - -(-n // virtual) if r < ranks - 1 else n - n // virtual
                for r, n in enumerate(own))
            for own in itertools.product(range(virtual, blocks + 1), repeat=ranks)
            if sum(own) == blocks
        ]  # fmt: skip
        assert not evaluated_plans or min(evaluated_plans) - 1 <= usual_blocks(grid, blocks)[
            0
        ] <= min(evaluated_plans)


def test_schedules_that_fill_less_keep_more():
    row = np.zeros(1, GRID)[0]
    row["pp"], row["microbatches"], row["virtual"] = 4, 8, 1
    row["schedule"] = SCHEDULE_WORDS.index("1F1B")
    assert [in_flight(row, s) for s in range(4)] == [4, 3, 2, 1]
    row["schedule"] = SCHEDULE_WORDS.index("GPipe")
    assert in_flight(row, 3) == 8
    row["schedule"], row["virtual"] = SCHEDULE_WORDS.index("Interleaved1F1B"), 2
    assert in_flight(row, 0) == 5.5
    assert in_flight(row, 3) == 2.5
