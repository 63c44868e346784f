"""Is `verify` right? Right plans must be ok, plans with a seeded bug must not, and by what margin.

    python -m tests.bench.verify_verdicts [--only WORD] [--seconds 600] [--write]

Every cell trains a small model (`verify_models`) under a plan in 2 or 4 processes and in one, with
what `verify` runs in each. How near a comparison came to its verdict is the largest difference,
relative to what is allowed: below 1 it is ok. `--write` makes `verify_verdicts.md`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshplan.errors import MeshplanError, Origin
from meshplan.plan.verdict import RankReport, Verdict
from meshplan.runtime.estimate.scale_down import ModelSource
from meshplan.runtime.verify.verify import _verify_rank
from meshplan.spec.reader import load_spec
from tests.bench.verify_bugs import planted
from tests.bench.verify_models import MODELS
from tests.helpers.pool import Pool, PoolError

PAGE: Final = Path(__file__).with_suffix(".md")
PRECISIONS: Final = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
LAYOUTS: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "full_shard": (2, {"strategy": "full_shard"}),
    "accumulate": (2, {"strategy": "full_shard", "batch": {"micro": 4, "accumulate": 2},
                       "clip_grad_norm": 0.01}),
    "hybrid": (4, {"strategy": "hybrid_shard", "mesh": [2, 2]}),
    "tp": (2, {"mesh": {"tp": 2}, "tp_plan": "auto"}),
    "tp x fsdp": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"}),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "1F1B", "microbatches": 2}}),
    "pp x fsdp": (4, {"mesh": {"pp": 2, "dp_shard": 2},
                      "pipeline": {"schedule": "1F1B", "microbatches": 2}}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """A model under a plan, with a bug or without."""

    model: str
    layout: str
    precision: str
    bug: str = ""
    syncs: bool = False

    def plan(self) -> dict[str, Any]:
        """The plan, whose batch is what is trained on."""
        words: dict[str, Any] = {"batch": {"micro": 4}, "precision": self.precision}
        if self.syncs:
            words["sync_batchnorm"] = True
        return MODELS[self.model].words() | words | LAYOUTS[self.layout][1]

    def __str__(self) -> str:
        where = f"{self.model}, {self.layout}, {self.precision}" + ", synchronized" * self.syncs
        return f"{self.bug}: {where}" if self.bug else where


def right_cells() -> Iterator[Cell]:
    """Every model, every precision, and every layout that it can be given."""
    for number, (name, model) in enumerate(MODELS.items()):
        for at, precision in enumerate(PRECISIONS):
            yield Cell(name, "ddp", precision)
            yield Cell(name, "full_shard", precision)
            if at in (number % 4, (number + 1) % 4):
                yield Cell(name, "accumulate", precision)
        yield Cell(name, "hybrid", PRECISIONS[number % 2])
        if name in ("unet", "autoencoder"):
            yield Cell(name, "ddp", "32-true", syncs=True)
            yield Cell(name, "full_shard", "bf16-mixed", syncs=True)
        for axis in model.cut:
            yield Cell(name, axis, "32-true")
            yield Cell(name, f"{axis} x fsdp", PRECISIONS[number % 2])


def wrong_cells() -> Iterator[Cell]:
    """Seeded bugs, each under layouts that it can happen in."""
    data = (
        "other inputs on a rank", "other targets on a rank", "gradients twice", "gradients half",
        "the gradients of one rank left out", "the gradients of one rank twice", "a stale weight",
        "lost momentum", "another start on one rank", "an output halved on one rank",
        "one gradient twice", "one gradient lost", "rows of a gradient shuffled",
        "a gradient's sign on one rank", "half of the samples",
    )  # fmt: skip
    turn = list(MODELS)
    for number, bug in enumerate(data):
        first, second, third = (turn[(number + 3 * n) % len(turn)] for n in range(3))
        yield Cell(first, "ddp", "32-true", bug)
        yield Cell(second, "full_shard", "32-true", bug)
        yield Cell(third, ("full_shard", "ddp")[number % 2], "bf16-mixed", bug)
    for model in ("unet", "autoencoder"):
        for precision in ("32-true", "bf16-mixed"):
            yield Cell(model, "full_shard", precision, "lost buffers")
    yield Cell("twins", "ddp", "32-true", "another constant")
    yield Cell("twins", "full_shard", "bf16-mixed", "another constant")
    for model in ("mlp", "gpt", "unet"):
        yield Cell(model, "full_shard", "32-true", "gradients 5% too large")
        yield Cell(model, "full_shard", "32-true", "outputs in bfloat16")
    for model in ("gpt", "tagger", "mixer"):
        yield Cell(model, "full_shard", "32-true", "a stale weight on one rank")
        yield Cell(model, "ddp", "32-true", "gradients not reduced")
        yield Cell(model, "full_shard", "bf16-mixed", "gradients not reduced")
        yield Cell(model, "accumulate", "32-true", "clipped at another norm")
        yield Cell(model, "ddp", "32-true", "weight decay")
        yield Cell(model, "full_shard", "bf16-mixed", "a learning rate 1.4 times")
        yield Cell(model, "full_shard", "32-true", "a frozen weight")
        yield Cell(model, "full_shard", "32-true", "state beside the optimizer's")
        yield Cell(model, "full_shard", "bf16-mixed", "a collective too many")
    for layout in ("pp", "pp x fsdp"):
        yield Cell("gpt", layout, "32-true", "gradients of a shared weight not added")
        yield Cell("gpt", layout, "32-true", "one gradient lost")
        yield Cell("gpt", layout.replace("pp", "tp"), "32-true", "one gradient twice")


def on_rank(cell: Cell) -> list[Any]:
    """What a rank has to say in `verify`, or why the plan does not run."""
    told: list[Any] = []
    plan = cell.plan()
    source = ModelSource(entry=plan["model"]["entry"], origin=Origin("--model"))
    try:
        with planted(cell.bug):
            _verify_rank(told.append, load_spec(plan), source)
    except MeshplanError as error:
        told.append(str(error.problems[0]))
    return told


def judge(cell: Cell, pools: dict[int, Pool]) -> Verdict:
    """The verdict on a cell."""
    world = LAYOUTS[cell.layout][0]
    pool = pools.setdefault(world, Pool(world))
    try:
        told = pool.run(on_rank, cell)
    except PoolError as error:
        return Verdict(world=world, notes=(), unmatched=(), refusal=str(error).splitlines()[-1])
    refusals = [each for messages in told for each in messages if isinstance(each, str)]
    if refusals:
        pool.close()  # Other ranks may wait in a collective.
        return Verdict(world=world, notes=(), unmatched=(), refusal=refusals[0])
    ranks = tuple(m for messages in told for m in messages if isinstance(m, RankReport))
    found = dict(next(m for m in told[0] if isinstance(m, dict)))
    assert found.pop("parts") == 1
    return Verdict(world=world, notes=(), unmatched=(), ranks=ranks, **found)


def nearness(verdict: Verdict) -> float:
    """The largest difference, relative to what is allowed."""
    if verdict.refusal:
        return math.inf
    return max(each.nearness for each in verdict.comparisons())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument("--seconds", type=float, default=900.0, help="begin no cell later")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    args = parser.parse_args()
    began, pools = time.monotonic(), dict[int, Pool]()
    found: dict[Cell, Verdict] = {}
    cells = [c for c in (*right_cells(), *wrong_cells()) if args.only in str(c)]
    for cell in cells:
        if time.monotonic() - began > args.seconds:
            break
        found[cell] = verdict = judge(cell, pools)
        is_right = verdict.is_ok is not bool(cell.bug)
        words = verdict.refusal.partition("\n")[0] or ", ".join(verdict.findings()) or "ok"
        print(f"{'  ' if is_right else '! '}{nearness(verdict):8.3g}  {cell}: {words}", flush=True)
    for pool in pools.values():
        pool.close()
    lines = summary(found, len(cells))
    print(*lines, sep="\n")
    if args.write:
        PAGE.write_text("\n".join(lines) + "\n")


def summary(found: dict[Cell, Verdict], asked: int) -> list[str]:
    """The page."""
    right = {c: v for c, v in found.items() if not c.bug}
    wrong = {c: v for c, v in found.items() if c.bug}
    refused = [c for c, v in right.items() if v.refusal]
    right_ran = {c: v for c, v in right.items() if not v.refusal}
    out = [
        "# Verdicts of verify",
        "",
        f"Made by `python -m tests.bench.verify_verdicts --write`: {len(found)} of {asked} cells.",
        "",
        f"- Right plans: {len(right_ran)} ran, {sum(v.is_ok for v in right_ran.values())} ok; "
        f"{len(refused)} did not run (below).",
        f"- Seeded bugs: {len(wrong)} of {len({c.bug for c in wrong})} kinds, "
        f"{sum(not v.is_ok for v in wrong.values())} found, "
        f"{sum(bool(v.refusal) for v in wrong.values())} of them refused while they trained.",
        "",
        "How near each came to the other verdict: the largest difference, relative to the allowed "
        "one.",
        "",
        "| | nearest | cell |",
        "|---|---|---|",
    ]
    for what, cells, sign in (("right", right_ran, -1), ("bug", wrong, 1)):
        ordered = sorted(cells.items(), key=lambda item: sign * nearness(item[1]))
        out += [f"| {what} | {nearness(v):.3g} | {cell} |" for cell, v in ordered[:5]]
    out += ["", *(f"Did not run: {c}: {right[c].refusal.partition(chr(10))[0]}" for c in refused)]
    missed = [str(c) for c, v in found.items() if v.is_ok is bool(c.bug) and not v.refusal]
    return out + [f"WRONG: {each}" for each in missed]


if __name__ == "__main__":
    main()
