"""The suite under several versions of torch and Python: one table.

    python -m tests.bench.torch_versions PYTHON [PYTHON ...] [--json FILE] [--write] [-- PYTEST...]

Each PYTHON is the interpreter of an environment with other versions of the two. It runs the tests
of this checkout, all or those that the pytest arguments name; nothing is installed here. Such an
environment is made so (PyPI's torch brings CUDA's libraries, which a CPU needs to import it):

    grep -v '^torch==' constraints.txt > rest.txt
    python3 -m venv torch-2.15.0
    torch-2.15.0/bin/pip install torch==2.15.0
    torch-2.15.0/bin/pip install -r rest.txt

What fails is run once more by itself, in one process: on a busy machine tests that start ranks
run out of time. `--json` keeps the results, and those of versions that were run before stay in
the file and in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = Path(__file__).with_suffix(".md")
ORDINARY: Final = ("-n", "1", "--dist", "loadfile")
"""What pytest is told where the command says nothing."""
CAUSES: Final = "\n## Causes\n"
"""What stands below this in the page was written by hand, and stays."""
WIDEST: Final = 200
"""Letters of a reason."""
_ASK: Final = (
    "import sys, torch, meshplan; "
    "print(f'{torch.__version__}, Python {sys.version_info[0]}.{sys.version_info[1]}'); "
    "print(meshplan.__file__)"
)


@dataclass(frozen=True)
class Result:
    """What the tests said under one version."""

    passed: int
    failed: Mapping[str, str]
    """Each test that failed twice, with the reason in one line."""
    skipped: int
    busy: tuple[str, ...]
    """Those that failed among the others, and passed by themselves."""
    minutes: float
    args: tuple[str, ...]


def run(python: str, args: Sequence[str]) -> tuple[str, Result]:
    """(versions of torch and Python, result) of the tests under this interpreter."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    asked = subprocess.run(
        [python, "-c", _ASK], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    if asked.returncode:
        sys.exit(f"{python} cannot import torch and meshplan:\n{asked.stderr}")
    version, file = asked.stdout.split("\n")[:2]
    if not Path(file).is_relative_to(ROOT):
        sys.exit(f"{python} imports the meshplan at {file}, not that of {ROOT}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:

        def tests(name: str, *more: str) -> list[tuple[str, str, str]]:
            """(test, how it ended, why) of one run of pytest."""
            report = Path(folder, name)
            subprocess.run(
                [python, "-m", "pytest", "-v", f"--junitxml={report}",
                 "-o", f"cache_dir={folder}/cache", *args, *more],
                env=environment, cwd=ROOT,
            )  # fmt: skip
            return cases(report.read_text()) if report.exists() else []

        found = tests("first.xml")
        if not found:
            sys.exit(f"{python} ran no tests")
        failed = {test: why for test, how, why in found if how == "failed"}
        # `--lf` finds them in the cache; a worker that died left no trace there, and its test
        # counts as failed.
        again = tests("again.xml", "-n", "0", "--lf", "--lfnf", "none") if failed else []
    busy = tuple(test for test, how, _ in again if how == "passed" and test in failed)
    counts = Counter(how for _, how, _ in found)
    return version, Result(
        counts["passed"] + len(busy),
        {test: why for test, why in failed.items() if test not in busy},
        counts["skipped"],
        busy,
        (time.monotonic() - began) / 60,
        tuple(args),
    )


def cases(report: str) -> list[tuple[str, str, str]]:
    """(test, "passed", "failed" or "skipped", why it failed) of each in a report of pytest."""
    found = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        test = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        how, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                how, why = "failed", reason(child.get("message") or "", child.text or "")
            elif child.tag == "skipped":
                how = "skipped"
        if found.get(test, ("",))[0] != "failed":  # A test may pass and its clean-up fail.
            found[test] = how, why
    return [(test, how, why) for test, (how, why) in found.items()]


def reason(message: str, text: str) -> str:
    """Why a test failed, in one line: what was raised first, maybe in another process."""
    raised = re.findall(
        r"^E +((?:\w+\.)*\w+(?:Error|Exception|Interrupt)\b.*)$", text, re.MULTILINE
    )
    lines = [line.strip() for line in (message or text).splitlines() if line.strip()] or ["?"]
    chosen = raised[-1] if len(raised) > 1 else lines[0]
    return chosen if len(chosen) <= WIDEST else chosen[: WIDEST - 3] + "..."


def page(results: Mapping[str, Result]) -> str:
    """The table, and below it what failed."""
    lines = [
        "# The suite under several versions of torch and Python\n",
        "Written by `python -m tests.bench.torch_versions PYTHON ... --write`: the tests that "
        "every change\nruns, on CPU and gloo, with the packages of `constraints.txt` but for "
        "torch.\n",
        "| torch | passed | failed | skipped | minutes |",
        "|---|---|---|---|---|",
    ]
    ordered = sorted(results.items(), key=lambda item: [int(n) for n in numbers(item[0])])
    for version, result in ordered:
        figures = (result.passed, len(result.failed), result.skipped, f"{result.minutes:.0f}")
        lines.append(f"| {version} | {' | '.join(map(str, figures))} |")
    for version, result in ordered:
        if result.failed or result.busy or tuple(result.args) != ORDINARY:
            lines.append(f"\n## torch {version}\n")
        if tuple(result.args) != ORDINARY:
            lines.append(f"Of `pytest {' '.join(result.args)}`.\n")
        if result.failed:
            lines += ["| test | why |", "|---|---|"]
            lines += [f"| {cell(test)} | {cell(why)} |" for test, why in result.failed.items()]
        if result.busy:
            lines.append(f"\nPassed by themselves only: {', '.join(map(cell, result.busy))}.")
    return "\n".join(lines) + "\n"


def numbers(version: str) -> list[str]:
    """Those of a release, to sort by."""
    return re.findall(r"\d+", version.partition("+")[0])


def cell(text: str) -> str:
    """As code in a table of Markdown."""
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"


def load(path: Path) -> dict[str, Result]:
    """The results that an earlier run kept."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for row in kept.values():
        row["busy"], row["args"] = tuple(row["busy"]), tuple(row["args"])
    return {version: Result(**row) for version, row in kept.items()}


def main() -> None:
    parser = argparse.ArgumentParser(usage=(__doc__ or "").splitlines()[2].strip())
    parser.add_argument("pythons", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    own, _, rest = (list(part) for part in split(sys.argv[1:]))
    options = parser.parse_args(own)
    results = load(options.json) if options.json else {}
    for python in options.pythons:
        version, result = run(python, rest or ORDINARY)
        results[version] = result
        if options.json:
            kept = {version: asdict(result) for version, result in results.items()}
            options.json.write_text(json.dumps(kept, indent=1) + "\n")
    text = page(results)
    print(text)
    if options.write:
        before = PAGE.read_text() if PAGE.exists() else ""
        PAGE.write_text(text + "".join(before.partition(CAUSES)[1:]))


def split(args: Sequence[str]) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """What is ours, the two dashes, and what is pytest's."""
    at = args.index("--") if "--" in args else len(args)
    return args[:at], args[at : at + 1], args[at + 1 :]


if __name__ == "__main__":
    main()
