"""Output of `meshplan plan` if there is no plan: the reason, and changes that would help."""

from __future__ import annotations

from typing import Any, Final

from meshplan.planner.answers.infeasible import Remedy, Trouble
from meshplan.render.base.statements import statement_lines
from meshplan.render.base.text import WIDTH, columns, folded, packed, wrapped
from meshplan.units import format_gib, format_step

_HOPELESS: Final = (
    "even with only model, batch, precision, optimizer and hardware stated, no plan fits: no other "
    "setting is the cause"
)


def trouble_to_json(trouble: Trouble) -> dict[str, Any]:
    """Return `result.conflict` and `result.fixes` of schema plan/1."""
    return {
        "conflict": {
            "statements": [{"path": s.path, "value": s.text} for s in trouble.conflict],
            "is_least": trouble.is_least,
            "is_hopeless": trouble.is_hopeless,
            "why": trouble.why,
            "is_whole": trouble.is_whole,
        },
        "more_devices": trouble.more_devices or None,
        "fixes": [_remedy_to_json(each) for each in trouble.remedies],
    }


def _remedy_to_json(each: Remedy) -> dict[str, Any]:
    return {
        "change": each.change,
        "setting": dict(each.setting),
        "num_gpus": each.num_gpus,
        "step_s": each.evaluated.seconds,
        "is_whole": each.is_whole,
        "peak_bytes": each.evaluated.memory.high_bytes,
        "chosen": dict(each.evaluated.stated),
    }


def trouble_to_text(trouble: Trouble) -> list[str]:
    """Return the lines of the answer."""
    return [*conflict_to_text(trouble), "", *_remedies(trouble)]


def conflict_to_text(trouble: Trouble) -> list[str]:
    """Return a sentence on the conflict, and the statements that cannot be satisfied together."""
    why = wrapped(f"  {trouble.why}", indent=4) if trouble.why else []
    if not trouble.conflict:
        if not trouble.is_hopeless:
            what = f"{ended(trouble)} before the conflicting settings were found"
            return [what, *why]
        return [*wrapped(_HOPELESS, indent=2), *why]
    many = len(trouble.conflict) > 1
    title = (
        f"with every other setting open, no plan with {'these' if many else 'this one'} fits; "
        f"leave {'any of them' if many else 'it'} open as well, and a plan fits"
    )
    if not trouble.is_least:
        title = f"some of these settings conflict; {ended(trouble)} before it was clear which"
    return [*wrapped(title, indent=2), *(f"  {each}" for each in trouble.conflict), *why]


def ended(trouble: Trouble) -> str:
    """Return the reason why the search ended early."""
    return "the search was interrupted" if trouble.is_interrupted else "the time limit was reached"


def _remedies(trouble: Trouble) -> list[str]:
    more = trouble.more_devices
    devices = wrapped(f"with more devices: {more}", indent=4) if more else []
    if not trouble.remedies:
        late = "" if trouble.is_whole else f" before {ended(trouble)}"
        return [f"no single change that helps was found{late}", *devices]
    heads = columns(
        [
            (
                f"  {each.change}",
                f"{format_step(each.evaluated.seconds)} a step",
                f"at most {format_gib(each.evaluated.memory.high_bytes)}",
            )
            for each in trouble.remedies
        ],
        "<>>",
    )
    lines = []
    for head, each in zip(heads, trouble.remedies, strict=True):
        statements = statement_lines(each.setting, each.evaluated.plan.graph.blocks())
        lines += [*folded(head, WIDTH), *packed("      ", statements)]
    return [
        "changes that make a plan fit, one at a time; each was searched and its memory simulated:",
        *lines,
        *devices,
    ]
