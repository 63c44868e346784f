"""A plan with compiled blocks is chosen by the figures of the same blocks without a compiler."""

from __future__ import annotations

from meshplan.planner.problem.decision import Decision
from meshplan.render.plans.plan import decision_to_json, decision_to_text


def check_eager_figures(eager: Decision, compiled: Decision) -> None:
    """Check that both chose the same plan, and that only the second is told as an upper end."""
    one, two = eager.chosen, compiled.chosen
    assert one is not None
    assert two is not None
    assert two.plan.assignment.compiled
    assert dict(one.stated) == dict(two.stated)
    assert (one.seconds, eager.gap) == (two.seconds, compiled.gap)
    low, high = two.memory.worst.band
    assert (one.memory.worst.band[1], one.memory.worst.peak) == (high, two.memory.worst.peak)
    assert low < one.memory.worst.band[0]
    assert (bool(one.memory.bound), bool(two.memory.bound)) == (False, True)
    said = "step times are those of eager blocks"
    for decision, is_said in ((eager, False), (compiled, True)):
        words = " ".join("\n".join(decision_to_text(decision, "plan.yaml")).split())
        assert (said in words) is is_said
        note = decision_to_json(decision)["profile"]["note"]
        assert (said in (note or "")) is is_said
        assert ("fits: at most" in words) is is_said
