"""Random faults on random ranks: does every other rank end soon, naming the rank and the cause?

    python -m tests.bench.faults [--num 200] [--seed 0] [--write]

Kills, stops, exceptions, batches that do not fit, another plan or model, ranks that leave early or
call something else, under plans and loops drawn at random, on 2 to 8 ranks of this machine.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.helpers.faults import PLANS, STEPS, Case, Outcome, names, run

LIMIT_S: Final = 10.0
PAGE: Final = Path(__file__).with_suffix(".md")

FAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "kill": ("data", "model", "loss", "backward", "optimizer", "state"),
    "stop": ("start", "guard", "data", "model", "loss", "backward", "optimizer", "state"),
    "raise": ("data", "model", "loss", "backward", "optimizer", "state"),
    "nan": ("loss",),
    "uneven": ("end of loop", "leave", "size"),
    "configuration": ("plan", "model ", "seed"),
    "verb": ("full_state_dict", "barrier", "evaluation"),
}
WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "kill": ("died or was killed",),
    "stop": ("is stopped",),
    "raise": ("Mishap: in",),
    "uneven": ("in a deadlock", "has ended", "waits in", "batches of the same size"),
    "configuration": ("has a different plan than rank", "cannot apply its plan"),
    "verb": ("in a deadlock", "has ended", "waits in", "waits to begin"),
}
"""Words of which one must stand in what a rank says."""


def draw(random_: random.Random) -> Case:
    """A job with a fault."""
    kind = random_.choice(list(FAULTS))
    where = random_.choice(FAULTS[kind])
    plan = random_.choice(list(PLANS))
    big = plan in ("hybrid", "tp x full_shard", "pp x full_shard")
    world = random_.choice((4, 4, 4, 8) if big else (2, 2, 4, 4, 8))
    if plan == "tp":
        world = random_.choice((2, 4))
    by_hand = where != "size" and random_.random() < 0.5
    step = STEPS - 1 if where == "state" else random_.randrange(STEPS)
    culprit = random_.randrange(world)
    if plan.startswith("pp") and where in ("loss", "backward"):
        culprit = random_.randrange(world // 2, world)  # Where the last stage is.
    holds_store = random_.random() < 0.3
    if where == "start":  # Of another rank than that with the store nobody knows a process yet.
        culprit, holds_store = 0, True
    return Case(
        kind=kind,
        where=where.strip(),
        plan=plan,
        by_hand=by_hand,
        world=world,
        culprit=culprit,
        step=step,
        holds_store=holds_store,
    )


def judge(case: Case, ends: Mapping[int, Outcome]) -> str:
    """Why this is not what was promised; "" where it is."""
    others = {rank: end for rank, end in ends.items() if rank != case.culprit}
    for rank, end in others.items():
        if end.how == "hangs":
            return f"rank {rank} hangs"
    if case.where == "seed" or _is_harmless(case):
        bad = [rank for rank, end in ends.items() if end.how != "ended"]
        return f"rank {bad[0]}: {ends[bad[0]].text[-300:]}" if bad else ""
    if case.kind == "nan":
        return ""
    for rank, end in others.items():
        if end.how != "error":
            return f"rank {rank} {end.how}"
        if not any(word in end.text for word in WORDS[case.kind]):
            return f"rank {rank} does not say why: {end.text[-400:]}"
        # A plan that differs from rank 0's is another rank's.
        is_named = names(end.text, case.culprit) or case.kind == "configuration"
        if not is_named:
            return f"rank {rank} does not name the rank: {end.text[-400:]}"
        # A configuration counts from where the model is built, and the plan is decided first.
        if end.seconds > LIMIT_S and case.kind != "configuration":
            return f"rank {rank} took {end.seconds:.1f} s"
    return ""


def _is_harmless(case: Case) -> bool:
    """Whether nothing can go wrong: no forward of plain DDP needs another rank."""
    return case.where == "evaluation" and case.plan == "ddp"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a kind of fault")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    random_ = random.Random(options.seed)
    rows: dict[tuple[str, str], list[float]] = defaultdict(list)
    bad = []
    began = time.monotonic()
    for number in range(options.num):
        case = draw(random_)
        if options.only and options.only not in (case.kind, case.where):
            continue
        ends = run(case)
        why = judge(case, ends)
        longest = max(end.seconds for rank, end in ends.items() if rank != case.culprit)
        rows[case.kind, case.where].append(longest)
        print(f"{number:4d} {'BAD' if why else 'ok '} {longest:5.1f} s  {case}", flush=True)
        if why:
            bad.append((case, why))
            print(f"     {why}", flush=True)
    lines = ["| fault | where | cases | longest, s |", "|---|---|---|---|"]
    for (kind, where), seconds in sorted(rows.items()):
        lines.append(f"| {kind} | {where} | {len(seconds)} | {max(seconds):.1f} |")
    total = sum(map(len, rows.values()))
    lines.append("")
    lines.append(f"{total - len(bad)} of {total} as promised, in {time.monotonic() - began:.0f} s.")
    print("\n".join(lines))
    if options.write:
        head = PAGE.read_text().partition("| fault |")[0] if PAGE.exists() else ""
        PAGE.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
