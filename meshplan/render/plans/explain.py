"""Output of `meshplan explain why` and `why-not`."""

from __future__ import annotations

from typing import Any, Final

from meshplan.planner.answers.explain import NAMES, WhyNot
from meshplan.planner.objectives.simplify import SLACK
from meshplan.planner.problem.decision import Evaluated
from meshplan.render.base.statements import flow, plan_lines
from meshplan.render.base.text import wrapped
from meshplan.render.plans.plan import shares_to_json
from meshplan.units import format_bytes, format_gib, format_step

_SAME: Final = 5e-4
"""Relative difference of two step times below which they count as equal."""
_TAKEN: Final = "; the fastest plan takes {:.1%} less time but is less simple"


def why_not_to_json(answer: WhyNot) -> dict[str, Any]:
    """Return the `result` of schema explain/1."""
    return {
        "setting": answer.setting,
        "step_s": answer.seconds,
        "best_step_s": answer.base_s,
        "plan_step_s": answer.plan.seconds if answer.plan else None,
        "is_planned": answer.is_planned,
        "blocks": {"with": answer.num_with[0], "of": answer.num_with[1]},
        "objective": answer.objective,
        "peak_bytes": answer.evaluated.memory.high_bytes if answer.evaluated else None,
        "plan_peak_bytes": answer.plan.memory.high_bytes if answer.plan else None,
        "missing_bytes": answer.missing_bytes,
        "is_whole": answer.is_whole,
        "why": answer.why,
        "verdict": verdict(answer),
        "chosen": dict(answer.evaluated.stated) if answer.evaluated else None,
        "shares": shares_to_json(answer.shares),
        "plan_shares": shares_to_json(answer.plan_shares),
    }


def verdict(answer: WhyNot) -> str:
    """Return the answer in one line, without the setting that it is about."""
    return ("" if answer.is_whole else "search incomplete, time limit reached: ") + _verdict(answer)


def _verdict(answer: WhyNot) -> str:
    num_with, num = answer.num_with
    if 0 < num_with < num:
        return f"the plan uses it on {num_with} of {num} blocks; on all blocks: {_alone(answer)}"
    return _alone(answer)


def _alone(answer: WhyNot) -> str:
    if answer.why:
        return f"not in the search space: {answer.why}"
    if answer.seconds is None:
        if answer.missing_bytes is None or answer.missing_bytes <= 0:
            return (
                "no plan with it fits" if answer.is_whole else "no plan with it that fits was found"
            )
        return f"does not fit: at least {format_gib(answer.missing_bytes)} over the limit"
    if answer.plan is not None and answer.objective == "memory":
        return _by_memory(answer, answer.plan)
    plan_s = answer.plan.seconds if answer.plan is not None else answer.base_s
    if plan_s is None or answer.base_s is None:
        return f"{format_step(answer.seconds)} a step"
    more = answer.seconds / plan_s - 1
    if answer.is_planned:
        less = 1 - answer.base_s / plan_s
        return "the plan uses it" + (_TAKEN.format(less) if less >= _SAME else "")
    if more <= -_SAME and answer.is_left:
        words = "faster, but the planner does not choose this by itself: state it in the plan"
        return f"{more:+.1%}: {words}"
    if more <= -_SAME and answer.is_stated:
        return f"{more:+.1%}: faster, but the plan states another value"
    if more <= -_SAME:
        return f"{more:+.1%}: faster, but by less than {SLACK:.0%}, and the plan is simpler"
    if more < _SAME:
        return "as fast as the plan"
    shares, base = answer.shares, answer.plan_shares
    if shares is None or base is None:
        return f"{more:+.1%}"
    grown = {name: getattr(shares, name) - getattr(base, name) for name in NAMES}
    most = max(grown, key=lambda name: grown[name])
    share = f"({grown[most] / plan_s:+.1%})"
    return f"{more:+.1%}: {_on_another_mesh(answer)}{NAMES[most]}{_axes(answer, most)} {share}"


def _on_another_mesh(answer: WhyNot) -> str:
    """Return text on the mesh of the best plan with the setting; "" if it is the chosen plan's."""
    if answer.evaluated is None or answer.plan is None:
        return ""
    mesh = answer.evaluated.stated.get("mesh")
    if mesh is None or mesh == answer.plan.stated.get("mesh"):
        return ""
    return f"with mesh: {flow(mesh)}, "


def _axes(answer: WhyNot, cause: str) -> str:
    """Return text on the axes of exposed communication in the best plan with the setting.

    This is "" unless the cause of the cost is the communication of tp, cp and ep.
    """
    if cause != "tensor_parallel" or answer.evaluated is None:
        return ""
    mesh = answer.evaluated.plan.mesh
    axes = [axis for axis in ("tp", "cp", "ep") if mesh.size(axis) > 1]
    return f" of {' and '.join(axes)}" if axes else ""


def _by_memory(answer: WhyNot, plan: Evaluated) -> str:
    """Compare memory and time of the best plan with the setting to those of the chosen plan."""
    assert answer.evaluated is not None
    if answer.is_planned:
        return "the plan uses it"
    more = answer.evaluated.memory.high_bytes - plan.memory.high_bytes
    memory = f"uses {format_bytes(more)} more" if more > 0 else "uses no more memory"
    return f"{memory}, {answer.evaluated.seconds / plan.seconds - 1:+.1%} time"


def why_not_to_text(answer: WhyNot) -> list[str]:
    """Return the lines of the answer."""
    lines = [f"{answer.setting}: {verdict(answer)}"]
    if answer.evaluated is not None and answer.seconds is not None:
        memory = format_gib(answer.evaluated.memory.high_bytes)
        lines += [
            "",
            f"the best plan with it, {format_step(answer.seconds)} a step, at most {memory}"
            + (":" if answer.evaluated.stated else ", as it is stated"),
        ]
        lines += [part for line in plan_lines(answer.evaluated) for part in wrapped(f"  {line}", 4)]
    return lines
