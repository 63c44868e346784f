"""Plans of models whose blocks with experts and without take turns: figures from below stay below.

Which seeded bug would this catch? Parameters that are gathered ahead where nothing follows; a unit
of experts that are spread counted with its block; a short model of other blocks than it stands for.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.plan.plan import make_plan
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.overrides import statements
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.truncated import TruncatedBound, shorten
from meshplan.planner.solve.config import ConfigSolver, solve_config
from meshplan.planner.tables.cost_table import memory_bounds
from tests.planner.test_gauge import LLAMA, job_in

QWEN: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 12,
    "hidden_size": 256, "head_dim": 32, "intermediate_size": 512, "moe_intermediate_size": 512,
    "num_experts": 256, "num_experts_per_tok": 2, "mlp_only_layers": [0, 11],
}  # fmt: skip
DEEPSEEK: dict[str, Any] = QWEN | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 64,
    "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 3,
}  # fmt: skip


@pytest.fixture(params=["deepseek", pytest.param("qwen", marks=pytest.mark.wide)])
def job(tmp_path: Path, request: pytest.FixtureRequest) -> PlanningProblem:
    return job_in(tmp_path, QWEN if request.param == "qwen" else DEEPSEEK, nodes=8)


def test_figures_from_below_are_below(job: PlanningProblem) -> None:
    """Of the answer that takes the least memory, which is replayed whole."""
    rng, numbers = random.Random(1), job.table
    bounds, shares = memory_bounds(numbers), []
    decided = np.flatnonzero(numbers.reduction_floor_bytes >= bounds)
    rows = [int(row) for row in rng.sample(list(decided), 5)]
    for row in rows:
        smallest = ConfigSolver(numbers, row, float("inf")).smallest()
        plan = make_plan(
            job.request.read(overrides(job.stated(numbers, smallest))), job.request.graph
        )
        ranks = int(numbers.grid[row]["pp"])
        step = plan.mesh.world_size // ranks
        held = max(
            analytic_log_of_rank(plan, place * step, device=job.request.device).pooled_bytes
            for place in range(ranks)
        )
        assert bounds[row] <= held, numbers.grid[row]
        shares.append(bounds[row] / held)
    assert max(shares) > 0.7


def test_tp_cuts_what_every_block_shares_whatever_its_number(job: PlanningProblem) -> None:
    """A trial has other blocks than those that show all: the third may be dense in one alone."""
    whole, part = job.chain_at(1), job.chain_at(4)
    assert part.order == whole.order
    assert len({part.order[n] for n, name in enumerate(part.names) if name}) == 2
    for one, cut in zip(whole.kinds, part.kinds, strict=True):
        if one.has_options:
            assert sum(cut.numels) < sum(one.numels)


@pytest.mark.wide
def test_few_blocks_of_each_kind_never_say_more_than_all(job: PlanningProblem) -> None:
    question, numbers, rng = job.request, job.table, random.Random(0)
    looks = dict(zip(job.chain_at(1).names, job.chain_at(1).order, strict=True))
    assert question.shorter is not None
    shortened = 0
    while shortened < 3:
        row = rng.choice(np.flatnonzero(job.grid["pp"] == 1).tolist())
        smallest = ConfigSolver(numbers, row, float("inf")).smallest()
        room = max(smallest.linear_bytes) * rng.choice((1.05, 1.3, 2))
        found = solve_config(numbers, row, room) or smallest
        (blocks,) = job.blocks(numbers, found)
        short = shorten(blocks, question.shorter, looks)
        if short is None or not short.times:
            continue
        shortened += 1
        assert len(short.graph.blocks()) == len(short.blocks)
        stated = statements(job.spec, job.free, job.grid[row], [short.blocks], {}, "default")
        few = make_plan(question.read(overrides(stated)), short.graph)
        plan = make_plan(question.read(overrides(job.stated(numbers, found))), question.graph)
        least = TruncatedBound(
            analytic_log_of_rank(few, 0, device=question.device), short
        ).least_bytes
        whole = analytic_log_of_rank(plan, 0, device=question.device).pooled_bytes
        assert 0.7 * whole < least <= whole, job.grid[row]
