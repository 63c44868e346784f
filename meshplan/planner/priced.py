"""A live model's plan that leaves nothing open, or that cannot be searched: priced as it is stated.

Its bytes are those of `estimate`; its seconds are of a microbatch that was counted as it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from meshplan.cost.profile import without
from meshplan.errors import PlanError, Problem
from meshplan.planner.costed import Costed
from meshplan.planner.decision import Bound, Decision, Ladder, Question, Way
from meshplan.planner.space import Rejected


def is_priced(question: Question) -> bool:
    """Whether a plan is of a live model, and there is nothing to search."""
    traced, spec = question.traced, question.read(())
    if traced is None or not traced.is_priced(spec):
        return False
    return not spec.free_fields or bool(traced.refuses(spec))


def price(question: Question, told: Callable[[str], None] = lambda text: None) -> Decision:
    """The one plan that there is.

    Raises:
        PlanError: Something is left open, or has no figures.
    """
    began, spec, traced = time.monotonic(), question.read(()), question.traced
    assert traced is not None
    why = traced.refuses(spec)
    if spec.free_fields:
        left = " and ".join(spec.free_fields)
        fix = "state it, and the plan is priced as it is"
        what = f"{left} is left to the planner, but {why}"
        raise PlanError(Problem(what, spec.origin(spec.free_fields[0]), fix))
    told("1 configuration")
    found = traced.priced(spec)
    plan, memory, cluster = found.plan, found.memory, question.cluster
    costed = Costed(plan, cluster, question.profile, found.chain)
    unsent = Costed(plan, cluster, without(costed.profile, network=True), found.chain)
    way = Way(stated={}, seconds=costed.seconds, plan=plan, memory=memory)
    samples = (plan.micro or 0) * plan.accumulate * plan.num_data_ranks
    flops = found.flops * samples
    return Decision(
        spec=spec,
        chosen=way if memory.fits else None,
        best_s=costed.seconds if memory.fits else float("inf"),
        gap=0.0,
        alternatives=(),
        rejected=(Rejected("other plans", why),) if why else (),
        ladder=Ladder(
            roofline_s=flops / costed.profile.peak_flops / plan.mesh.world_size,
            no_network_s=unsent.seconds,
            no_memory_limit_s=way.seconds,
            plan_s=way.seconds,
        ),
        num_configs=1,
        num_options=1,
        num_measured=1,
        search_s=time.monotonic() - began,
        samples=samples,
        tokens=samples * (spec.batch.seq_len or 0),
        flops=flops,
        profile=costed.profile,
        limit_bytes=question.limit_bytes,
        objective=question.objective,
        profile_path=question.profile_path,
        bounds=(Bound(way.seconds, memory.worst.band[1]),),
        measured=(way,),
    )
