"""Price the stated plan of a live model, if the planner cannot search others or is not to.

Memory is estimated as by `meshplan estimate`. The step time follows from the costs of a microbatch,
which are recorded while the microbatch runs on fake tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from meshplan.errors import PlanError, Problem
from meshplan.layout.mesh import DATA_AXES
from meshplan.memory.answer.estimate import left_in_words
from meshplan.planner.problem.decision import Bound, Decision, Evaluated, PlanRequest
from meshplan.planner.problem.live_model import TracedChoices
from meshplan.planner.space.space import Rejected, UnsearchedError
from meshplan.planner.tables.whole_plan import Costed
from meshplan.spec.spec import Spec


def is_priced(request: PlanRequest) -> bool:
    """Return True if a live model's plan is priced as it is stated, and not searched.

    That is so if it cannot be searched, or if it has pp or tp and states everything.
    """
    traced, spec = request.traced, request.read(())
    if traced is None or not traced.is_priced(spec):
        return False
    mesh = spec.mesh if isinstance(spec.mesh, Mapping) else {}
    if mesh.get("pp", 1) != 1 and not spec.free_fields:
        return True  # The plan may state stages and schedules that are not searched.
    if TracedChoices.of(spec).tp > 1 and _states_everything(spec):
        return True
    # Whether tp and pp can be searched is found out by the search: that takes traces.
    tried = {"tp", "pp"} if mesh.get("tp", 1) == 1 or mesh.get("pp", 1) == 1 else {"tp"}
    others = {axis: size for axis, size in mesh.items() if axis not in tried}
    return bool(traced.refuses(replace(spec, mesh=others) if mesh else spec))


def is_priced_instead(request: PlanRequest) -> bool:
    """Return True if a live model's plan is priced as stated where its tp cannot be searched."""
    traced, spec = request.traced, request.read(())
    if traced is None or spec.free_fields or not traced.is_priced(spec):
        return False
    return TracedChoices.of(spec).tp > 1


def _states_everything(spec: Spec) -> bool:
    """Return True if a spec states all that the planner chooses for a live model."""
    mesh = spec.mesh if isinstance(spec.mesh, Mapping) else {}
    has_data = any(mesh.get(axis, 1) != 1 for axis in DATA_AXES)
    return (
        not spec.free_fields
        and (spec.strategy is not None or not has_data)
        and "activation_checkpointing" in spec.origins
        and isinstance(spec.batch.micro, int)
    )


def price(request: PlanRequest, report: Callable[[str], None] = lambda text: None) -> Decision:
    """Return a decision whose only plan is the stated one, with its memory and step time.

    Args:
        request: The request, of a live model.
        report: Called with lines on the progress.

    Raises:
        UnsearchedError: The plan does not fit.
        PlanError: The plan leaves something open, or the cost model has no figures for it.
    """
    began, spec, traced = time.monotonic(), request.read(()), request.traced
    assert traced is not None
    why = "the plan states everything"
    if not _states_everything(spec):
        why = traced.refuses(spec)
    if spec.free_fields:
        left = " and ".join(spec.free_fields)
        are = "are" if len(spec.free_fields) > 1 else "is"
        fix = "state a value for each, and the plan is estimated as it stands"
        what = f"{left} {are} left to the planner, which cannot search this plan: {why}"
        raise PlanError(Problem(what, spec.origin(spec.free_fields[0]), fix))
    report("1 configuration")
    found = traced.priced(spec)
    plan, memory, cluster = found.plan, found.memory, request.cluster
    if not memory.fits:
        left = left_in_words(memory.worst.band[1], memory.limit_bytes)
        fix = (
            "see meshplan estimate --fixes for the effect of each change; no other plan is searched"
        )
        raise UnsearchedError(
            Problem(
                f"the plan as stated does not fit: {memory.size}: {left}", spec.origin("mesh"), fix
            ),
            (Rejected("other plans", why),),
        )
    costed = Costed(plan, cluster, request.profile, found.chain)
    evaluated = Evaluated(stated={}, seconds=costed.seconds, plan=plan, memory=memory)
    samples = (plan.micro or 0) * plan.accumulate * plan.num_data_ranks
    flops = found.flops * samples
    return Decision(
        spec=spec,
        chosen=evaluated,
        best_s=evaluated.seconds,
        gap=0.0,
        alternatives=(),
        rejected=(Rejected("other plans", why),),
        ladder=None,
        num_configs=1,
        num_options=1,
        num_measured=1,
        search_s=time.monotonic() - began,
        samples=samples,
        tokens=samples * (spec.batch.seq_len or 0),
        flops=flops,
        profile=costed.profile,
        limit_bytes=request.limit_bytes,
        objective=request.objective,
        profile_path=request.profile_path,
        bounds=(Bound(evaluated.seconds, memory.worst.band[1]),),
        measured=(evaluated,),
    )
