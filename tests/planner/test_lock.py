"""The lock file: whose plan it is of, and what happens where it cannot be read or written."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from meshplan.api import checking
from meshplan.api.planning import search_plan
from meshplan.cli.app import main
from meshplan.errors import SpecError
from meshplan.planner.lock.lock import lock_path, overrides, read, spec_hash
from meshplan.planner.problem.truncated_estimate import TruncatedEstimate
from meshplan.spec.reader import load_spec
from tests.planner.test_planner import job

__all__ = ["job"]

TIGHT = {"mesh": {"dp_shard": 8}, "strategy": None}


def test_a_lock_holds_from_every_folder(job, capsys, monkeypatch):
    """Written beside the plan under one name of it, read under another."""
    path = job(**TIGHT)
    monkeypatch.chdir(path.parent)
    assert main(["plan", "-f", path.name]) == 0
    written = lock_path(path).read_bytes()
    monkeypatch.chdir(path.parent.parent)
    for name in (f"{path.parent.name}/{path.name}", str(path), f"./{path.parent.name}/plan.yaml"):
        capsys.readouterr()
        assert main(["plan", "-f", name]) == 0
        assert "nothing changed since the last lock" in capsys.readouterr().err
        assert lock_path(path).read_bytes() == written
        assert main(["explain", "-f", name, "memory"]) == 0
        assert "planning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it does not begin with lock:"),
        ("garbage", "it does not begin with lock:"),
        ("[1, 2", "the '[' that opens here is never closed"),
        ("[" * 3000, "values are nested more than 32 levels deep"),
        ("lock: &a [1]\nchosen: [*a, *a]", "anchors such as '&a' are not supported"),
        ("lock: 1", "its format is 1, and this version reads 2"),
        ("lock: 2\nchosen: {}", "it has no inputs"),
        ("lock: 2\ninputs: {plan: a, model: b}\nchosen: 3", "it has no chosen"),
        ("lock: 2\nchosen: {}\ninputs: {plan: a}", "its inputs have no model"),
        ("lock: 2\nchosen: {}\ninputs: {plan: a, model: b}", "it was changed after it was written"),
    ],
)
def test_a_broken_lock_is_told_of_in_words(tmp_path, text, why):
    path = tmp_path / "plan.lock.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        read(path)
    assert str(caught.value.problems[0].what).endswith(f"of this version: {why}")


@pytest.mark.parametrize("kind", ["folder", "device"])
def test_what_is_no_file_is_neither_read_nor_replaced(job, capsys, kind):
    """/dev/zero has no end, and a rename onto /dev/null would be the end of it."""
    path = job(**TIGHT)
    target = Path("/dev/zero") if kind == "device" else path.parent
    code = main(["plan", "-f", str(path), "-o", str(target)])
    err = capsys.readouterr().err
    assert code == 2
    assert f"{target}: the lock cannot be written: this is a {kind}, not a file" in err
    assert "fix: give a path in an existing folder" in err
    assert target.is_dir() if kind == "folder" else target.is_char_device()


def test_a_lock_that_cannot_be_written_leaves_nothing_behind(job, capsys, monkeypatch):
    path = job(**TIGHT)
    assert main(["plan", "-f", str(path), "-q"]) == 0
    before = lock_path(path).read_bytes()
    names = sorted(os.listdir(path.parent))

    def fill(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    capsys.readouterr()
    assert main(["plan", "-f", str(path), "-q"]) == 2
    err = capsys.readouterr().err
    assert "the lock cannot be written: No space left on device" in err
    assert lock_path(path).read_bytes() == before
    assert sorted(os.listdir(path.parent)) == names


def test_a_folder_that_is_not_there_is_said(job, capsys):
    path = job(**TIGHT)
    assert main(["plan", "-f", str(path), "-q", "-o", "/nowhere/at/all.lock.yaml"]) == 2
    assert "give a path in an existing folder" in capsys.readouterr().err


def test_what_is_planned_without_a_lock_is_what_plan_says(job, capsys):
    """As fast, too: a short model is looked at as often."""
    for mesh in ({"pp": 2, "dp_shard": "auto"}, {"dp_shard": "auto"}):
        path = job(mesh=mesh)
        stated = search_plan(path).chosen.stated
        given = _words(checking.decide(path, overrides(stated)))
        assert _words(checking.decide(path)) == given
        assert _words(checking.decide(path, config=path.with_name("config.json"))) == given
    glances = []
    for decided in (lambda: search_plan(path), lambda: checking.decide(path)):
        with counting_glances() as count:
            decided()
        glances.append(count[0])
    assert glances[0] == glances[1] > 0


def _words(plan):
    a, stages = plan.assignment, plan.assignment.stages
    again = {name: each.policy for name, each in a.recompute.items()}
    cut = (stages.units, stages.schedule, stages.microbatches) if stages else ()
    return plan.mesh, plan.micro, again, cut, a.strategy.name


@contextmanager
def counting_glances():
    """How often a short model was looked at."""
    count, look = [0], TruncatedEstimate.bound

    def counted(self, *args, **more):
        count[0] += 1
        return look(self, *args, **more)

    with mock.patch.object(TruncatedEstimate, "bound", counted):
        yield count


@pytest.mark.parametrize(
    ("plan", "digest"),
    [
        ("auto", "3daf08b92392135d2d4b8a572e87f4938800a0d88b3b099e0b0f4f6e281644eb"),
        ("moe_ep", "4135a8b1f5cd27867f65b6d8d10f57af670fb80dda337a867b230c0a4c617f44"),
        ("pp_fsdp_tp", "31db51d9f9a8e05a7b0c609afb484ee18bae1a7b48689f5e5c18fee3f38d08dc"),
    ],
)
def test_locks_that_users_have_stay_valid(plan, digest):
    """The hash of a plan is of a spec's classes and fields: their names are a file format."""
    spec = load_spec(Path(__file__).parents[2] / "plans" / f"{plan}.yaml")
    assert spec_hash(spec) == f"sha256:{digest}"
