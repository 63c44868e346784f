"""Small changes of the package's code: does a test fail for each one?

    python -m tests.bench.mutants --record              # which tests run which lines: half an hour
    python -m tests.bench.mutants [--num 300] [--seed 0] [--only 'meshplan/runtime/*'] [--write]

Mutants are drawn at random by the seed. Each is put into a copy of the tree, and faces the tests
that run the changed block of code: those that name its file first, then the quickest and most
particular, up to `--budget` seconds. One that hangs them is killed by the clock. What is drawn and
how it ended stands in `--json`: the same command goes on where it was ended, and with `--again`
those that survived face the tests of now. `--write` makes `mutants.md`; `mutants_alive.json`, kept
by hand, says why a mutant may live.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.bench import mutants_record
from tests.bench.mutants_drawn import Mutant, draw, population

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = Path(__file__).with_suffix(".md")
REASONS: Final = Path(__file__).with_name("mutants_alive.json")
PATIENCE: Final = (45.0, 5.0)
"""Seconds, and times the recorded ones, that a test gets before the clock kills the mutant."""
LEFT_OUT: Final = re.compile(
    r"tests/(bench|hostile|pictures|report)/"
    r"|.*/test_(architecture|blueprint.*|compile|demo|docs|notebooks|show|torchrun|wheel)\.py"
)
"""Tests of what is above the rooms, or that take minutes."""
WARM: Final = (
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.nn.parallel", "sympy",
    "torch.profiler", "torch.distributed.checkpoint.state_dict", "torch.distributed.pipelining",
    "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.t5.modeling_t5", "matplotlib",
    "hypothesis", "networkx",
)  # fmt: skip
"""What tests import. It is there when the process of a mutant begins."""


def copied(to: Path) -> Path:
    """A copy of the tree as it is now, without what git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def record(copy: Path, names: Sequence[str]) -> dict[str, Any]:
    """Run the tests once, and return what each of them runs, by its name."""
    folder = copy / "recorded"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(mutants_record.SITE)
    (folder / "now").write_bytes(bytes(8))
    (folder / "log").touch()
    environment = os.environ | {
        mutants_record.FOLDER: str(folder),
        "PYTHONPATH": f"{folder}{os.pathsep}{copy}",
        "PYTHONPYCACHEPREFIX": str(folder / "compiled"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.bench.mutants_record"]
    subprocess.run([*command, *names], cwd=copy, env=environment, check=False)
    found: dict[str, Any] = json.loads((folder / "tests.json").read_text())
    return found


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


class Tests:
    """Which tests a mutant has to face.

    Args:
        copy: A copy of the tree.
        recorded: What `--record` has written.
        budget_s: How long the tests of one mutant took together when they were recorded, at most.
    """

    def __init__(self, copy: Path, recorded: Mapping[str, Any], budget_s: float) -> None:
        self.copy = copy
        self.tests: Mapping[str, Any] = recorded["tests"]
        self.digests: Mapping[str, str] = recorded["files"]
        self.budget_s = budget_s
        self.turn = int(time.time())
        self.texts = {
            str(p.relative_to(copy)): p.read_text() for p in copy.glob("tests/**/test_*.py")
        }
        self.files = {name.partition("::")[0] for name in self.tests}

    def of(self, mutant: Mutant) -> list[str]:
        """The likeliest to find it first."""
        same = self.digests.get(mutant.file) == digest(self.copy / "meshplan" / mutant.file)
        at = f"{mutant.file}:"
        if mutant.block and same:
            at += str(mutant.block)
        found = {
            name: test
            for name, test in self.tests.items()
            if name and any(b == at or (at[-1] == ":" and b.startswith(at)) for b in test["blocks"])
        }
        named = self.naming(mutant)

        def cost(name: str) -> float:
            first = 0.1 if name.partition("::")[0] in named else 1.0
            return first * (found[name]["seconds"] + 0.01) * len(found[name]["blocks"])

        chosen, seconds = [], 0.0
        for name in sorted(found, key=cost):
            if seconds + found[name]["seconds"] <= self.budget_s:
                seconds += found[name]["seconds"]
                chosen.append(name)
        return chosen

    def naming(self, mutant: Mutant) -> set[str]:
        """The files that name the mutant's."""
        dotted = f"meshplan.{mutant.file.removesuffix('.py').replace('/', '.')}"
        pattern = re.compile(rf"\b{dotted}\b")
        return {name for name, text in self.texts.items() if pattern.search(text)}

    def put(self, path: Path, source: bytes) -> None:
        """Write a file, with a time of its own: by whole seconds compiled files are told apart."""
        path.write_bytes(source)
        self.turn += 2
        os.utime(path, (self.turn, self.turn))


class Chosen:
    """A pytest plugin that runs these tests in this order, and keeps the name of one that fails.

    Tests that were not there at the recording are new ones of the same files, and come first.
    """

    def __init__(self, names: Sequence[str], known: Mapping[str, Any], at: Path) -> None:
        self.order = {name: number for number, name in enumerate(names)}
        self.known = known
        self.at = at

    @pytest.hookimpl(trylast=True)  # Those of `wide` are left out before.
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        new = [item for item in items if item.nodeid not in self.known]
        files = {name.partition("::")[0] for name in self.known}
        first = [item for item in new if item.nodeid.partition("::")[0] in files]
        last = [item for item in new if item.nodeid.partition("::")[0] not in files]
        old = [item for item in items if item.nodeid in self.order]
        items[:] = first + sorted(old, key=lambda item: self.order[item.nodeid]) + last

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        def ring(*_: Any) -> None:
            self.at.write_text(f"{nodeid}, by the clock")
            os._exit(pytest.ExitCode.TESTS_FAILED)

        signal.signal(signal.SIGALRM, ring)
        recorded = self.known[nodeid]["seconds"] if nodeid in self.known else 5.0
        signal.alarm(math.ceil(PATIENCE[0] + PATIENCE[1] * recorded))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.at.write_text(report.nodeid)

    def pytest_runtest_logfinish(self) -> None:
        signal.alarm(0)


@dataclass(frozen=True)
class End:
    """How a mutant ended.

    Attributes:
        outcome: `killed`, `survived`, or `not run` where no test runs the code.
        by: The test that failed, or `the clock`.
    """

    outcome: str
    by: str = ""
    seconds: float = 0.0


def face(mutant: Mutant, tests: Tests) -> End:
    """Put the mutant into the copy, run its tests in a process of their own, take it out again."""
    names = tests.of(mutant)
    # New files are in no recording: all of their tests are run, last.
    files = [name.partition("::")[0] for name in names]
    files += sorted(tests.naming(mutant) - tests.files)
    if not files:
        return End("not run")
    path = tests.copy / "meshplan" / mutant.file
    source = path.read_bytes()
    tests.put(path, mutant.applied(source))
    failed = tests.copy / "failed"
    failed.unlink(missing_ok=True)
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _run(tests, names, files, failed)
    try:
        limit_s = 120.0 + PATIENCE[1] * tests.budget_s  # Where no signal is heard.
        status = None
        while status is None and time.monotonic() - began < limit_s:
            time.sleep(0.05)
            done, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if done else None
        by = failed.read_text() if failed.exists() else "the import"
        seconds = round(time.monotonic() - began, 1)
        if status is None:
            return End("killed", "the clock", seconds)
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:
            return End("not run")
        return End("survived" if status == 0 else "killed", by if status else "", seconds)
    finally:
        _end(pid)
        tests.put(path, source)


def _run(tests: Tests, names: Sequence[str], files: Sequence[str], failed: Path) -> None:
    """Life of the process of a mutant. It never returns."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(tests.copy / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tests.copy)
    os.environ["PYTHONPATH"] = sys.path[0] = str(tests.copy)
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "meshplan")]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")  # What ranks would import again.
    chosen = Chosen(names, tests.tests, failed)
    arguments = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *dict.fromkeys(files)]
    code = 3
    try:
        code = int(pytest.main(arguments, plugins=[chosen]))
    finally:
        os._exit(code)


def _end(pid: int) -> None:
    """End the process and those that it has started."""
    for ended in (os.killpg, os.waitpid):
        try:
            ended(pid, signal.SIGKILL if ended is os.killpg else 0)
        except (ProcessLookupError, ChildProcessError):
            continue


def reasons() -> dict[tuple[str, str, str], tuple[str, str]]:
    """Why a mutant may live, by file, line and change: a word, and a sentence."""
    kept = json.loads(REASONS.read_text()) if REASONS.exists() else []
    return {(row["file"], row["text"], row["change"]): (row["is"], row["why"]) for row in kept}


def page(rows: Sequence[Mapping[str, Any]], lines: Mapping[Any, int]) -> Iterator[str]:
    """The page of the repository."""
    why, judged = reasons(), [row for row in rows if row["outcome"]]
    by_room: dict[str, Counter[str]] = {}
    alive: dict[str, list[str]] = {"alive": [], "equivalent": []}
    for row in judged:
        told = why.get((row["file"], row["text"], row["change"]), ("alive", ""))
        end = row["outcome"] if row["outcome"] == "killed" else told[0]
        line = lines.get((row["file"], row["text"], row["change"], row["nth"]))
        if end != "killed" and line is None:
            continue  # The code is gone.
        room = row["file"].partition("/")[0].removesuffix(".py")
        by_room.setdefault(room, Counter())[end] += 1
        if end != "killed":
            none = "no test runs it" if row["outcome"] == "not run" else "not looked into yet"
            alive[end].append(
                f"- `{row['file']}:{line}` `{row['text'][:90]}`: `{row['change'][:120]}`"
                f" — {told[1] or none}"
            )
    total = sum(by_room.values(), Counter())
    yield "| room | tried | killed | equivalent | alive | killed of those that change anything |"
    yield "|---|---|---|---|---|---|"
    for room, counts in [*sorted(by_room.items()), ("all", total)]:
        changing = counts["killed"] + counts["alive"]
        share = f"{100 * counts['killed'] / changing:.0f} %" if changing else ""
        yield (
            f"| {room} | {sum(counts.values())} | {counts['killed']} | {counts['equivalent']} "
            f"| {counts['alive']} | {share} |"
        )
    yield from ["", "## Alive", "", *sorted(alive["alive"])]
    yield from ["", "## Equivalent", "", *sorted(alive["equivalent"])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="patterns of files")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of tests per mutant")
    parser.add_argument("--json", type=Path, default=PAGE.with_suffix(".json"))
    parser.add_argument("--tests", type=Path, default=Path("mutants_tests.json"))
    parser.add_argument("--record", action="store_true", help="write --tests")
    parser.add_argument("--again", action="store_true", help="try those again that survived")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the copy goes too.
    drawable = population(ROOT)
    now = {mutant.key: mutant for each in drawable.values() for mutant in each}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copied(Path(folder))
        if options.record:
            files = sorted(str(p.relative_to(copy)) for p in copy.glob("tests/**/test_*.py"))
            kept = [file for file in files if not LEFT_OUT.match(file)]
            tests = record(copy, [*kept, "meshplan"])
            digests = {file: digest(copy / "meshplan" / file) for file in drawable}
            options.tests.write_text(json.dumps({"files": digests, "tests": tests}))
            return
        rows = json.loads(options.json.read_text()) if options.json.exists() else []
        if len(rows) < options.num:
            drawn = draw(population(ROOT, options.only), options.num, options.seed)
            known = {(row["file"], row["text"], row["change"], row["nth"]) for row in rows}
            rows += [
                {"file": m.file, "text": m.text, "change": m.change, "nth": m.nth, "kind": m.kind,
                 "line": m.line, "outcome": "", "by": "", "seconds": 0.0}
                for m in drawn if m.key not in known
            ]  # fmt: skip
        tests_ = Tests(copy, json.loads(options.tests.read_text()), options.budget)
        for name in WARM:
            importlib.import_module(name)
        for number, row in enumerate(rows[: options.num]):
            mutant = now.get((row["file"], row["text"], row["change"], row["nth"]))
            if row["outcome"] and not (options.again and row["outcome"] != "killed"):
                continue
            if mutant is None:
                row["outcome"] = ""
                continue
            end = face(mutant, tests_)
            row.update(vars(end), line=mutant.line)
            print(f"{number:4d} {end.outcome:8s} {end.seconds:5.1f} s  {mutant.file}:{mutant.line} "
                  f"{mutant.change[:100]}  {end.by}", flush=True)  # fmt: skip
            options.json.write_text(json.dumps(rows, indent=1))
    lines = {key: mutant.line for key, mutant in now.items()}
    text = "\n".join(page(rows, lines)) + "\n"
    print(text)
    if options.write:
        head = PAGE.read_text().partition("| room |")[0] if PAGE.exists() else ""
        PAGE.write_text(head + text)


if __name__ == "__main__":
    main()
