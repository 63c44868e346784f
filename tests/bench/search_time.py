"""How long a plan takes, as whole processes: `tests/bench/search_time.md`.

    python -m tests.bench.search_time [--runs 3] > tests/bench/search_time.md

Processor time beside wall time, since other work on the machine lengthens the one and not the
other. Models of configs are planned without torch; live ones are built on meta, traced and planned.
Modules are compiled before, as pip does when it installs a package.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Final

import meshplan
from meshplan.render.base.text import columns
from tests.bench.planned_models import write_plan


@dataclass(frozen=True, slots=True)
class Case:
    """A question.

    Args:
        samples: Of a step of all GPUs.
        wanted_s: What it should take at the most, on two cores.
    """

    model: str
    gpus: int
    samples: int
    seq_len: int
    wanted_s: float | None
    gpu: str = "h100-sxm-80gb"
    more: Mapping[str, Any] = field(default_factory=dict)


CASES: Final = (
    Case("Llama-3.1-8B", 8, 64, 8192, 0.6),
    Case("Llama-3.1-8B", 8, 64, 8192, None, gpu="a100-sxm-40gb"),
    Case("Llama-3.1-70B", 256, 1024, 8192, 1.0),
    Case("Llama-3.1-405B", 16384, 2048, 8192, 1.5),
    Case("Llama-3.1-405B", 131072, 16384, 8192, 2.5),
    Case("Llama-3.1-405B", 12288, 1536, 8192, None),
    Case("Mixtral-8x7B", 64, 256, 4096, None),
    Case("DeepSeek-V3", 2048, 16384, 4096, 10.0),
    Case("UNet, 98 blocks", 1024, 8192, 0, 3.0),
    Case("Llama-3.1-8B, live", 8, 64, 8192, 6.0),
)

PEERS: Final = """Other planners, as measured on such a machine when this one was designed, none of
which answers the same question (AutoParallel is given the mesh; Calculon tries configurations and
searches none of their options; torch's solver chooses what one model recomputes):

| planner | case | seconds |
|---|---|---:|
| AutoParallel | 8B, the mesh given | 41 to 368 |
| AutoParallel | 70B, the mesh given | 234 |
| Galvatron | 7B on 8 GPUs | 75 to 408 |
| Calculon | 8,112 configurations | 88 |
| torch's SAC ILP | one model of 24 layers | 93 |"""


def compile_package() -> None:
    """Otherwise the first process would do it, or all, where none may write what it compiled."""
    package = str(Path(meshplan.__file__).parent)
    subprocess.run([sys.executable, "-m", "compileall", "-q", package], check=True)


def run(case: Case) -> tuple[float, float, float, dict[str, Any]]:
    """(seconds, processor seconds, seconds when asked again, the answer)."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_plan(
            Path(folder),
            case.model,
            hardware={
                "nodes": max(1, case.gpus // 8), "gpus_per_node": min(8, case.gpus),
                "gpu": case.gpu, "inter": "50GB/s",
            },
            batch={"global": case.samples} | ({"seq_len": case.seq_len} if case.seq_len else {}),
            solve={"time_limit": "300s"},
        )  # fmt: skip
        environment = os.environ | {"MESHPLAN_CACHE": os.path.join(folder, "cache")}
        seconds, processor_s, answer = _ask(path, environment)
        again_s, _, same = _ask(path, environment)
        assert answer["chosen"] == same["chosen"], case
        return seconds, processor_s, again_s, answer


def _ask(path: Path, environment: Mapping[str, str]) -> tuple[float, float, dict[str, Any]]:
    out = path.with_name("answer.json")
    words = [sys.executable, "-m", "meshplan", "plan", "-f", str(path), "-q", "--dry-run", "--json"]
    began = time.monotonic()
    with out.open("w") as file:
        process = subprocess.Popen(words, stdout=file, env=environment)
        _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    assert os.waitstatus_to_exitcode(status) in (0, 1), words
    return seconds, used.ru_utime + used.ru_stime, json.loads(out.read_text())["result"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    rows = [("model", "GPUs", "wanted", "seconds", "processor", "again", "configurations", "gap")]
    compile_package()
    for case in CASES:
        if args.only not in case.model:
            continue
        found = [run(case) for _ in range(args.runs)]
        answer = found[0][3]
        rows.append((
            case.model + ("" if case.gpu.startswith("h100") else f" ({case.gpu})"),
            f"{case.gpus:,}",
            f"{case.wanted_s:g} s" if case.wanted_s else "",
            f"{statistics.median(one[0] for one in found):.2f}",
            f"{statistics.median(one[1] for one in found):.2f}",
            f"{statistics.median(one[2] for one in found):.2f}",
            f"{answer['num_configs']:,}",
            f"{answer['gap']:.2%}",
        ))  # fmt: skip
        print(*rows[-1], file=sys.stderr)
    print(f"""# How long a plan takes

`python -m tests.bench.search_time --runs {args.runs}`: whole processes, all of the space open,
median of {args.runs}; what is wanted is for two cores with nothing else to do. "again": the same
command once more, which reads the answer from the cache. Timed on
{date.today()}.

```""")
    print(*columns(rows, "<>>>>>>>"), sep="\n")
    print(f"```\n\n{PEERS}")


if __name__ == "__main__":
    main()
