"""The plan for other hardware beside the one that there is."""

from __future__ import annotations

import json

import pytest

import meshplan
from meshplan.api import planning
from meshplan.cli.app import main
from meshplan.errors import SpecError
from meshplan.planner.answers.reshard import reshard
from meshplan.planner.lock.lock import overrides
from tests.planner.test_planner import job

__all__ = ["job"]

HARDWARE = {"nodes": 1, "gpus_per_node": 4, "gpu": "h100-sxm-80gb", "inter": "50GB/s"}


def test_other_hardware_has_its_own_plan_and_the_way_there_its_bytes(job):
    path = job(hardware=HARDWARE)
    found = meshplan.retarget(path, {"nodes": 2, "gpu": "h200-sxm-141gb"})
    chosen = found.decision.chosen.plan
    assert (chosen.mesh.world_size, chosen.spec.hardware.gpu) == (8, "h200-sxm-141gb")
    old = meshplan.decide(path)
    assert old.mesh.world_size == 4
    assert found.moved == reshard(old, chosen)
    assert {("mesh.dp_shard", 4, 8)} <= {
        (each.what, each.old, each.new) for each in found.difference.fields
    }
    same = meshplan.retarget(path, "nodes=2,gpu=h200-sxm-141gb", old=chosen)
    assert same.moved.moved_bytes == 0
    assert same.difference.fields == ()


def asked(path, capsys, *flags):
    code = main(["plan", "-f", str(path), "--dry-run", "-q", "--json", *flags])
    return code, json.loads(capsys.readouterr().out)["result"]


def test_what_if_is_the_same_plan_there_and_the_best_one_there(job, capsys):
    path = job(hardware=HARDWARE)
    flags = [each for words in ("gpu=h200", "headroom=0.999") for each in ("--what-if", words)]
    code, found = asked(path, capsys, *flags)
    assert code == 0
    there, less = found["what_if"]
    chosen = planning.search_plan(path)
    # By the same constants: else an H200 would have its own, of steps that were timed there.
    alike = ["hardware.gpu=h200", "profile=generic"]
    same = planning.search_plan(path, [*overrides(chosen.chosen.stated), *alike])
    best = planning.search_plan(path, alike)
    assert there["same"]["step_s"] == same.chosen.seconds
    assert there["same"]["peak_bytes"] == same.chosen.memory.worst.band[1]
    assert there["anew"]["step_s"] == best.chosen.seconds
    assert there["anew"]["chosen"] == best.chosen.stated
    assert there["same"]["limit_bytes"] > found_limit(chosen)
    assert (there["why"], there["why_not"]) == ("", "")
    assert (less["same"], less["anew"]) == (None, None)
    assert less["why"].startswith("does not fit into")
    assert less["why_not"].startswith("nothing fits into")
    assert not path.with_name(path.stem + ".lock.yaml").exists()


def found_limit(decision):
    return decision.chosen.memory.limit_bytes


def test_every_verb_with_seconds_says_whose_they_are(job, capsys):
    path = job(hardware={**HARDWARE, "nodes": 2, "inter": None}, profile="megatron")
    picture = str(path.with_name("pareto.png"))
    for words in (
        ["explain", "why-not", "strategy=zero2"],
        ["draw", "--what", "pareto", "-o", picture],
    ):
        assert main([*words, "-f", str(path)]) == 0
        told = capsys.readouterr().err.replace("\n", " ")
        assert "step times are estimated by constants for megatron assuming 50 GB/s" in told
    report = meshplan.make_report(path).html
    assert "Step times are estimated by constants for megatron assuming 50 GB/s" in report
    other = path.with_name("other.yaml")
    other.write_text(path.read_text().replace("megatron", "generic"))
    assert main(["diff", str(path), str(other), "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)["result"]["fields"]
    assert {"what": "profile", "old": "megatron", "new": "generic"} in fields


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--what-if", "colour=red"], "--what-if: 'colour=red' does not set a hardware field"),
        (["-o", "none/l.yaml"], "none/l.yaml: the lock cannot be written: its folder does not"),
        (["--what-if", "gpu=foo"], "\n--what-if: hardware.gpu: gpu 'foo' is not in the"),
        (["--retarget", "gpu=foo"], "\n--retarget: hardware.gpu: gpu 'foo' is not in the"),
        (["--what-if", "gpu=foo", "--set", "batch.x=1"], "\n--set: batch.x: unknown key"),
        (["--what-if", "gpu=rtx4090"], "did you mean 'rtx-4090-24gb'"),
        (["--what-if", "gpu=h200", "--tokens", "1e12", "--days", "3"], "leave --what-if out"),
    ],
)
def test_a_typing_error_is_told_before_the_search(flags, says, job, capsys, monkeypatch):
    monkeypatch.setattr(planning, "search_plan", None)
    assert main(["plan", "-f", str(job(hardware=HARDWARE)), *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.wide
def test_where_nothing_fits_there_is_nothing_to_compare(job):
    found = meshplan.retarget(job(hardware=HARDWARE), {"headroom": 0.999})
    assert (found.decision.chosen, found.difference, found.moved) == (None, None, None)


@pytest.mark.parametrize("bad", ["colour=red", "nodes", "", {}])
def test_what_is_no_hardware_is_refused(bad, job):
    with pytest.raises(SpecError):
        meshplan.retarget(job(hardware=HARDWARE), bad)
