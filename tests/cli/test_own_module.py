"""A module of one's own, by `--model`, in the verbs that a config had to answer before."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from meshplan.cli.app import main
from meshplan.runtime.demo_model import ByteLlama

MODEL = ["--model", "meshplan.runtime.demo_model:ByteLlama"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A plan of the demo's model that says nothing of it."""
    path = tmp_path_factory.mktemp("own") / "plan.yaml"
    fields = {
        "version": 1,
        "hardware": {"nodes": 1, "gpus_per_node": 2, "gpu": "h100-sxm-80gb"},
        "mesh": {"dp_shard": 2},
        "strategy": "full_shard",
        "precision": "bf16-mixed",
        "batch": {"micro": 2, "accumulate": 1},
        "input": {"shape": [2, 64], "dtype": "int64"},
    }
    path.write_text(json.dumps(fields))
    return path


def answer(capsys, *words: str) -> dict:
    assert main([*words, *MODEL, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["result"]


def test_its_memory_is_explained_as_it_is_estimated(plan, capsys):
    explained = answer(capsys, "explain", "-f", str(plan), "memory")["memory"]
    estimated = answer(capsys, "estimate", "-f", str(plan))
    (group,) = estimated["groups"]
    assert (explained["terms"], explained["band"]) == (group["terms"], group["band"])


def test_its_blocks_are_explained(plan, capsys):
    found = answer(capsys, "explain", "-f", str(plan), "layers.1")["module"]
    assert {each["name"] for each in found["tensors"]} >= {"layers.1.attn.wq.weight"}


def test_two_plans_for_it_are_compared(plan, capsys):
    other = plan.with_name("other.yaml")
    other.write_text(plan.read_text().replace("full_shard", "zero1"))
    assert main(["diff", str(plan), str(other), *MODEL, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["result"]["fields"]


@pytest.mark.parametrize("what", ["pareto", "ladder"])
def test_its_candidates_are_drawn(plan, capsys, what):
    target = plan.with_name(f"{what}.svg")
    found = answer(capsys, "draw", "-f", str(plan), "--what", what, "-o", str(target))
    assert found["file"] == str(target)
    assert target.read_text().rstrip().endswith("</svg>")


def test_its_report_leaves_nothing_out(plan, capsys):
    target = plan.with_name("report.html")
    found = answer(capsys, "report", "-f", str(plan), "-o", str(target))
    assert found["left_out"] == []
    assert {"timeline", "pareto", "ladder"} <= set(found["pictures"])


class Talkative(ByteLlama):
    """One that prints when it is built and in its forward."""

    def __init__(self) -> None:
        super().__init__()
        print("built")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        print("forward")
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("verb", ["check", "plan"])
def test_what_it_prints_is_not_in_the_answer(plan, capsys, verb):
    assert main([verb, "-f", str(plan), "--model", f"{__name__}:Talkative", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["result"]
    assert "built" in err


@pytest.mark.parametrize("verb", ["estimate", pytest.param("verify", marks=pytest.mark.wide)])
def test_what_it_prints_in_other_processes_is_not_in_the_answer(plan, verb):
    words = [verb, "-f", str(plan), "--model", f"{__name__}:Talkative", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "meshplan", *words], capture_output=True, text=True
    )
    assert json.loads(done.stdout)["result"]
    assert "forward" in done.stderr
