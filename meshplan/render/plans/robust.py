"""Output on `solve.robust`: what the chosen plan loses if constants are off."""

from __future__ import annotations

from typing import Any, Final

from meshplan.planner.problem.decision import Decision
from meshplan.render.base.text import packed, wrapped
from meshplan.render.plans.layouts import other_lines

_MOST: Final = 6
"""Most cases that are listed."""
_NONE: Final = 0.0005
"""Regret below which a plan counts as the fastest."""


def robustness_to_json(decision: Decision) -> dict[str, Any] | None:
    """Return the key `robust` of schema plan/1; None if plans were not compared."""
    found = decision.robustness
    if found is None:
        return None
    return {
        "share": found.share,
        "regret": found.regret,
        "fastest_regret": found.fastest_regret,
        "least_regret": found.least_regret,
        "is_whole": found.is_whole,
        "cases": [
            {
                "case": each.case,
                "constant": each.constant,
                "change": each.change,
                "step_s": each.seconds,
                "best_step_s": each.best_s,
                "regret": each.regret,
                "best": dict(each.best.stated),
            }
            for each in found.sensitivities
        ],
    }


def robustness_to_text(decision: Decision) -> list[str]:
    """Return lines on what the chosen plan loses if constants are off.

    Args:
        decision: The planner's decision; `decision.chosen` is not None.

    Returns:
        The lines; [] if the plan file does not state `solve.robust`.
    """
    found, chosen = decision.robustness, decision.chosen
    assert chosen is not None
    if "robust" not in decision.spec.solve:
        return []
    if found is None:
        why = "the search is incomplete" if not decision.is_whole else "one plan is possible"
        return [f"robust  nothing was compared: {why}"]
    share, rows = f"{found.share * 100:g}%", found.sensitivities
    later = "" if found.is_whole else " as far as was searched"
    lines = wrapped(
        f"robust  in {len(rows)} cases of constants that are {share} off, this plan is at most "
        f"{found.regret:.1%} slower than the fastest plan of the case{later}",
        8,
    )
    if found.fastest.stated != chosen.stated:
        gain = f"{1 - found.fastest.seconds / chosen.seconds:.1%} faster with the constants as they"
        text = (
            f"        the fastest plan: {gain} are, else at most {found.fastest_regret:.1%} slower"
        )
        lines += wrapped(text, 8)
    if found.least_regret >= _NONE:
        lines.append(f"        lower bound of all plans: {found.least_regret:.1%}")
    own = found.fastest.stated, chosen.stated
    listed = [each for each in rows if each.best.stated not in own and each.regret >= _NONE]
    if not listed:
        return [*lines, "        no other plan is the fastest in any of them"]
    lines.append(f"        other plans are the fastest in {len(listed)} of them:")
    for each in listed[:_MOST]:
        lines.append(f"        {each.case}: {each.regret:.1%} slower than with")
        lines += packed("          ", other_lines(each.best, chosen))
    return lines
