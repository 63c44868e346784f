"""A plan file made whole: by its lock where that holds, by planning where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshplan.errors import PlanError, Problem
from meshplan.graph import ModelGraph
from meshplan.planner.asking import TIME_LIMIT_S as TIME_LIMIT_S
from meshplan.planner.asking import Load, with_profile
from meshplan.planner.asking import cluster_of as cluster_of
from meshplan.planner.asking import question_of as question_of
from meshplan.planner.asking import question_of_file as question_of_file
from meshplan.planner.lock import chosen_spec, locked, profile_of_lock
from meshplan.planner.objectives import answer
from meshplan.sizing import graph_of
from meshplan.spec import Spec


def whole_spec(
    source: Any, load: Load, graph: ModelGraph, told: Callable[[str], None] = lambda text: None
) -> Spec:
    """The spec with nothing left to the planner.

    Args:
        source: The plan file, or a mapping.
        graph: The model that it is for.
        told: Is told where the choices come from.

    Raises:
        PlanError: Nothing fits, or the plan says too little to be planned.
        SpecError: The lock cannot be read.
    """
    spec = load(())
    if not spec.free_fields:
        return spec
    found = locked(source, spec, graph, load)
    if isinstance(found, Spec):
        return found
    sized = graph if graph.config else graph_of(spec)
    if sized is None:
        free = " and ".join(spec.free_fields)
        are = "are" if len(spec.free_fields) > 1 else "is"
        what = f"{free} {are} left to the planner, and {found}"
        fix = "give the plan its model, such as model: {config: PATH}, and run meshplan plan"
        raise PlanError(Problem(what, spec.origin(spec.free_fields[0]), fix))
    told(f"{found}: planning")
    question = with_profile(question_of(load, sized), profile_of_lock(source))
    decision = answer(question, told)
    if decision.chosen is None:
        raise PlanError(nothing_fits(spec))
    return chosen_spec(load, decision.chosen.stated, "the planner")


def nothing_fits(spec: Spec) -> Problem:
    """That there is no plan."""
    what = "nothing in the space fits into the memory that there is"
    return Problem(what, spec.origin("mesh"), "see meshplan plan; allow more, or take more devices")
