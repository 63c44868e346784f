"""Real launches: a user's script under torchrun, on one node and on two.

The very script that torchrun starts also runs as plain `python`, as a job of one: its losses are
what the others must find.
"""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MESHPLAN = (sys.executable, "-m", "meshplan")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TIMEOUT_S = 120

SCRIPT = """
import json, sys
import torch
import meshplan
from meshplan.runtime.demo_model import ByteLlama, next_byte_loss

torch.manual_seed(0)
model = meshplan.parallelize(ByteLlama(), json.loads(sys.argv[1]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
text = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(1))
x, y = meshplan.local_batch(model, (text[:, :-1], text[:, 1:]))
losses = [meshplan.train_step(model, optimizer, x, y, next_byte_loss) for step in range(3)]
if torch.distributed.get_rank() == 0:
    print(json.dumps({"losses": losses, "mesh": model.meshplan.plan.mesh.sizes}))
"""

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "train.py"
    path.write_text(SCRIPT)
    return path


def start(*command: object) -> subprocess.Popen[str]:
    """A command in a clean environment: what a pool of the tests has set must not reach it."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.Popen(
        [str(word) for word in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks before it goes
        out, errors = process.communicate()
        pytest.fail(f"no end after {TIMEOUT_S} s:\n{errors}")
    return process.returncode, out, errors


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    code, out, errors = result_of(process)
    assert code == 0, errors
    line: dict[str, Any] = json.loads(out)
    return line


@pytest.fixture(scope="module")
def one_process(script: Path) -> list[float]:
    """The losses of plain `python train.py`."""
    answered = answer(start(sys.executable, script, '{"version": 1, "strategy": "full_shard"}'))
    assert answered["mesh"] == {"dp_shard": 1}
    return list(answered["losses"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_two_ranks(script: Path, one_process: list[float]) -> None:
    plan = '{"version": 1, "strategy": "full_shard"}'
    answered = answer(start(*TORCHRUN, "--standalone", "--nproc-per-node", 2, script, plan))
    assert answered["mesh"] == {"dp_shard": 2}
    assert answered["losses"] == pytest.approx(one_process, abs=1e-6)
    assert one_process[2] < one_process[0]


@pytest.mark.wide
def test_two_nodes_are_seen_as_such(script: Path, one_process: list[float]) -> None:
    """No mesh is stated: hybrid_shard reads from the launchers what one node is."""
    port = free_port()
    nodes = [
        start(
            *TORCHRUN,
            *("--nnodes", 2, "--node-rank", node, "--nproc-per-node", 2),
            *("--master-addr", "127.0.0.1", "--master-port", port),
            *(script, '{"version": 1, "strategy": "hybrid_shard"}'),
        )
        for node in range(2)
    ]
    try:
        answered = answer(nodes[0])
        code, out, errors = result_of(nodes[1])
    finally:
        for node in nodes:
            node.terminate()
    assert (code, out) == (0, ""), errors
    assert answered["mesh"] == {"dp_replicate": 2, "dp_shard": 2}
    assert answered["losses"] == pytest.approx(one_process, abs=1e-6)


def test_a_plan_for_another_number_of_ranks_ends_the_job(script: Path) -> None:
    plan = '{"version": 1, "mesh": {"dp_shard": 3}}'
    code, out, errors = result_of(
        start(*TORCHRUN, "--standalone", "--nproc-per-node", 2, script, plan)
    )
    assert (code, out) == (1, "")
    assert (
        "meshplan: 1 problem\n"
        "<mapping>: mesh: the mesh has 3 devices, but 2 are available: WORLD_SIZE is 2\n"
        "    fix: make the product 2, such as dp_shard: 2, or start 3 ranks: torchrun "
        f"--nproc-per-node 3 {script} "
    ) in "\n".join(line.removeprefix("[rank0]: ") for line in errors.split("\n"))


def test_a_problem_stands_last_and_without_a_traceback(tmp_path: Path) -> None:
    """Which seeded bug would this catch? A hook that prints on every rank, or no error file."""
    path = tmp_path / "few.py"
    plan = {"version": 1, "mesh": {"dp_shard": 8}, "strategy": "full_shard"}
    path.write_text(
        f"import torch, meshplan\nmeshplan.parallelize(torch.nn.Linear(8, 8), {plan})\n"
    )
    run = start(*TORCHRUN, "--nproc-per-node", 2, path, "--lr", 1)
    errors = run.communicate(timeout=TIMEOUT_S)[1]
    assert run.returncode != 0
    ranks, _, summary = errors.partition("few.py FAILED")
    fix = f"start 8 ranks: torchrun --nproc-per-node 8 {path} --lr 1"
    assert ranks.count(fix) == 1
    assert fix in summary.partition("Root Cause")[2]
    assert f"at {path}:2: meshplan.parallelize" in summary
    assert "meshplan/runtime" not in errors


def lines_of(job: subprocess.Popen[str]) -> list[str]:
    """What the example prints, to its end."""
    out, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, err[-3000:]
    return [line for line in out.splitlines() if line.startswith("epoch")]


def test_the_example_goes_on_under_another_plan_after_it_was_killed(tmp_path: Path) -> None:
    example = ROOT / "examples/train.py"
    plans = {name: tmp_path / f"{name}.yaml" for name in ("ddp", "full_shard")}
    for name, path in plans.items():
        path.write_text(f"version: 1\nstrategy: {name}\n")
    whole = lines_of(start(sys.executable, example, plans["ddp"], tmp_path / "whole"))
    assert [line.partition(":")[0] for line in whole] == [
        "epoch 0, step 10", "epoch 1, step 20", "epoch 1, step 30"]  # fmt: skip
    nodes = ("--local", "--nodes", 2, "--gpus-per-node", 1)
    job = start(*MESHPLAN, "launch", *nodes, example, plans["full_shard"], tmp_path / "cut")
    assert job.stdout is not None
    while not job.stdout.readline().startswith("epoch 1, step 20"):
        assert job.poll() is None
    while not list((tmp_path / "cut").glob("step-00000020")):
        assert job.poll() is None
    job.terminate()  # Both launchers pass it on to their ranks, which save.
    job.communicate()
    stopped_at = max(int(path.name.partition("-")[2]) for path in (tmp_path / "cut").glob("step-*"))
    again = lines_of(start(sys.executable, example, plans["ddp"], tmp_path / "cut"))
    assert again == whole[2:]
    assert stopped_at > 20
    with open(tmp_path / "cut" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 33))
    assert [row["step"] for row in rows if row["test_loss"]] == ["16", "32"]
