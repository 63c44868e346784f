"""Find the best plan by the objective of a request: "time", "memory", "balanced" or "cost"."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from meshplan.errors import PlanError
from meshplan.plan.plan import make_plan
from meshplan.planner.objectives.balanced import balanced
from meshplan.planner.objectives.fastest import decide, grid_line
from meshplan.planner.objectives.memory import LeastMemory
from meshplan.planner.objectives.num_devices import cheapest
from meshplan.planner.objectives.offload_variants import add_offload_variants
from meshplan.planner.objectives.priced import is_closed, is_priced, is_priced_instead, price
from meshplan.planner.problem.decision import Decision, PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.space.fixed import AS_STATED
from meshplan.planner.space.space import EmptySpaceError, Rejected
from meshplan.spec.keys import TIME_LIMIT_S
from meshplan.spec.spec import AUTO

OnProgress = Callable[[str], None]
_NOT_ASKED: Final = "something fits without, and nothing asks for it: offload: auto does"


def answer(request: PlanRequest, report: OnProgress = lambda text: None) -> Decision:
    """Find the best plan by the request's objective.

    If the plan of a live model states something that the planner cannot search, or has tp and
    states everything, only this plan is priced.

    Args:
        request: The request.
        report: Called with lines on the progress.

    Raises:
        PlanError: The plan file lacks a statement, or allows no configuration.
    """
    if is_priced(request):
        return price(request, report)
    try:
        return _BY_OBJECTIVE[request.objective](request, report)
    except EmptySpaceError:
        if is_priced_instead(request):
            return price(request, report)
        raise
    except PlanError as error:
        # The advice to leave nothing auto is followed already, so `make_plan` refuses the plan:
        # raise its reason, as `check` does.
        if is_closed(request) and any(AS_STATED in each.fix for each in error.problems):
            make_plan(request.read(()), request.graph)
        raise


def smallest(request: PlanRequest, report: OnProgress = lambda text: None) -> Decision:
    """Find the plan that uses the least memory, whatever its step time.

    `Decision.gap` is the share by which the lower bound of all configurations is below the
    plan's memory.

    Args:
        request: The request.
        report: Called with lines on the progress.

    Raises:
        PlanError: The plan file lacks a statement, or allows no configuration.
    """
    return smallest_of(PlanningProblem(request), report)


def smallest_of(problem: PlanningProblem, report: OnProgress = lambda text: None) -> Decision:
    """Find the plan of a problem that uses the least memory.

    Configurations with offload are searched if the plan states `offload: auto`, or if nothing fits
    without offload.

    Args:
        problem: The problem. Its `capacity` is lowered.
        report: Called with lines on the progress.
    """
    began, request = time.monotonic(), problem.request
    limit = TIME_LIMIT_S if request.time_limit_s is None else request.time_limit_s
    report(grid_line(problem))
    offload = problem.spec.offload
    if AUTO in (offload.params, offload.activations):
        add_offload_variants(problem)
    least = LeastMemory(problem, began + limit)
    evaluated = (
        least.evaluated if least.evaluated is not None and least.evaluated.memory.fits else None
    )
    if evaluated is None and least.is_whole and add_offload_variants(problem):
        problem.allow(request.limit_bytes)
        least = LeastMemory(problem, began + limit)
        evaluated = (
            least.evaluated if least.evaluated is not None and least.evaluated.memory.fits else None
        )
    elif not problem.is_widened and len(problem.free.offload) > 1:
        problem.reject(Rejected("offload=params, activations", _NOT_ASKED))
    if evaluated is not None and (evaluated := problem.certified(evaluated)) is None:
        # A trace shows that the plan does not fit. Return the fastest plan, which is certified too.
        return replace(decide(request, report), objective="memory", gap=1.0, is_whole=False)
    samples, gap = 0, 1.0
    if evaluated is not None:
        samples = (
            (evaluated.plan.micro or 0) * evaluated.plan.accumulate * evaluated.plan.num_data_ranks
        )
        gap = max(0.0, 1 - least.lower_bytes / evaluated.memory.worst.band[1])
    return Decision(
        spec=problem.spec,
        chosen=evaluated,
        best_s=evaluated.seconds if evaluated is not None else float("inf"),
        gap=gap,
        alternatives=(),
        rejected=problem.free.rejected,
        ladder=None,
        num_configs=problem.num_configs,
        num_options=sum(problem.free.options),
        num_measured=least.num_measured,
        search_s=time.monotonic() - began,
        samples=samples,
        tokens=samples * (problem.spec.batch.seq_len or 0),
        flops=problem.flops_of_sample * samples,
        profile=problem.profile,
        limit_bytes=request.limit_bytes,
        is_whole=least.is_whole,
        is_interrupted=request.is_stopped(),
        objective="memory",
        profile_path=request.profile_path,
    )


def _by_time(request: PlanRequest, report: OnProgress) -> Decision:
    return decide(request, report)


_BY_OBJECTIVE: Final[Mapping[str, Callable[[PlanRequest, OnProgress], Decision]]] = (
    MappingProxyType({"time": _by_time, "memory": smallest, "balanced": balanced, "cost": cheapest})
)
