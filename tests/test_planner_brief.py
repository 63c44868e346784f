"""What is known of a row from the mesh alone: the same as its own plan tells.

Which seeded bug would this catch? A mesh that keeps another row's sizes, of ep or of its lender; a
kind of mesh that leaves out how data lie, or which axes are spread.
"""

from __future__ import annotations

import random
from pathlib import Path

from meshplan.errors import MeshplanError
from meshplan.plan import make_plan
from meshplan.planner.brief import Brief
from meshplan.planner.job import Job
from meshplan.planner.lock import overrides
from meshplan.planner.row import Row
from tests.test_planner_gauge import LLAMA, job_in

MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 704,
}  # fmt: skip


def opened(job: Job, brief: Brief, row: int) -> float:
    """What the row's own plan opens."""
    candidate = Row(job.usual, row, float("inf")).smallest()
    stated = overrides(job.stated(job.usual, candidate))
    return brief.links(make_plan(job.question.read(stated), job.question.graph))


def test_what_is_opened_is_known_from_the_mesh(tmp_path: Path) -> None:
    """Rows of one kind of mesh share a plan, and differ in the sizes of its axes."""
    job = job_in(tmp_path, MIXTRAL, nodes=4)
    brief, grid = job._brief, job.grid
    assert {2, 4, 8} <= set(grid["ep"].tolist())
    spread: set[float] = set()
    for row in random.Random(0).sample(range(len(grid)), 60):
        try:
            own = opened(job, brief, row)
        except MeshplanError:
            continue
        assert job.taken(row) == own
        spread.add(own)
    assert len(brief._kinds) < len(brief._taken)
    assert len(spread) > 12
