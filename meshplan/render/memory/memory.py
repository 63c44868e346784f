"""Output of `meshplan estimate -f`: the peak of every group of equal ranks, by category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from meshplan.memory import MemoryEstimate, Term
from meshplan.memory.answer.estimate import ModuleBytes, RankGroup, left_in_words
from meshplan.render.base.text import columns, gib, paint, wrapped
from meshplan.units import format_bytes, format_gib, spans_of

_HOW = {
    "1": "composed from blocks that were traced once",
    "3": "the whole step was traced",
}
_MOST_RUNS = 4
_MOST_MODULES = 40
_COLUMNS: Final[Mapping[str, tuple[Term, ...]]] = {
    "parameters": (Term.PARAMETERS,),
    "gradients": (Term.GRADIENTS,),
    "optimizer": (Term.OPTIMIZER,),
    "gathered": (Term.GATHERED,),
    "activations": (Term.ACTIVATIONS, Term.LOSS),
}
"""Columns of the table of modules, each with the memory categories that it sums."""


def memory_to_json(estimate: MemoryEstimate) -> dict[str, Any]:
    """Return the `result` of schema memory/1."""
    result: dict[str, Any] = {
        "groups": [_group_to_json(group) for group in estimate.groups],
        "tier": int(estimate.tier),
        "certified": estimate.certified,
        "is_upper_bound": bool(estimate.bound),
        "bound": estimate.bound,
        "limit_bytes": estimate.limit_bytes,
        "fits": estimate.fits,
        "size": estimate.size,
        "worst": estimate.groups.index(estimate.worst),
        "reconciliation": [
            {
                "name": step.name,
                "delta_bytes": step.delta_bytes,
                "total_bytes": step.total_bytes,
                "why": step.why,
            }
            for step in estimate.reconciliation
        ],
        "assumed": dict(estimate.assumed),
        "host": None if estimate.host is None else asdict(estimate.host),
    }
    result["fixes"] = [
        {
            "change": fix.change,
            "setting": fix.setting,
            "settings": list(fix.settings),
            "high_bytes": fix.total_bytes,
            "fits": fix.fits,
        }
        for fix in estimate.fixes
    ]
    return result


def _group_to_json(group: RankGroup) -> dict[str, Any]:
    return {
        "ranks": list(group.ranks),
        "stages": list(group.stages),
        "peak": group.peak._asdict(),
        "band": list(group.band),
        "at": group.at._asdict(),
        "terms": {str(term): size for term, size in group.terms.items()},
        "fits": group.fits,
        "host_bytes": group.host_bytes,
        "modules": [
            {
                "module": row.module,
                "count": row.count,
                "bytes": row.num_bytes,
                "terms": {str(term): size for term, size in row.terms.items()},
            }
            for row in group.modules
        ],
    }


def memory_to_text(
    estimate: MemoryEstimate, model: str, *, colour: bool = False, by_module: bool = False
) -> list[str]:
    """Return the lines of the answer, without the notes.

    Args:
        estimate: The estimate.
        model: Name of the plan, for the title.
        colour: If True, the lines are coloured.
        by_module: If True, also break the peak down by module.
    """
    sections = [_table(estimate, model, colour), _peak(estimate)]
    if by_module and estimate.worst.modules:
        sections.append(_modules(estimate.worst))
    sections.append(reconciliation_to_text(estimate))
    if estimate.fits is False and estimate.fixes:
        sections.append(_fixes(estimate, colour))
    sections.append(_basis(estimate))
    return "\n\n".join("\n".join(section) for section in sections).splitlines()


def _table(estimate: MemoryEstimate, model: str, colour: bool) -> list[str]:
    has_stages = any(group.stages for group in estimate.groups)
    header = ["ranks", *(["stages"] if has_stages else []), "tensors", "allocated", "reserved",
              "driver", "total", "from", "to"]  # fmt: skip
    rows = [
        [
            ranks_to_text(group.ranks),
            *([ranks_to_text(group.stages)] if has_stages else []),
            *map(gib, group.peak),
            gib(group.peak.total_bytes),
            *map(gib, group.band),
        ]
        for group in estimate.groups
    ]
    lines = columns([header, *rows], "<" * (2 if has_stages else 1) + ">" * 7)
    title = f"{model}: peak memory of each GPU in GiB"
    if estimate.limit_bytes is not None:
        title += f", of {format_gib(estimate.limit_bytes)}"
    if estimate.bound:
        title = f"AT MOST: {title}"
    marked = [
        line + _verdict(group, estimate.limit_bytes, colour)
        for line, group in zip(lines[1:], estimate.groups, strict=True)
    ]
    return [paint(title, "bold", colour), estimate.size_and_left, "", lines[0], *marked,
            *_on_host(estimate)]  # fmt: skip


def _on_host(estimate: MemoryEstimate) -> list[str]:
    """Return lines on the host memory that offloading needs; [] if nothing is offloaded."""
    most = max(estimate.groups, key=lambda group: group.host_bytes)
    if not most.host_bytes:
        return []
    size = format_bytes(most.host_bytes)
    whose = f"rank {most.ranks[0]}" if len(estimate.groups) > 1 else "each rank"
    host = estimate.host
    assert host is not None
    used, limit = format_gib(host.held_bytes), format_gib(host.limit_bytes)
    there = "" if host.is_stated else " (assumed; state hardware.host_memory)"
    over = ": TOO MUCH" if host.is_over else ""
    return [
        "",
        f"host memory: {size} for {whose}; the ranks of a node use {used} of its "
        f"{limit}{there}{over}",
    ]


def _verdict(group: RankGroup, limit_bytes: int | None, colour: bool) -> str:
    if limit_bytes is None:
        return ""
    left = left_in_words(group.band[1], limit_bytes)
    return "  " + (
        paint(f"ok, {left}", "green", colour) if group.fits else paint(left, "red", colour)
    )


def _peak(estimate: MemoryEstimate) -> list[str]:
    group = estimate.worst
    whole = group.peak.requested_bytes
    whose = ranks_in_words(group.ranks)
    where = (
        f"in {group.at.module}" if group.at.module else f"outside all modules, for {group.at.term}"
    )
    title = f"the peak of {whose} is in {group.at.phase}, {where}:"
    largest_first = sorted(group.terms.items(), key=lambda item: -item[1])
    rows = [
        (f"  {term}", format_bytes(size), f"{size / whole:.1%}") for term, size in largest_first
    ]
    return [title, *columns(rows, "<>>")]


def _modules(group: RankGroup) -> list[str]:
    """Return a table of the peak by module; modules after the first `_MOST_MODULES` share a row."""
    shown, rest = group.modules[:_MOST_MODULES], group.modules[_MOST_MODULES:]
    names = [row.module or "(no module)" for row in shown]
    rows = [
        (f"  {name}", f"x {row.count}" if row.count > 1 else "", *_columns(row.terms))
        for name, row in zip(names, shown, strict=True)
    ]
    if rest:
        others = _sum(rest)
        rows.append((f"  {len(rest)} others", "", *_columns(others)))
    rows.append(("  total", "", *_columns(_sum(group.modules))))
    header = ("  module", "", *_COLUMNS, "other", "total")
    return ["the peak by module:", *columns([header, *rows], "<<" + ">" * (len(_COLUMNS) + 2))]


def _sum(rows: Sequence[ModuleBytes]) -> Mapping[Term, int]:
    return {term: sum(row.terms.get(term, 0) for row in rows) for term in Term}


def _columns(terms: Mapping[Term, int]) -> tuple[str, ...]:
    """Return cells for the columns of `_COLUMNS`, for all other terms, and for the total."""
    apart = [sum(terms.get(term, 0) for term in kinds) for kinds in _COLUMNS.values()]
    whole = sum(terms.values())
    return tuple(
        format_bytes(size) if size else "-" for size in (*apart, whole - sum(apart), whole)
    )


def reconciliation_to_text(estimate: MemoryEstimate) -> list[str]:
    """Return a table that leads from the textbook's states to the largest peak of all ranks."""
    return ["from the textbook formula to this estimate:", *columns(_steps(estimate), "<>><")]


def _steps(estimate: MemoryEstimate) -> list[tuple[str, str, str, str]]:
    first, *rest = estimate.reconciliation
    rows = [(f"  {first.name}", "", format_bytes(first.total_bytes), "")]
    rows += [
        (f"  {step.name}", _signed(step.delta_bytes), format_bytes(step.total_bytes), step.why)
        for step in rest
    ]
    return rows


def explained_to_text(estimate: MemoryEstimate) -> list[str]:
    """Return a table that leads from the textbook's states to the upper end of the largest peak.

    The plan fits if this upper end is within the limit.
    """
    group = estimate.worst
    low, high = group.band
    where = f" of {group.at.module}" if group.at.module else ""
    title = (
        f"{ranks_in_words(group.ranks)}, in {group.at.phase}{where}: {estimate.size}"
        f"{_verdict(group, estimate.limit_bytes, False)}"
    )
    why = f"margin of error: the peak is between {format_bytes(low)} and this, which has to fit"
    over = ("  error", _signed(high - group.peak.total_bytes), format_bytes(high), why)
    return [title, "", "from the textbook formula to this estimate:",
            *columns([*_steps(estimate), over], "<>><")]  # fmt: skip


def _fixes(estimate: MemoryEstimate, colour: bool) -> list[str]:
    rows = []
    for fix in estimate.fixes:
        count = len(fix.settings)
        change = fix.change if count == 1 else f"these {count} together"
        rows.append((f"  {change}", f"to {format_gib(fix.total_bytes)}", fix.setting))
    lines = columns(rows, "<><")
    marked = [
        paint("ok  ", "green", colour) + line if fix.fits else paint("OVER", "red", colour) + line
        for fix, line in zip(estimate.fixes, lines, strict=True)
    ]
    return ["changes, each estimated, the cheapest first:", *marked, *_conclusion(estimate)]


def _conclusion(estimate: MemoryEstimate) -> list[str]:
    """Return what to do: the cheapest change that fits, or what comes nearest to the limit."""
    cheapest = next((fix for fix in estimate.fixes if fix.fits), None)
    if cheapest is not None:
        return ["", "the cheapest that fits, in plan.yaml:", *(f"  {s}" for s in cheapest.settings)]
    nearest = min(estimate.fixes, key=lambda fix: fix.total_bytes)
    assert estimate.limit_bytes is not None
    missing = format_bytes(nearest.total_bytes - estimate.limit_bytes)
    return ["", *wrapped(
        f"none of them fits: {missing} is missing with {nearest.setting}; `meshplan plan` searches "
        "all layouts, and with more GPUs each holds less"
    )]  # fmt: skip


def _basis(estimate: MemoryEstimate) -> list[str]:
    how = f"tier {estimate.tier}: {_HOW[estimate.tier]}; {estimate.certified}"
    if estimate.bound:
        how = f"an upper bound: {estimate.bound}"
    return [how, *(f"assumed: {what}: {value}" for what, value in estimate.assumed)]


def _signed(num_bytes: int) -> str:
    return f"{'+' if num_bytes >= 0 else '-'}{format_bytes(abs(num_bytes))}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks with the word "rank" or "ranks", for use in a sentence.

    >>> ranks_in_words([3]), ranks_in_words(range(4))
    ('rank 3', 'ranks 0-3')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_to_text(ranks)}"


def ranks_to_text(ranks: Sequence[int]) -> str:
    """Return ranks as runs of consecutive numbers; if there are many runs, also their count.

    >>> ranks_to_text([0, 1, 2, 4]), ranks_to_text(range(0, 99, 2))
    ('0-2, 4', '0, 2, 4, 6, ... 98 (50)')
    """
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans_of(ranks)]
    if len(runs) <= _MOST_RUNS:
        return ", ".join(runs)
    return f"{', '.join(runs[:_MOST_RUNS])}, ... {runs[-1]} ({len(ranks)})"
