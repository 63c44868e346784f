"""`meshplan explain` on paper."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshplan.planner.explain import NAMES, WhyNot
from meshplan.render.statements import way_lines
from meshplan.render.text import wrapped
from meshplan.units import format_gib


def why_not_to_json(answer: WhyNot) -> dict[str, Any]:
    """The `result` of schema explain/1."""

    def shares(of: Any) -> dict[str, float] | None:
        return None if of is None else {f"{k}_s": v for k, v in dataclasses.asdict(of).items()}

    return {
        "setting": answer.setting,
        "step_s": answer.seconds,
        "best_step_s": answer.base_s,
        "missing_bytes": answer.missing_bytes,
        "is_whole": answer.is_whole,
        "why": answer.why,
        "verdict": verdict(answer),
        "chosen": dict(answer.way.stated) if answer.way else None,
        "shares": shares(answer.shares),
        "best_shares": shares(answer.base_shares),
    }


def verdict(answer: WhyNot) -> str:
    """The answer in a line."""
    return ("" if answer.is_whole else "so far, the time was up: ") + _verdict(answer)


def _verdict(answer: WhyNot) -> str:
    if answer.why:
        return f"not in the space: {answer.why}"
    if answer.seconds is None:
        if answer.missing_bytes is None or answer.missing_bytes <= 0:
            return (
                "nothing with it fits" if answer.is_whole else "nothing with it was found that fits"
            )
        return f"does not fit: {format_gib(answer.missing_bytes)} are missing at the least"
    if answer.base_s is None:
        return f"{answer.seconds:.3f} s a step"
    slower = answer.seconds / answer.base_s - 1
    if slower < 5e-4:
        return "it is what the plan has, or as fast"
    shares, base = answer.shares, answer.base_shares
    assert shares is not None
    assert base is not None
    grown = {name: getattr(shares, name) - getattr(base, name) for name in NAMES}
    most = max(grown, key=lambda name: grown[name])
    return f"{slower:+.1%}: {NAMES[most]} ({grown[most] / answer.base_s:+.1%})"


def why_not_to_text(answer: WhyNot) -> list[str]:
    """The lines of the answer."""
    lines = [f"{answer.setting}: {verdict(answer)}"]
    if answer.way is not None and answer.seconds is not None:
        lines += ["", f"the best with it, {answer.seconds:.3f} s a step:"]
        lines += [part for line in way_lines(answer.way) for part in wrapped(f"  {line}", 4)]
    return lines
