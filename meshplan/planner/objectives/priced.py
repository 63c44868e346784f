"""Price a plan as it is stated, if the planner cannot search others like it or is not to.

Memory is estimated as by `meshplan estimate`. The step time follows from the costs of a microbatch:
those that the model's config gives, or those recorded while the microbatch runs on fake tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from meshplan.cost.chain import chain_of
from meshplan.errors import PlanError, Problem, UnstatedError
from meshplan.layout.mesh import DATA_AXES
from meshplan.memory.analytic.estimate import check_analytic, estimate_analytic
from meshplan.memory.analytic.microbatches import refusals
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.plan.plan import Plan, make_plan
from meshplan.planner.problem.certified import OVER, certify_plan
from meshplan.planner.problem.decision import Bound, Decision, Evaluated, PlanRequest
from meshplan.planner.problem.live_model import TracedChoices
from meshplan.planner.space.space import PRICED_ALONE, Rejected, UnsearchedError
from meshplan.planner.tables.memory_bounds import element_bytes_of
from meshplan.planner.tables.unpriced import unpriced, unsearched
from meshplan.planner.tables.whole_plan import Costed
from meshplan.spec.spec import Spec


def is_priced(request: PlanRequest) -> bool:
    """Return True if a plan is priced as it is stated, and not searched.

    That is so if the planner cannot search plans like it. What such a plan leaves out has its
    default. A config's plan with something `auto` is left to the search, which says what keeps it
    from that; a live model's is refused by `price`.
    """
    traced, spec = request.traced, request.read(())
    if traced is None:
        return is_closed(request) and bool(_why_unsearched(spec, request))
    if not traced.is_priced(spec):
        return False
    mesh = spec.mesh if isinstance(spec.mesh, Mapping) else {}
    if mesh.get("pp", 1) != 1 and not spec.free_fields:
        return True  # The plan may state stages and schedules that are not searched.
    if TracedChoices.of(spec).tp > 1 and _states_everything(spec):
        return True
    # Whether tp and pp can be searched is found out by the search: that takes traces.
    others = {axis: size for axis, size in mesh.items() if axis not in ("tp", "pp")}
    return bool(traced.refuses(replace(spec, mesh=others) if mesh else spec))


def is_closed(request: PlanRequest) -> bool:
    """Return True if a config's plan states its mesh, and leaves nothing `auto`."""
    spec = request.read(())
    return request.traced is None and spec.mesh is not None and not spec.free_fields


def why_priced(request: PlanRequest) -> str:
    """Return why a plan is priced as it is stated, and not searched; "" if it is searched."""
    return _why(request.read(()), request) if is_priced(request) else ""


def _why(spec: Spec, request: PlanRequest) -> str:
    if request.traced is None:
        return _why_unsearched(spec, request)
    if _states_everything(spec):
        return "the plan states everything"
    return request.traced.refuses(spec)


def is_priced_instead(request: PlanRequest) -> bool:
    """Return True if a live model's plan is priced as stated where its tp cannot be searched."""
    traced, spec = request.traced, request.read(())
    if traced is None or spec.free_fields or not traced.is_priced(spec):
        return False
    return TracedChoices.of(spec).tp > 1


def _states_everything(spec: Spec) -> bool:
    """Return True if a spec states all that the planner would choose."""
    mesh = spec.mesh if isinstance(spec.mesh, Mapping) else {}
    has_data = any(mesh.get(axis, 1) != 1 for axis in DATA_AXES)
    return (
        not spec.free_fields
        and (spec.strategy is not None or not has_data)
        and "activation_checkpointing" in spec.origins
        and isinstance(spec.batch.micro, int)
    )


def _why_unsearched(spec: Spec, request: PlanRequest) -> str:
    """Return why the planner cannot search plans of a config like a stated one; "" if it can."""
    try:
        plan = make_plan(spec, request.graph)
    except PlanError:
        return ""  # The search may add what is missing, and else says what is wrong.
    if plan.micro is None:
        return ""
    if problems := [*unsearched(plan), *refusals(plan)]:
        return problems[0].what
    try:
        check_analytic(plan, device=request.device)
    except PlanError as error:
        return error.problems[0].what
    return ""


class _StatedPlan(NamedTuple):
    """The stated plan, with its memory and its costs.

    Attributes:
        plan: The plan.
        memory: Its memory, as `meshplan estimate` reports it.
        costed: Its costs.
        flops: Flops of the forward and backward of one sample.
        is_traced: True if the memory comes from a trace.
    """

    plan: Plan
    memory: MemoryEstimate
    costed: Costed
    flops: float
    is_traced: bool


def _stated(spec: Spec, request: PlanRequest) -> _StatedPlan:
    """Return the stated plan: by the rules for the model's config if there are any, else traced."""
    cluster, profile = request.cluster, request.profile
    if request.traced is not None:
        traced = request.traced.priced(spec)
        costed = Costed(traced.plan, cluster, profile, traced.chain)
        return _StatedPlan(traced.plan, traced.memory, costed, traced.flops, is_traced=True)
    plan = make_plan(spec, request.graph)
    if problems := list(unpriced(plan)):  # Found out before a trace, which takes seconds.
        raise PlanError(problems)
    try:
        memory = estimate_analytic(plan, device=request.device, limit_bytes=request.limit_bytes)
        found = None
    except UnstatedError:
        raise  # A trace would lack it, too.
    except PlanError:
        if request.price is None:
            raise
        found = request.price(spec)
        memory = found.memory
    try:
        costed, flops = Costed(plan, cluster, profile), _sample_flops(plan)
        assert costed.seconds
    except PlanError:
        if found is None:
            raise
        costed, flops = Costed(plan, cluster, profile, found.chain), found.flops
    return _StatedPlan(plan, memory, costed, flops, is_traced=found is not None)


def _sample_flops(plan: Plan) -> float:
    """Return the flops of the forward and backward of one sample, by the model's config."""
    (_, seq_len), size = plan.fed(), element_bytes_of(plan).computed
    return chain_of(plan.graph, seq_len=seq_len, element_bytes=size).flops


def price(request: PlanRequest, report: Callable[[str], None] = lambda text: None) -> Decision:
    """Return a decision whose only plan is the stated one, with its memory and step time.

    Args:
        request: The request.
        report: Called with lines on the progress.

    Raises:
        UnsearchedError: The plan does not fit.
        PlanError: The plan leaves something open, or the cost model has no figures for it.
    """
    began, spec = time.monotonic(), request.read(())
    why = _why(spec, request)
    if spec.free_fields:
        left = " and ".join(spec.free_fields)
        are = "are" if len(spec.free_fields) > 1 else "is"
        fix = "state a value for each, and the plan is estimated as it stands"
        what = f"{left} {are} left to the planner, which cannot search this plan: {why}"
        raise PlanError(Problem(what, spec.origin(spec.free_fields[0]), fix))
    report("1 configuration")
    found = _stated(spec, request)
    plan, costed = found.plan, found.costed
    evaluated = Evaluated(stated={}, seconds=costed.seconds, plan=plan, memory=found.memory)
    over, missing = "", None
    if not found.memory.fits:
        over = found.memory.size_and_left
        missing = found.memory.high_bytes - request.limit_bytes
    elif not found.is_traced:
        certified = certify_plan(request, evaluated)
        evaluated, over = (evaluated, OVER) if certified is None else (certified, "")
    if over:
        what = f"the plan as stated does not fit: {over}"
        fix = (
            "see meshplan estimate --fixes for the effect of each change; no other plan is searched"
        )
        problem = Problem(what, spec.origin("mesh"), fix)
        raise UnsearchedError(problem, (Rejected("other plans", why),), missing)
    return Decision(
        spec=spec,
        chosen=evaluated,
        best_s=evaluated.seconds,
        gap=0.0,
        alternatives=(),
        rejected=(Rejected(PRICED_ALONE, why),),
        ladder=None,
        num_configs=1,
        num_options=1,
        num_measured=1,
        search_s=time.monotonic() - began,
        samples=plan.samples,
        flops=found.flops * plan.samples,
        profile=costed.profile,
        limit_bytes=request.limit_bytes,
        objective="time",  # Others compare plans, and there is only this one.
        profile_path=request.profile_path,
        bounds=(Bound(evaluated.seconds, evaluated.memory.high_bytes),),
        measured=(evaluated,),
    )
