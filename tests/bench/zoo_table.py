"""What the cells of the zoo say together: totals, reasons, and the table kept in the repository."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from tests.bench import zoo_models as zoo
from tests.bench import zoo_timm
from tests.bench.zoo_cell import OUTCOMES, Cell

SHORT: Final = {"pass": "ok", "refused": "no", "not yet": "-", "wrong": "WRONG",
                "error": "ERROR", "timeout": "TIMEOUT"}  # fmt: skip
TABLE: Final = Path(__file__).with_name("zoo.md")


def report(cells: Sequence[Cell], layouts: Sequence[str]) -> Iterator[str]:
    """Totals per layout, then why cells did not pass."""
    for layout in layouts:
        counts = Counter(cell.outcome for cell in cells if cell.layout == layout)
        total = sum(counts.values())
        if total:
            share = f"{100 * counts['pass'] / total:.1f} %"
            words = ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o])
            yield f"{layout}: {share} of {total} pass ({words})"


def reasons(cells: Sequence[Cell]) -> Iterator[str]:
    """Each reason once, with the number of cells."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.outcome not in ("pass", "not yet"):
            # Names differ from model to model; what is left is the kind of reason.
            why = re.sub(r"/\S*/site-packages/", "…/", cell.why)
            kind = re.sub(r"'[^']*'|\b\w+(\.\w+)+\b|\d+", "…", why)[:110]
            found.setdefault((cell.outcome, kind), []).append(f"{cell.name} ({cell.layout})")
    for (outcome, kind), places in sorted(found.items(), key=lambda item: -len(item[1])):
        yield f"{len(places)} {outcome}: {kind} — {', '.join(places[:3])}"


def write(cells: Sequence[Cell], layouts: Sequence[str]) -> None:
    """The table of the repository."""
    import transformers

    kept = json.loads(zoo.RECIPES_FILE.read_text())
    by = {(cell.name, cell.layout): cell for cell in cells}
    names = sorted({cell.name for cell in cells})
    lines = [
        "# The zoo",
        "",
        f"Written by `python -m tests.bench.zoo --write`; torch {torch.__version__}, transformers "
        f"{transformers.__version__}, timm {_timm_version()}, gloo on CPU.",
        f"{len(names)} of {len(zoo.entries())} architectures that can be built, of timm one small "
        "model of each family; "
        f"{len(kept['not built'])} more cannot be built or run in one "
        "process from a shrunk configuration and do not count (`zoo_recipes.json` says why).",
        "`ok` two steps of SGD equal one process to 1e-5; `no` refused with a reason; `-` not "
        "available yet in this version; blank not run.",
        "`*` a sample's numbers depend on its batch: compared with one process on the same parts; "
        "`e` run in evaluation mode, because training mode draws random numbers.",
        "",
        *(
            f"- {library}: {line}"
            for library in ("transformers", "timm")
            for line in report([c for c in cells if _library(c.name) == library], layouts)
        ),
        "",
        f"| architecture | class | {' | '.join(layouts)} |",
        f"|---|---|{'---|' * len(layouts)}",
    ]
    for name in names:
        entry = zoo.entries()[name]
        mark = ("*" if entry.coupled else "") + ("" if entry.training else " e")
        row = [SHORT[by[name, lay].outcome] if (name, lay) in by else "" for lay in layouts]
        lines.append(f"| {name}{mark} | {entry.cls} | {' | '.join(row)} |")
    lines += ["", "## Why not", "", *(f"- {line}" for line in reasons(cells)), ""]
    TABLE.write_text("\n".join(lines))


def _library(name: str) -> str:
    return "timm" if name.startswith(zoo_timm.PREFIX) else "transformers"


def _timm_version() -> str:
    return importlib.metadata.version("timm") if zoo_timm.is_there() else "not installed"


def kept() -> dict[tuple[str, str], str]:
    """The cells of the kept table, as SHORT spells them."""
    rows = [
        [word.strip() for word in line.split("|")[1:-1]] for line in TABLE.read_text().splitlines()
    ]
    header = next(row for row in rows if row[:1] == ["architecture"])
    return {
        (row[0].split("*")[0].split(" ")[0], layout): word
        for row in rows
        if len(row) == len(header) and row is not header and set(row[0]) != {"-"}
        for layout, word in zip(header[2:], row[2:], strict=True)
    }
