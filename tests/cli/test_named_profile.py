"""`profile: NAME`: seconds as of another framework's code, in the plan file and as a flag.

Which seeded bug would this catch? A flag that is passed over, a verb that keeps the generic
constants, a lock that still counts as current under another profile, an error that is not said.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshplan.cli.app import main
from meshplan.cost.calibration import write_profile
from meshplan.cost.profile import profile_of, runs_of
from meshplan.layout.hardware import Cluster, find_device
from meshplan.planner.lock.lock import profile_of_lock
from meshplan.spec.reader import load_spec
from tests.planner.test_planner import LLAMA, job

__all__ = ["job"]

# Large enough that the device, not its host, sets the pace.
WIDE = LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}

CLUSTER = Cluster(device=find_device("a100-sxm-80gb"), nodes=1, gpus_per_node=8)
STATED = {
    "hardware": {"nodes": 1, "gpus_per_node": 8, "gpu": "a100-sxm-80gb"},
    "mesh": {"dp_shard": 8}, "strategy": "full_shard", "precision": "bf16-mixed",
    "batch": {"micro": 1, "accumulate": 1, "seq_len": 4096}, "activation_checkpointing": "none",
}  # fmt: skip


@pytest.fixture
def path(job):
    return str(job(WIDE, **STATED))


def answer(capsys, *words):
    assert main([*words, "--json", "-q"]) == 0
    return json.loads(capsys.readouterr().out)["result"]


def test_flag_and_key_say_the_same(path, capsys):
    plan = ("plan", "-f", path, "--dry-run")
    generic = answer(capsys, *plan)
    named = answer(capsys, *plan, "--profile", "megatron")
    assert generic["profile"]["framework"] == "native"
    assert generic["profile"]["runs"] is None
    assert named["profile"]["framework"] == "megatron"
    assert named["profile"]["runs"]["num_runs"] == runs_of("megatron", "a100-sxm-80gb")["num_runs"]
    assert named["step_s"] < generic["step_s"]
    assert answer(capsys, *plan, "--set", "profile=megatron")["step_s"] == named["step_s"]
    # The last of two statements holds.
    twice = answer(capsys, *plan, "--profile", "megatron", "--set", "profile=generic")
    assert twice["step_s"] == generic["step_s"]


def test_the_answer_says_by_which_runs_and_how_far_off_they_are(path, capsys):
    assert main(["plan", "-f", path, "--dry-run", "--profile", "torchtitan", "-q"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    off = runs_of("torchtitan", "a100-sxm-80gb")["left_out"]["median"]
    assert "runs on h100-sxm-96gb (none on a100-sxm-80gb, where the error is not known) of" in out
    assert f"{off:.1%} off in the median" in out
    assert main(["plan", "-f", path, "--dry-run", "-q"]) == 0
    assert "published runs" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--profile", "megatrom"), "megatrom cannot be read: there is no such file"),
        (("--set", "profile=megatrom"), "'megatrom' is not a profile"),
        (("--profile", "megatron", "--set", "precision=32-true"), "computed in bfloat16"),
    ],
)
def test_what_is_no_profile_for_the_plan_is_said(path, words, says, capsys):
    assert main(["plan", "-f", path, "--dry-run", *words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "megatron" in err


def test_a_flag_prices_the_locked_plan_and_a_key_has_it_searched_anew(job, capsys):
    path = job(WIDE, **STATED | {"batch": {"global": 64, "seq_len": 4096}, "mesh": "auto"})
    assert main(["plan", "-f", str(path), "-q"]) == 0
    named = ["diff", str(path), str(path), "--profile", "megatron"]
    assert main(named) == 0
    assert "plan.lock.yaml was made" not in capsys.readouterr().err
    content = json.loads(path.read_text()) | {"profile": "megatron"}
    path.write_text(json.dumps(content))
    assert main(["estimate", "-f", str(path)]) == 0
    assert "plan.lock.yaml was made with profile: generic" in capsys.readouterr().err
    assert main(["plan", "-f", str(path), "-q"]) == 0
    capsys.readouterr()
    assert main(["estimate", "-f", str(path)]) == 0
    assert "plan.lock.yaml was made" not in capsys.readouterr().err


def test_what_is_named_goes_before_the_file_that_a_lock_was_made_with(path, capsys, tmp_path):
    mine = tmp_path / "mine.json"
    write_profile(replace(profile_of(CLUSTER), efficiency=0.1, residual=0.01), mine)
    assert main(["plan", "-f", path, "-q", "--profile", str(mine)]) == 0
    capsys.readouterr()
    assert profile_of_lock(path, load_spec(path)) == mine
    assert profile_of_lock(path, load_spec(path, ["profile=generic"])) is None
