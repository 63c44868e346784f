"""`meshplan demo`, end to end: real processes, real text, real bytes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn

from meshplan.cli.app import main
from meshplan.memory import StateBytes
from meshplan.plan.plan import make_plan
from meshplan.render.demo import agrees, bytes_to_text, losses_to_text
from meshplan.runtime.demo import _batches
from meshplan.runtime.trace.structure import graph_of
from meshplan.spec.reader import load_spec

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "meshplan", "demo"]


@pytest.mark.slow
def test_the_demo():
    done = subprocess.run(
        [*DEMO, "--steps", "3"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith((ROOT / "tests/golden/show_hybrid_2x4.txt").read_text())
    assert done.stdout.endswith("measured and predicted: ok on every rank, to the byte\n")
    rows = re.findall(r"^ +(\d) +(\d\.\d{6}) +(\d\.\d{6}) +(\S+)$", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert 5.5 < float(rows[0][1]) < 6.0
    assert float(rows[2][1]) < 4.5
    assert all(abs(float(a) - float(b)) < 1e-4 for _, a, b, _ in rows)
    held = re.findall(r"^ +(\d) .* 3,216,028  3,216,028 +0$", done.stdout, re.MULTILINE)
    assert held == list("01234567")
    assert done.stderr.splitlines() == [
        "note: 8 processes on the CPU of this machine, and gloo between them",
        *(f"{who}: step {step}/3, loss {float(rows[step - 1][1]):.3f}"
          for who in ("8 ranks", "1 process") for step in (1, 2, 3)),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.wide
def test_the_demo_as_json_with_another_plan():
    mesh = ["--set", "mesh={dp_shard: 2}", "--set", "hardware.gpus_per_node=2"]
    done = subprocess.run(
        [*DEMO, "--plan", "zero2", *mesh, "--set", "batch={micro: 2}", "--steps", "2", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["schema"] == "demo/1"
    result = content["result"]
    assert (result["ok"], result["plan"]) == (True, "plans/zero2.yaml")
    assert len(result["losses"]) == len(result["losses_of_one_process"]) == 2
    assert result["held_bytes"] == result["predicted_bytes"]
    assert len(result["held_bytes"]) == 2


def processes_of(group: int) -> list[str]:
    """What runs in a process group; what waits to be reaped does not."""
    out = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, its_group = rest.split()[:3]
        if int(its_group) == group and state != "Z":
            out.append(f"{name} {state}")
    return out


@pytest.mark.slow
@pytest.mark.wide
def test_ctrl_c_ends_everything_quietly():
    demo = subprocess.Popen(
        [*DEMO, "--steps", "1000"], cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert demo.stderr is not None
        for line in demo.stderr:
            if "step 1/1000" in line:
                break
        assert len(processes_of(demo.pid)) >= 10
        os.killpg(demo.pid, signal.SIGINT)
        _, err = demo.communicate(timeout=20)
        assert (demo.returncode, err) == (130, "meshplan: interrupted\n")
        deadline = time.monotonic() + 5
        while processes_of(demo.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_of(demo.pid) == []
    finally:
        if processes_of(demo.pid):
            os.killpg(demo.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--plan", "full_shard", "--set", "hardware.gpus_per_node=64", "--set", "batch="],
            "plans/full_shard.yaml: mesh: the plan has 64 ranks, and the demo starts at most 16\n"
            "    fix: use a smaller mesh, for example with --set mesh.dp_shard=2",
        ),
        (
            ["--set", "optimizer=lion"],
            "--set: optimizer: the demo has no optimizer lion\n    fix: use adamw, adam, sgd, "
            "sgd_momentum, adagrad, rmsprop: --set optimizer=adamw",
        ),
        (
            ["--steps", "1"],
            "the demo needs at least 2 steps: the optimizer has no state in the first one\n"
            "    fix: use --steps 2 or more",
        ),
        (
            ["-f", "plans/tp.yaml", "--plan", "tp"],
            "-f and --plan both name the plan\n    fix: leave one of them out",
        ),
    ],
)
def test_what_it_refuses(flags, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["demo", *flags]) == 2
    assert capsys.readouterr() == ("", f"meshplan: 1 problem\n{message}\n")


def test_a_batch_is_all_that_the_ranks_take_in_a_step():
    spec = {"version": 1, "mesh": {"dp_shard": 2}, "batch": {"micro": 3, "accumulate": 4}}
    plan = make_plan(load_spec(spec), graph_of(nn.Linear(4, 4)), world_size=2)
    ((inputs, targets),) = _batches(plan, 1)
    assert inputs.shape == targets.shape == (3 * 4 * 2, 128)
    assert inputs[:, 1:].equal(targets[:, :-1])


def test_a_difference_is_said_and_is_no():
    losses, alone = [5.0, 4.0, 3.0], [5.0, 4.0, 3.001]
    assert not agrees(losses, alone, 1e-4)
    assert not agrees([float("nan")], [5.0], 1e-4)
    assert losses_to_text(losses, alone, 8, 1e-4)[-1] == (
        "largest difference over all 3 steps: 1.0e-03, 1e-04 allowed: DIFFERENT"
    )


def test_bytes_that_cancel_out_still_differ():
    held, said = StateBytes(100, 200, 300, 0), StateBytes(100, 201, 299, 0)
    lines = bytes_to_text([said, held], [said, said])
    assert lines[-2].split() == ["1", "100", "200", "300", "600", "600", "2"]
    assert lines[-1] == "measured and predicted: DIFFERENT on 1 rank"


def test_long_runs_are_shown_in_a_dozen_rows():
    losses = [float(step) for step in range(100)]
    lines = losses_to_text(losses, losses, 8, 1e-4)
    assert 10 <= len(lines) <= 16
    assert lines[2].split()[0] == "1"
    assert lines[-2].split()[0] == "100"
