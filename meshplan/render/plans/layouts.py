"""Output on other kinds of layout: the fastest plan of each, beside the chosen plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from meshplan.planner.problem.decision import Decision, Evaluated, OtherLayout
from meshplan.render.base.statements import flow, plan_lines
from meshplan.render.base.text import columns, packed, wrapped
from meshplan.units import format_gib, format_step

KIND_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {"tp": "tp", "pp": "pp", "hybrid": "hybrid", "data": "FSDP/DDP only"}
)
"""{kind of layout: its name in a column}."""


def other_layouts_to_json(
    decision: Decision, plan_to_json: Callable[[Evaluated], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the key `other_layouts` of schema plan/1: one object for each kind of layout.

    Args:
        decision: The planner's decision.
        plan_to_json: Returns the keys that plans have in this schema.
    """
    return [
        {
            "kind": each.kind,
            "is_whole": each.is_whole,
            **(
                {**plan_to_json(each.evaluated), "chosen": dict(each.evaluated.stated)}
                if each.evaluated is not None
                else {"step_s": None, "peak_bytes": None, "chosen": None, "why": each.why}
            ),
        }
        for each in decision.other_layouts
    ]


def layouts_to_text(decision: Decision) -> list[str]:
    """Return lines with the fastest plan of each other kind of layout, fastest first.

    Kinds whose fastest plans are the same share an entry. Kinds without a plan are named at the
    end, unless the search space has no other kind of layout at all: then there are no lines.

    Args:
        decision: The planner's decision; `decision.chosen` is not None.
    """
    chosen, layouts = decision.chosen, decision.other_layouts
    if chosen is None or not any(each.is_in_space for each in layouts):
        return []
    by_words: dict[str, list[OtherLayout]] = {}
    for each in layouts:
        if each.evaluated is not None:
            by_words.setdefault(str(each.evaluated.stated), []).append(each)
    entries = sorted(by_words.values(), key=lambda same: _seconds(same[0]))
    heads = columns([_head(same, chosen) for same in entries], "<>>>") if entries else []
    lines = [
        line
        for head, same in zip(heads, entries, strict=True)
        for line in packed(f"  {head}  ", _statements(same, chosen))
    ]
    # The balanced plan is the fastest plan that uses no more memory than it does. The plans listed
    # here had to fit into the same memory.
    where = " within the same memory" if decision.objective == "balanced" else ""
    return [f"fastest plans with another kind of layout{where}", *lines, *_missing(layouts)]


def _seconds(layout: OtherLayout) -> float:
    assert layout.evaluated is not None
    return layout.evaluated.seconds


def _head(same: Sequence[OtherLayout], chosen: Evaluated) -> tuple[str, ...]:
    """Return the cells of an entry: kinds, share beside the chosen plan, step time, memory."""
    evaluated = same[0].evaluated
    assert evaluated is not None
    return (
        ", ".join(KIND_WORDS[each.kind] for each in same),
        f"{evaluated.seconds / chosen.seconds - 1:+z.1%}",
        format_step(evaluated.seconds),
        format_gib(evaluated.memory.high_bytes),
    )


def _statements(same: Sequence[OtherLayout], chosen: Evaluated) -> Iterator[str]:
    """Yield the mesh, the strategy, and what else turns the chosen plan into this one."""
    evaluated = same[0].evaluated
    assert evaluated is not None
    if not all(each.is_whole for each in same):
        yield "the fastest found so far"
    a = evaluated.plan.assignment
    mesh = {axis.name: axis.size for axis in (*a.mesh, *a.mesh.loans)}
    yield f"mesh: {flow(evaluated.stated.get('mesh', mesh))}"
    # A mesh without a data axis needs no strategy, and a plan that states one is refused.
    if (strategy := evaluated.stated.get("strategy", a.strategy.name)) is not None:
        yield f"strategy: {strategy}"
    yield from other_lines(evaluated, chosen, ("mesh", "strategy"))


def other_lines(
    evaluated: Evaluated, chosen: Evaluated, without: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield the statements that turn the chosen plan into another one.

    Args:
        evaluated: The other plan.
        chosen: The chosen plan.
        without: Paths in the plan file whose statements are left out.
    """
    there = set(plan_lines(chosen))
    heads = tuple(f"{path}:" for path in without)
    for line in plan_lines(evaluated):
        if line not in there and not (heads and line.startswith(heads)):
            yield line
    for path in chosen.stated:
        if path not in evaluated.stated and path.startswith("rules["):
            yield f"without {path}"
        elif (
            path == "pipeline.virtual"
            and path not in evaluated.stated
            and evaluated.plan.assignment.stages
        ):
            yield f"{path}: 1"


def _missing(layouts: Sequence[OtherLayout]) -> Iterator[str]:
    """Yield lines on the kinds without a plan, grouped by the reason."""
    by_why: dict[str, list[str]] = {}
    for each in layouts:
        if each.evaluated is None:
            by_why.setdefault(each.why, []).append(KIND_WORDS[each.kind])
    for why, kinds in by_why.items():
        yield from wrapped(f"  {', '.join(kinds)}: {why}", 4)
