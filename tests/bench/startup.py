"""How long the command line takes to answer, beside a bare Python.

    python -m tests.bench.startup [--runs 15]

The commands take turns, so that whatever else the machine does hits all alike; the least of the
times is what the command itself needs. Exit code 1 when `estimate` is over its limit.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from meshplan.spec.recipes import recipe_path

LIMIT_S: Final = 0.150
HEAVY: Final = ("torch", "numpy", "sympy", "networkx", "matplotlib")
MESHPLAN: Final = "import sys; from meshplan.cli.app import main; sys.exit(main())"
LOADED: Final = (
    "import contextlib, io, sys; from meshplan.cli.app import main\n"
    "with contextlib.redirect_stdout(io.StringIO()): main()\n"
    f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
)

ESTIMATE: Final = ("estimate", "--params", "3e9", "--gpus", "8")
COMMANDS: Final = {
    "python -c pass": ("-c", "pass"),
    "meshplan estimate --params 3e9 --gpus 8 --json": ("-c", MESHPLAN, *ESTIMATE, "--json"),
    "meshplan estimate --params 3e9 --gpus 8": ("-c", MESHPLAN, *ESTIMATE),
    "meshplan estimate ... --max-params": (
        "-c", MESHPLAN, *ESTIMATE, "--gpu", "h100-sxm-80gb", "--max-params",
    ),
    "meshplan estimate -f plans/full_shard.yaml --params 3e9": (
        "-c", MESHPLAN, "estimate", "-f", str(recipe_path("full_shard")), "--params", "3e9",
    ),
}  # fmt: skip


def seconds_of(words: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args(arguments).runs
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, words in COMMANDS.items():
            times[name].append(seconds_of(words))
    bare = min(times["python -c pass"])
    for name, found in times.items():
        least, usual = min(found), statistics.median(found)
        print(f"{name:58} {1e3 * least:5.0f} ms  (median {1e3 * usual:4.0f})"
              f"  {least / bare:5.1f} x bare")  # fmt: skip
    words = [sys.executable, "-c", LOADED, *ESTIMATE, "--json"]
    loaded = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    print(f"heavy modules that estimate --json imported: {', '.join(loaded) or 'none'}")
    worst = min(times["meshplan estimate --params 3e9 --gpus 8 --json"])
    print(f"estimate --json: {worst:.3f} s, limit {LIMIT_S:.3f} s")
    return 1 if loaded or worst > LIMIT_S else 0


if __name__ == "__main__":
    raise SystemExit(main())
