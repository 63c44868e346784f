"""A plan with compiled blocks is faster than one without, and fits at most what that one takes."""

from __future__ import annotations

from meshplan.planner.problem.decision import Decision
from meshplan.render.plans.plan import decision_to_text


def check_compiled_figures(eager: Decision, compiled: Decision) -> None:
    """Check the choices with and without `compile: true` of one plan that is otherwise open."""
    one, two = eager.chosen, compiled.chosen
    assert one is not None
    assert two is not None
    assert two.plan.assignment.compiled
    assert 0.4 * one.seconds < two.seconds < one.seconds
    low, high = two.memory.worst.band
    assert low < high
    assert (bool(one.memory.bound), bool(two.memory.bound)) == (False, True)
    for decision, is_bound in ((eager, False), (compiled, True)):
        words = " ".join("\n".join(decision_to_text(decision, "plan.yaml")).split())
        assert ("fits: at most" in words) is is_bound
