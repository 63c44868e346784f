"""What the cells of the hunt say together: totals, reasons, and the table of the repository."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from tests.bench.wild_cell import OUTCOMES, Cell

SHORT: Final = {
    "pass": "ok",
    "own": "own",
    "refused": "no",
    "wrong": "WRONG",
    "crash": "CRASH",
    "hang": "HANG",
}
TABLE: Final = Path(__file__).with_name("wild.md")


def report(cells: Sequence[Cell], layouts: Sequence[str]) -> Iterator[str]:
    """Totals per layout and in all."""
    for layout in (*layouts, "all"):
        counts = Counter(c.outcome for c in cells if layout in (c.layout, "all"))
        total = sum(counts.values())
        if total:
            words = ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o])
            yield f"{layout}: {words} of {total}"


def reasons(cells: Sequence[Cell]) -> Iterator[str]:
    """Each reason once, with the number of cells and the way forward."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.outcome not in ("pass", "own"):
            # Names differ from model to model; what is left is the kind of reason.
            kind = re.sub(r"'[^']*'|\b\w+(\.\w+)+\b|\b[A-Z]\w*[a-z]\w*\b|\d+", "…", cell.why)[:90]
            found.setdefault((cell.outcome, kind), []).append(cell)
    for (outcome, _), alike in sorted(found.items(), key=lambda item: -len(item[1])):
        places = ", ".join(f"{c.name} ({c.layout})" for c in alike[:4])
        more = f" and {len(alike) - 4} more" if len(alike) > 4 else ""
        fix = alike[0].fix.partition("; ")[0] or "-"
        why = alike[0].why.partition("; ")[0][:220]
        way = f" Way forward: {fix[:220]}." if outcome == "refused" else ""
        yield f"{len(alike)} {outcome}: {why}.{way} — {places}{more}"


def write(cells: Sequence[Cell], layouts: Sequence[str]) -> None:
    """The table of the repository."""
    by = {(cell.name, cell.layout): cell for cell in cells}
    names = list(dict.fromkeys(cell.name for cell in cells))
    lines = [
        "# The hunt",
        "",
        f"Written by `python -m tests.bench.wild --write`; torch {torch.__version__}, gloo on CPU.",
        f"{len(names)} models and loops that nobody prepared, {len(cells)} cells. `ok`: three "
        "steps, the output in evaluation and the state dict equal one process (1e-5 in float32, "
        "1e-8 where that is confirmed in float64; in bf16 within four times what rounding makes "
        "in one process); `no`: refused on every rank, with the reason below; `own`: raises in one "
        "process too, as for an operator without bfloat16.",
        "",
        *(f"- {line}" for line in report(cells, layouts)),
        "",
        f"| case | {' | '.join(layouts)} |",
        f"|---|{'---|' * len(layouts)}",
    ]
    for name in names:
        row = [SHORT[by[name, lay].outcome] if (name, lay) in by else "" for lay in layouts]
        lines.append(f"| {name} | {' | '.join(row)} |")
    lines += ["", "## Why not", "", *(f"- {line}" for line in reasons(cells)), ""]
    TABLE.write_text("\n".join(lines))
