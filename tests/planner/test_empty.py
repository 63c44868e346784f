"""Where nothing is left to choose from: why, in words that help, and fixes that work."""

from __future__ import annotations

import itertools
import json

import pytest

from meshplan.api.planning import fewest_devices, search_plan
from meshplan.cli.app import main
from meshplan.errors import PlanError
from meshplan.layout.hardware import find_device
from meshplan.planner.space.space import EmptySpaceError
from tests.planner.test_planner import PLAN, job

__all__ = ["job"]

MANY = {"nodes": 512, "gpus_per_node": 8, "gpu": "h100-sxm-80gb", "inter": "50GB/s"}
WITHOUT_CP = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "tp"), "auto")
ALONE = {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}


def test_samples_that_no_mesh_shares_out_are_the_reason(job, capsys):
    path = job(hardware=MANY, mesh=WITHOUT_CP)
    with pytest.raises(EmptySpaceError) as caught:
        search_plan(path)
    (problem,) = caught.value.problems
    what = "no mesh of 4,096 devices can split 64 samples: its data ranks need at least 256"
    assert problem.what == what
    assert problem.origin.path == "batch.global"
    assert problem.fix == "set batch.global to a multiple of 256, or use fewer devices"
    assert search_plan(path, ["batch.global=256"]).chosen is not None
    assert main(["plan", "-f", str(path), "-q"]) == 1
    out = capsys.readouterr().out
    assert what in " ".join(out.split())
    assert "not in the search space\n  mesh.tp=8: " in out
    assert max(map(len, out.splitlines()[1:])) <= 100
    assert main(["plan", "-f", str(path), "-q", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["rejected"][0] == {"what": "everything", "why": what}
    assert len(result["rejected"]) > 3
    assert result["more_devices"].startswith("no mesh of 65,536 devices")


@pytest.mark.parametrize(
    ("batch", "least"),
    [({"micro": 4}, 4096), ({"accumulate": 2}, 2048), ({"micro": 2, "accumulate": 2}, 4096)],
)
def test_what_is_stated_of_the_batch_counts_among_the_samples(job, batch, least):
    mesh = {"tp": 4, "dp_shard": "auto"}
    path = job(hardware=MANY, batch=PLAN["batch"] | batch, mesh=mesh)
    with pytest.raises(EmptySpaceError) as caught:
        search_plan(path)
    assert f"its data ranks need at least {least:,}" in caught.value.problems[0].what
    assert search_plan(path, [f"batch.global={least}"]).chosen is not None


def test_what_is_not_known_of_the_machine_is_said_first_and_where(job, capsys):
    # The nodes of this GPU differ too much for a usual network.
    hardware = {key: value for key, value in MANY.items() if key != "inter"}
    path = job(hardware=hardware | {"gpu": "l40s-48gb"})
    assert main(["plan", "-f", str(path)]) == 2
    err = capsys.readouterr().err
    assert "plan.yaml:1:64: hardware: the plan states no bandwidth between nodes" in err
    assert "configurations" not in err


def test_the_usual_network_is_assumed_and_told(job, capsys):
    """With it, a plan is the one that states the same bandwidth."""
    hardware = {**ALONE, "nodes": 2, "inter": "50GB/s"}
    stated = search_plan(job(hardware=hardware))
    path = job(hardware={key: value for key, value in hardware.items() if key != "inter"})
    assumed = search_plan(path)
    assert stated.chosen is not None
    assert assumed.chosen is not None
    assert assumed.chosen.seconds == stated.chosen.seconds
    assert stated.profile.assumed_network == ""
    assert main(["plan", "-f", str(path), "-q", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "assumed: 50 GB/s per GPU between nodes (NVIDIA DGX H100 datasheet" in said
    assert "if yours differs, state hardware.inter" in said


def test_more_nodes_that_nothing_is_known_of_are_no_silence(job, capsys):
    path = job(hardware=ALONE | {"gpu": "l40s-48gb", "headroom": 0.99})
    assert main(["plan", "-f", str(path)]) == 1
    out, err = capsys.readouterr()
    said = " ".join(out.split())
    assert "with more devices: the plan states no bandwidth between nodes, and there is no" in said
    assert "usual one for nodes of l40s-48gb; add inter:" in said
    assert err.count("looking for a plan on") == 1
    with pytest.raises(PlanError, match="states no bandwidth between nodes"):
        fewest_devices(path, ["hardware.headroom=0"], tokens="1e13", days="1")


def test_a_training_is_told_in_words_and_units(job, capsys):
    path = job(mesh={"dp_shard": "auto"}, strategy=None, hardware=PLAN["hardware"])
    words = ["plan", "-f", str(path), "-q", "--dry-run", "--tokens", "1e9", "--days", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "\n1.00 B tokens in 1 day\n" in out
    line = next(line for line in out.splitlines() if "<- the fewest" in line)
    assert line.split()[2:4] == ["1", "node"]
    assert " min " in line
    assert "0.0 days" not in out


def test_nothing_stands_after_the_answer_but_what_was_left_out(job, capsys):
    """No empty lines in a row, and none at the end."""
    one = {"nodes": 1, "gpus_per_node": 1, "gpu": "h100-sxm-80gb"}
    for fields in ({}, {"solve": {"objective": "memory"}}, {"hardware": one}):
        assert main(["plan", "-f", str(job(**fields)), "-q", "--dry-run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1]
        assert all(one or two for one, two in itertools.pairwise(lines))
    assert "on rank 0, in" in "\n".join(lines)


def test_a_gpu_of_ones_own_is_planned_as_a_listed_one(job, capsys):
    """The facts of an RTX 4090 in place of its name: the same seconds, of every plan."""
    listed = find_device("rtx-4090-24gb")
    hardware = {"nodes": 1, "gpus_per_node": 8, "intra": "31GB/s"}
    own = {
        "memory": listed.usable_bytes, "bf16": listed.peak_flops["bfloat16"],
        "fp32": listed.peak_flops["float32"], "hbm": "1008GB/s",
    }  # fmt: skip
    pinned = {
        "mesh": {"dp_shard": 8}, "strategy": "full_shard", "activation_checkpointing": "full",
        "batch": {"micro": 1, "accumulate": 2, "seq_len": 1024},
    }  # fmt: skip
    named = search_plan(job(hardware={**hardware, "gpu": listed.name}, **pinned))
    path = job(hardware={**hardware, "gpu": own}, **pinned)
    found = search_plan(path)
    assert named.chosen is not None
    assert found.chosen is not None
    assert found.chosen.seconds == named.chosen.seconds
    assert main(["plan", "-f", str(path), "-q"]) == 0
    assert main(["check", "-f", str(path)]) == 0
    assert main(["estimate", "-f", str(path), "-q"]) == 0
    assert "of 23.6 GiB" in capsys.readouterr().out


def test_what_is_not_known_of_a_gpu_of_ones_own_is_asked_for(job, capsys):
    gpu = {"memory": "48GB"}
    path = job(hardware={"nodes": 1, "gpus_per_node": 8, "gpu": gpu})
    assert main(["plan", "-f", str(path)]) == 2
    err = capsys.readouterr().err
    for what in ("bfloat16 throughput", "memory bandwidth", "bandwidth between the GPUs of one"):
        assert what in err
    assert "bf16=" in err
    assert "hbm=" in err


def test_features_that_do_not_go_together_are_the_reason(job):
    """The answer was that no mesh satisfies the plan, and to leave cp open."""
    mesh = {"pp": 2, "dp_shard": 2, "cp": 2}
    with pytest.raises(PlanError) as caught:
        search_plan(job(hardware=ALONE, mesh=mesh))
    (problem,) = caught.value.problems
    assert problem.what.startswith("cp and pp do not go together")
    assert problem.origin.path == "mesh.cp"
    # What is open clashes with nothing: the search has each of the two.
    open_ = search_plan(job(hardware=ALONE, mesh=dict.fromkeys(mesh, "auto")))
    assert open_.chosen is not None
    split = {"schedule": "InterleavedZeroBubble", "virtual": 2}
    found = search_plan(job(hardware=ALONE, mesh={"pp": 2, "dp_shard": 4}, pipeline=split))
    assert found.chosen is not None
