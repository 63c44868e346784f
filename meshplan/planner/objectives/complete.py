"""A plan file made whole: by its lock where that holds, by planning where it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshplan.errors import PlanError, Problem
from meshplan.model.graph import ModelGraph
from meshplan.planner.lock.lock import (
    Lock,
    check_holds,
    chosen_spec,
    lock_in_words,
    locked,
    profile_of_lock,
)
from meshplan.planner.objectives.answer import answer
from meshplan.planner.problem.decision import PlanRequest
from meshplan.planner.problem.request import Load, config_of, loading, question_of, with_shorter
from meshplan.spec.spec import Spec
from meshplan.textbook.inputs import graph_of


def complete_spec(
    source: Any,
    load: Load,
    graph: ModelGraph,
    told: Callable[[str], None] = lambda text: None,
    ask: Callable[[Path | None], PlanRequest] | None = None,
    config: str | Path | None = None,
    lock: Lock | None = None,
    noted: Callable[[str], None] = lambda text: None,
) -> Spec:
    """The spec with nothing left to the planner; other arguments as for `complete_statements`.

    Args:
        lock: Somebody's choice among the locks; None asks the one beside the plan file.
    """
    if lock is not None:
        check_holds(lock, loading(source, ()), graph)
        noted(lock.used)
        return chosen_spec(load, lock.statements, str(lock.path))
    return chosen_spec(load, *complete_statements(source, load, graph, told, ask, config, noted))


def complete_statements(
    source: Any,
    load: Load,
    graph: ModelGraph,
    told: Callable[[str], None] = lambda text: None,
    ask: Callable[[Path | None], PlanRequest] | None = None,
    config: str | Path | None = None,
    noted: Callable[[str], None] = lambda text: None,
) -> tuple[Mapping[str, Any], str]:
    """(what goes on top of a plan file, who says so).

    THE place that decides which spec is in force. A lock that holds completes the plan. Without
    one, what is `auto` is planned, and what is left out has its default.

    Args:
        source: The plan file, or a mapping.
        graph: The model that it is for.
        told: Is told what is being done.
        ask: The question about a model that no config tells of, by a profile of the machine.
        config: That the graph is from; None where it is from none.
        noted: Is told in one line which lock the plan goes by, or why by none.

    Raises:
        PlanError: Nothing fits, or the plan says too little to be planned.
        SpecError: The lock cannot be read.
    """
    spec = load(())
    found = locked(source, load, graph)
    if line := lock_in_words(found, source, spec):
        noted(line)
    if not isinstance(found, str):
        return found.statements, found.path.name
    if not spec.free_fields:
        return {}, ""
    sized = graph if graph.config else graph_of(spec)
    if sized is None and ask is None:
        free = " and ".join(spec.free_fields)
        are = "are" if len(spec.free_fields) > 1 else "is"
        what = f"{free} {are} left to the planner, and {found}"
        fix = "give the plan its model, such as model: {config: PATH}, and run meshplan plan"
        raise PlanError(Problem(what, spec.origin(spec.free_fields[0]), fix))
    profile = profile_of_lock(source)
    question = (
        ask(profile)
        if sized is None and ask is not None
        else question_of(load, sized or graph, profile=profile)
    )
    path, origin = config_of(spec, config)
    is_other = sized is not None and sized is not graph
    if path is not None and (is_other or config is not None):
        question = with_shorter(question, path, origin)  # As `meshplan plan` has it.
    decision = answer(question, told)
    if decision.chosen is None:
        raise PlanError(nothing_fits(spec))
    return decision.chosen.stated, "the planner"


def nothing_fits(spec: Spec) -> Problem:
    """That there is no plan."""
    what = "nothing in the space fits into the memory that there is"
    return Problem(what, spec.origin("mesh"), "see meshplan plan; allow more, or take more devices")
