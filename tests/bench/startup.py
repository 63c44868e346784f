"""How long the command line takes to answer, beside a bare Python.

    python -m tests.bench.startup [--runs 15] [--verbs]

The commands take turns, so that whatever else the machine does hits all alike; the least of the
times is what the command itself needs. Exit code 1 when `estimate` is over its limit. `--verbs`
times the verbs on a module of one's own (0.6 M parameters), as multiples of importing torch.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Final

from meshplan.spec.recipes import recipe_path

LIMIT_S: Final = 0.150
HEAVY: Final = ("torch", "numpy", "sympy", "networkx", "matplotlib")
MESHPLAN: Final = "from meshplan.cli import run; run()"
LOADED: Final = (
    "import contextlib, io, sys; from meshplan.cli import main\n"
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

TORCH: Final = "import torch"
_PLAN: Final = ("-f", str(recipe_path("full_shard")), "--set", "hardware.gpu=h100-sxm-80gb")
_AUTO: Final = ("-f", str(recipe_path("auto")))
VERBS: Final = {
    TORCH: (("-c", TORCH), 1.0),
    "check": (("-c", MESHPLAN, "check", *_PLAN), 1.5),
    "show": (("-c", MESHPLAN, "show", *_PLAN), 1.6),
    "estimate": (("-c", MESHPLAN, "estimate", *_PLAN), 2.2),
    "report": (("-c", MESHPLAN, "report", *_PLAN, "-o", "{folder}/report.html"), 2.8),
    "verify": (("-c", MESHPLAN, "verify", *_PLAN, "--set", "hardware.gpus_per_node=4"), 4.4),
    "explain why mesh.tp": (("-c", MESHPLAN, "explain", "why", "mesh.tp", *_AUTO), None),
}
"""By name, (the command, its limit as a multiple of the first one); None where it is in seconds."""


def verbs(runs: int) -> int:
    """Time the verbs in turns, and return 1 if one takes more than its multiple of torch."""
    times: dict[str, list[float]] = {name: [] for name in VERBS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(runs):
            for name, (words, _limit) in VERBS.items():
                times[name].append(seconds_of([word.format(folder=folder) for word in words]))
    torch_s, over = statistics.median(times[TORCH]), 0
    for name, (_words, limit) in VERBS.items():
        usual = statistics.median(times[name])
        over += limit is not None and usual > limit * torch_s
        wanted = f"at most {limit}" if limit is not None else "at most 2 s"
        print(f"{name:20} {usual:6.2f} s  {usual / torch_s:5.2f} x  {wanted}")
    return 1 if over else 0


def seconds_of(words: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--verbs", action="store_true", help="time the verbs on a module")
    asked = parser.parse_args(arguments)
    runs = asked.runs
    if asked.verbs:
        return verbs(runs)
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
