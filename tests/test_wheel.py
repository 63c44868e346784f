"""What is installed elsewhere is whole: every file that code reads beside it is in the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "meshplan"
READ = re.compile(r"""["']([\w-]+\.(?:json|css|js|yaml|txt|c))["']""")
"""A file named in code."""
OURS = {"plan.yaml", "config.json", "package.json"}
"""Those that belong to whoever runs it."""


def data_files() -> dict[str, Path]:
    """By place in the package; what is compiled from them is not among them."""
    return {
        str(path.relative_to(PACKAGE)): path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".so")
    }


def read_by_code() -> set[str]:
    """Files that code names and that stand beside it."""
    return {
        str((path.parent / name).relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if "files(" in line or "_file(" in line or "with_name(" in line
        for name in READ.findall(line)
        if name not in OURS
    }


def test_every_file_that_code_reads_is_part_of_the_package():
    read = read_by_code()
    assert {"layout/hardware.json", "report/page.css", "report/page.js", "pictures/base/views.js",
            "cost/profiles.json"} <= read  # fmt: skip
    assert read | {"py.typed"} == set(data_files())


def test_the_wheel_takes_the_package_as_it_is():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert set(wheel) == {"targets"}
    assert set(wheel["targets"]) == {"wheel"}
    # No list of what is in or out stands beside it, so that nothing can be forgotten there.
    assert set(wheel["targets"]["wheel"]) == {"packages", "force-include", "hooks"}
    assert wheel["targets"]["wheel"]["hooks"] == {"custom": {"path": "hatch_build.py"}}
    assert wheel["targets"]["wheel"]["packages"] == ["meshplan"]
    assert wheel["targets"]["wheel"]["force-include"] == {"plans": "meshplan/plans"}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout")
def test_git_knows_every_file():
    """Hatch leaves out what git ignores, and a commit what git does not know."""
    names = [str(path.relative_to(ROOT)) for path in data_files().values()]
    ignored = subprocess.run(
        ["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True
    )
    assert ignored.stdout == ""
    known = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True)
    assert sorted(known.stdout.split()) == sorted(names)


@pytest.mark.wide
def test_a_wheel_draws_and_reports_without_its_checkout(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(ROOT)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if built.returncode and "hatchling" in built.stderr:
        pytest.skip("nothing to build with: hatchling cannot be fetched")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    assert {f"meshplan/{name}" for name in data_files()} <= names
    is_pure = wheel.name.endswith("-py3-none-any.whl")
    library = "meshplan/memory/log/libmeshplan_allocator.so"
    assert is_pure is (library not in names) is (shutil.which("cc") is None)
    model = tmp_path / "installed" / "meshplan" / "plans" / "models" / "llama-3.1-8b.json"
    assert model.exists()
    (tmp_path / "plan.yaml").write_text(
        f"version: 1\nmodel: {{config: {model}}}\nstrategy: full_shard\n"
        "hardware: {nodes: 1, gpus_per_node: 8, gpu: h100-sxm-80gb}\n"
        "batch: {micro: 1, accumulate: 1, seq_len: 1024}\nactivation_checkpointing: full\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    for words in (["draw", "--what", "treemap", "-o", "t.html"], ["report", "-o", "r.html"]):
        done = subprocess.run(
            [sys.executable, "-m", "meshplan", words[0], "-f", "plan.yaml", *words[1:]],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    page = (tmp_path / "r.html").read_text()
    for name in ("report/page.css", "report/page.js", "pictures/base/views.js"):
        first = data_files()[name].read_text().splitlines()[0]
        assert first in page
