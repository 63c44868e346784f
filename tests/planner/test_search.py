"""The search against trying everything: whatever is fastest and fits is what it finds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from meshplan.cost.grid import SCHEDULE_WORDS
from meshplan.planner.problem.excess import LastExcess, least_over
from meshplan.planner.solve.config import Candidate, ConfigSolver, config_bound, solve_config
from meshplan.planner.solve.result import Guess, ReplayedMemory
from meshplan.planner.solve.search import search
from meshplan.planner.tables.cost_table import (
    CostTable,
    by_bound,
    memory_bounds,
    priced_bounds,
    time_bounds,
    weights,
)
from tests.helpers.brute import (
    HALVED,
    alike_rows,
    always_fits,
    began_by,
    beside_blocks,
    everywhere,
    fastest,
    handed_by,
    kept_by,
    random_numbers,
    random_rounds,
)


@pytest.mark.parametrize("block", range(10))
def test_nothing_in_the_space_is_faster(block):
    for seed in range(block * 50, block * 50 + 50):
        numbers, capacity = random_numbers(seed)
        expected = min(fastest(numbers, row, capacity) for row in range(len(numbers.grid)))
        found = search(numbers, capacity, always_fits, tolerance=0.0)
        seconds = found.best.seconds if found.best else float("inf")
        assert seconds == pytest.approx(expected, rel=1e-9), seed
        assert found.gap <= 1e-9 or found.best is None


@pytest.mark.parametrize(
    "block", [0, 1, *(pytest.param(n, marks=pytest.mark.wide) for n in range(2, 10))]
)
def test_nothing_is_faster_with_several_stages_a_rank(block):
    several = 0
    for seed in range(block * 40, block * 40 + 40):
        numbers, capacity = random_rounds(seed)
        by_row = [fastest(numbers, row, capacity) for row in range(len(numbers.grid))]
        for row, each in enumerate(by_row):
            one = solve_config(numbers, row, capacity)
            assert (one.seconds if one else np.inf) == pytest.approx(each, rel=1e-9), (seed, row)
        expected = min(by_row)
        found = search(numbers, capacity, always_fits, tolerance=0.0)
        seconds = found.best.seconds if found.best else float("inf")
        assert seconds == pytest.approx(expected, rel=1e-9), seed
        several += found.best is not None and numbers.grid[found.best.row]["virtual"] > 1
    assert several


def test_what_is_dealt_out_to_stages_is_what_was_chosen():
    """Each stage has its blocks, each rank what the memory bounds were told of."""
    for seed in range(30):
        numbers, capacity = random_rounds(seed)
        for row in np.flatnonzero(numbers.grid["virtual"] > 1):
            for one in (
                solve_config(numbers, int(row), capacity),
                ConfigSolver(numbers, row, 1.0).smallest(),
            ):
                if one is None:
                    continue
                config = numbers.grid[row]
                ranks, virtual = int(config["pp"]), int(config["virtual"])
                word, count = SCHEDULE_WORDS[config["schedule"]], int(config["microbatches"])
                kept = kept_by(word, ranks, virtual, count)
                handed = handed_by(word, ranks, virtual, count)
                assert len(one.ends) == ranks * virtual + 1
                began = began_by(word, ranks, virtual, count) if word != HALVED else [False] * ranks
                held, seconds = [0.0] * ranks, [0.0] * ranks
                for rank in range(ranks):
                    held[rank] += beside_blocks(numbers, row, rank)
                for stage, (i, j) in enumerate(itertools.pairwise(one.ends)):
                    table, backward_extra_bytes = np.array(one.option_counts[stage]), stage // ranks
                    own = numbers.order[i:j]
                    assert list(table.sum(axis=1)) == [own.count(k) for k in range(3)]
                    assert 1 in own
                    keeps = kept[stage % ranks][backward_extra_bytes]
                    bytes_ = numbers.resident[row] + keeps * numbers.saved[row]
                    if began[stage % ranks] and backward_extra_bytes == virtual - 1:
                        bytes_ = bytes_ + numbers.unreduced_grad_bytes[row][:, None]
                    held[stage % ranks] += float(bytes_[table > 0] @ table[table > 0])
                    hands_on = 0 < stage < ranks * virtual - 1
                    held[stage % ranks] += (
                        handed[stage % ranks][backward_extra_bytes]
                        * float(numbers.sent[row])
                        * hands_on
                    )
                    taken = numbers.seconds[row][table > 0] @ table[table > 0]
                    seconds[stage % ranks] += float(taken)
                assert one.linear_bytes == pytest.approx(held)
                a, b = (float(each[row]) for each in weights(numbers.grid))
                step = a * max(seconds) + b * sum(seconds) + float(numbers.once_s[row])
                assert one.seconds == pytest.approx(step)


@pytest.mark.parametrize("block", range(4))
def test_what_is_really_held_decides(block):
    """Each row holds more than the figures say, by an amount of its own."""
    for seed in range(block * 25, block * 25 + 25):
        numbers, capacity = random_numbers(seed)
        extra = np.random.default_rng(seed).uniform(0, capacity / 2, len(numbers.grid))
        extra[:: 1 + seed % 5] *= 4  # Some hold more than there is, whatever their blocks do.

        def measure(
            candidate: Candidate, extra: Any = extra, room: float = capacity
        ) -> ReplayedMemory:
            excess = float(extra[candidate.row])
            fits = max(candidate.linear_bytes) + excess <= room * (1 + 1e-12)
            return ReplayedMemory(fits=fits, excess=everywhere(candidate, excess))

        rows = range(len(numbers.grid))
        expected = min(fastest(numbers, row, capacity - extra[row]) for row in rows)
        found = search(numbers, capacity, measure, tolerance=0.0)
        seconds = found.best.seconds if found.best else float("inf")
        assert seconds == pytest.approx(expected, rel=1e-9), seed
        assert not found.given_up


@pytest.mark.parametrize("block", range(4))
def test_a_candidate_with_less_excess_than_one_that_failed_is_found(block):
    """The excess of a candidate is no bound for those with fewer linear bytes: halve the way."""
    for seed in range(block * 25, block * 25 + 25):
        numbers, capacity = random_numbers(seed)
        rows = range(len(numbers.grid))
        least = [max(ConfigSolver(numbers, r, float("inf")).smallest().linear_bytes) for r in rows]
        share = np.random.default_rng(seed).uniform(0, 1, len(least))
        most = [low + part * max(capacity - low, 0) for low, part in zip(least, share, strict=True)]

        def measure(
            candidate: Candidate, most: Any = most, room: float = capacity
        ) -> ReplayedMemory:
            held = candidate.linear_bytes
            over = {r: 0.9 * room for r, own in enumerate(held) if own > most[candidate.row]}
            return ReplayedMemory(fits=not over, excess=over or everywhere(candidate, 0.0))

        expected = min(fastest(numbers, row, min(most[row], capacity)) for row in rows)
        found = search(numbers, capacity, measure, tolerance=0.0)
        seconds = found.best.seconds if found.best else float("inf")
        assert seconds == pytest.approx(expected, rel=1e-9), seed


@pytest.mark.parametrize("is_guessed", [True, False])
@pytest.mark.parametrize("is_told_whole", [True, False])
@pytest.mark.parametrize("drawn", [random_numbers, random_rounds])
def test_the_excess_of_one_rank_takes_nothing_from_the_others(drawn, is_told_whole, is_guessed):
    """Some ranks hold more by an amount of their own, of which one that is over may tell alone."""
    uneven = 0
    for seed in range(60):
        numbers, capacity = drawn(seed)
        rng = np.random.default_rng(seed)
        shape = len(numbers.grid), int(numbers.grid["pp"].max())
        extra = rng.uniform(0, 0.6 * capacity, shape) * (rng.random(shape) < 0.6)

        def measure(
            candidate: Candidate, extra: Any = extra, room: float = capacity
        ) -> ReplayedMemory:
            held = np.array(candidate.linear_bytes)
            excess = extra[candidate.row][: len(held)]
            over = np.flatnonzero(held + excess > room * (1 + 1e-12))
            told = over[:1] if len(over) and not is_told_whole else range(len(held))
            return ReplayedMemory(not len(over), {int(r): float(excess[r]) for r in told})

        def guess(candidate: Candidate, extra: Any = extra, room: float = capacity) -> Guess | None:
            held = np.array(candidate.linear_bytes)
            excess = extra[candidate.row][: len(held)]
            over = np.flatnonzero(held + excess > room * (1 + 1e-12))
            told = over[:1] if len(over) else range(len(held))
            known = {int(r): float(excess[r]) for r in told}
            return Guess(known, bool(len(over))) if is_guessed else None

        rows = range(len(numbers.grid))
        rooms = [tuple(capacity - extra[row][: int(numbers.grid["pp"][row])]) for row in rows]
        expected = min(fastest(numbers, row, rooms[row]) for row in rows)
        found = search(numbers, capacity, measure, guess=guess, tolerance=0.0)
        seconds = found.best.seconds if found.best else float("inf")
        if found.given_up:
            assert found.lower_s <= expected * (1 + 1e-9), seed
        else:
            assert seconds == pytest.approx(expected, rel=1e-9), seed
        evenly = min(fastest(numbers, row, min(rooms[row])) for row in rows)
        uneven += expected < evenly * (1 - 1e-9)
    assert uneven > 5


def equal_ranks(seed: int) -> tuple[CostTable, float]:
    """Four stages, of which those in the middle keep equally many microbatches."""
    numbers, capacity = random_numbers(seed)
    if len(numbers.order) > 4:
        numbers.grid["pp"], numbers.grid["microbatches"] = 4, 3
        numbers.grid["schedule"] = SCHEDULE_WORDS.index("GPipe")
    return numbers, capacity


@pytest.mark.parametrize("drawn", [random_numbers, random_rounds, equal_ranks])
def test_each_rank_has_a_capacity_of_its_own(drawn):
    solved = 0
    for seed in range(40):
        numbers, capacity = drawn(seed)
        rng = np.random.default_rng(seed)
        for row in range(len(numbers.grid)):
            rooms = tuple(capacity * rng.uniform(0.5, 1.2, int(numbers.grid["pp"][row])))
            expected = fastest(numbers, row, rooms)
            assert config_bound(numbers, row, rooms) <= expected * (1 + 1e-9), (seed, row)
            one = solve_config(numbers, row, rooms)
            assert (one.seconds if one else np.inf) == pytest.approx(expected, rel=1e-9)
            solved += one is not None and len(rooms) > 1
    assert solved > 40


@pytest.mark.parametrize("drawn", [random_numbers, random_rounds])
def test_a_rank_may_fit_with_another_setting(drawn):
    """Of two allocator settings, each is the better one of some ranks: neither hides the other."""
    either = 0
    for seed in range(80):
        numbers, capacity = drawn(seed)
        rng = np.random.default_rng(seed)
        shape = 2, len(numbers.grid), int(numbers.grid["pp"].max())
        extra = rng.uniform(0, 0.5 * capacity, shape)

        def measure(
            candidate: Candidate, extra: Any = extra, room: float = capacity
        ) -> ReplayedMemory:
            held = np.array(candidate.linear_bytes)
            found = []
            for own in extra[:, candidate.row, : len(held)]:
                excess = dict(enumerate(map(float, own)))
                if max(held + own) <= room * (1 + 1e-12):
                    return ReplayedMemory(fits=True, excess=excess)
                found.append(ReplayedMemory(fits=False, excess=excess))
            return least_over(found)

        rows = range(len(numbers.grid))
        own = [
            [tuple(capacity - each[row][: int(numbers.grid["pp"][row])]) for row in rows]
            for each in extra
        ]
        by_setting = [min(fastest(numbers, row, rooms[row]) for row in rows) for rooms in own]
        found = search(numbers, capacity, measure, tolerance=0.0)
        seconds = found.best.seconds if found.best else float("inf")
        if found.given_up:
            assert found.lower_s <= min(by_setting) * (1 + 1e-9), seed
        else:
            assert seconds == pytest.approx(min(by_setting), rel=1e-9), seed
        either += by_setting[1] < by_setting[0]
    assert either > 5


def test_the_end_of_a_search_replays_every_rank():
    """What each rank needs is learnt at once, where another rank does not fit, too."""
    spared = 0
    for seed in range(60):
        numbers, capacity = random_numbers(seed)
        rng = np.random.default_rng(seed)
        extra = rng.uniform(0, 0.6 * capacity, (len(numbers.grid), int(numbers.grid["pp"].max())))

        def measure_all(
            candidate: Candidate, extra: Any = extra, room: float = capacity
        ) -> ReplayedMemory:
            excess = extra[candidate.row][: len(candidate.linear_bytes)]
            fits = max(candidate.linear_bytes + excess) <= room * (1 + 1e-12)
            return ReplayedMemory(fits, dict(enumerate(map(float, excess))))

        def measure(
            candidate: Candidate, measure_all: Any = measure_all, room: float = capacity
        ) -> ReplayedMemory:
            whole = measure_all(candidate)
            over = [r for r, b in enumerate(candidate.linear_bytes) if b + whole.excess[r] > room]
            return replace(whole, excess={over[0]: whole.excess[over[0]]}) if over else whole

        one = search(numbers, capacity, measure, tolerance=0.0)
        other = search(numbers, capacity, measure, measure_all=measure_all, tolerance=0.0)
        if not one.given_up:
            assert (one.best and one.best.seconds) == (other.best and other.best.seconds)
        assert not other.given_up
        spared += one.num_measured - other.num_measured
    assert spared > 0


def test_a_candidate_that_fits_with_much_excess_hides_no_faster_one():
    """Its memory peaks while nothing is kept: another that keeps more needs no more than it."""
    hidden = 0
    for seed in range(60):
        numbers, capacity = random_numbers(seed)
        rng = np.random.default_rng(seed)
        floor = capacity * rng.uniform(0.8, 1.0, len(numbers.grid))

        def measure(
            candidate: Candidate, floor: Any = floor, room: float = capacity
        ) -> ReplayedMemory:
            held = candidate.linear_bytes
            needed = [max(own, float(floor[candidate.row])) for own in held]
            return ReplayedMemory(
                max(needed) <= room, {r: needed[r] - held[r] for r in range(len(held))}
            )

        def guess(candidate: Candidate, room: float = capacity) -> Guess:
            return Guess(everywhere(candidate, 0.5 * room))

        expected = min(fastest(numbers, row, capacity) for row in range(len(numbers.grid)))
        found = search(numbers, capacity, measure, guess=guess, tolerance=0.0)
        seconds = found.best.seconds if found.best else float("inf")
        assert seconds == pytest.approx(expected, rel=1e-9), seed
        hidden += found.num_measured > 1
    assert hidden > 10


@pytest.mark.parametrize("wrong", [(-1.0, 0.0), (0.0, 0.0), (0.0, 2.0), (-0.5, 0.5)])
def test_a_guess_tells_where_to_look_and_never_what_is_found(wrong):
    """Guesses too low, right, too high: the answer is that of whoever guesses nothing."""
    for seed in range(40):
        numbers, capacity = random_numbers(seed)
        rng = np.random.default_rng(seed)
        extra = rng.uniform(0, capacity / 3, len(numbers.grid))
        guesses = np.maximum(extra + rng.uniform(*wrong, len(extra)) * capacity / 2, 0.0)
        surely = extra * rng.uniform(0, 1, len(extra))

        def measure(
            candidate: Candidate, extra: Any = extra, room: float = capacity
        ) -> ReplayedMemory:
            excess = float(extra[candidate.row])
            fits = max(candidate.linear_bytes) + excess <= room * (1 + 1e-12)
            return ReplayedMemory(fits=fits, excess=everywhere(candidate, excess))

        def guess(
            candidate: Candidate, guesses: Any = guesses, extra: Any = extra, room: float = capacity
        ) -> Guess:
            """Sure of being over only where it is, and not always then."""
            is_over = max(candidate.linear_bytes) + extra[candidate.row] > room * (1 + 1e-12)
            return Guess(
                everywhere(candidate, guesses[candidate.row]),
                bool(is_over) and candidate.row % 3 > 0,
            )

        rows = range(len(numbers.grid))
        expected = min(fastest(numbers, row, capacity - extra[row]) for row in rows)
        found = search(
            numbers, capacity, measure, guess=guess, taken=surely.__getitem__, tolerance=0.0
        )
        seconds = found.best.seconds if found.best else float("inf")
        assert seconds == pytest.approx(expected, rel=1e-9), seed


def test_a_good_guess_spares_measures():
    measured = [0, 0]
    for seed in range(30):
        numbers, capacity = random_numbers(seed)
        extra = np.random.default_rng(seed).uniform(0, capacity / 3, len(numbers.grid))

        def measure(
            candidate: Candidate, extra: Any = extra, room: float = capacity
        ) -> ReplayedMemory:
            excess = float(extra[candidate.row])
            return ReplayedMemory(
                max(candidate.linear_bytes) + excess <= room, everywhere(candidate, excess)
            )

        def guess(candidate: Candidate, extra: Any = extra) -> Guess:
            return Guess(everywhere(candidate, extra[candidate.row]))

        measured[0] += search(numbers, capacity, measure).num_measured
        measured[1] += search(numbers, capacity, measure, guess=guess).num_measured
    # What a guess alone keeps from being replayed is replayed once at the end.
    assert measured[1] < 0.95 * measured[0], measured


def test_bounds_are_below_and_not_far():
    shares = []
    for seed in range(24):
        numbers, capacity = (random_rounds if seed % 2 else random_numbers)(seed)
        rows = np.arange(len(numbers.grid))
        plain, priced = time_bounds(numbers), priced_bounds(numbers, rows, capacity)
        least = memory_bounds(numbers)
        for row in rows:
            exact = fastest(numbers, row, capacity)
            assert plain[row] <= exact * (1 + 1e-9)
            assert priced[row] <= exact * (1 + 1e-9)
            if np.isfinite(exact):
                assert least[row] <= capacity * (1 + 1e-9)
                shares.append(max(plain[row], priced[row]) / exact)
    assert np.median(shares) > 0.9


def test_of_a_model_without_blocks_the_smallest_is_looked_at_too():
    numbers, capacity = random_numbers(3)
    numbers = replace(numbers, names=("",) * len(numbers.order))
    numbers.grid["pp"], numbers.grid["schedule"] = 1, 0
    smallest = min(
        max(ConfigSolver(numbers, row, float("inf")).smallest().linear_bytes)
        for row in range(len(numbers.grid))
    )

    def measure(candidate: Candidate) -> ReplayedMemory:
        return ReplayedMemory(
            fits=max(candidate.linear_bytes) <= smallest,
            excess=everywhere(candidate, 0.5 * capacity),
        )

    found = search(numbers, capacity, measure)
    assert found.best is not None
    assert max(found.best.linear_bytes) == smallest


def test_what_comes_near_is_told_whole():
    numbers, capacity = random_numbers(7)
    found = search(numbers, capacity, always_fits, tolerance=0.0, slack=0.3)
    assert found.best is not None
    by_row = {row: fastest(numbers, row, capacity) for row in range(len(numbers.grid))}
    within = {r for r, s in by_row.items() if s <= found.best.seconds * 1.3}
    assert {candidate.row for candidate in found.near} == within
    for candidate in found.near:
        assert candidate.seconds == pytest.approx(by_row[candidate.row], rel=1e-9)


def test_what_cannot_be_told_is_left_out_with_its_reason():
    numbers, capacity = random_numbers(7)
    first = search(numbers, capacity, always_fits).best
    assert first is not None

    def measure(candidate: Candidate) -> ReplayedMemory:
        if candidate.row == first.row:
            return ReplayedMemory(fits=False, why="no rules for it")
        return ReplayedMemory(fits=True)

    found = search(numbers, capacity, measure)
    assert found.refused == {first.row: "no rules for it"}
    assert found.best is None or found.best.row != first.row


def test_a_row_that_is_given_up_is_not_proved(monkeypatch):
    """Nobody knows whether it would have been faster."""
    monkeypatch.setattr("meshplan.planner.solve.search._MOST_TRIES", 1)
    numbers, capacity = random_numbers(7)
    fastest_row = search(numbers, capacity, always_fits).best
    assert fastest_row is not None

    def measure(candidate: Candidate) -> ReplayedMemory:
        return ReplayedMemory(
            fits=candidate.row != fastest_row.row, excess=everywhere(candidate, 0.1)
        )

    found = search(numbers, capacity, measure)
    assert found.given_up
    assert found.best is not None
    assert found.lower_s < found.best.seconds
    assert found.gap > 0


def test_time_that_is_up_gives_the_best_so_far_and_its_gap():
    numbers, capacity = random_numbers(7)
    found = search(numbers, capacity, always_fits, deadline=0.0)
    assert (found.best, found.is_whole, found.gap) == (None, False, 1.0)


def test_a_gap_is_told_when_the_time_is_up_after_an_answer():
    """A row that fits is looked at again at once; until then its bound counts, and not zero."""
    for seed in range(20):
        numbers, capacity = random_numbers(seed)
        answers: list[Candidate] = []

        def measure(candidate: Candidate, answers: Any = answers) -> ReplayedMemory:
            answers.append(candidate)
            return ReplayedMemory(
                fits=True, excess=everywhere(candidate, 0.2 * max(candidate.linear_bytes))
            )

        found = search(numbers, capacity, measure, is_stopped=lambda answers=answers: bool(answers))
        if found.best is not None:
            assert found.gap < 0.5, seed
            assert found.lower_s <= min(
                fastest(numbers, row, capacity) for row in range(len(numbers.grid))
            ) * (1 + 1e-9)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_whenever_the_time_is_up_nothing_is_faster_than_the_lower_bound(spread):
    """Of rows that wait, of those not yet come to, and of those put off by a wrong guess."""
    cut_short = 0
    for seed in range(160, 220):
        numbers, capacity = (random_rounds if seed % 2 else random_numbers)(seed, num_rows=8)
        rng = np.random.default_rng(seed)
        extra = rng.uniform(0, spread, len(numbers.grid)) * capacity
        guesses = extra * rng.uniform(0.5, 2.0, len(extra))
        rows = range(len(extra))
        expected = min(fastest(numbers, row, capacity - extra[row]) for row in rows)

        def measure(
            candidate: Candidate, extra: Any = extra, room: float = capacity
        ) -> ReplayedMemory:
            excess = float(extra[candidate.row])
            return ReplayedMemory(
                max(candidate.linear_bytes) + excess <= room, everywhere(candidate, excess)
            )

        def guess(candidate: Candidate, guesses: Any = guesses) -> Guess:
            return Guess(everywhere(candidate, guesses[candidate.row]))

        for num_looks in range(40):
            looks = iter(range(num_looks))
            found = search(
                numbers, capacity, measure, guess=guess, tolerance=0.0,
                is_stopped=lambda looks=looks: next(looks, None) is None,
            )  # fmt: skip
            if found.is_whole:
                break
            cut_short += 1
            assert found.lower_s <= expected * (1 + 1e-9), (seed, num_looks)
    assert cut_short > 100


def test_an_answer_is_there_soon_though_all_that_is_fast_holds_too_much():
    """The last rows are far slower, and all that fits: nobody waits for those before them."""
    numbers, _ = random_numbers(1, num_rows=80)
    in_parts = np.arange(80) >= 60
    numbers.grid["tp"] = np.where(in_parts, 8, 1)
    numbers.seconds[in_parts] *= 100
    capacity, asked = 1e4, []

    def measure(candidate: Candidate) -> ReplayedMemory:
        asked.append(candidate.row)
        over = 0.0 if in_parts[candidate.row] else 2 * capacity
        return ReplayedMemory(fits=not over, excess=everywhere(candidate, over))

    found = search(numbers, capacity, measure, is_stopped=lambda: len(asked) >= 30)
    assert found.best is not None
    assert in_parts[found.best.row]
    assert not found.is_whole
    assert found.gap > 0.5


class Known:
    """What each row holds above its linear figures, which guesses know.

    Attributes:
        measured, guessed: The rows that somebody asked for.
    """

    def __init__(self, capacity: float, extra: NDArray[np.float64], *, is_sure: bool) -> None:
        self.capacity, self.extra, self.is_sure = capacity, extra, is_sure
        self.measured: Counter[int] = Counter()
        self.guessed: set[int] = set()

    def fits(self, candidate: Candidate) -> bool:
        return max(candidate.linear_bytes) + self.extra[candidate.row] <= self.capacity * (1 + 1e-9)

    def measure(self, candidate: Candidate) -> ReplayedMemory:
        self.measured[candidate.row] += 1
        return ReplayedMemory(
            self.fits(candidate), everywhere(candidate, self.extra[candidate.row])
        )

    def guess(self, candidate: Candidate) -> Guess:
        self.guessed.add(candidate.row)
        is_over = self.is_sure and not self.fits(candidate)
        return Guess(everywhere(candidate, self.extra[candidate.row]), is_over)


def test_a_row_of_which_a_guess_is_sure_is_hardly_measured():
    ruled_out = measured = 0
    for seed in range(40):
        numbers, capacity = random_numbers(seed)
        extra = np.random.default_rng(seed).uniform(0, capacity, len(numbers.grid))
        known = Known(capacity, extra, is_sure=True)
        search(numbers, capacity, known.measure, guess=known.guess)
        for row in range(len(numbers.grid)):
            if not known.fits(ConfigSolver(numbers, row, float("inf")).smallest()):
                # With one rank the smallest, once; with more, what rank is over decides.
                ranks = int(numbers.grid["pp"][row])
                assert known.measured[row] <= (1 if ranks == 1 else 6), seed
                ruled_out += 1
                measured += known.measured[row]
    assert ruled_out > 50
    assert measured < 1.5 * ruled_out


def test_what_guesses_let_hope_for_is_tried_before_its_turn():
    """The fastest answer is there when a third of the rows have not been looked at."""
    numbers, capacity, extra = alike_rows()
    known = Known(capacity, extra, is_sure=False)
    whole = search(numbers, capacity, known.measure, guess=known.guess)
    assert whole.best is not None
    assert whole.best.row == 56
    known.guessed.clear()
    found = search(
        numbers,
        capacity,
        known.measure,
        guess=known.guess,
        is_stopped=lambda: len(known.guessed) >= 53,
    )
    assert found.best is not None
    assert not found.is_whole
    assert found.best.seconds == whole.best.seconds


def test_what_comes_near_holds_what_was_measured_before_its_turn():
    """Row 60 is measured for want of a faster answer, and never again."""
    numbers, capacity, extra = alike_rows()
    extra[60:] = 0.3 * extra[0]
    known = Known(capacity, extra, is_sure=False)
    found = search(numbers, capacity, known.measure, guess=known.guess, slack=0.3)
    near = {each.row: each for each in found.near if each.row in known.measured}
    assert 60 in near
    assert all(map(known.fits, near.values()))


def test_no_more_bounds_are_asked_for_than_the_answer_needs(monkeypatch):
    """Of a large space, they are most of the work where the fastest row fits at once."""
    numbers, _, _ = alike_rows()
    bounded = []

    def counted(*asked: Any) -> Iterator[tuple[float, int]]:
        for bound, row in by_bound(*asked):
            bounded.append(row)
            yield bound, row

    monkeypatch.setattr("meshplan.planner.solve.search.by_bound", counted)
    found = search(numbers, float("inf"), always_fits)
    assert found.best is not None
    assert found.best.row == 59
    assert len(bounded) < 10


def test_ranks_that_did_not_fit_are_guessed_to_need_the_most_next_time():
    candidate = Candidate(3, 1.0, (0, 1, 2, 3), (), (50.0, 60.0, 40.0))
    last = LastExcess()
    assert last.guess(candidate) == [50.0, 60.0, 40.0]
    last.note(3, {2: 30.0})
    last.note(4, {0: 99.0})  # Of another configuration.
    assert last.guess(candidate) == [80.0, 90.0, 70.0]  # As if all were like the one known.
    last.note(3, {0: 5.0, 1: 1.0})
    assert last.guess(candidate) == [55.0, 61.0, 70.0]
