"""Seconds of a pipeline: what is told against a played one.

Which seeded bug would this catch? A bubble of one stage too many, or of one way there and back.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from meshplan.cost.grid import SCHEDULE_WORDS
from meshplan.cost.pipeline import pipeline_seconds
from meshplan.cost.simulate import simulate
from meshplan.layout.schedules import SCHEDULES
from tests.cost.test_step import row


def pipeline(pp, count, virtual, schedule):
    return row(pp=pp, microbatches=count, virtual=virtual, schedule=SCHEDULE_WORDS.index(schedule))


def both(schedule, pp, count, virtual, forward, crossing=0.0, ratio=2.0):
    """(played, told) seconds."""
    backward = [ratio * each for each in forward]
    played = simulate(SCHEDULES[schedule], forward, backward, ranks=pp, microbatches=count,
                      crossing_s=crossing)  # fmt: skip
    by_rank = [(1 + ratio) * sum(forward[rank::pp]) for rank in range(pp)]
    told = pipeline_seconds(
        pipeline(pp, count, virtual, schedule), np.array(max(by_rank)), np.array(sum(by_rank)),
        np.array(crossing),
    )  # fmt: skip
    assert played.busy_s == pytest.approx([count * each for each in by_rank])
    return played.seconds, told[0]


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        ("GPipe", 1),
        ("1F1B", 1),
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 3),
        ("InterleavedZeroBubble", 2),
        ("InterleavedZeroBubble", 3),
        ("InterleavedZeroBubble", 5),
    ],
)
def test_equal_stages_take_exactly_what_is_told(schedule, virtual, pp):
    for rounds, crossing in ((1, 0.0), (2, 0.0), (5, 0.0), (1, 0.01), (2, 0.01), (5, 0.01)):
        count = pp * rounds
        played, told = both(schedule, pp, count, virtual, [1.0] * pp * virtual, crossing)
        assert told == pytest.approx(played, rel=1e-9)
    if virtual == 1:
        played, told = both(schedule, pp, 2 * pp + 1, 1, [1.0] * pp)
        assert told == pytest.approx(played, rel=1e-9)
        # Between whole rounds what crosses is told to a way there and back.
        played, told = both(schedule, pp, 2 * pp + 1, 1, [1.0] * pp, 0.01)
        assert abs(told - played) <= 0.02


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
def test_unequal_stages_take_about_as_long_as_told(spread):
    rng = random.Random(7)
    for _ in range(60):
        pp, rounds = rng.choice((2, 4, 8)), rng.choice((1, 2, 4))
        stages = [1 + spread * rng.random() for _ in range(pp)]
        for schedule in ("GPipe", "1F1B"):
            played, told = both(schedule, pp, pp * rounds, 1, stages)
            # The slowest stage need not wait for what comes behind it.
            assert -1e-9 <= told / played - 1 <= 0.4 * spread
            assert schedule != "GPipe" or told == pytest.approx(played)
        chunks = [1 + spread * rng.random() for _ in range(2 * pp)]
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
            played, told = both(schedule, pp, pp * rounds, 2, chunks)
            assert abs(told / played - 1) <= 0.75 * spread


def test_the_bubble_of_the_textbook():
    played = simulate(SCHEDULES["1F1B"], [1.0] * 4, [2.0] * 4, ranks=4, microbatches=8)
    assert played.idle_share == pytest.approx(3 / 11)
    split = simulate(SCHEDULES["InterleavedZeroBubble"], [1.0] * 8, [2.0] * 8, ranks=4,
                     microbatches=8)  # fmt: skip
    whole = simulate(SCHEDULES["Interleaved1F1B"], [1.0] * 8, [2.0] * 8, ranks=4, microbatches=8)
    assert split.seconds < whole.seconds
