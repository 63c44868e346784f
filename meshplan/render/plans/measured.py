"""Output of `meshplan compare RUN`."""

from __future__ import annotations

from typing import Any

from meshplan.planner.answers.difference import Figure
from meshplan.planner.answers.measured import ComparedFigure, RunComparison
from meshplan.render.base.text import columns, wrapped
from meshplan.units import format_bytes, format_step


def comparison_to_json(found: RunComparison) -> dict[str, Any]:
    """Return the `result` of schema compare/1."""
    return {
        "run": found.run.file,
        "device": found.run.device,
        "ranks": found.run.ranks,
        "tolerance": found.tolerance,
        "agrees": not found.apart,
        "flops": found.run.flops,
        "flops_per_s": found.flops_per_s,
        "mfu": found.mfu,
        "figures": [
            {
                "what": each.what,
                "unit": each.unit,
                "predicted": each.predicted.value,
                "measured": each.measured.value,
                "error": each.error,
                "why_unknown": each.predicted.why or each.measured.why,
            }
            for each in found.figures
        ],
        "constants": [
            {"name": each.name, "now": each.now, "needed": each.needed} for each in found.constants
        ],
    }


def comparison_to_text(found: RunComparison) -> list[str]:
    """Return the lines of the answer."""
    rows, unknown = [("", "predicted", "measured", "error")], []
    apart = found.apart
    for each in found.figures:
        if each.predicted.value is None and each.measured.value is None:
            continue
        error = "" if each.error is None else f"{each.error:+.1%}"
        error += " *" if each in apart else ""
        cells = (_cell(each, each.predicted), _cell(each, each.measured))
        rows.append((f"  {each.what}", *cells, error))
        if why := each.predicted.why or each.measured.why:
            unknown.append((each.what, why))
    lines = [_verdict(found), "", *columns(rows, "<>><")]
    if apart:
        lines.append(f"  * more than {found.tolerance:.0%} of the measurement apart")
    by_reason: dict[str, list[str]] = {}
    for what, why in unknown:
        by_reason.setdefault(why, []).append(what)
    for why, names in by_reason.items():
        lines += wrapped(f"  unknown: {'; '.join(names)}: {why}", indent=4)
    if found.flops_per_s is not None:
        share = "" if found.mfu is None else f", {found.mfu:.1%} of the device's peak (MFU)"
        lines.append(f"  rank 0 computed {found.flops_per_s / 1e12:.4g} TFLOP/s{share}")
    if found.constants:
        lines += ["", "One of these constants of the profile alone would close the difference:"]
        lines += columns(
            [(f"  {each.name}", f"{each.now:.4g}", "->", f"{each.needed:.4g}")
             for each in found.constants], "<>>>",
        )  # fmt: skip
        lines += wrapped("meshplan calibrate measures them on this machine", indent=2)
    return lines


def _verdict(found: RunComparison) -> str:
    both = ((each, each.predicted.value, each.measured.value) for each in found.figures)
    known = [each for each, a, b in both if a is not None and b is not None]
    within = f"within {found.tolerance:.0%}"
    if not known:
        return "nothing that was measured is predicted"
    if not found.apart:
        return f"{len(known)} of {len(known)} predictions hold {within}"
    worst = max(found.apart, key=lambda each: abs(each.error or 0.0))
    return (
        f"{len(known) - len(found.apart)} of {len(known)} predictions hold {within}; "
        f"farthest apart: {worst.what}"
    )


def _cell(row: ComparedFigure, figure: Figure) -> str:
    if figure.value is None:
        return "-"
    return format_step(figure.value) if row.unit == "s" else format_bytes(figure.value)
