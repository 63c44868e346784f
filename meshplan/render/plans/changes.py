"""Changes between the last lock and a new decision of the planner, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from meshplan.planner.lock.changes import FieldChange
from meshplan.render.base.statements import statement_value
from meshplan.units import format_gib, format_step

_INPUTS: Final = {
    "inputs.plan": "the plan file",
    "inputs.model": "the model",
    "inputs.profile": "the machine",
    "inputs.profile_file": "the measured profile of the machine",
}
_FIGURES: Final = {
    "expected.step_s": "a step",
    "expected.tokens_per_s_per_gpu": "tokens/s per GPU",
    "expected.mfu": "MFU",
    "memory.high_bytes": "memory",
}


def changes_to_json(changes: Sequence[FieldChange] | None) -> list[dict[str, Any]] | None:
    """Return `result.changed` of schema plan/1; None without a last lock."""
    if changes is None:
        return None
    return [{"field": each.field, "old": each.old, "new": each.new} for each in changes]


def changes_to_text(changes: Sequence[FieldChange] | None, blocks: Sequence[str] = ()) -> list[str]:
    """Return a line per change; [] without a last lock.

    Args:
        changes: The changed fields; None without a last lock.
        blocks: Fqns of the blocks of the model that is planned now, in order.
    """
    if changes is None:
        return []
    if not changes:
        return ["nothing changed since the last lock"]
    return [f"changed since the last lock: {_line(each, blocks)}" for each in changes]


def _line(change: FieldChange, blocks: Sequence[str]) -> str:
    field, old, new = change.field, change.old, change.new
    if field in _INPUTS:
        return _INPUTS[field]
    name = _FIGURES.get(field, field)
    return f"{name}: {_value(field, old, blocks)} -> {_value(field, new, blocks)}"


def _value(field: str, value: Any, blocks: Sequence[str]) -> str:
    if value is None:
        return "not stated" if field not in _FIGURES else "unknown"
    if field == "expected.step_s":
        return format_step(value)
    if field == "expected.mfu":
        return f"{value:.1%}"
    if field == "expected.tokens_per_s_per_gpu":
        return f"{value:,.0f}"
    if field == "memory.high_bytes":
        return format_gib(value)
    return statement_value(field, value, blocks)
