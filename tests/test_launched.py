"""Real jobs through `meshplan launch`: nodes as launchers and as network namespaces, SLURM tasks.

Which seeded bug would this catch? Launchers that make two jobs, ranks of which one stops alone, a
state that is saved too late, a restart from the beginning, a rank that waits for a missing one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshplan.state.folder import steps_in
from tests.helpers.launched import train
from tests.helpers.nodes import INTERFACE, nodes, why_none

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests/helpers/launched.py"
MESHPLAN = (sys.executable, "-P", "-m", "meshplan")
TIMEOUT_S = 70
ENDLESS = 10**6
PLAN = {
    "version": 1, "hardware": {"nodes": 2, "gpus_per_node": 2}, "strategy": "hybrid_shard",
    "mesh": {"dp_replicate": 2, "dp_shard": 2},
}  # fmt: skip

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(PLAN))
    return path


def start(*command: object, **variables: str) -> subprocess.Popen[str]:
    """A command in a clean environment: what a pool of the tests has set must not reach it."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
            "GLOO_SOCKET_IFNAME")  # fmt: skip
    environ = {key: value for key, value in os.environ.items() if key not in ours}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [str(word) for word in command], env=environ | variables, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def ended(job: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], str]:
    """(exit code, what each rank printed at its end, by rank; stderr) of a job."""
    try:
        out, err = job.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        out, err = job.communicate()
        pytest.fail(f"no end after {TIMEOUT_S} s:\n{out}\n{err[-3000:]}")
    ranks = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return job.returncode, sorted(ranks, key=lambda rank: rank["RANK"]), err


def places(ranks: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return [tuple(rank[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
            for rank in ranks]  # fmt: skip


TWO_BY_TWO = [(0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2)]


@pytest.mark.wide  # `test_torchrun.py` has an example in this form.
def test_two_nodes_on_this_machine_save_when_they_are_stopped(plan, pool, tmp_path):
    states = tmp_path / "states"
    job = start(*MESHPLAN, "launch", "-f", plan, "--local", SCRIPT, plan, states, ENDLESS)
    assert job.stdout is not None
    assert job.stdout.readline() == "begun\n"
    job.send_signal(signal.SIGTERM)
    code, ranks, err = ended(job)
    assert code != 0  # As torchrun, which was ended by a signal.
    assert "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d" in err
    assert places(ranks) == TWO_BY_TWO
    (alone,) = pool(1).run(train, {"version": 1, "strategy": "full_shard"}, tmp_path / "alone", 3)
    for rank in ranks:
        assert rank["losses"][: len(alone)] == pytest.approx(alone, abs=1e-6)
    step = ranks[0]["steps"]
    assert steps_in(states) == [step]
    # The job goes on under another plan, with the losses of one that was never stopped.
    one = {"version": 1, "strategy": "ddp"}
    (more,) = pool(1).run(train, one, states, step + 3)
    (whole,) = pool(1).run(train, one, tmp_path / "whole", step + 3)
    assert len(more) == 3
    assert more == pytest.approx(whole[-3:], abs=1e-5)


@pytest.mark.wide
def test_a_killed_rank_starts_all_again_from_the_newest_state(plan, pool, tmp_path):
    plan.write_text(yaml.safe_dump({"version": 1, "strategy": "full_shard"}))
    words = ["-f", plan, "--nodes", 1, "--gpus-per-node", 2, "--max-restarts", 1]
    job = start(*MESHPLAN, "launch", *words, SCRIPT, plan, tmp_path / "states", 6, DIES="1")
    code, ranks, err = ended(job)
    assert code == 0, err[-3000:]
    assert [rank["steps"] for rank in ranks] == [4, 4]
    (whole,) = pool(1).run(train, {"version": 1, "strategy": "ddp"}, tmp_path / "whole", 6)
    assert ranks[0]["losses"][-1] == pytest.approx(whole[-1], abs=1e-5)


@pytest.mark.wide
def test_two_nodes_as_two_network_namespaces(plan, pool, tmp_path):
    """Each node sees one interface, and the other node only through it."""
    if why := why_none():
        pytest.skip(why)
    with nodes(2) as made:
        words = (*MESHPLAN, "launch", "-f", plan, "--host", made.host, SCRIPT, plan,
                 tmp_path / "states", 3)  # fmt: skip
        jobs = [start(*made.enter(node), *words, GLOO_SOCKET_IFNAME=INTERFACE) for node in range(2)]
        found = [ended(job) for job in jobs]
    assert [code for code, _, _ in found] == [0, 0], found[0][2][-3000:]
    ranks = sorted((rank for _, own, _ in found for rank in own), key=lambda rank: rank["RANK"])
    assert places(ranks) == TWO_BY_TWO
    (alone,) = pool(1).run(train, {"version": 1, "strategy": "full_shard"}, tmp_path / "alone", 3)
    assert all(rank["losses"][:3] == pytest.approx(alone, abs=1e-6) for rank in ranks)


SRUN = """#!/bin/bash
# As srun: a task for each of two nodes with two.
count=${1#--ntasks-per-node=}
while [[ $1 == -* ]]; do shift; done
export SLURM_NTASKS=$((2 * count)) SLURM_NTASKS_PER_NODE=$count SLURM_NNODES=2 SLURM_STEP_ID=0
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % count)) SLURM_NODEID=$((rank / count)) "$@" &
done
for job in $(jobs -p); do wait "$job" || exit; done
"""


@pytest.mark.wide
@pytest.mark.parametrize("form", ["torchrun", "tasks"])
def test_a_slurm_script_trains_in_both_forms(plan, tmp_path, form):
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho localhost\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script, states = tmp_path / "job.sbatch", tmp_path / "states"
    write = start(*MESHPLAN, "launch", "-f", plan, "--slurm", script, SCRIPT, plan, states, 3)
    assert write.wait(TIMEOUT_S) == 0
    job = start(
        "bash", script, form, PATH=f"{tmp_path}:{os.environ['PATH']}", GLOO_SOCKET_IFNAME="lo",
        SLURM_JOB_ID=str(os.getpid()), SLURM_JOB_NODELIST="localhost",
    )  # fmt: skip
    code, ranks, err = ended(job)
    assert code == 0, err[-3000:]
    assert places(ranks) == TWO_BY_TWO
    assert len({tuple(rank["losses"]) for rank in ranks}) == 1


MISSING = """
import datetime, torch, meshplan
from meshplan.runtime.base import mesh
mesh.JOIN_TIMEOUT = datetime.timedelta(seconds=5)
meshplan.parallelize(torch.nn.Linear(4, 4), {"version": 1, "strategy": "ddp"})
"""


@pytest.mark.wide
def test_a_missing_rank_is_one_error_on_every_rank():
    variables = {"SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NAME": "x",
                 "SLURM_JOB_ID": str(os.getpid()), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    jobs = [
        start(sys.executable, "-c", MISSING, SLURM_PROCID=rank, SLURM_LOCALID=rank, **variables)
        for rank in ("0", "2")
    ]
    for job in jobs:
        code, _, err = ended(job)
        assert code == 1
        assert "SLURM_NTASKS: rank 1 of 3 did not join within 5 s\n    fix: see if" in err
