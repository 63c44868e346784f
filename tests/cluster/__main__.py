"""`python -m tests.cluster --nodes 2 --speeds 25mbit,50mbit,200mbit`: predicted and measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from tests.cluster.measured import measure, read, table
from tests.helpers.nodes import why_none


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="nodes of four ranks")
    parser.add_argument(
        "--speeds",
        default="25mbit,50mbit,200mbit",
        help="bandwidths of each node's link to the others, as tc writes them",
    )
    parser.add_argument(
        "--inside",
        default="200mbit",
        help="bandwidth of what the ranks of a node send to each other, all together",
    )
    parser.add_argument("--plans", default="", help="names, separated by ';'; all without")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each plan")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--again", type=Path, help="predict the run in this folder anew")
    parser.add_argument("--folder", type=Path, help="keep profiles and figures in this folder")
    stated = parser.parse_args()
    if stated.again is not None:
        rows = read(stated.again)
    elif why := why_none(limits=True):
        print(why, file=sys.stderr)
        return 1
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = stated.folder or Path(temporary)
            folder.mkdir(exist_ok=True)
            plans = [name for name in stated.plans.split(";") if name]
            rows = measure(
                stated.nodes, stated.speeds.split(","), folder, inside=stated.inside, plans=plans,
                steps=stated.steps,
            )  # fmt: skip
    print("\n".join(table(rows)))
    if stated.json is not None:
        stated.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
