"""`action.yml` and its script: how a pull request changes memory, time and traffic of plans."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
PLAN = """\
version: 1
model: {config: llama.json}
mesh: {dp_shard: 16}
strategy: full_shard
batch: {micro: 1, accumulate: 1, seq_len: 8192}
hardware: {gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8, inter: 50GB/s}
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose first commit has plans/a.yaml and plans/kept.yaml."""
    folder = tmp_path / "repository"
    (folder / "plans").mkdir(parents=True)
    shutil.copy(ROOT / "plans" / "models" / "llama-3.1-8b.json", folder / "plans" / "llama.json")
    for name in ("a", "kept"):
        (folder / "plans" / f"{name}.yaml").write_text(PLAN)
    git(folder, "init", "-q")
    commit(folder)
    return folder


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "plans")


def compare(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables | {
        "MESHPLAN": f"{sys.executable} -m meshplan", "PYTHONPATH": str(ROOT), "NO_COLOR": "1",
    }  # fmt: skip
    words = words or (str(ROOT / "tools" / "compare_plans.sh"), "HEAD~1")
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_changed_plan_is_compared_and_a_new_one_estimated(repository: Path) -> None:
    tp = PLAN.replace("{dp_shard: 16}", "{dp_shard: 8, tp: 2}") + "tp_plan: auto\n"
    (repository / "plans" / "a.yaml").write_text(tp)
    (repository / "plans" / "new.yaml").write_text(PLAN)
    commit(repository)
    done = compare(repository)
    assert (done.returncode, done.stderr) == (0, "")
    changed, new = done.stdout.split("### ")[1:]
    assert changed.startswith("`plans/a.yaml`\n```text\nbefore: plans/a.yaml -> plans/a.yaml\n")
    for words in ("mesh.tp        -   ->  2", "\n  a step  ", "\n  peak memory, at most  "):
        assert words in changed
    assert new.startswith("`plans/new.yaml`\n```text\nplans/new.yaml: peak memory of each GPU")
    trees = subprocess.run(
        ["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True
    )
    assert len(trees.stdout.splitlines()) == 1


def test_a_plan_with_a_problem_fails_and_a_lock_stands_for_its_plan(repository: Path) -> None:
    (repository / "plans" / "kept.lock.yaml").write_text("version: 1\n")
    commit(repository)
    done = compare(repository)
    assert done.returncode == 1
    assert "### `plans/kept.yaml`" in done.stdout
    assert "kept.lock.yaml" in done.stdout
    (repository / "plans" / "kept.lock.yaml").unlink()
    commit(repository)
    assert "### `plans/kept.yaml`" in compare(repository).stdout
    (repository / "README.md").write_text("no plan")
    commit(repository)
    assert compare(repository).stdout == "No plan has changed.\n"


@pytest.mark.parametrize(("found", "method"), [("", "POST"), ("17", "PATCH")])
def test_the_comment_is_written_once_and_then_updated(
    repository: Path, tmp_path: Path, found: str, method: str
) -> None:
    """The last step of the action itself, with a `gh` that notes how it is called."""
    (repository / "plans" / "a.yaml").write_text(PLAN.replace("micro: 1", "micro: 2"))
    commit(repository)
    programs = tmp_path / "bin"
    programs.mkdir()
    gh = programs / "gh"
    gh.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n[ "$2" = --paginate ] && echo {found}\n:\n'
    )
    gh.chmod(0o755)
    given: dict[str, Any] = {
        "BASE": "HEAD~1", "PLANS": ACTION["inputs"]["plans"]["default"], "COMMENTS": "true",
        "PULL_REQUEST": "5", "GITHUB_REPOSITORY": "o/r", "GITHUB_ACTION_PATH": str(ROOT),
        "RUNNER_TEMP": str(tmp_path), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "PATH": f"{programs}:{os.environ['PATH']}",
    }  # fmt: skip
    step = ACTION["runs"]["steps"][-1]
    assert set(step["env"]) - {"GH_TOKEN"} <= set(given)
    done = compare(repository, "bash", "-e", "-o", "pipefail", "-c", step["run"], **given)
    assert (done.returncode, done.stderr) == (0, "")
    body = (tmp_path / "summary").read_text()
    assert body.startswith("<!-- meshplan -->\n### `plans/a.yaml`")
    assert "batch.micro" in body
    asked, written = (tmp_path / "called").read_text().splitlines()
    assert asked.startswith("api --paginate repos/o/r/issues/5/comments")
    target = "repos/o/r/issues/comments/17" if found else "repos/o/r/issues/5/comments"
    assert written == (
        f"api --silent --method {method} {target} --field body=@{tmp_path}/meshplan.md"
    )
