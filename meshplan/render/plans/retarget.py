"""Output of `meshplan plan --retarget`: the existing plan and a plan for other hardware."""

from __future__ import annotations

from typing import Any

from meshplan.planner.answers.difference import PlanDifference
from meshplan.planner.answers.reshard import Reshard
from meshplan.render.base.text import columns
from meshplan.render.plans.difference import difference_to_json, difference_to_text
from meshplan.units import format_bytes


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
