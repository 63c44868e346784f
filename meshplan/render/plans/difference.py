"""Output of `meshplan diff A B`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshplan.planner.answers.difference import Differs, DiffSide, Figure, PlanDifference
from meshplan.render.base.statements import flow, statement_value
from meshplan.render.base.text import columns, wrapped
from meshplan.units import format_bytes, format_step


def difference_to_json(found: PlanDifference) -> dict[str, Any]:
    """Return the `result` of schema diff/1."""

    def lines(items: Sequence[Differs]) -> list[dict[str, Any]]:
        return [{"what": each.what, "old": each.old, "new": each.new} for each in items]

    return {
        "same": found.is_same,
        "fields": lines(found.fields),
        "blocks": lines(found.blocks),
        "placements": lines(found.placements),
        "old": _side_to_json(found.old),
        "new": _side_to_json(found.new),
        **{
            f"{name}_difference": _minus(getattr(found.new, name), getattr(found.old, name))
            for name in _FIGURES
        },
    }


_FIGURES = {
    "step_s": "a step",
    "tokens_per_s": "tokens per second",
    "peak_bytes": "peak memory, at most",
    "traffic_bytes": "sent and received by rank 0",
}


_MOST_IN_COLUMN = 40
"""Maximum characters of a cell; longer values get lines of their own to keep columns narrow."""


def _side_to_json(side: DiffSide) -> dict[str, Any]:
    return {
        "name": side.name,
        **{name: getattr(side, name).value for name in _FIGURES},
        "unknown": {name: getattr(side, name).why for name in _FIGURES if getattr(side, name).why},
        "routes": [
            {"kind": kind, "axes": list(axes), "bytes": size}
            for (kind, axes), size in side.routes.items()
        ],
    }


def _minus(new: Figure, old: Figure) -> float | None:
    return None if new.value is None or old.value is None else new.value - old.value


def difference_to_text(found: PlanDifference) -> list[str]:
    """Return the lines of the answer."""
    title = f"{found.old.name} -> {found.new.name}"
    if found.is_same:
        title += ": the same plan"
    sections = [[title]]
    for items in (found.fields, found.blocks, found.placements):
        if items:
            sections.append(_rows(found, items))
    sections.append(_figures(found))
    return "\n\n".join("\n".join(section) for section in sections).splitlines()


def _rows(found: PlanDifference, items: Sequence[Differs]) -> list[str]:
    """Return a row per difference; long ones come last, on lines of their own."""
    rows, long = [], []
    for item in items:
        old = _word(item.what, item.old, found.old)
        new = _word(item.what, item.new, found.new)
        if max(len(item.what), len(old)) > _MOST_IN_COLUMN:
            lines = (f"  {item.what}", f"    {old}", f"    -> {new}")
            long += [part for line in lines for part in wrapped(line, indent=7)]
        else:
            rows.append((f"  {item.what}", old, "->", new))
    return [*(columns(rows, "<<<<") if rows else []), *long]


def _word(what: str, value: Any, side: DiffSide) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        blocks = side.plan.graph.blocks() if side.plan is not None else ()
        return statement_value(what, value, blocks)
    if isinstance(value, dict):
        return flow(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _figures(found: PlanDifference) -> list[str]:
    rows, missing = [], []
    for name, words in _FIGURES.items():
        old, new = getattr(found.old, name), getattr(found.new, name)
        if old.value is None or new.value is None:
            side = found.old if old.value is None else found.new
            why = old.why or new.why
            missing += wrapped(f"  {words}: unknown for {side.name}: {why}", indent=4)
            continue
        share = f"{new.value / old.value - 1:+.1%}" if old.value else ""
        rows.append((f"  {words}", _figure(name, old), "->", _figure(name, new), share))
    return [*columns(rows, "<>>>>"), *missing]


def _figure(name: str, figure: Figure) -> str:
    assert figure.value is not None
    if name == "step_s":
        return format_step(figure.value)
    if name == "tokens_per_s":
        return f"{figure.value:,.0f}"
    return format_bytes(figure.value)
