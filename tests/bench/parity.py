"""Every cell of parity: each recipe's layout on each model of the zoo, at 2, 4 and 8 ranks.

    python -m tests.bench.parity [--worlds 2 4 8] [--models odd t5] [--tolerance 1e-6]

A cell passes when the losses of three steps and every parameter after them are those of one
process to within the tolerance. It has no plan where the layout makes no sense for the model or the
number of ranks, and is refused where `parallelize` says so. Anything else is wrong, and makes
the exit code 1.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tests.helpers import models, parity
from tests.helpers.pool import Pool, PoolError

WIDTH: Final = max(map(len, models.NAMES))
SHORT: Final = {"pass": "ok", "no plan": "-", "refused": "no", "wrong": "WRONG"}


class Cell(NamedTuple):
    """What became of one cell, a key of SHORT, with the largest difference or the why."""

    outcome: str
    difference: float = 0.0
    why: str = ""


def train(name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """`parity.train` without torch's warnings: eight ranks would say each of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parity.train(name, plan)


def run(pool: Pool, name: str, layout: str, tolerance: float) -> Cell:
    plan = parity.cell_plan(name, layout, pool.world)
    if isinstance(plan, str):
        return Cell("no plan", why=plan)
    try:
        result = pool.run(train, name, plan)[0]
    except PoolError as error:
        story = str(error).strip().split("\n")
        said = re.search(r"(?:PlanError|SpecError): (.*)", str(error), re.DOTALL)
        if said:
            return Cell("refused", why=" ".join(said[1].split())[:300])
        return Cell("wrong", float("inf"), story[-1])
    difference = max(result["loss"], result["state"])
    outcome = "pass" if difference <= tolerance else "wrong"
    return Cell(outcome, difference, "" if outcome == "pass" else f"{result}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--models", nargs="+", choices=models.NAMES, default=models.NAMES)
    parser.add_argument("--tolerance", type=float, default=parity.TOLERANCE)
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    cells: dict[tuple[int, str, str], Cell] = {}
    for world in asked.worlds:
        print(f"\n{world} ranks".ljust(WIDTH + 1), *parity.LAYOUTS, flush=True)
        pool = Pool(world)
        for name in asked.models:
            row = []
            for layout in parity.LAYOUTS:
                cell = cells[world, name, layout] = run(pool, name, layout, asked.tolerance)
                row.append(SHORT[cell.outcome].ljust(len(layout)))
            print(name.ljust(WIDTH), *row, flush=True)
        pool.close()
    report(cells, time.monotonic() - began)
    return 1 if any(cell.outcome == "wrong" for cell in cells.values()) else 0


def report(cells: dict[tuple[int, str, str], Cell], seconds: float) -> None:
    """The counts, the largest difference that passed, and why cells were refused or wrong."""
    by_outcome: dict[str, list[Any]] = {outcome: [] for outcome in SHORT}
    for place, cell in cells.items():
        by_outcome[cell.outcome].append((place, cell))
    counts = ", ".join(f"{len(found)} {outcome}" for outcome, found in by_outcome.items())
    print(f"\n{len(cells)} cells in {seconds:.0f} s: {counts}")
    if by_outcome["pass"]:
        place, cell = max(by_outcome["pass"], key=lambda item: item[1].difference)
        print(f"largest difference that passed: {cell.difference:.1e} ({place[1]}, {place[2]}, "
              f"{place[0]} ranks)")  # fmt: skip
    reasons: dict[str, list[str]] = {}
    for outcome in ("no plan", "refused"):
        for (world, name, layout), cell in by_outcome[outcome]:
            reasons.setdefault(f"{outcome}: {cell.why}", []).append(f"{name} {layout} {world}")
    for why, places in reasons.items():
        print(f"{len(places)} cells, {why}\n    {', '.join(places)}")
    for (world, name, layout), cell in by_outcome["wrong"]:
        print(f"WRONG: {name} {layout} on {world} ranks: {cell.why}")


if __name__ == "__main__":
    raise SystemExit(main())
