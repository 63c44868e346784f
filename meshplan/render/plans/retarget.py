"""Output of `meshplan plan --retarget` and `--what-if`: plans for other hardware."""

from __future__ import annotations

from typing import Any

from meshplan.planner.answers.difference import PlanDifference
from meshplan.planner.answers.reshard import Reshard
from meshplan.planner.answers.what_if import WhatIf
from meshplan.planner.problem.decision import Evaluated
from meshplan.render.base.text import columns, packed, wrapped
from meshplan.render.plans.difference import difference_to_json, difference_to_text
from meshplan.render.plans.layouts import other_lines
from meshplan.units import format_bytes, format_step


def retarget_to_json(found: PlanDifference, moved: Reshard) -> dict[str, Any]:
    """Return `result.retarget` of schema plan/1: the keys of diff/1, and the bytes that move."""
    return {
        **difference_to_json(found),
        "reshard": {
            "state_bytes": moved.state_bytes,
            "needed_bytes": moved.needed_bytes,
            "moved_bytes": moved.moved_bytes,
            "most_bytes": moved.most_bytes,
            "most_rank": moved.most_rank,
        },
    }


def what_if_to_json(found: WhatIf) -> dict[str, Any]:
    """Return an entry of `result.what_if` of schema plan/1: the plan there, and the best one."""
    best = found.anew
    return {
        "hardware": found.hardware,
        "same": None if found.same is None else _figures(found.same),
        "why": found.why,
        "anew": None if best is None else {**_figures(best), "chosen": dict(best.stated)},
        "why_not": found.why_not,
    }


def _figures(evaluated: Evaluated) -> dict[str, Any]:
    memory = evaluated.memory
    return {
        "step_s": evaluated.seconds,
        "expected_bytes": memory.worst.peak.total_bytes,
        "peak_bytes": memory.high_bytes,
        "limit_bytes": memory.limit_bytes,
    }


def what_if_to_text(found: WhatIf, chosen: Evaluated) -> list[str]:
    """Return the lines of an answer.

    Args:
        found: The chosen plan on other hardware.
        chosen: The plan on the hardware that the plan file states.
    """

    def line(name: str, evaluated: Evaluated | None, why: str) -> str:
        if evaluated is None:
            return f"  {name}  {why}"
        share = evaluated.seconds / chosen.seconds - 1
        return (
            f"  {name}  {format_step(evaluated.seconds)} a step ({share:+.1%}), "
            f"{evaluated.memory.size}"
        )

    best = found.anew
    lines = [
        f"what if {found.hardware}",
        *wrapped(line("this plan   ", found.same, found.why), 16),
        *wrapped(line("planned anew", best, found.why_not), 16),
    ]
    if best is not None:
        lines += packed(" " * 16, [*other_lines(best, chosen)])
    return lines


def retarget_to_text(found: PlanDifference, moved: Reshard) -> list[str]:
    """Return the lines of the answer."""
    share = moved.moved_bytes / moved.needed_bytes if moved.needed_bytes else 0.0
    rows = [
        ("  the whole model, counted once", format_bytes(moved.state_bytes)),
        ("  all ranks together", format_bytes(moved.needed_bytes)),
        ("  to be moved, if every rank keeps its device",
         f"{format_bytes(moved.moved_bytes)}, {share:.0%}"),
        (f"  most received by one rank, rank {moved.most_rank}", format_bytes(moved.most_bytes)),
    ]  # fmt: skip
    return [
        *difference_to_text(found),
        "",
        "parameters and optimizer state",
        *columns(rows, "<<"),
    ]
