"""Why a plan is what it is: the same search again, with something else held.

The answer to "why not" is the best that there is with it, what it costs and where, or how much
memory is missing, or why it is not in the space at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from meshplan.errors import Origin, PlanError, Problem, SpecError
from meshplan.planner.answers.settings import (
    FIELDS,
    READ_AGAIN,
    STATED,
    blocks_with,
    has,
    narrowed,
    no_mesh,
    settings_of,
)
from meshplan.planner.objectives.answer import smallest_of
from meshplan.planner.objectives.balanced import balance
from meshplan.planner.objectives.fastest import decide_job
from meshplan.planner.objectives.memory import least_rows
from meshplan.planner.objectives.num_devices import cheapest, with_nodes
from meshplan.planner.objectives.offload_variants import fastest_that_fits
from meshplan.planner.problem.decision import Decision, Evaluated, PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import Candidate, ConfigSolver
from meshplan.planner.space.space import EmptySpaceError, Freedom
from meshplan.planner.tables.cost_table import memory_bounds

_MOST_SIZES: Final = 8
"""Of a microbatch, of which the nearest to the plan's are looked at."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the seconds of a step go.

    Attributes:
        compute: What the model's own operations take.
        recompute: What runs again.
        tensor_parallel: What tp sends.
        data: What data ranks send and nothing hides, and the optimizer.
        host: What an optimizer on the host takes, and what waits for copies.
        pipeline: Bubbles, and what stages wait for.
    """

    compute: float
    recompute: float
    tensor_parallel: float
    data: float
    pipeline: float
    host: float = 0.0


NAMES: Final[Mapping[str, str]] = {
    "compute": "kernels that reach less",
    "recompute": "recomputation",
    "tensor_parallel": "exposed communication",
    "data": "gathering and reducing that nothing hides",
    "pipeline": "bubbles of the pipeline",
    "host": "the optimizer on the host, and what waits for copies",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """One setting, held.

    Args:
        setting: As it was asked.
        seconds: Of the best step with it; None where there is none.
        base_s: Of the best step without.
        way: The best with it.
        plan: The plan that there is, which may be slower than the best, and simpler.
        is_planned: Whether that has it.
        num_with: Of that one's blocks, how many have it, and how many there are; (0, 0) where it is
            nothing that blocks choose.
        is_left: Whether the planner leaves it as the plan has it, or chooses it in part.
        shares: Where the seconds go.
        plan_shares: Where those of the plan go.
        objective: By which the one is the plan, and the other the best.
        missing_bytes: What is missing where nothing fits: of the plan that comes nearest.
        is_whole: Whether the searches came to their ends, and not to the time limit's.
        why: Why it is not in the space.
    """

    setting: str
    base_s: float | None = None
    seconds: float | None = None
    way: Evaluated | None = None
    plan: Evaluated | None = None
    is_planned: bool = False
    num_with: tuple[int, int] = (0, 0)
    is_left: bool = False
    shares: Shares | None = None
    plan_shares: Shares | None = None
    objective: str = "time"
    missing_bytes: int | None = None
    is_whole: bool = True
    why: str = ""


class Asker:
    """Questions about one plan file, each beside the same plan.

    Args:
        told: Is told how large each space is.
    """

    def __init__(
        self, question: PlanRequest, told: Callable[[str], None] = lambda text: None
    ) -> None:
        self._question, self._told = question, told

    @cached_property
    def _job(self) -> PlanningProblem:
        if self._question.objective == "cost":
            # Of the number of nodes that is the cheapest: there the cheapest is the fastest.
            self._question = _on_the_cheapest(self._question)
        if self._question.objective == "balanced" and (found := balance(self._question)):
            # The fastest of what holds no more than the plan.
            self._question = replace(self._question, limit_bytes=found.limit_bytes)
        return PlanningProblem(self._question)

    @cached_property
    def _num_rows(self) -> int:
        return len(self._job.grid)

    @cached_property
    def decision(self) -> Decision:
        """The plan that there is."""
        if self._is_about_memory:
            return smallest_of(self._job)
        return decide_job(self._job)

    @property
    def _is_about_memory(self) -> bool:
        return self._question.objective == "memory"

    @property
    def free(self) -> Freedom:
        """What the plan leaves open."""
        return self._job.free

    def settings(self, path: str) -> list[str]:
        """Every value of a field, as settings.

        Raises:
            SpecError: It is nothing that the planner chooses.
        """
        if path != "batch.micro":
            return list(settings_of(self.free, path))
        rows = self._job.grid
        sizes = np.where(rows["pp"] > 1, rows["micro"] * rows["microbatches"], rows["micro"])
        chosen = self.decision.chosen
        own = chosen.plan.micro if chosen is not None and chosen.plan.micro else 1
        near = sorted(set(map(int, sizes)), key=lambda size: abs(math.log(size / own)))
        return [f"{path}={size}" for size in sorted(near[:_MOST_SIZES])]

    def why_not(self, setting: str) -> WhyNot:
        """What the plan would be with one setting held.

        Args:
            setting: As "mesh.tp=8".

        Raises:
            SpecError: It is no setting that the planner chooses.
            PlanError: The plan says too little.
        """
        path, equals, text = map(str.strip, setting.partition("="))
        if path not in (*FIELDS, *STATED):
            fix = f"ask about one of {', '.join((*FIELDS, *STATED))}, such as mesh.tp=8"
            raise SpecError(Problem(f"'{path}' is nothing that is planned", Origin(path), fix))
        if not equals:
            what, fix = "why not which value?", f"ask why-not {path}=VALUE, or why {path} for all"
            raise SpecError(Problem(what, Origin(path), fix))
        if path in (*READ_AGAIN, *STATED):
            return self._stated(setting)
        if path in self._job.spec.origins and path == "sequence_parallel":
            return WhyNot(setting=setting, why="the plan states it")
        held, why = narrowed(self.free, path, text)
        if held is None:
            return WhyNot(setting=setting, why=why)
        num_rows = self._num_rows  # Whatever is wrong with the plan itself is told as such.
        job = PlanningProblem(self._question, held)
        try:
            grid = job.grid
        except EmptySpaceError:
            return WhyNot(setting=setting, why=no_mesh(self.free, path, text))
        self._told(f"{num_rows:,} configurations, {len(grid):,} of them with {setting}")
        plan = self.decision.chosen
        answer = self._beside(setting, job)
        if plan is None:
            return answer
        return replace(
            answer, is_planned=has(plan, path, text), num_with=blocks_with(plan, path, text)
        )

    def _stated(self, setting: str) -> WhyNot:
        """The best with a setting in the plan file."""
        read = self._question.read
        assert self._num_rows  # Whatever is wrong with the plan itself is told as such.
        try:
            job = PlanningProblem(replace(self._question, read=lambda more: read([setting, *more])))
            self._told(f"{len(job.grid):,} configurations with {setting}")
        except PlanError as error:
            problem = error.problems[0]
            reason = f": {problem.fix}" if isinstance(error, EmptySpaceError) else ""
            return WhyNot(setting=setting, why=f"{problem.what}{reason}")
        path, _, text = map(str.strip, setting.partition("="))
        plan = self.decision.chosen
        is_left = path in STATED
        is_planned = plan is not None and (
            job.spec == self._job.spec if is_left else has(plan, path, text)
        )
        return replace(self._beside(setting, job), is_planned=is_planned, is_left=is_left)

    def _beside(self, setting: str, job: PlanningProblem) -> WhyNot:
        """The best of one space beside the plan."""
        base, plan = self.decision, self.decision.chosen
        way, candidate, is_whole = self._best(job)
        return WhyNot(
            setting=setting,
            base_s=base.best_s if plan is not None else None,
            seconds=way.seconds if way is not None else None,
            way=way,
            plan=plan,
            shares=_shares(job, candidate) if candidate else None,
            plan_shares=_shares(self._job, plan.candidate) if plan and plan.candidate else None,
            missing_bytes=_missing(job) if way is None and is_whole else None,
            is_whole=base.is_whole and is_whole,
            objective=self._question.objective,
        )

    def _best(self, job: PlanningProblem) -> tuple[Evaluated | None, Candidate | None, bool]:
        """(the best of a space, of its search, whether that came to its end)."""
        if self._is_about_memory:
            decision = smallest_of(job)
            job.allow(job.question.limit_bytes)
            way = decision.chosen
            return way, way.candidate if way is not None else None, decision.is_whole
        found = fastest_that_fits(job, _deadline(job))
        measured = found.measured.result if found.measured is not None else None
        assert measured is None or isinstance(measured, Evaluated)
        return measured, found.best, found.is_whole


def _on_the_cheapest(question: PlanRequest) -> PlanRequest:
    decision = cheapest(question)
    nodes = question.cluster.nodes
    if decision.chosen is not None:
        nodes = int(decision.chosen.stated.get("hardware.nodes", nodes))
    return with_nodes(question, nodes)


def _deadline(job: PlanningProblem) -> float:
    limit = job.question.time_limit_s
    return float("inf") if limit is None else time.monotonic() + limit


def _missing(job: PlanningProblem) -> int | None:
    """Bytes that whatever holds the least would hold too many; None where that takes too long.

    Rows by their linear figures, which are never above the truth, until these reach the least that
    was measured.
    """
    numbers, deadline = job.usual, _deadline(job)
    rows = least_rows(numbers.grid, memory_bounds(numbers), float("inf"))
    smallest = [ConfigSolver(numbers, row, float("inf")).smallest() for row in rows]
    smallest.sort(key=lambda candidate: max(candidate.linear_bytes))
    least: float = float("inf")
    for candidate in smallest:
        if max(candidate.linear_bytes) >= least:
            break
        if time.monotonic() > deadline or job.question.is_stopped():
            return None
        way = job.measure(numbers, candidate, to_the_end=True).result
        if isinstance(way, Evaluated):
            least = min(least, way.memory.worst.band[1])
    return int(least) - job.question.limit_bytes if least < float("inf") else None


def _shares(job: PlanningProblem, candidate: Candidate) -> Shares:
    """Where the seconds of a candidate go."""
    numbers = job.usual
    at, row = candidate.row, numbers.grid[candidate.row]
    takes = np.sum([np.array(stage) for stage in candidate.takes], axis=0)
    count = takes.sum(axis=1)
    compute, tensor = float(numbers.compute_s[at] @ count), float(numbers.tensor_s[at] @ count)
    taken = takes > 0
    recompute = float((takes * numbers.again_s[at])[taken].sum())
    whole = float((takes[taken] * numbers.seconds[at][taken]).sum())
    stages = int(row["pp"])
    per_rank = int(row["microbatches"]) / stages
    host = float(numbers.host_s[at] @ count)
    data = whole - compute - recompute - tensor - host
    pipeline = candidate.seconds - whole * per_rank
    return Shares(
        compute=compute * per_rank,
        recompute=recompute * per_rank,
        tensor_parallel=tensor * per_rank,
        data=data * per_rank,
        pipeline=pipeline,
        host=host * per_rank,
    )
