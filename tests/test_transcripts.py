"""The first evening, typed and answered: every answer in `tests/transcripts` is what comes today.

    python -m tests.test_transcripts [NAME ...]     writes the answers anew, to be read in the diff

A transcript is a list of commands after "$ ", each with its answer, which run one after the other
in a folder with the files of `tests/transcripts/files` and a config. Figures that depend on the
machine (losses, and what `verify` measures) are written as "#".
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_docs import PROGRAMS

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "transcripts"
LONG = frozenset({"gpt", "llama", "pictures", "vision"})
"""Transcripts that take half a minute and more."""
MEASURED = re.compile(r"^(loss, step|gradient norm|step \d+: loss|parameters: ok|collectives of)")


def commands_of(text: str) -> list[str]:
    return [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]


def replayed(text: str, folder: Path) -> Iterator[str]:
    """The lines of a transcript with today's answers.

    Args:
        text: The transcript; its answers are not read.
        folder: An empty folder.
    """
    bin_, work = folder / "bin", folder / "evening"
    bin_.mkdir()
    shutil.copytree(FOLDER / "files", work)
    shutil.copy(ROOT / "plans" / "models" / "llama-3.1-8b.json", work / "llama.json")
    for name, words in PROGRAMS.items():
        (bin_ / name).write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *words])} "$@"\n')
        (bin_ / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "NO_COLOR": "1",
        "MESHPLAN_CACHE": "off",
        "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "COLUMNS": "100",
    }  # fmt: skip
    environment.pop("MESHPLAN_ALLOW_CODE", None)
    yield from (line for line in text.splitlines() if line.startswith("#"))
    for command in commands_of(text):
        yield f"$ {command}"
        done = subprocess.run(
            ["bash", "-c", command], cwd=work, env=environment, text=True, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        for line in done.stdout.splitlines():
            yield re.sub(r"\d[\d.,e+-]*", "#", line) if MEASURED.match(line) else line
        yield ""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[pytest.mark.wide] if path.stem in LONG else [])
        for path in sorted(FOLDER.glob("*.txt"))
    ],
)
def test_every_answer_is_todays(name: str, tmp_path: Path) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    assert "\n".join(replayed(text, tmp_path)) + "\n" == text


def test_the_evening_has_sixty_commands() -> None:
    texts = [path.read_text() for path in FOLDER.glob("*.txt")]
    assert sum(len(commands_of(text)) for text in texts) >= 60


def main(names: list[str]) -> None:
    """Write the answers anew."""
    for path in sorted(FOLDER.glob("*.txt")):
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                path.write_text("\n".join(replayed(path.read_text(), Path(folder))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
