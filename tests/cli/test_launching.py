"""`meshplan launch` and `meshplan doctor`."""

from __future__ import annotations

import json
import os
import shlex
import sys

import pytest

from meshplan.cli import main
from meshplan.launch.machine import Checkup
from meshplan.runtime import doctor

PLAN = """version: 1
model: {entry: "meshplan.runtime.demo_model:build"}
hardware: {nodes: 2, gpus_per_node: 4}
mesh: {dp_replicate: 2, dp_shard: 4}
strategy: hybrid_shard
batch: {micro: 4, global: 32, seq_len: 128}
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """The only plan of the working directory, beside a script."""
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "MASTER_ADDR", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "train.py").write_text("")
    return "plan.yaml"


@pytest.fixture
def started(monkeypatch):
    """What is started in the place of this process: (program, command line, environment)."""
    calls = []
    monkeypatch.setattr(os, "execve", lambda *words: calls.append(words))
    return calls


def test_it_becomes_torchrun(plan, started, capfd):
    words = [
        "--host",
        "no-such-host",
        "--max-restarts",
        "3",
        "train.py",
        "--lr",
        "1",
        "-f",
        "x",
        "--json",
    ]
    main(["launch", "-f", plan, *words])
    ((program, command, environ),) = started
    assert (program, command) == (sys.executable, [
        *TORCHRUN, "--nnodes", "2", "--nproc-per-node", "4", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "no-such-host:29400", "--rdzv-id", "meshplan", "--max-restarts", "3",
        "train.py", "--lr", "1", "-f", "x", "--json"])  # fmt: skip
    assert environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert "PYTHONSAFEPATH" not in environ  # The script imports what lies beside it.
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == shlex.join(command)


def test_it_prints_the_command(plan, started, capfd):
    assert main(["launch", "--nodes", "1", "--gpus-per-node", "8", "--dry-run", "train.py"]) == 0
    out = capfd.readouterr().out
    size = ["--standalone", "--nnodes", "1", "--nproc-per-node", "8"]
    line = shlex.join([*TORCHRUN, *size, "train.py"])
    assert out.endswith(f" {line}\n")
    assert "TORCH_FR_BUFFER_SIZE=2000 " in out
    assert main(["launch", "--dry-run", "--host", "a", "--json", "-m", "pkg.train", "x"]) == 0
    result = json.loads(capfd.readouterr().out)["result"]
    assert result["command"][-3:] == ["-m", "pkg.train", "x"]
    assert result["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "60"
    assert not started


def test_the_nodes_of_a_slurm_job_meet_at_the_first(plan, monkeypatch, capfd):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[3-4]")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert main(["launch", "--dry-run", "train.py"]) == 0
    assert "--rdzv-endpoint gpu3:29400 --rdzv-id 12 " in capfd.readouterr().out


def test_a_script_for_sbatch_is_written_once(plan, started, tmp_path, capfd):
    assert main(["launch", "--slurm", "job.sbatch", "train.py"]) == 0
    assert capfd.readouterr().out == "wrote job.sbatch; next: sbatch job.sbatch\n"
    text = (tmp_path / "job.sbatch").read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\n" in text
    assert main(["launch", "--slurm", "job.sbatch", "train.py"]) == 2
    assert "this file exists already" in capfd.readouterr().err
    assert (tmp_path / "job.sbatch").read_text() == text
    assert not started


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "--host: 2 nodes must meet at one of them, which is not named"),
        ([], "launch needs the script to start"),
        (["--gpu", "8", "train.py"], "launch has no flag --gpu"),
        (["no.py"], "no.py: there is no such script"),
        (["--nodes", "3", "train.py"], "3 nodes x 4 ranks are 12, but the mesh has 8 devices"),
        (["--nodes", "0", "train.py"], "--nodes: 0 is not a number of at least 1"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts: -1 is less than 0"),
        (["--local", "--node-rank", "1", "train.py"], "--local starts every node"),
        (["--local", "--slurm", "x", "train.py"], "--local and --slurm exclude each other"),
        (["--json", "--local", "train.py"], "stdout is the script's"),
        (["--slurm", "no/x", "train.py"], "the script cannot be written: its folder does not"),
    ],
)
def test_bad_words(plan, started, capfd, words, message):
    assert main(["launch", *words]) == 2
    assert message in capfd.readouterr().err
    assert not started


@pytest.fixture
def quick(monkeypatch):
    """A doctor without its self-test, which starts processes."""
    found = Checkup("self-test", {"gloo": "2 processes"})
    monkeypatch.setattr(doctor, "examine_collectives", lambda: found)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_a_healthy_machine(quick, plan, capfd):
    assert main(["doctor", "-f", plan]) == 0
    out = capfd.readouterr().out
    for line in ("versions: ok", "shared memory: ok", "environment: ok", "plan: ok",
                 "  dry run: ByteLlama on dp_replicate 2 x dp_shard 4"):  # fmt: skip
        assert f"{line}\n" in out


def test_problems_are_an_answer(quick, plan, monkeypatch, capfd):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    assert main(["doctor"]) == 1
    out = capfd.readouterr().out
    assert "environment: 1 problem\n" in out
    assert "  problem: GLOO_SOCKET_IFNAME: there is no network interface eth99\n" in out
    assert main(["doctor", "--json", "-f", plan, "--set", "strategy=ddp"]) == 1
    result = json.loads(capfd.readouterr().out)["result"]
    assert not result["ok"]
    topics = {each["topic"]: each for each in result["topics"]}
    assert topics["environment"]["problems"][0]["file"] == "GLOO_SOCKET_IFNAME"
    assert "ddp uses dp_replicate only" in topics["plan"]["problems"][0]["what"]
    assert topics["versions"]["facts"]["torch"].startswith("2.")


def test_no_answer_without_a_plan(quick, capfd):
    assert main(["doctor", "-f", "none.yaml"]) == 2
    assert "none.yaml" in capfd.readouterr().err


def test_the_self_test_finds_a_wrong_sum(monkeypatch):
    sums = iter([(0, (3.0, 0.1)), (1, (2.0, 0.1))])
    monkeypatch.setattr(doctor, "run_ranks", lambda *words: sums)
    (problem,) = doctor.examine_collectives().problems
    assert "an all-reduce over gloo gives 3.0, not 3" in problem.what


@pytest.mark.wide
def test_the_self_test():
    found = doctor.examine_collectives()
    assert not found.problems
    assert found.facts["gloo"].startswith("2 processes sum 16.0 MiB in ")
