"""Which tests run which lines of the package: what decides the tests that a mutant has to face.

Every block of the package's code gets a call that notes it, when the code is compiled: no file
changes, and line numbers stay. `sitecustomize` asks for it in each process that the tests start, so
that ranks and command lines are seen too. As a pytest plugin this module says which test is on, by
a number in a file that all of these processes map into memory.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import json
import mmap
import os
import time
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "MESHPLAN_MUTANTS_RECORD"
"""The environment variable that names the folder of the recording."""
SITE: Final = "from tests.bench import mutants_record\n\nmutants_record.begin()\n"
NOTE: Final = "_note_that_it_runs"


def blocks(tree: ast.Module) -> list[list[ast.stmt]]:
    """Every block of statements inside of a function, outermost first."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = {
        node: None for each in ast.walk(tree) if isinstance(each, functions)
        for node in ast.walk(each)
    }  # fmt: skip
    found = []
    for node in inside:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            # The body of a lambda or of a conditional expression is no list.
            if isinstance(block, list) and block and not isinstance(node, ast.ClassDef):
                found.append(block)
    return found


def begin() -> None:
    """Note each block of the package that this process runs, once per test."""
    folder = Path(os.environ[FOLDER])
    with open(folder / "now", "r+b") as file:
        now = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND)
    last: dict[str, int] = {}

    def note(block: str) -> None:
        number = now[0]
        if last.get(block) != number:
            last[block] = number
            os.write(log, f"{number} {block}\n".encode())

    setattr(builtins, NOTE, note)
    package = str(Path(__file__).resolve().parents[2] / "meshplan") + os.sep
    compile_ = importlib.machinery.SourceFileLoader.source_to_code

    def source_to_code(self: Any, data: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, bytes) or not str(path).startswith(package):
            return compile_(self, data, path, *args, **kwargs)
        tree = ast.parse(data)
        name = str(path).removeprefix(package)
        for block in blocks(tree):
            first = block[0]
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            call = ast.parse(f"{NOTE}({f'{name}:{first.lineno}'!r})").body[0]
            for node in ast.walk(call):
                ast.copy_location(node, first)
            block.insert(1 if is_text else 0, call)
        return compile_(self, tree, path, *args, **kwargs)

    importlib.machinery.SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]


class Plugin:
    """Says which test is on, and keeps how long it took and how it ended."""

    def __init__(self) -> None:
        self.folder = Path(os.environ[FOLDER])
        self.names = [""]
        self.seconds = [0.0]
        self.passed = [False]
        self.began = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.names.append(nodeid)
        self.seconds.append(0.0)
        self.passed.append(True)
        self.began = time.monotonic()
        with open(self.folder / "now", "r+b") as file:
            file.write((len(self.names) - 1).to_bytes(8, "little"))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed[-1] &= report.outcome == "passed"

    def pytest_runtest_logfinish(self) -> None:
        self.seconds[-1] = time.monotonic() - self.began

    def pytest_sessionfinish(self) -> None:
        ran: list[dict[str, None]] = [{} for _ in self.names]
        for line in (self.folder / "log").read_text().splitlines():
            number, _, block = line.partition(" ")
            ran[int(number)][block] = None
        tests = {
            name: {"seconds": round(seconds, 3), "blocks": sorted(blocks)}
            for name, seconds, passed, blocks in zip(
                self.names, self.seconds, self.passed, ran, strict=True
            )
            if passed
        }
        (self.folder / "tests.json").write_text(json.dumps(tests))


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Plugin())
