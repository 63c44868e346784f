"""Find the fastest plan that fits, and choose the simplest plan that is hardly slower.

Costs come from the `cost` package and memory from the `memory` package. Every plan returned was
estimated by the `memory` package.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from meshplan.cost.profile import without
from meshplan.garbage import collecting_rarely
from meshplan.layout.mesh import AXES
from meshplan.planner.objectives.layouts import decide_beside_others, with_other_layouts
from meshplan.planner.objectives.offload_variants import fastest_that_fits, searched
from meshplan.planner.objectives.refine import refine
from meshplan.planner.objectives.robust import RobustChoice
from meshplan.planner.objectives.search_plans import search_plans
from meshplan.planner.objectives.simplify import SLACK, Simplifier
from meshplan.planner.problem.decision import Bound, Decision, Evaluated, Ladder, PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import Candidate
from meshplan.planner.solve.deadline import Deadline
from meshplan.planner.solve.result import ReplayedMemory, SearchResult
from meshplan.planner.solve.search import search
from meshplan.planner.solve.shares import shares_of
from meshplan.planner.space.space import Rejected
from meshplan.planner.tables.cost_table import CostTable, memory_bounds, time_bounds
from meshplan.units import format_step

_MOST_CHOICES: Final = 8
"""Most plans that are chosen and then checked by a trace of the model. A plan that does not fit by
its trace is excluded from the next choice."""


def decide(request: PlanRequest, report: Callable[[str], None] = lambda text: None) -> Decision:
    """Find the fastest plan of a request.

    Args:
        request: The request.
        report: Called with lines on the progress.

    Raises:
        PlanError: The plan file lacks a statement, or allows no configuration.
    """
    return fastest_of(PlanningProblem(request), report)


@collecting_rarely()
def fastest_of(
    problem: PlanningProblem, report: Callable[[str], None] = lambda text: None
) -> Decision:
    """Find the fastest plan of a problem.

    Plans whose tp shards less (`PlanningProblem.less_sharded`) are searched below the seconds of
    the best that shards most. More sharding mostly takes less time, too, but sequence parallelism
    has two collectives where tp alone has one, which counts where tensors are small.

    Args:
        problem: The problem. Its grid and its `measured` estimates are extended.
        report: Called with lines on the progress.
    """
    limit = problem.request.time_limit_s
    deadline = None if limit is None else Deadline.after(limit)
    began = time.monotonic()
    report(grid_line(problem))
    table, found = _searched(problem, deadline, report)

    def decide() -> Decision:
        decision = _decided(problem, table, found, deadline, report, began)
        return _or_less_sharded(problem, decision, deadline, report)

    if not problem.request.other_layouts:
        return decide()
    fastest = found.measured.result if found.measured is not None else None
    if not (found.is_whole and isinstance(fastest, Evaluated)):
        return with_other_layouts(problem, decide())
    return decide_beside_others(problem, fastest, time.monotonic() - began, decide)


def _or_less_sharded(
    problem: PlanningProblem,
    decision: Decision,
    deadline: Deadline | None,
    report: Callable[[str], None],
) -> Decision:
    """Return a decision, or the one on a problem of `less_sharded` that has a faster plan."""
    spaces = problem.less_sharded if decision.chosen is not None and decision.is_whole else ()
    for other in spaces:
        found = fastest_that_fits(other, deadline, below_s=decision.best_s)
        count = decision.num_configs + other.num_configs
        if found.best is not None:
            began = time.monotonic()
            report(grid_line(other))
            better = _decided(other, *_searched(other, deadline, report), deadline, report, began)
            if better.chosen is not None and better.best_s < decision.best_s:
                decision = better
        gap = max(decision.gap, 1 - found.lower_s / decision.best_s)
        whole = decision.is_whole and found.is_whole
        is_interrupted = decision.is_interrupted or problem.request.is_stopped()
        decision = replace(
            decision, num_configs=count, gap=gap, is_whole=whole, is_interrupted=is_interrupted
        )
    return decision


def _searched(
    problem: PlanningProblem, deadline: Deadline | None, report: Callable[[str], None]
) -> tuple[CostTable, SearchResult]:
    """Search a problem, without those of `less_sharded`, and return its final table, too."""
    return searched(
        problem,
        lambda table: search_plans(
            problem,
            table,
            slack=SLACK,
            deadline=deadline,
            is_stopped=problem.request.is_stopped,
            report=lambda better: report(_line(problem, better)),
        ),
    )


def _decided(
    problem: PlanningProblem,
    table: CostTable,
    found: SearchResult,
    deadline: Deadline | None,
    report: Callable[[str], None],
    began: float,
) -> Decision:
    """Choose the simplest plan from a search, and check it by a trace of the model.

    Args:
        problem: The problem. It is searched again if the trace of the chosen plan does not fit.
        table: The cost table that was searched.
        found: The result of the search.
        deadline: The time limit; None for no limit.
        report: Called with lines on the progress.
        began: Value of `time.monotonic()` when the search began.
    """
    robustness = None
    for number in range(_MOST_CHOICES):
        if number:
            report(
                "a trace of the chosen plan needs more memory than was estimated: searching again"
            )
            table, found = _searched(problem, deadline, report)
        refine(problem, table, found, deadline)
        chosen, others = Simplifier(problem, table, found).choose()
        if chosen is None:
            break
        if (share := problem.spec.solve.get("robust")) is not None and found.is_whole:
            usual = chosen
            chosen, robustness = RobustChoice(problem, found, share, report).choose(usual)
            if chosen.stated != usual.stated:
                others = (usual, *(each for each in others if each.stated != chosen.stated))
        if (certified := problem.certified(chosen)) is not None:
            chosen = certified
            break
    else:
        chosen = None
    best = found.best
    ladder = _ladder(problem, table, best) if best else None
    is_stopped = problem.request.is_stopped()
    return Decision(
        spec=problem.spec,
        chosen=chosen,
        best_s=best.seconds if best else float("inf"),
        gap=found.gap,
        alternatives=others,
        rejected=(*problem.free.rejected, *_why_refused(found)),
        ladder=ladder,
        num_configs=problem.num_configs,
        num_options=sum(problem.free.options),
        num_measured=found.num_measured,
        search_s=time.monotonic() - began,
        samples=problem.samples(best.row) if best else 0,
        flops=problem.flops(best.row) if best else 0.0,
        profile=problem.profile,
        limit_bytes=problem.request.limit_bytes,
        # If the user stops after the search, simplification ends early and may choose another plan.
        is_whole=found.is_whole and not is_stopped,
        is_interrupted=is_stopped,
        profile_path=problem.request.profile_path,
        bounds=tuple(_bounds(problem, table)),
        measured=tuple(problem.measured),
        unoffloaded_s=found.unoffloaded_s,
        robustness=robustness,
    )


def grid_line(problem: PlanningProblem) -> str:
    """Return a progress line with the number of configurations in the problem's grid."""
    count = len(problem.grid)
    return f"searching {count:,} configuration{'' if count == 1 else 's'}"


def _bounds(problem: PlanningProblem, table: CostTable) -> Iterator[Bound]:
    """Return an iterator over the lower bounds of all configurations with a possible plan."""
    seconds, num_bytes = time_bounds(table), memory_bounds(table)
    exists = np.isfinite(seconds) & np.isfinite(num_bytes)
    return map(Bound, seconds[exists].tolist(), map(problem.widened, num_bytes[exists].tolist()))


def _line(problem: PlanningProblem, found: SearchResult) -> str:
    """Return a progress line on the best plan so far: its step time and mesh."""
    assert found.best is not None
    row: np.void = problem.grid[found.best.row]
    mesh = " x ".join(f"{axis} {row[axis]}" for axis in AXES if row[axis] > 1) or "one device"
    return f"best so far: {format_step(found.best.seconds)} with {mesh}"


def _ladder(problem: PlanningProblem, table: CostTable, best: Candidate) -> Ladder | None:
    """Search the space without network time, then without a memory limit, and list the step times.

    Returns:
        The ladder; None if the user stopped the searches.
    """
    stop = problem.request.is_stopped
    if stop():
        return None
    no_network = SearchResult(best=best)  # A single device has no network time.
    if problem.free.world > 1:
        free = problem.table_at(without(problem.profile, network=True))
        no_network = search(free, problem.capacity, _fits, is_stopped=stop)
    no_limit = search(table, float("inf"), _fits, is_stopped=stop)
    if not (no_network.is_whole and no_limit.is_whole):
        return None
    assert no_network.best is not None
    assert no_limit.best is not None
    return Ladder(
        roofline_s=problem.flops(best.row) / problem.profile.peak_flops / problem.free.world,
        no_network_s=no_network.best.seconds,
        no_memory_limit_s=no_limit.best.seconds,
        plan_s=best.seconds,
        shares=shares_of(table, best),
    )


def _fits(candidate: Candidate) -> ReplayedMemory:
    """Stand in for a replay: every candidate fits."""
    return ReplayedMemory(fits=True)


def _why_refused(found: SearchResult) -> Iterator[Rejected]:
    """Yield one rejection per reason, with the number of configurations refused for it."""
    by_why: dict[str, list[int]] = {}
    for row, why in found.refused.items():
        by_why.setdefault(why, []).append(row)
    for why, rows in by_why.items():
        many = f"{len(rows)} configurations" if len(rows) > 1 else "1 configuration"
        yield Rejected(many, why)
