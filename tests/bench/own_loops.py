"""Every loop of `tests.helpers.own_loops` under every plan, beside one process.

    python -m tests.bench.own_loops [--loops WORD ...] [--plans NAME ...]

Prints a row for each loop: "ok" where losses and final parameters are those of one process,
"refused" where meshplan says what to write instead, and in capitals what is neither.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.helpers import more_own_loops, own_loops  # noqa: F401
from tests.helpers.pool import Pool, PoolError


def verdict(pools: dict[int, Pool], loop: str, plan: str) -> tuple[str, str]:
    """The worst verdict of the ranks."""
    world = own_loops.PLANS[plan][0]
    try:
        found = pools[world].run(own_loops.outcome, loop, plan)
    except PoolError as error:
        return "HANGS", str(error)[:2000]
    return max(found, key=lambda each: ("ok", "refused", "error", "WRONG").index(each[0]))


def main() -> None:
    """Run the cells that were asked for, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", nargs="*", default=[])
    parser.add_argument("--plans", nargs="*", default=list(own_loops.PLANS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    pools = {2: Pool(2), 4: Pool(4)}
    cells = {}
    for loop in own_loops.LOOPS:
        if asked.loops and not any(word in loop for word in asked.loops):
            continue
        for plan in asked.plans:
            cells[f"{loop}|{plan}"] = word, text = verdict(pools, loop, plan)
            if word != "ok":
                print(f"{loop:24} {plan:14} {word}: {text[:400]}", flush=True)
    words = [word for word, _ in cells.values()]
    print({word: words.count(word) for word in sorted(set(words))})
    if asked.json:
        asked.json.write_text(json.dumps(cells, indent=1))
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
