"""Explain a plan by searching again with one setting fixed.

The answer to "why not" is the best plan with that setting, and the parts of the step in which it
is slower. If no plan with the setting fits, the answer is the memory that is missing. If the
setting is not in the space, the answer is the reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from meshplan.errors import MeshplanError, Origin, PlanError, Problem, SpecError
from meshplan.planner.answers.settings import (
    READ_AGAIN,
    STATED,
    blocks_with,
    fields_of,
    has,
    narrowed,
    no_mesh,
    settings_of,
    why_rejected,
)
from meshplan.planner.objectives.answer import answer, smallest_of
from meshplan.planner.objectives.balanced import balance
from meshplan.planner.objectives.fastest import fastest_of
from meshplan.planner.objectives.memory import least_rows
from meshplan.planner.objectives.num_devices import cheapest, with_nodes
from meshplan.planner.objectives.offload_variants import fastest_of_all
from meshplan.planner.objectives.priced import is_priced, price
from meshplan.planner.problem.decision import Decision, Evaluated, PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import ConfigSolver
from meshplan.planner.solve.shares import Shares, shares_of
from meshplan.planner.space.space import EmptySpaceError, Freedom, UnsearchedError
from meshplan.planner.tables.cost_table import memory_bounds
from meshplan.shown import shown

_MOST_SIZES: Final = 8
"""Most microbatch sizes that `why batch.micro` compares: those nearest to the plan's size."""

NAMES: Final[Mapping[str, str]] = {
    "compute": "slower matrix products",
    "traffic": "more memory traffic",
    "recompute": "recomputation",
    "tensor_parallel": "exposed communication",
    "data": "exposed gathers and reductions",
    "launch": "kernels that the host launches too slowly",
    "update": "the optimizer's step",
    "pipeline": "pipeline bubbles",
    "host": "the optimizer on the host, and waits for copies",
}


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """The best plan with one setting fixed, compared with the plan chosen without it.

    Args:
        setting: The setting as it was given, such as "mesh.tp=8".
        base_s: Seconds of the best step without the setting; None if nothing fits.
        seconds: Seconds of the best step with the setting; None if nothing fits.
        evaluated: The best plan with the setting; None if nothing fits.
        plan: The plan chosen without the setting, which may be simpler and slower than the best;
            None if nothing fits.
        is_planned: If True, `plan` has the setting already.
        num_with: (blocks of `plan` with the setting, blocks of `plan` that choose the field);
            (0, 0) if blocks do not choose it.
        is_left: If True, the setting is of a field in `settings.STATED`, which the planner keeps as
            stated or chooses in part.
        is_stated: If True, the plan file states the field, perhaps with another value.
        shares: The parts of the step time of `evaluated`; None if there is no such plan.
        plan_shares: The parts of the step time of `plan`; None if there is no such plan.
        objective: The objective by which both plans were chosen.
        missing_bytes: Bytes by which the smallest plan with the setting exceeds the limit; None if
            a plan fits, or if the search for the smallest was stopped.
        is_whole: If True, all searches ran to their end, before the time limit.
        why: Reason why the setting is not in the space; "" if it is.
    """

    setting: str
    base_s: float | None = None
    seconds: float | None = None
    evaluated: Evaluated | None = None
    plan: Evaluated | None = None
    is_planned: bool = False
    num_with: tuple[int, int] = (0, 0)
    is_left: bool = False
    is_stated: bool = False
    shares: Shares | None = None
    plan_shares: Shares | None = None
    objective: str = "time"
    missing_bytes: int | None = None
    is_whole: bool = True
    why: str = ""


class Asker:
    """Answer questions about the settings of one plan file.

    All answers compare with the same plan: that which the planner chooses with no setting fixed.

    Args:
        request: The request of the plan file.
        report: Called with a line on the number of configurations of each search.
    """

    def __init__(
        self, request: PlanRequest, report: Callable[[str], None] = lambda text: None
    ) -> None:
        self._request, self._report = request, report

    @cached_property
    def _problem(self) -> PlanningProblem:
        if self._request.objective == "cost":
            # On a fixed number of nodes, the plan with the fewest GPU-hours is the fastest one.
            self._request = _on_the_cheapest(self._request)
        if self._request.objective == "balanced" and (found := balance(self._request)):
            # The balanced plan is the fastest plan within its memory, so lower the limit to this.
            self._request = replace(self._request, limit_bytes=found.limit_bytes)
        return PlanningProblem(self._request)

    @cached_property
    def _num_rows(self) -> int:
        return len(self._problem.grid)

    @cached_property
    def decision(self) -> Decision:
        """The planner's decision without any setting fixed."""
        if self._is_priced:
            return price(self._request)
        if self._is_about_memory:
            return smallest_of(self._problem)
        return fastest_of(self._problem)

    @cached_property
    def _is_priced(self) -> bool:
        return is_priced(self._request)

    @property
    def _is_about_memory(self) -> bool:
        return self._request.objective == "memory"

    @property
    def free(self) -> Freedom:
        """The choices that the plan leaves open."""
        return self._problem.free

    def settings(self, path: str) -> list[str]:
        """Return the settings of a field that can be asked about, such as "mesh.tp=8".

        Args:
            path: The field, such as "mesh.tp"; or a word for several, such as "mesh".

        Raises:
            SpecError: The planner does not choose this field, or searches no plans like this one.
        """
        first, *others = fields_of(path)
        if self._is_priced:
            why = self.decision.rejected[0].why
            what = f"only the plan as it is stated is priced, and no other values of {first}: {why}"
            fix = f"ask why-not {first}=VALUE, or compare a changed copy of the plan: meshplan diff"
            raise SpecError(Problem(what, Origin(path), fix))
        if others:
            return [setting for field in (first, *others) for setting in self.settings(field)]
        path = first
        if path != "batch.micro":
            return list(settings_of(self.free, path))
        rows = self._problem.grid
        sizes = np.where(rows["pp"] > 1, rows["micro"] * rows["microbatches"], rows["micro"])
        chosen = self.decision.chosen
        own = chosen.plan.micro if chosen is not None and chosen.plan.micro else 1
        near = sorted(set(map(int, sizes)), key=lambda size: abs(math.log(size / own)))
        return [f"{path}={size}" for size in sorted(near[:_MOST_SIZES])]

    def why_not(self, setting: str) -> WhyNot:
        """Search the best plan with one setting fixed.

        Args:
            setting: The setting, such as "mesh.tp=8".

        Raises:
            SpecError: The setting has no value, or its field or value is unknown.
            PlanError: The plan file lacks a statement.
        """
        word, equals, text = map(str.strip, setting.partition("="))
        path, *others = fields_of(word)
        if others:
            what, fix = f"'{word}' stands for several fields", f"ask why-not {path}=VALUE"
            raise SpecError(Problem(what, Origin(word), fix))
        setting = f"{path}={text}"
        if not equals:
            what = f"why-not needs a value of {path}"
            fix = f"ask why-not {path}=VALUE, or why {path} for all values"
            raise SpecError(Problem(what, Origin(path), fix))
        if self._is_priced:
            return self._as_stated(setting)
        if path in (*READ_AGAIN, *STATED):
            return self._stated(setting)
        if path in self._problem.spec.origins and path == "sequence_parallel":
            return WhyNot(setting=setting, why="the plan states it")
        fixed, why = narrowed(self.free, path, text)
        if fixed is None:
            return WhyNot(setting=setting, why=why)
        num_rows = self._num_rows  # Raise errors of the plan before those of the setting.
        problem = PlanningProblem(self._request, fixed)
        try:
            grid = problem.grid
        except EmptySpaceError:
            return WhyNot(setting=setting, why=no_mesh(self.free, path, text))
        self._report(
            f"searching {len(grid):,} of {num_rows:,} configurations: those with {setting}"
        )
        plan = self.decision.chosen
        found = self._beside(setting, problem)
        if plan is None:
            return found
        return replace(
            found, is_planned=has(plan, path, text), num_with=blocks_with(plan, path, text)
        )

    def _as_stated(self, setting: str) -> WhyNot:
        """Price the stated plan with a setting added, or search if that leaves something open."""
        base = self.decision.chosen
        assert base is not None
        beside = WhyNot(
            setting=setting, base_s=base.seconds, plan=base, is_left=True,
            objective=self._request.objective,
        )  # fmt: skip
        try:
            found = answer(self._request.stating([setting]))
        except UnsearchedError as error:
            return replace(beside, missing_bytes=error.missing_bytes)
        except MeshplanError as error:
            return replace(beside, why=error.problems[0].what)
        if found.samples != self.decision.samples:
            why = f"a step would have {found.samples:,} samples, not {self.decision.samples:,}"
            return replace(beside, why=why)
        if (evaluated := found.chosen) is None:
            return replace(beside, is_whole=found.is_whole)
        return replace(
            beside,
            seconds=evaluated.seconds,
            evaluated=evaluated,
            is_planned=evaluated.plan.spec == base.plan.spec,
            is_whole=found.is_whole,
        )

    def _stated(self, setting: str) -> WhyNot:
        """Search the best plan with a setting added to the plan file."""
        assert self._num_rows  # Raise errors of the plan before those of the setting.
        try:
            problem = PlanningProblem(self._request.stating([setting]))
            self._report(f"searching {len(problem.grid):,} configurations with {setting}")
        except PlanError as error:
            cause = error.problems[0]
            reason = f": {cause.fix}" if isinstance(error, EmptySpaceError) else ""
            why = why_rejected(self.free, setting) or f"{cause.what}{reason}"
            return WhyNot(setting=setting, why=why)
        path, _, text = map(str.strip, setting.partition("="))
        plan = self.decision.chosen
        is_left, spec = path in STATED, self._problem.spec
        is_planned = plan is not None and (
            problem.spec == spec if is_left else has(plan, path, text)
        )
        return replace(
            self._beside(setting, problem),
            is_planned=is_planned,
            is_left=is_left,
            is_stated=path in spec.origins and path not in spec.free_fields,
        )

    def _beside(self, setting: str, problem: PlanningProblem) -> WhyNot:
        """Compare the best plan of a problem with the plan chosen without the setting."""
        base, plan = self.decision, self.decision.chosen
        evaluated, shares, is_whole = self._best(problem)
        return WhyNot(
            setting=setting,
            base_s=base.best_s if plan is not None else None,
            seconds=evaluated.seconds if evaluated is not None else None,
            evaluated=evaluated,
            plan=plan,
            shares=shares,
            plan_shares=_shares_in(self._problem, plan) if plan is not None else None,
            missing_bytes=_missing(problem) if evaluated is None and is_whole else None,
            is_whole=base.is_whole and is_whole,
            objective=self._request.objective,
        )

    def _best(self, problem: PlanningProblem) -> tuple[Evaluated | None, Shares | None, bool]:
        """Return (the best plan of a problem, its shares, True if the search ran to its end)."""
        if self._is_about_memory:
            decision = smallest_of(problem)
            problem.allow(problem.request.limit_bytes)
            evaluated = decision.chosen
            shares = _shares_in(problem, evaluated) if evaluated is not None else None
            return evaluated, shares, decision.is_whole
        at, found = fastest_of_all(problem, _deadline(problem))
        measured = found.measured.result if found.measured is not None else None
        assert measured is None or isinstance(measured, Evaluated)
        shares = shares_of(at.table, found.best) if found.best is not None else None
        return measured, shares, found.is_whole


def _shares_in(problem: PlanningProblem, plan: Evaluated) -> Shares | None:
    """Return the shares of a plan of a problem; None if it does not come from a search."""
    if plan.candidate is None:
        return None
    tp, spec = plan.plan.mesh.size("tp"), plan.plan.spec
    for each in problem.less_sharded:
        settings = spec.sequence_parallel, spec.loss_parallel
        if tp in each.free.axes["tp"] and settings in each.free.tensor_settings:
            problem = each
    return shares_of(problem.table, plan.candidate)


def _on_the_cheapest(request: PlanRequest) -> PlanRequest:
    decision = cheapest(request)
    nodes = request.cluster.nodes
    if decision.chosen is not None:
        nodes = int(decision.chosen.stated.get("hardware.nodes", nodes))
    return with_nodes(request, nodes)


def _deadline(problem: PlanningProblem) -> float:
    limit = problem.request.time_limit_s
    return float("inf") if limit is None else time.monotonic() + limit


def _missing(problem: PlanningProblem) -> int | None:
    """Return the bytes by which the smallest plan exceeds the limit.

    Candidates are estimated in the order of their linear bytes, which are lower bounds, until these
    reach the least estimate. The result is None if the search is stopped or nothing can be
    estimated.
    """
    table, deadline = problem.table, _deadline(problem)
    rows = least_rows(table.grid, memory_bounds(table), float("inf"))
    smallest = [ConfigSolver(table, row, float("inf")).smallest() for row in rows]
    smallest.sort(key=lambda candidate: max(candidate.linear_bytes))
    least: float = float("inf")
    for candidate in smallest:
        if max(candidate.linear_bytes) >= least:
            break
        if time.monotonic() > deadline or problem.request.is_stopped():
            return None
        evaluated = problem.measure(table, candidate, to_the_end=True).result
        if isinstance(evaluated, Evaluated):
            least = min(least, evaluated.memory.high_bytes)
    return int(least) - problem.request.limit_bytes if least < float("inf") else None
