"""A command that asks a question again reads the answer, and any other question is searched.

Which seeded bug would this catch? An input of the search that is left out of the key; a file that
is read although it was cut short, changed, or written by others; an answer that was not searched to
its end.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from types import MappingProxyType

import pytest

from meshplan.cli.app import main
from meshplan.files import CACHE_VARIABLE
from meshplan.own_process import IS_COMMAND
from meshplan.planner.objectives import answer as objectives
from meshplan.planner.objectives import decision_cache
from tests.planner.test_planner import job

__all__ = ["job"]


@pytest.fixture
def asked(monkeypatch, tmp_path, capsys):
    """Ask `plan` as a command does; the result is (whether it searched, its answer, its notes).

    `asked.of` asks any other words.
    """
    searched = []

    def counting(decide):
        return lambda request, report: searched.append(request) or decide(request, report)

    counted = {name: counting(decide) for name, decide in objectives._BY_OBJECTIVE.items()}
    monkeypatch.setattr(objectives, "_BY_OBJECTIVE", MappingProxyType(counted))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    token = IS_COMMAND.set(True)

    def ask(path, *words):
        return of(["plan", "-f", str(path), "--dry-run", *words])

    def of(words):
        before = len(searched)
        code = main(words)
        out, err = capsys.readouterr()
        assert code in (0, 1), err
        return len(searched) > before, out, err

    ask.of = of
    yield ask
    IS_COMMAND.reset(token)


def kept(tmp_path):
    return sorted((tmp_path / "cache").iterdir())


def test_the_same_question_has_the_same_answer_without_a_search(asked, job):
    path = job()
    assert asked(path)[0]
    searched, _, notes = asked(path)
    assert not searched
    assert "to the same question; MESHPLAN_CACHE=off searches again" in notes
    again = [asked(path, "--json")[1] for _ in range(2)]
    assert again[0] == again[1]


def test_an_answer_with_other_layouts_answers_other_verbs_too(asked, job):
    path = job()
    _, with_layouts, _ = asked(path)
    assert "dp_replicate" in with_layouts
    assert not asked.of(["estimate", "-f", str(path)])[0]


def test_an_answer_without_other_layouts_is_searched_for_them(asked, job):
    path = job()
    assert asked.of(["estimate", "-f", str(path)])[0]
    searched, answer, _ = asked(path)
    assert searched
    assert (False, answer) == asked(path)[:2]
    assert not asked.of(["estimate", "-f", str(path)])[0]


@pytest.mark.parametrize("objective", ["time", "memory", "cost"])
def test_objectives_are_kept(asked, job, objective):
    words = ("--price", "2") if objective == "cost" else ()
    path = job(solve={"objective": objective})
    first, second = asked(path, *words), asked(path, *words)
    assert (first[0], second[0]) == (True, False)
    assert first[1] == second[1]


@pytest.mark.parametrize("more", [{"solve": {"robust": "10%"}}, {"mesh": {"dp_shard": 2, "tp": 4}}])
def test_a_robust_choice_and_a_stated_mesh_are_kept(asked, job, more):
    path = job(**more)
    first, second = asked(path), asked(path)
    assert (first[0], second[0], first[1] == second[1]) == (True, False, True)


def test_that_nothing_fits_is_kept_too(asked, job):
    path = job()
    words = ("--set", "hardware.headroom=0.01")
    assert [asked(path, *words)[0] for _ in range(2)] == [True, False]


@pytest.mark.parametrize(
    "words",
    [
        ("--set", "batch.global=128"),
        ("--set", "precision=32-true"),
        ("--set", "solve.objective=memory"),
        ("--set", "solve.time_limit=29s"),
        ("--set", "hardware.gpu=a100-sxm-80gb"),
        ("--set", "hardware.headroom=0.5"),
        ("--set", "hardware.nodes=1"),
        ("--profile", "megatron"),
    ],
)
def test_another_question_is_searched(asked, job, words):
    path = job()
    asked(path)
    assert asked(path, *words)[0]
    assert not asked(path)[0]


def test_another_model_is_searched(asked, job):
    path = job()
    asked(path)
    config = json.loads(path.with_name("config.json").read_text())
    path.with_name("config.json").write_text(json.dumps({**config, "intermediate_size": 4096}))
    assert asked(path)[0]


def test_the_same_plan_in_another_place_is_searched(asked, job, tmp_path):
    path = job()
    asked(path)
    shutil.copytree(path.parent, tmp_path / "other", ignore=shutil.ignore_patterns("cache"))
    assert asked(tmp_path / "other" / path.name)[0], "its messages would name the first place"
    path.write_text(f"# A line more.\n{path.read_text()}")
    assert asked(path)[0], "its messages would name the lines of before"


def test_another_package_searches_again(asked, job, monkeypatch, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "costs.py").write_text("x = 1")
    monkeypatch.setattr(decision_cache, "_PACKAGE", package)
    path = job()
    asked(path)
    assert not asked(path)[0]
    (package / "costs.py").write_text("x = 2")
    os.utime(package / "costs.py", (1, 1))
    assert asked(path)[0]


@pytest.mark.parametrize("harm", ["cut", "changed", "others", "empty", "link", "older"])
def test_a_file_that_is_not_whole_or_not_ours_is_not_read(asked, job, tmp_path, harm):
    class Runs:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    path = job()
    _, answer, _ = asked(path)
    (file,) = kept(tmp_path)
    data = file.read_bytes()
    if harm == "cut":
        file.write_bytes(data[:-1])
    elif harm == "changed":
        file.write_bytes(data[:32] + pickle.dumps(Runs()))
    elif harm == "others":
        file.chmod(0o622)
    elif harm == "empty":
        file.write_bytes(b"")
    elif harm == "older":
        file.write_bytes(data[32:])
    else:
        shutil.move(file, tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    searched, again, _ = asked(path)
    assert searched
    assert answer == again
    assert not (tmp_path / "ran").exists()
    assert not asked(path)[0], "the new answer is kept in its place"


def test_a_search_that_was_stopped_is_not_kept(asked, job, tmp_path):
    path = job()
    asked(path, "--set", "solve.time_limit=0.01s")
    assert not (tmp_path / "cache").exists()


def test_only_commands_keep_and_read(asked, job, tmp_path, monkeypatch):
    path = job()
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert [asked(path)[0] for _ in range(2)] == [True, True]
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    token = IS_COMMAND.set(False)
    assert [asked(path)[0] for _ in range(2)] == [True, True]
    IS_COMMAND.reset(token)
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_does_no_harm(asked, job, tmp_path):
    (tmp_path / "cache").write_text("a file")
    path = job()
    assert [asked(path)[0] for _ in range(2)] == [True, True]


def test_few_answers_are_kept(asked, job, tmp_path, monkeypatch):
    monkeypatch.setattr(decision_cache, "_MOST_FILES", 2)
    path = job()
    for number, size in enumerate((8, 16, 32)):
        asked(path, "--set", f"batch.global={size}")
        for file in kept(tmp_path):
            os.utime(file, (number, number))
    assert len(kept(tmp_path)) == 2
    assert not asked(path, "--set", "batch.global=32")[0], "the oldest is the one to go"


def test_a_process_keeps_its_answer_in_the_folder_of_caches(job, tmp_path):
    path = job()
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "home")}
    del environment[CACHE_VARIABLE]
    notes = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "meshplan", "plan", "-f", str(path), "--dry-run"],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        notes.append(done.stderr)
    assert ["same question" in each for each in notes] == [False, True]
    (file,) = (tmp_path / "home" / "meshplan").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "home" / "meshplan").stat().st_mode & 0o777 == 0o700
