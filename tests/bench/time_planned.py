"""Steps that `python -m tests.gpu` timed on one GPU, priced as `plan` prices them.

The models are built from transformers' configs and run eagerly under the wrappers of meshplan, so
they say what the profile hf-eager has to: seconds of the operations that `plan` counts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.profile import resolve
from meshplan.layout.hardware import Cluster
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import request_of_file
from meshplan.planner.solve.config import solve_config
from tests.gpu.seconds import CASES, CONFIGS

FRAMEWORK: Final = "hf-eager"
_DTYPE: Final = "bfloat16"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A timed step, and the plan of it.

    Args:
        key: Framework, device, dtype.
        group: Where it was timed.
        model: Name of the model's config.
        real_s: Median seconds of a step.
        problem: The plan, with one configuration in its grid.
    """

    key: tuple[str, str, str]
    group: str
    model: str
    real_s: float
    problem: PlanningProblem

    @property
    def cluster(self) -> Cluster:
        return self.problem.request.cluster

    @property
    def grid(self) -> NDArray[np.void]:
        return self.problem.grid

    def seconds(self, facts: Mapping[str, Any]) -> float:
        """Seconds of a step with the constants of a row of `profiles.json`."""
        table = self.problem.table_at(resolve(self.cluster, *self.key[::2], facts))
        candidate = solve_config(table, 0, float("inf"))
        assert candidate is not None
        return candidate.seconds


def planned_runs(path: Path) -> Iterator[PlannedRun]:
    """Yield the runs of a file of `tests.gpu`, without those in another dtype or limited by a host.

    A step whose optimizer runs on the host says nothing of the device.
    """
    found = json.loads(path.read_text())
    timed = {row["name"]: row["measured"]["seconds"] for row in found["sections"]["seconds"]}
    with tempfile.TemporaryDirectory() as name:
        for config, values in CONFIGS[found["size"]].items():
            (Path(name) / config).mkdir()
            (Path(name) / config / "config.json").write_text(json.dumps(values))
        for case in timed:
            plan = CASES[case].plan(found["gpu"], found["size"])
            if not str(plan["precision"]).startswith("bf16") or plan["offload"] != "none":
                continue
            file = Path(name) / "plan.json"
            folder = Path(name) / CASES[case].config
            file.write_text(json.dumps({**plan, "model": {"config": str(folder)}}))
            problem = PlanningProblem(request_of_file(file))
            problem.grid = problem.grid[:1]  # The others differ in what `plan` chooses for memory.
            key = FRAMEWORK, found["gpu"], _DTYPE
            group = f"one {found['device']}, torch {found['torch']}"
            yield PlannedRun(key, group, CASES[case].config, timed[case], problem)


def predictor_of(
    runs: Sequence[PlannedRun],
) -> Callable[[Mapping[str, Any]], NDArray[np.float64]]:
    """Return a function from a row of `profiles.json` to the seconds of each run."""
    return lambda facts: np.array([run.seconds(facts) for run in runs])
