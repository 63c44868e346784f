"""Complete a plan file: with its lock if that applies to the plan, else by planning."""

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
from meshplan.planner.problem.request import Load, loading, request_of, with_shorter
from meshplan.spec.spec import Spec
from meshplan.textbook.inputs import config_of, graph_of


def complete_spec(
    source: Any,
    load: Load,
    graph: ModelGraph,
    report: Callable[[str], None] = lambda text: None,
    ask: Callable[[Path | None], PlanRequest] | None = None,
    config: str | Path | None = None,
    lock: Lock | None = None,
    noted: Callable[[str], None] = lambda text: None,
) -> Spec:
    """Return the spec of a plan file with all open choices made.

    Args:
        source: Path of the plan file, or its content as a mapping.
        load: Reads the plan file with more statements on top.
        graph: The model that the plan is for.
        report: Called with lines on the progress.
        ask: Builds the request for a model without a config, from the path of a profile or None.
        config: The config that `graph` was read from; None if it was not read from a config.
        lock: The lock that the user named; None to use the lock next to the plan file.
        noted: Called with one line: the lock that the plan uses, or why it uses none.

    Raises:
        PlanError: Nothing fits, or the plan lacks a statement that planning needs.
        SpecError: The lock cannot be read, or the named lock does not apply to this plan.
    """
    if lock is not None:
        check_holds(lock, loading(source, ()), graph)
        noted(lock.used)
        return chosen_spec(load, lock.statements, str(lock.path), lock.hash)
    return chosen_spec(load, *complete_statements(source, load, graph, report, ask, config, noted))


def complete_statements(
    source: Any,
    load: Load,
    graph: ModelGraph,
    report: Callable[[str], None] = lambda text: None,
    ask: Callable[[Path | None], PlanRequest] | None = None,
    config: str | Path | None = None,
    noted: Callable[[str], None] = lambda text: None,
) -> tuple[Mapping[str, Any], str, str | None]:
    """Return the statements that complete a plan file, and what made them: a lock or the planner.

    Every command uses this rule. A lock that applies to the plan completes it. Without such a lock,
    fields that are `auto` are planned, and fields left out have their defaults.

    Args:
        source: Path of the plan file, or its content as a mapping.
        load: Reads the plan file with more statements on top.
        graph: The model that the plan is for.
        report: Called with lines on the progress.
        ask: Builds the request for a model without a config, from the path of a profile or None.
        config: The config that `graph` was read from; None if it was not read from a config.
        noted: Called with one line: the lock that the plan uses, or why it uses none.

    Returns:
        ({path: value} statements, their source for error messages, hash of the lock). The source is
        the name of the lock file, "the planner", or "" if nothing is left open; the hash is None if
        no lock made them.

    Raises:
        PlanError: Nothing fits, or the plan lacks a statement that planning needs.
        SpecError: The lock cannot be read.
    """
    spec = load(())
    found = locked(source, load, graph)
    if line := lock_in_words(found, source, spec):
        noted(line)
    if not isinstance(found, str):
        return found.statements, found.path.name, found.hash
    if not spec.free_fields:
        return {}, "", None
    # A live model is asked about itself: the config of the plan may be another model's.
    sized = graph if graph.config or ask is not None else graph_of(spec)
    if sized is None:
        free = " and ".join(spec.free_fields)
        are = "are" if len(spec.free_fields) > 1 else "is"
        what = f"{free} {are} left to the planner, and {found}"
        fix = "add the model to the plan, such as model: {config: PATH}, and run meshplan plan"
        raise PlanError(Problem(what, spec.origin(spec.free_fields[0]), fix))
    profile = profile_of_lock(source, spec)
    if ask is not None:
        request = ask(profile)
    else:
        request = request_of(load, sized, profile=profile)
        path, origin = config_of(spec, config)
        if path is not None and (sized is not graph or config is not None):
            request = with_shorter(request, path, origin)  # As `meshplan plan` does.
    decision = answer(request, report)
    if decision.chosen is None:
        raise PlanError(nothing_fits(spec))
    return decision.chosen.stated, "the planner", None


def nothing_fits(spec: Spec) -> Problem:
    """Return the problem to report if no plan fits into the memory."""
    what = "no configuration of the space fits into the memory of the devices"
    fix = "run meshplan plan for the reasons; state less in the plan, or use more devices"
    return Problem(what, spec.origin("mesh"), fix)
