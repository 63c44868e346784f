"""Try a choice on the model, and return the reason if the planner cannot plan it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final

from meshplan.errors import PlanError, Problem
from meshplan.memory.analytic.estimate import check_analytic
from meshplan.memory.analytic.microbatches import refusals
from meshplan.memory.replay.optimizer import check_optimizer
from meshplan.plan.plan import Plan, make_plan
from meshplan.planner.problem.chains import Chains
from meshplan.planner.problem.decision import PlanRequest
from meshplan.planner.space.fixed import AS_STATED
from meshplan.planner.tables.unpriced import unpriced, unsearched
from meshplan.spec.spec import Offload, Spec

_OF_MODULES: Final = "the planner does not search plans with offloaded parameters of single modules"
_NOT_COMPOSED: Final = "what a live model offloads is not composed of traced pieces"


def why_not_allowed(trial: Spec, request: PlanRequest, chains: Chains) -> str:
    """Return why the planner cannot use a trial spec; "" if it can.

    Args:
        trial: A spec that changes one choice, to find out if the model allows it.
        request: The request that the trial belongs to.
        chains: The block costs of that request. A trial with tp is refused if the costs of its
            blocks cannot be derived.
    """
    few, traced = request.few or request.graph, request.traced
    if any(rule.offload for rule in trial.rules):
        return _OF_MODULES
    if traced is not None and trial.offload != Offload():
        return _NOT_COMPOSED
    if trial.activation_checkpointing.mode != "none" and not few.blocks():
        return f"{few.name} has no repeated blocks, and others are not planned"
    if traced is not None and (why := traced.refuses(trial)):
        return why
    try:
        decide = partial(make_plan, graph=few) if traced is None else traced.decide
        plan = decide(trial)
        check_optimizer(trial.optimizer, is_sharded=plan.assignment.shards_parameters)
        if why := _unpriced_by_rules(plan, decide):
            return why
        if traced is not None:
            return ""
        problems = list(refusals(plan))
        if not problems and plan.mesh.size("tp") > 1:
            chains.of(plan)
        elif not problems:
            check_analytic(plan, device=request.device)
    except PlanError as error:
        problems = list(error.problems)
    return problems[0].what if problems else ""


def not_searched(why: str, trial: Spec, request: PlanRequest) -> Problem:
    """Return the problem of a plan file whose plans cannot be searched.

    Args:
        why: The reason, as `why_not_allowed` returns it.
        trial: The trial spec that was refused.
        request: The request that the trial belongs to.
    """
    other = "state every open key and trace the model with meshplan estimate"
    fix = AS_STATED if _has_figures_as_stated(trial, request) else other
    return Problem(why, trial.origin(""), f"leave it out, or {fix}")


def _has_figures_as_stated(trial: Spec, request: PlanRequest) -> bool:
    """Return True if a plan of a config has figures as it is stated, though not for a search."""
    if request.traced is not None:
        return False
    try:
        plan = make_plan(trial, request.few or request.graph)
    except PlanError:
        return False
    is_traced = request.price is not None
    return not any(unpriced(plan)) and (is_traced or any(unsearched(plan)))


def _unpriced_by_rules(plan: Plan, decide: Callable[[Spec], Plan]) -> str:
    """Return what the rules of a trial add that the cost model has no figures for; "" for nothing.

    A model of which blocks are no units by themselves, because they share modules, is priced as if
    they were.

    Args:
        plan: The plan of the trial.
        decide: Returns the plan of a spec.
    """
    spec = plan.spec
    if not spec.rules or plan.mesh.size("tp", "cp", "ep", "pp") > 1:
        return ""  # Without its rules, a plan may have nothing to do for those axes.
    bare = decide(replace(spec, rules=()))
    without = {each.what for each in chain(unpriced(bare), unsearched(bare))}
    whys = (each.what for each in chain(unpriced(plan), unsearched(plan)))
    return next((why for why in whys if why not in without), "")
