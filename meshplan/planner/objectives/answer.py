"""Find the best plan by the objective of a request: "time", "memory", "balanced" or "cost"."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from meshplan.errors import PlanError
from meshplan.files import CACHE_VARIABLE
from meshplan.plan.plan import make_plan
from meshplan.planner.objectives.balanced import balanced
from meshplan.planner.objectives.decision_cache import cache_of
from meshplan.planner.objectives.fastest import decide, grid_line
from meshplan.planner.objectives.memory import LeastMemory
from meshplan.planner.objectives.num_devices import cheapest
from meshplan.planner.objectives.offload_variants import add_offload_variants
from meshplan.planner.objectives.priced import is_closed, is_priced, is_priced_instead, price
from meshplan.planner.problem.decision import Decision, PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.space.fixed import AS_STATED
from meshplan.planner.space.space import EmptySpaceError, Rejected
from meshplan.spec.spec import AUTO

OnProgress = Callable[[str], None]
_NOT_ASKED: Final = "something fits without, and nothing asks for it: offload: auto does"


def answer(request: PlanRequest, report: OnProgress = lambda text: None) -> Decision:
    """Find the best plan by the request's objective.

    In a command, the answer is kept on disk, and the same question is answered by reading it.

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
    cache = cache_of(request)
    if cache is not None and (kept := cache.get()) is not None:
        decision, when = kept
        report(f"the answer of {when} to the same question; {CACHE_VARIABLE}=off searches again")
        return decision
    try:
        decision = _BY_OBJECTIVE[request.objective](request, report)
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
    if cache is not None and decision.is_whole:
        cache.put(decision)
    return decision


def smallest_of(problem: PlanningProblem, report: OnProgress = lambda text: None) -> Decision:
    """Find the plan of a problem that uses the least memory, whatever its step time.

    `Decision.gap` is the share by which the lower bound of all configurations is below the
    plan's memory.

    Configurations with offload are searched if the plan states `offload: auto`, or if nothing fits
    without offload.

    Args:
        problem: The problem. Its `capacity` is lowered.
        report: Called with lines on the progress.
    """
    began, request = time.monotonic(), problem.request
    report(grid_line(problem))
    offload = problem.spec.offload
    if AUTO in (offload.params, offload.activations):
        add_offload_variants(problem)
    least = LeastMemory(problem, began + request.limit_s)
    if least.fitting is None and least.is_whole and add_offload_variants(problem):
        problem.allow(request.limit_bytes)
        least = LeastMemory(problem, began + request.limit_s)
    elif not problem.is_widened and len(problem.free.offload) > 1:
        problem.reject(Rejected("offload=params, activations", _NOT_ASKED))
    evaluated = least.fitting
    if evaluated is not None and (evaluated := problem.certified(evaluated)) is None:
        # A trace shows that the plan does not fit. Return the fastest plan, which is certified too.
        return replace(decide(request, report), objective="memory", gap=1.0, is_whole=False)
    samples, gap = 0, 1.0
    if evaluated is not None:
        samples = evaluated.plan.samples
        gap = max(0.0, 1 - least.lower_bytes / evaluated.memory.high_bytes)
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
        flops=problem.chain_at(1).flops * samples,
        profile=problem.profile,
        limit_bytes=request.limit_bytes,
        is_whole=least.is_whole,
        is_interrupted=request.is_stopped(),
        objective="memory",
        profile_path=request.profile_path,
    )


def _by_memory(request: PlanRequest, report: OnProgress) -> Decision:
    return smallest_of(PlanningProblem(request), report)


_BY_OBJECTIVE: Final[Mapping[str, Callable[[PlanRequest, OnProgress], Decision]]] = (
    MappingProxyType({"time": decide, "memory": _by_memory, "balanced": balanced, "cost": cheapest})
)
