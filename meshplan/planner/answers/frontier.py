"""Search the frontier of memory against time: the fastest plans for ever lower memory limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from meshplan.planner.objectives.offload_variants import fastest_of_all
from meshplan.planner.objectives.priced import is_priced, price
from meshplan.planner.problem.decision import Evaluated, PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.units import format_gib, format_step

_STEP: Final = 0.95
"""Share of one plan's memory that the next plan of a frontier may use."""
_MOST_POINTS: Final = 16


def frontier(
    request: PlanRequest, report: Callable[[str], None] = lambda text: None
) -> tuple[tuple[Evaluated, ...], bool]:
    """Search for plans of which none is both slower and larger than another.

    The first plan is the fastest that fits. Each next plan is the fastest with 5 % less memory than
    the plan before.

    Args:
        request: The request.
        report: Called with lines on the progress.

    Returns:
        (the plans, fastest first; True if all searches ran to their end).
    """
    if is_priced(request):
        alone = price(request, report).chosen
        return ((alone,) if alone else ()), True
    deadline = time.monotonic() + request.limit_s
    out: list[Evaluated] = []
    limit, free, is_whole = request.limit_bytes, None, True
    while len(out) < _MOST_POINTS:
        problem = PlanningProblem(replace(request, limit_bytes=limit), free)
        free = problem.free
        problem, found = fastest_of_all(problem, deadline)
        is_whole = is_whole and found.is_whole
        evaluated = found.measured.result if found.measured is not None else None
        if not isinstance(evaluated, Evaluated) or not found.is_whole:
            break
        if (evaluated := problem.certified(evaluated)) is None:
            is_whole = False
            break
        out.append(evaluated)
        report(f"{format_step(evaluated.seconds)} within {format_gib(limit)}")
        limit = int(evaluated.memory.high_bytes * _STEP)
    return undominated(out), is_whole


def undominated(evaluated_plans: Iterable[Evaluated]) -> tuple[Evaluated, ...]:
    """Return the plans that no other plan dominates in time and memory, fastest first."""
    least, out = float("inf"), list[Evaluated]()
    for evaluated in sorted(evaluated_plans, key=lambda w: (w.seconds, w.memory.high_bytes)):
        if evaluated.memory.high_bytes < least:
            least = evaluated.memory.high_bytes
            out.append(evaluated)
    return tuple(out)
