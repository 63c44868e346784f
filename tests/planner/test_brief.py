"""What is known of rows from their mesh alone: the same as their own plans tell.

Which seeded bug would this catch? A mesh that keeps another row's sizes, of ep or of its lender; a
kind of mesh that leaves out how data lie, or which axes are spread; a trial that takes rows along
that could be, or leaves some that cannot; an answer that is kept for another memory, or none where
the limit was only too low.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.cost.grid import ACTIVATIONS_ON_HOST
from meshplan.errors import MeshplanError
from meshplan.plan.plan import make_plan
from meshplan.planner.lock.lock import overrides
from meshplan.planner.objectives.offload_variants import _offload_variants, add_offload_variants
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.truncated_estimate import TruncatedEstimate
from meshplan.planner.solve.config import ConfigSolver, config_bound, solve_config
from tests.helpers.brute import random_numbers, random_rounds
from tests.planner.test_gauge import LLAMA, job_in

MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 704,
}  # fmt: skip


def opened(job: PlanningProblem, brief: TruncatedEstimate, row: int) -> float:
    """What the row's own plan opens."""
    candidate = ConfigSolver(job.table, row, float("inf")).smallest()
    stated = overrides(job.stated(job.table, candidate))
    return brief.links(make_plan(job.request.read(stated), job.request.graph))


def test_what_is_opened_is_known_from_the_mesh(tmp_path: Path) -> None:
    """Rows of one kind of mesh share a plan, and differ in the sizes of its axes."""
    job = job_in(tmp_path, MIXTRAL, nodes=4)
    brief, grid = job._truncated, job.grid
    assert {2, 4, 8} <= set(grid["ep"].tolist())
    spread: set[float] = set()
    for row in random.Random(0).sample(range(len(grid)), 40):
        try:
            own = opened(job, brief, row)
        except MeshplanError:
            continue
        assert job.taken(row) == own
        spread.add(own)
    assert len(brief._kinds) < len(brief._taken)
    assert len(spread) > 8


def test_what_cannot_wait_on_the_host_where_experts_are_spread_is_not_searched(
    tmp_path: Path,
) -> None:
    """One trial says what the memory room would say of each of those rows; others stay."""
    job = job_in(tmp_path, MIXTRAL | {"num_hidden_layers": 3}, nodes=1)
    numbers = job.table
    with_all = [_offload_variants(numbers.grid, what, job)[1] for what in job.free.offload[1:]]
    assert add_offload_variants(job)
    rows = job.grid[len(numbers.grid) :]
    told = next(r for r in job.free.rejected if "experts are spread" in r.what)
    assert "offload=activations " in told.what
    for what, all_rows in zip(job.free.offload[1:], with_all, strict=True):
        kept = rows[rows["offload"] == what]
        assert set(all_rows["ep"]) == {1, 2, 4, 8}
        assert set(kept["ep"]) == ({1} if what & ACTIVATIONS_ON_HOST else {1, 2, 4, 8})
        assert len(kept[kept["ep"] == 1]) == (all_rows["ep"] == 1).sum()
        spread = all_rows[(all_rows["ep"] > 1) & (all_rows["micro"] == 1)][:3]
        job.grid = np.concatenate([job.grid, spread])
        again = job.table_at(job.profile)
        for row in range(len(job.grid) - len(spread), len(job.grid)):
            measured = job.measure(again, ConfigSolver(again, row, float("inf")).smallest())
            assert (measured.why == told.why) == bool(what & ACTIVATIONS_ON_HOST)


@pytest.mark.parametrize("make", [random_numbers, random_rounds])
def test_a_row_that_is_asked_again_answers_as_if_it_was_not(make: Any) -> None:
    """As the limit of a search moves, up and down, and its memory."""
    rng, again, found, close = np.random.default_rng(0), 0, 0, 0
    for seed in range(5):
        numbers, capacity = make(seed)
        for row in range(len(numbers.grid)):
            for _ in range(4):
                room = capacity * rng.choice([0.7, 1.0])
                best = solve_config(replace(numbers), row, room)
                limit = float(rng.choice([0.9, 1.01, 1.5, np.inf]))
                limit *= best.seconds if best else 1.0
                again += (row, room) in numbers.answers
                expected = best if best is not None and best.seconds < limit else None
                least = config_bound(numbers, row, room)
                assert best is None or least <= best.seconds * (1 + 1e-12)
                close += best is not None and least > 0.9 * best.seconds
                assert solve_config(numbers, row, room, limit) == expected
                assert best is None or least <= config_bound(numbers, row, room) * (1 + 1e-12)
                found += expected is not None
    assert again > 30
    assert found > 25
    assert close > 20


def test_what_holds_less_than_one_that_is_not_over_is_not_looked_at(tmp_path: Path) -> None:
    job = job_in(tmp_path, LLAMA, nodes=1)
    numbers = job.table
    at = (job.grid["pp"] == 1) & (job.grid["dp_shard"] == 8)
    row = int(np.flatnonzero(at)[0])
    smallest, fastest = (
        ConfigSolver(numbers, row, np.inf).smallest(),
        solve_config(numbers, row, np.inf),
    )
    assert fastest is not None
    assert job._truncated_bound(numbers, fastest, guesses=False) is not None
    assert job._truncated_bound(numbers, smallest, guesses=False) is None
    assert job._truncated_bound(numbers, smallest, guesses=True) is not None
    job.allow(job.request.limit_bytes * 2)  # What was seen is of another limit.
    assert job._truncated_bound(numbers, smallest, guesses=False) is not None
    other = replace(fastest, linear_bytes=(fastest.linear_bytes[0] * 1.1,))
    assert job._truncated_bound(numbers, other, guesses=False) is not None
    job.capacity = max(fastest.linear_bytes) / 2
    over = job._truncated_bound(numbers, fastest, guesses=False)
    assert over is not None
    assert over.is_over
    assert job._truncated_bound(numbers, smallest, guesses=False) is not None


def test_a_pipeline_is_replayed_at_once(tmp_path: Path) -> None:
    """Its bound would take as long as its replay, and say less."""
    job = job_in(tmp_path, LLAMA, nodes=1)
    row = int(np.flatnonzero(job.grid["pp"] == 2)[0])
    smallest = ConfigSolver(job.table, row, np.inf).smallest()
    assert job.guess(job.table, smallest) is None
    job.capacity = max(smallest.linear_bytes) / 2
    assert not job.is_over(job.table, smallest)
