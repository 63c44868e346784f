"""What `meshplan plan` says beside the plan: what changed, how it ended, on which machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal

import pytest
import yaml

from meshplan.api import checking
from meshplan.api.planning import search_plan
from meshplan.cli.app import main
from meshplan.cost.calibration import write_profile
from meshplan.cost.profile import profile_of
from meshplan.errors import PlanError
from meshplan.layout.hardware import Cluster, Link, find_device
from meshplan.planner.lock.changes import FieldChange, changes
from meshplan.planner.lock.lock import lock_path, read
from meshplan.planner.objectives import fastest
from tests.planner.test_planner import LLAMA, PLAN, job

__all__ = ["job"]

TIGHT = {"mesh": {"dp_shard": 8}, "strategy": None}


def plan(capsys, path, *words):
    """(exit code, result, stderr) of `meshplan plan`."""
    code = main(["plan", "-f", str(path), "--json", *words])
    out, err = capsys.readouterr()
    return code, json.loads(out)["result"], err


def test_what_changed_since_the_last_lock(job, capsys):
    path = job(mesh={"dp_shard": 8}, strategy=None)
    code, result, err = plan(capsys, path)
    assert (code, result["changed"]) == (0, None)
    assert "since the last lock" not in err
    code, result, err = plan(capsys, path)
    assert (code, result["changed"]) == (0, [])
    assert "nothing changed since the last lock" in err
    assert "wrote" not in err
    path = job(mesh={"dp_replicate": 2, "dp_shard": 4}, strategy=None)
    code, result, err = plan(capsys, path, "--dry-run")
    by_field = {each["field"]: each for each in result["changed"]}
    assert by_field["mesh.dp_shard"] == {"field": "mesh.dp_shard", "old": 8, "new": 4}
    assert by_field["mesh.dp_replicate"] == {"field": "mesh.dp_replicate", "old": None, "new": 2}
    assert "inputs.plan" in by_field
    assert "inputs.model" not in by_field
    assert "mesh.dp_shard: 8 -> 4" in err
    assert "mesh.dp_replicate: not stated -> 2" in err
    assert "changed since the last lock: the plan file" in err
    assert read(lock_path(path)).chosen["mesh"] == {"dp_shard": 8}


def test_a_last_lock_that_people_edited_is_not_compared(job, capsys):
    path = job(**TIGHT)
    assert plan(capsys, path)[0] == 0
    content = yaml.safe_load(lock_path(path).read_text())
    for text, why in (
        (yaml.safe_dump(content | {"expected": 3}), "it was changed after it was written"),
        ("[", "the '[' that opens here is never closed"),
    ):
        lock_path(path).write_text(text)
        code, result, err = plan(capsys, path)
        assert (code, result["changed"]) == (0, None)
        assert "the last lock cannot be compared" in err
        assert why in err
        assert read(lock_path(path)) is not None


def test_figures_that_hardly_move_are_no_change():
    rest = {"inputs": {"plan": "a", "model": "b"}, "memory": [{"high_bytes": 3}]}
    old = rest | {"expected": {"step_s": 1.0}, "chosen": {"batch.micro": 1000}}
    new = rest | {"expected": {"step_s": 1.0005}, "chosen": {"batch.micro": 1001}}
    assert changes(old, new) == (FieldChange("batch.micro", 1000, 1001),)
    assert len(changes(old, new | {"expected": {"step_s": 1.002}})) == 2


def test_an_interrupt_gives_the_best_so_far(job, capsys, monkeypatch):
    """Ctrl-C at the first answer: it is printed with its gap, and only --keep-best writes it."""
    plain = {"loss_chunks": 1, "loss_parallel": False, "allocator": "default"}
    # Several answers, one better.
    path = job(hardware=PLAN["hardware"] | {"headroom": 0.94}, **plain)
    whole = search_plan(path)
    line = fastest._line

    def press(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return line(*args)

    monkeypatch.setattr(fastest, "_line", press)
    before = signal.getsignal(signal.SIGINT)
    code, result, _ = plan(capsys, path)
    assert signal.getsignal(signal.SIGINT) is before
    assert code == 130
    assert (result["fits"], result["is_whole"], result["is_interrupted"]) == (True, False, True)
    assert not lock_path(path).exists()
    assert main(["plan", "-f", str(path)]) == 130
    out, errors = capsys.readouterr()
    assert out.startswith(f"{path}: interrupted, the best plan so far\n")
    assert "note: interrupted: no lock is written; --keep-best writes" in errors
    assert not lock_path(path).exists()
    assert main(["plan", "-f", str(path), "--keep-best", "--dry-run", "-q"]) == 130
    assert not lock_path(path).exists()
    capsys.readouterr()
    code, result, _ = plan(capsys, path, "--keep-best")
    assert code == 130
    assert result["gap"] > 1e-3
    assert result["step_s"] * (1 - result["gap"]) <= whole.best_s * (1 + 1e-9)
    lock = read(lock_path(path))
    again = checking.estimate_memory(path)
    assert lock is not None
    assert again.fits
    assert again.worst.band[1] == result["peak_bytes"]
    monkeypatch.undo()
    assert main(["plan", "-f", str(path), "--dry-run", "-q"]) == 0


def test_an_interrupt_before_any_answer_writes_nothing(job, capsys, monkeypatch):
    path = job()
    decision = search_plan(path, is_stopped=lambda: True)
    assert (decision.chosen, decision.is_whole, decision.is_interrupted) == (None, False, True)
    assert decision.gap == 1.0
    assert not lock_path(path).exists()
    at_once = contextlib.nullcontext(lambda: True)
    monkeypatch.setattr("meshplan.cli.planning.until_interrupted", lambda: at_once)
    assert main(["plan", "-f", str(path), "-q"]) == 130
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path}: interrupted before a plan was found")


def test_time_that_is_up_after_an_answer_is_an_honest_no(job, capsys, monkeypatch):
    path = job()
    monkeypatch.setattr(
        "meshplan.planner.solve.search._Search._is_late", lambda self: self.found.best is not None
    )
    code, result, _ = plan(capsys, path)
    assert (code, result["fits"], result["is_whole"]) == (1, True, False)
    assert not result["is_interrupted"]
    assert main(["plan", "-f", str(path), "--dry-run", "-q"]) == 1
    out = capsys.readouterr().out
    assert "search incomplete: time limit reached; no configuration is more than" in out


def measured(path, *, share=1.0, dtype="bfloat16", gpu="h100-sxm-80gb"):
    """A profile as calibrate writes it: the generic one with links of another speed."""
    device = find_device(gpu)
    cluster = Cluster(device=device, nodes=1, gpus_per_node=8, intra=Link("intra", share * 450e9))
    profile = profile_of(cluster, dtype="bfloat16")

    write_profile(dataclasses.replace(profile, dtype=dtype, device=gpu), path)
    return path


def test_a_profile_is_gone_by(job, tmp_path, capsys):
    hardware = {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
    path = job(LLAMA | {"hidden_size": 2048, "intermediate_size": 5632}, hardware=hardware, **TIGHT)
    usual = search_plan(path)
    slow = search_plan(path, profile=measured(tmp_path / "slow.json", share=0.01))
    assert slow.profile.intra_bytes_per_s < usual.profile.intra_bytes_per_s / 50
    assert slow.best_s > usual.best_s * 1.5
    code, result, _ = plan(capsys, path, "--profile", str(tmp_path / "slow.json"))
    assert code == 0
    assert result["profile"]["file"].endswith("slow.json")
    assert result["step_s"] == pytest.approx(slow.chosen.seconds)


@pytest.mark.parametrize(
    ("made", "words"),
    [({"dtype": "float16"}, "was measured in float16, but the plan computes in bfloat16"),
     ({"gpu": "a100-sxm-80gb"}, "was measured on a100-sxm-80gb, not on h100-sxm-80gb")],
)  # fmt: skip
def test_a_profile_of_something_else_is_refused(job, tmp_path, made, words):
    profile = measured(tmp_path / "profile.json", **made)
    with pytest.raises(PlanError, match=words):
        search_plan(job(), profile=profile)


def test_a_file_that_is_no_profile_is_refused(job, tmp_path, capsys):
    path = job()
    assert main(["plan", "-f", str(path), "--profile", str(tmp_path / "config.json")]) == 2
    assert "is not a profile" in capsys.readouterr().err
    assert main(["plan", "-f", str(path), "--profile", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_lock_depends_on_the_profile(job, tmp_path, capsys, monkeypatch):
    asked = []

    def noted(question, told):
        asked.append(question.profile)
        return fastest.decide(question, told)

    monkeypatch.setattr("meshplan.planner.objectives.complete.answer", noted)
    path = job()
    profile = measured(tmp_path / "profile.json")
    assert main(["plan", "-f", str(path), "--profile", str(profile), "-q"]) == 0
    content = yaml.safe_load(lock_path(path).read_text())
    assert content["inputs"]["profile_file"]["path"] == "profile.json"
    assert main(["check", "-f", str(path)]) == 0
    assert "planning" not in capsys.readouterr().err
    measured(profile, share=0.5)
    assert main(["check", "-f", str(path)]) == 0
    assert "was made with another state of profile.json: planning" in capsys.readouterr().err
    (again,) = asked
    assert again.intra_bytes_per_s == pytest.approx(0.5 * 450e9 * 0.75)  # It goes by the new one.
    _, result, err = plan(capsys, path, "--profile", str(profile), "--dry-run")
    assert "inputs.profile_file" in {each["field"] for each in result["changed"]}
    assert "the measured profile of the machine" in err
    profile.unlink()  # Where the job runs nobody measured; the choices hold.
    assert main(["check", "-f", str(path)]) == 0
    assert "planning" not in capsys.readouterr().err
