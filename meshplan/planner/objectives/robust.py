"""Choose the plan that loses least if constants of the cost model are off (`solve.robust`).

The seconds of a step follow from constants that nobody knows to a percent: the share of its peak
that a matrix product reaches, the bandwidth of a link. Each constant in turn is taken to be off by
a share r, in both directions, and then all communication against all computation. These are the
*scenarios* k, the constants as they are among them. With t_k(x) the seconds of plan x in scenario
k, the chosen plan minimises its regret

    max_k t_k(x) / min_y t_k(y) - 1

Memory does not depend on these constants. So a scenario is another cost table over the same
configurations, searched like the first one and with the memory estimates made so far. The plans
compared are all that a search has found to fit. Since t_k is at least `time_bounds` of the
scenario's table, no plan of a configuration has a smaller regret than

    max_k time_bounds_k / min_y t_k(y) - 1

and the least of these over all configurations is reported beside the regret of the choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from meshplan.cost.profile import Profile
from meshplan.planner.knapsack.knapsack import Floats
from meshplan.planner.objectives.offload_variants import add_offload_variants
from meshplan.planner.objectives.search_plans import search_plans
from meshplan.planner.objectives.simplify import SLACK
from meshplan.planner.problem.decision import Evaluated, Robustness, Sensitivity
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import Candidate, solve_config
from meshplan.planner.solve.deadline import Deadline
from meshplan.planner.solve.result import ReplayedMemory, SearchResult
from meshplan.planner.tables.cost_table import CostTable, memory_bounds, seconds_of, time_bounds

TOLERANCE: Final = 1e-3
"""Share by which some plan may be faster than the fastest plan found in a scenario."""
_MOST_COMPROMISES: Final = 12
"""Most configurations that are tried because they may have a smaller regret than any plan found."""

COMPUTATION: Final[Mapping[str, str]] = MappingProxyType(
    {
        "efficiency": "speed of matrix products",
        "attention_efficiency": "speed of attention",
        "memory_bytes_per_s": "memory bandwidth",
        "streamed_bytes_per_s": "memory bandwidth of sums of gradients",
        "host_bytes_per_s": "memory bandwidth of the host",
        "kernel_s": "seconds of a kernel",
        "launch_s": "host seconds of a kernel",
        "optimizer_bytes": "bytes of the optimizer step",
    }
)
COMMUNICATION: Final[Mapping[str, str]] = MappingProxyType(
    {
        "intra_bytes_per_s": "bandwidth within a node",
        "inter_bytes_per_s": "bandwidth between nodes",
        "intra_latency_s": "latency within a node",
        "inter_latency_s": "latency between nodes",
        "pcie_bytes_per_s": "bandwidth to the host",
        "collective_s": "host seconds of a tp collective",
        "collective_rank_s": "host seconds of a tp collective per rank",
        "collective_node_s": "seconds of a tp collective per doubling of nodes",
        "contention": "contention of hidden communication",
        "contention_alone": "contention of DDP alone on its nodes",
        "tp_exposed": "exposed share of tp communication",
        "crossing_s": "seconds between stages",
        "congestion": "slowdown between nodes per doubling of nodes",
        "reduce_scatter_factor": "seconds of a reduce-scatter",
    }
)
"""The constants of `Profile` that may be off, in words; `peak_flops` only multiplies shares."""
_SHARES: Final = ("efficiency", "attention_efficiency", "tp_exposed")
"""Constants that cannot exceed 1."""


class _Scenario(NamedTuple):
    """One case of constants that are off, and the costs then.

    Attributes:
        case, constant, change: As in `Sensitivity`.
        table: The cost table.
    """

    case: str
    constant: str
    change: float
    table: CostTable


def off(profile: Profile, name: str, change: float) -> Profile:
    """Return a profile with one constant off.

    Args:
        profile: The profile.
        name: Name of the constant, a field of `Profile`.
        change: Share by which it is larger, such as -0.1. Shares of a peak stay at most 1.
    """
    value = getattr(profile, name)
    if value is None:
        return profile
    changed = value * (1 + change)
    return replace(profile, **{name: min(changed, 1.0) if name in _SHARES else changed})


def against(profile: Profile, change: float) -> Profile:
    """Return a profile whose communication is slower and whose computation is faster.

    Args:
        profile: The profile.
        change: The share of both; negative for faster communication and slower computation.
    """
    for names, slower in ((COMMUNICATION, change), (COMPUTATION, -change)):
        for name in names:
            is_rate = name.endswith(("_per_s", "efficiency"))
            profile = off(profile, name, -slower if is_rate else slower)
    return profile


class RobustChoice:
    """The scenarios of a problem, the plans found in them, and their seconds in each.

    Args:
        problem: The problem that was searched. Variants with offload are added to its grid.
        found: The result of the search.
        share: Share by which constants are off.
        report: Called with lines on the progress.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        found: SearchResult,
        share: float,
        report: Callable[[str], None],
    ) -> None:
        assert found.best is not None
        self._problem, self._found, self._share, self._report = problem, found, share, report
        limit_s = problem.request.time_limit_s
        self._deadline = None if limit_s is None else Deadline.after(limit_s)
        # A scenario multiplies seconds by 1 - r (fewer seconds of a kernel) to 1 / (1 - r) (a lower
        # bandwidth). A variant with offload gains no more than this on the best.
        ahead = 1 / (1 - share) ** 2
        everywhere = np.ones(len(problem.grid), dtype=np.bool_)
        add_offload_variants(problem, found.best.seconds * ahead, everywhere)
        self._is_whole = True
        self._scenarios = [_Scenario("", "", 0.0, problem.table), *self._all()]
        self._plans: list[tuple[Evaluated, Floats]] = []
        """(plan that fits, [scenarios] seconds of a step)."""

    def choose(self, chosen: Evaluated) -> tuple[Evaluated, Robustness]:
        """Return the plan with the smallest regret, and how much it loses where.

        The plan that would be chosen otherwise is kept if its regret is hardly larger: by `SLACK`,
        as simpler plans are preferred to faster ones.

        Args:
            chosen: The plan that is chosen for the constants as they are.
        """
        best = self._found.measured
        assert best is not None
        for each in (chosen, best.result, *self._problem.measured):
            self._add(each)
        count = len(self._scenarios) - 1
        self._report(f"searching the fastest plan in {count} cases of constants that are off")
        for number in range(1, count + 1):
            self._search(number)
        self._compromise()
        least = min(self._plans, key=lambda plan: (self._regret(plan[1]), plan[0].seconds))
        assert chosen.candidate is not None
        own = self._seconds(chosen.candidate)
        is_changed = self._regret(own) > self._regret(least[1]) + SLACK
        if is_changed:
            chosen, own = least
        return chosen, self._robustness(own, is_changed)

    def _all(self) -> Iterator[_Scenario]:
        """Yield the scenarios in which the costs of some configuration differ."""
        problem, share = self._problem, self._share
        base = problem.table
        cases = [
            (f"{what} {share * 100:g}% {how}", name, change, off(problem.profile, name, change))
            for name, what in (*COMPUTATION.items(), *COMMUNICATION.items())
            for how, change in (("lower", -share), ("higher", share))
        ]
        for change, first, second in ((share, "slower", "faster"), (-share, "faster", "slower")):
            case = f"communication {share * 100:g}% {first} and computation {second}"
            cases.append((case, "communication", change, against(problem.profile, change)))
        for case, constant, change, profile in cases:
            if profile == problem.profile:
                continue
            table = problem.table_at(profile)
            differs = not np.array_equal(table.seconds, base.seconds)
            if differs or not np.array_equal(table.once_s, base.once_s):
                yield _Scenario(case, constant, change, table)

    def _seconds(self, candidate: Candidate) -> Floats:
        """Return [scenarios] seconds of a step of a candidate."""
        return np.array(
            [seconds_of(s.table, candidate.row, candidate.option_counts) for s in self._scenarios]
        )

    def _add(self, evaluated: object) -> None:
        """Add a plan to those that are compared, if it is one that fits."""
        if not isinstance(evaluated, Evaluated) or not evaluated.memory.fits:
            return
        if all(evaluated.stated != plan.stated for plan, _ in self._plans):
            assert evaluated.candidate is not None
            self._plans.append((evaluated, self._seconds(evaluated.candidate)))

    def _fastest(self, number: int) -> tuple[Evaluated, float]:
        """Return the fastest plan found so far in a scenario, and its seconds of a step there."""
        plan, seconds = min(self._plans, key=lambda plan: float(plan[1][number]))
        return plan, float(seconds[number])

    @property
    def _best_s(self) -> Floats:
        """[scenarios] seconds of a step of the fastest plan."""
        return np.asarray(np.min([seconds for _, seconds in self._plans], axis=0))

    def _regret(self, seconds: Floats) -> float:
        return float((seconds / self._best_s).max()) - 1

    def _search(self, number: int) -> None:
        """Add the fastest plan of a scenario."""
        problem, table = self._problem, self._scenarios[number].table
        best, seconds = self._fastest(number)
        assert best.candidate is not None
        known = replace(best.candidate, seconds=seconds)
        found = search_plans(
            problem,
            table,
            measure=self._measure,
            known=(known, ReplayedMemory(fits=True, result=best)),
            tolerance=TOLERANCE,
            deadline=self._deadline,
            is_stopped=problem.request.is_stopped,
        )
        self._is_whole &= found.is_whole
        if found.measured is not None:
            self._add(found.measured.result)

    def _measure(self, candidate: Candidate, *, to_the_end: bool = False) -> ReplayedMemory:
        """Estimate a candidate's memory; its plan has the seconds of the constants as they are."""
        table = self._problem.table
        seconds = seconds_of(table, candidate.row, candidate.option_counts)
        candidate = replace(candidate, seconds=seconds)
        return self._problem.measure(table, candidate, to_the_end=to_the_end)

    @property
    def _least_regrets(self) -> Floats:
        """[configs] lower bounds on the regret of every plan of a configuration."""
        bounds = np.array([time_bounds(each.table) for each in self._scenarios])
        is_out = memory_bounds(self._problem.table) > self._problem.capacity
        return np.where(is_out, np.inf, (bounds / self._best_s[:, None]).max(axis=0) - 1)

    def _compromise(self) -> None:
        """Add plans that are the fastest of no scenario and may have the smallest regret."""
        table, problem = self._problem.table, self._problem
        least = min(self._regret(seconds) for _, seconds in self._plans)
        bounds = self._least_regrets
        known = {plan.candidate.row for plan, _ in self._plans if plan.candidate is not None}
        rows = [int(row) for row in np.argsort(bounds, kind="stable") if int(row) not in known]
        for row in rows[:_MOST_COMPROMISES]:
            late = self._deadline is not None and time.monotonic() > self._deadline
            if bounds[row] >= least or late or problem.request.is_stopped():
                return
            excess = self._found.excess_of(problem.grid[row], row, problem.taken(row))
            room = tuple(problem.capacity - more for more in excess)
            candidate = solve_config(table, row, room)
            if candidate is None:
                continue
            if self._regret(self._seconds(candidate)) < least:
                self._add(self._measure(candidate).result)

    def _robustness(self, own: Floats, is_changed: bool) -> Robustness:
        """Return what the plan with these seconds loses, and where."""
        fastest = min(self._plans, key=lambda plan: plan[0].seconds)
        rows = []
        for number, each in enumerate(self._scenarios[1:], 1):
            rows.append(Sensitivity(*each[:3], float(own[number]), *self._fastest(number)))
        rows.sort(key=lambda row: -row.regret)
        return Robustness(
            share=self._share,
            sensitivities=tuple(rows),
            regret=self._regret(own),
            fastest=fastest[0],
            fastest_regret=self._regret(fastest[1]),
            least_regret=max(float(self._least_regrets.min()), 0.0),
            is_changed=is_changed,
            is_whole=self._is_whole and not self._problem.request.is_stopped(),
        )
