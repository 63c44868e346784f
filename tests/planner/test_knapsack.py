"""What the search is made of: an option for every block, and a cut into stages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshplan.planner.knapsack import knapsack
from meshplan.planner.knapsack.knapsack import NONE, Options, _Labels, solve
from meshplan.planner.knapsack.lp_relaxation import solve_relaxations
from meshplan.planner.knapsack.pareto_counts import pareto_counts_of
from meshplan.planner.knapsack.stage_cuts import cut_into_stages


@pytest.mark.parametrize("seed", range(3))
def test_knapsack(seed):
    """Against every choice, with correlated and with free figures."""
    rng = np.random.default_rng(seed)
    for number in range(200):
        kinds, options = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        seconds = rng.uniform(1, 2, (kinds, options)).round(3)
        memory = rng.uniform(0, 10, (kinds, options)).round(2)
        if number % 3 == 0:
            memory = 10 - (seconds - 1) * 10 + rng.uniform(0, 0.01, (kinds, options))
        seconds[rng.random((kinds, options)) < 0.15] = np.inf
        counts = rng.integers(0, 6, kinds).astype(np.int64)
        capacity = float(rng.uniform(0, counts.sum() * 10 + 0.1))
        evaluated_plans = [
            [
                (sum(seconds[k, list(x)]), sum(memory[k, list(x)]))
                for x in itertools.combinations_with_replacement(
                    np.flatnonzero(np.isfinite(seconds[k])), int(count)
                )
            ]
            for k, count in enumerate(counts)
        ]
        expected = min(
            (
                sum(t for t, _ in evaluated)
                for evaluated in itertools.product(*evaluated_plans)
                if sum(m for _, m in evaluated) <= capacity
            ),
            default=float("inf"),
        )
        choice = solve(Options(seconds, memory), counts, capacity)
        assert choice.seconds == pytest.approx(expected, rel=1e-9)
        if choice.option_counts:
            table = np.array(choice.option_counts)
            assert (table.sum(axis=1) == counts).all()
            assert np.where(table > 0, table * memory, 0).sum() <= capacity * (1 + 1e-9)


def test_a_cut_asks_for_as_few_exact_values_as_it_can():
    rng = np.random.default_rng(0)
    exact = np.full((3, 9, 9), np.inf)
    i, j = np.triu_indices(9, 1)
    exact[:, i, j] = rng.uniform(1, 2, (3, len(i))) * (j - i)
    asked = []

    def value(*at: int) -> float:
        asked.append(at)
        return float(exact[at])

    cost, ends = cut_into_stages(exact * 0.9, value, (4.0, 1.0))
    costs = [
        4 * max(times) + sum(times)
        for first, second in itertools.combinations(range(1, 8), 2)
        for times in [[exact[0, 0, first], exact[1, first, second], exact[2, second, 8]]]
    ]
    assert cost == pytest.approx(min(costs))
    assert ends[0] == 0
    assert ends[-1] == 8
    assert len(asked) == len(set(asked)) < np.isfinite(exact).sum() / 2


@pytest.mark.parametrize("seed", range(10))
def test_many_menus_are_asked_at_once_as_one_by_one(seed):
    """With other kinds, options that lack, no choice at all, and too little memory."""
    rng = np.random.default_rng(seed)
    asked = []
    for _ in range(12):
        kinds, options = int(rng.integers(1, 5)), int(rng.integers(1, 6))
        seconds = rng.uniform(1, 2, (kinds, options))
        seconds[rng.random((kinds, options)) < 0.2] = np.inf
        memory = rng.uniform(0, 10, (kinds, options)).round(2)
        counts = rng.integers(0, 6, (int(rng.integers(1, 9)), kinds)).astype(np.int64)
        asked.append((Options(seconds, memory), counts, float(rng.uniform(0, 60))))
    one_by_one = [menu.relaxed(counts, np.array([room])) for menu, counts, room in asked]
    together = solve_relaxations(asked)
    every = np.concatenate(one_by_one)
    assert 0 < np.isfinite(every).sum() < len(every)
    for one, other in zip(one_by_one, together, strict=True):
        assert (np.isfinite(one) == np.isfinite(other)).all()
        assert other == pytest.approx(one, rel=1e-13)
    (alone,) = solve_relaxations(asked[:1])
    assert (alone == one_by_one[0]).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_relaxation_is_the_best_of_all_prices_of_memory(seed):
    """By duality: at any price of a byte, what each block takes at its cheapest is a bound."""
    rng = np.random.default_rng(seed)
    for _ in range(100):
        kinds, options = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        seconds, memory = rng.uniform(1, 2, (kinds, options)), rng.uniform(0, 10, (kinds, options))
        counts = rng.integers(0, 6, (int(rng.integers(1, 4)), kinds)).astype(np.int64)
        capacity = rng.uniform(0, 10 * counts.sum(axis=1) + 0.1)
        with np.errstate(divide="ignore", invalid="ignore"):
            slopes = np.subtract.outer(seconds, seconds) / -np.subtract.outer(memory, memory)
        prices = np.append(slopes[np.isfinite(slopes) & (slopes > 0)], 0.0)
        least = (seconds + prices[:, None, None] * memory).min(axis=2)
        dual = (counts @ least.T - np.outer(capacity, prices)).max(axis=1)
        fits = counts @ memory.min(axis=1) <= capacity
        found = Options(seconds, memory).relaxed(counts, capacity)
        assert found == pytest.approx(np.where(fits, dual, np.inf), rel=1e-9)


def test_only_what_is_fast_enough_is_an_answer():
    rng = np.random.default_rng(0)
    for _ in range(100):
        seconds, memory = rng.uniform(1, 2, (2, 4)), rng.uniform(0, 10, (2, 4))
        counts, capacity = rng.integers(1, 5, 2).astype(np.int64), float(rng.uniform(5, 40))
        menu = Options(seconds, memory)
        best = solve(menu, counts, capacity)
        assert solve(menu, counts, capacity, best.seconds * (1 - 1e-9)) == NONE
        if best != NONE:
            assert solve(menu, counts, capacity, best.seconds * (1 + 1e-9)) == best


def test_the_first_answer_fits_and_no_exchange_makes_it_better():
    """It need not be the best; the nearer it is, the less is left to decide."""
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(600):
        kinds, options = int(rng.integers(1, 4)), int(rng.integers(2, 6))
        seconds, memory = rng.uniform(1, 2, (kinds, options)), rng.uniform(0, 10, (kinds, options))
        counts, capacity = rng.integers(0, 6, kinds).astype(np.int64), float(rng.uniform(0, 60))
        menu = Options(seconds, memory)
        if counts @ menu.fastest[1] <= capacity:
            continue  # There is nothing to decide.
        best, first = solve(menu, counts, capacity), _Labels(menu, counts, capacity, 1e9)._first()
        if best == NONE:
            assert first == float("inf")
        else:
            assert first >= best.seconds * (1 - 1e-9)
            shares.append(first / best.seconds)
    assert len(shares) > 100
    assert np.mean(np.isclose(shares, 1.0)) > 0.9
    assert max(shares) < 1.03


def test_the_first_answer_rules_out_as_much_as_one_known_before(monkeypatch):
    """Who asks without a limit waits no longer than who knows an answer of that time already."""
    weighed = []

    def counted(*asked):
        found = pareto_counts_of(*asked)
        weighed.append(len(found.option_counts))
        return found

    monkeypatch.setattr(knapsack, "pareto_counts_of", counted)
    rng, counts, capacity = np.random.default_rng(0), np.array([20, 20]), 200.0
    for _ in range(5):
        # The faster an option, the more it holds.
        seconds = np.sort(rng.uniform(1, 2, (2, 4)))
        memory = np.sort(rng.uniform(0, 10, (2, 4)))[:, ::-1]
        menu = Options(seconds, memory)
        first = _Labels(menu, counts, capacity, np.inf)._first()
        weighed.clear()
        solve(menu, counts, capacity)
        without_limit = sum(weighed)
        weighed.clear()
        solve(menu, counts, capacity, first)
        assert 0 < without_limit == sum(weighed)


def test_mixes_pay_no_more_than_the_slack():
    """Of all that blocks may take together: what is near enough, and no other beats."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        seconds, memory = rng.uniform(1, 2, 3), rng.uniform(0, 5, 3)
        count, price, slack = 4, float(rng.uniform(0, 0.5)), float(rng.uniform(0.1, 1.5))
        paid = seconds + price * memory
        all_ = [
            np.array(option_counts)
            for option_counts in itertools.product(range(count + 1), repeat=3)
        ]
        near = [
            option_counts for option_counts in all_
            if option_counts.sum() == count and option_counts @ (paid - paid.min()) <= slack
        ]  # fmt: skip
        left = {
            tuple(map(int, option_counts))
            for option_counts in near
            if not any(
                each @ seconds < option_counts @ seconds and each @ memory < option_counts @ memory
                for each in near
            )
        }
        found = pareto_counts_of(seconds, memory, count, price, slack, (0.0, np.inf))
        assert {tuple(map(int, option_counts)) for option_counts in found.option_counts} == left
