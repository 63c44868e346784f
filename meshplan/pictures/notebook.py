"""HTML that notebooks show for a spec, a plan, an estimate or a layout, with all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from meshplan.layout.layout import Layout
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.pictures.base.palette import ink_on, shard_ink
from meshplan.pictures.memory.bars import INKS, memory_bars
from meshplan.pictures.mesh.mesh_map import mesh_map
from meshplan.plan.plan import Plan
from meshplan.shown import fields_of, short
from meshplan.spec.spec import Rule, Spec
from meshplan.units import format_bytes, format_count

_CELL = "padding:2px 8px;text-align:left"
_MOST = 40
_ROOM = 160
"""Characters of a field's value."""


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return an HTML table with all text escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f'<{tag} style="{_CELL}">{escape(cell)}</{tag}>' for cell in cells)

    first = f"<tr>{line(head, 'th')}</tr>" if head else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table>{first}{body}</table>"


def spec_html(spec: Spec) -> str:
    """Return a table of the statements of a spec, with their places in the file."""
    paths = sorted(spec.origins, key=lambda path: (spec.origins[path].line, path))
    tops = dict.fromkeys(path.split(".")[0].split("[")[0] for path in paths if path)
    rows = [
        (name, _value(_of(spec, name)), spec.origin(name).place)
        for name in tops
        if name != "rules" and _of(spec, name) is not None
    ]
    rows += [
        (path, rule_in_words(rule), spec.origin(path).place)
        for rule in spec.rules[:_MOST]
        if (path := f"rules[{rule.index}]")
    ]
    if len(spec.rules) > _MOST:
        rows.append((f"… {len(spec.rules) - _MOST:,} more rules", "", ""))
    title = f"<b>{escape(spec.source)}</b>"
    return f"<div>{title}{table(rows, ('key', 'value', 'stated at'))}</div>"


def _of(spec: Spec, name: str) -> Any:
    return getattr(spec, name, None)


def _value(value: Any) -> str:
    """Return a value in the form that it has in a plan file."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_value, value)) + "]"
    names = getattr(value, "__dataclass_fields__", None)
    if names is not None:
        stated = {name.rstrip("_"): getattr(value, name) for name in names}
        return _value({k: v for k, v in stated.items() if v is not None and v != ()})
    return str(value)


def rule_in_words(rule: Rule) -> str:
    """Return the modules that a rule selects, and what it states of them."""
    stated = {
        name: getattr(rule, name)
        for name in rule.__dataclass_fields__
        if name not in ("index", "match") and getattr(rule, name) not in (None, "", False, {})
    }
    return f"{', '.join(map(str, rule.match))}: {_value(stated)}"


def plan_html(plan: Plan) -> str:
    """Return the mesh as tiles of ranks, and a table of the plan's main decisions."""
    facts, a = mesh_map(plan), plan.assignment
    rows = []
    for node in facts.nodes:
        if not node.tiles:
            rows.append(f"<div>… {node.number:,} more {facts.noun}s</div>")
            continue
        tiles = "".join(
            _tile(f"{tile.rank}", shard_ink(tile.shard, facts.num_shards).colour,
                  ", ".join(tile.at)) if tile else f"<span>… {node.missing:,} more</span>"
            for tile in node.tiles
        )  # fmt: skip
        rows.append(f"<div>{facts.noun} {node.number:,} {tiles}</div>")
    settings = [
        ("model", f"{plan.graph.name}, {format_count(plan.graph.num_params)} parameters"),
        ("mesh", str(plan.mesh)),
        ("strategy", a.strategy.name),
        ("batch", "not stated" if plan.micro is None else
         f"{plan.micro} samples per rank and microbatch, {plan.accumulate} microbatches a step"),
    ]  # fmt: skip
    if a.stages is not None:
        settings.append(("pipeline", f"{a.stages.schedule}, {a.stages.num} stages"))
    return (
        f'<div role="group" aria-label="{escape(facts.alt)}"><b>{escape(facts.title)}</b>'
        f"{''.join(rows)}{table(settings)}</div>"
    )


def _tile(text: str, colour: str, title: str) -> str:
    style = (
        f"display:inline-block;min-width:2em;margin:1px;padding:1px 4px;text-align:center;"
        f"background:{colour};color:{ink_on(colour)}"
    )
    return f'<span style="{style}" title="{escape(title)}">{escape(text)}</span>'


def memory_html(estimate: MemoryEstimate) -> str:
    """Return a bar with the peak of each group of ranks, and a table of the largest peak."""
    facts = memory_bars(estimate)
    most = max([facts.limit_bytes or 0, *(bar.total_bytes for bar in facts.bars)]) or 1
    lines = []
    for bar in facts.bars:
        parts = "".join(
            f'<span style="display:inline-block;height:1em;width:{100 * size / most:.3f}%;'
            f'background:{INKS[name].colour}" title="{escape(name)}: {format_bytes(size)}"></span>'
            for name, size in bar.parts
        )
        words = f"{bar.name}: {format_bytes(bar.total_bytes)}, {facts.verdict(bar)}"
        lines.append(
            f"<div>{escape(words)}</div>"
            f'<div style="width:40em;max-width:100%;white-space:nowrap">{parts}</div>'
        )
    worst = max(estimate.worst.terms.items(), key=lambda item: item[1], default=None)
    rows = [] if worst is None else [
        (str(term), format_bytes(size))
        for term, size in sorted(estimate.worst.terms.items(), key=lambda item: -item[1])
    ]  # fmt: skip
    return (
        f'<div role="group" aria-label="{escape(facts.alt)}"><b>{escape(facts.title)}</b>'
        f"{''.join(lines)}{table(rows, ('at the peak of the largest rank', 'bytes'))}</div>"
    )


def value_html(value: Any) -> str:
    """Return a table of the fields of a value, each abbreviated to a line.

    Args:
        value: An instance of a class that `meshplan.shown.shown` decorates.
    """
    stated = fields_of(value)
    rows = [(name, _field(name, item)) for name, item in stated[:_MOST]]
    if len(stated) > _MOST:
        rows.append((f"… {len(stated) - _MOST} more fields", ""))
    return f"<div><b>{escape(type(value).__name__)}</b>{table(rows)}</div>"


def _field(name: str, value: Any) -> str:
    """Return a field's value: bytes with their unit, text as it is, all else as its `repr`."""
    if name.endswith("_bytes") and type(value) is int and value >= 0:
        return format_bytes(value)
    if type(value) is int:
        return f"{value:,}"
    if isinstance(value, str) and value.isprintable() and len(value) <= _ROOM:
        return value
    return short(value, _ROOM)


def layout_html(layout: Layout) -> str:
    """Return a table of the axes that shard each dim, and of axes with partial sums."""
    rows = [
        (f"dim {dim}", f"cut by {', '.join(axes)}" if axes else "whole")
        for dim, axes in enumerate(layout.cuts)
    ]
    rows += [(f"axis {axis}", "each rank has a partial sum") for axis in layout.partial]
    return f"<div><b>{escape(layout.spell())}</b>{table(rows)}</div>"
