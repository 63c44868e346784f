"""The torchrun line of a plan, its environment, and scripts for sbatch."""

from __future__ import annotations

import socket
import subprocess
from importlib import util
from pathlib import Path

import pytest

from meshplan.errors import PlanError, SpecError
from meshplan.launch.command import (
    TorchrunJob,
    check_script,
    flight_recorder,
    job_size,
    own_address,
    serves_unasked,
)
from meshplan.launch.slurm import check_new, slurm_script, write_slurm_script
from meshplan.spec.reader import load_spec


def spec_of(**stated):
    return load_spec({"version": 1, **stated})


HARDWARE = {"nodes": 2, "gpus_per_node": 4, "gpu": "h100-sxm-80gb"}
MESH = {"dp_replicate": 2, "dp_shard": 4}


def line(**stated):
    job = TorchrunJob(**{"nodes": 2, "ranks_per_node": 4, "script": ["t.py", "--lr", "1"]} | stated)
    return " ".join(job.command("python"))


def test_one_node_meets_on_a_free_port():
    assert line(nodes=1) == (
        "python -m torch.distributed.run --standalone --nnodes 1 --nproc-per-node 4 t.py --lr 1"
    )


def test_several_nodes_meet_at_the_first():
    assert line(host="a", port=7, run_id="j", max_restarts=3) == (
        "python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d "
        "--rdzv-endpoint a:7 --rdzv-id j --max-restarts 3 t.py --lr 1"
    )


def test_the_first_node_knows_itself_by_its_address():
    said = line(host="a", run_id="j", is_host=True, address="10.0.0.1")
    assert "--rdzv-id j --rdzv-conf is_host=true --local-addr 10.0.0.1 t.py" in said
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no such host") == ""


def test_a_name_that_stands_for_the_loopback_is_no_address_for_other_nodes(monkeypatch):
    """Debian's /etc/hosts gives a machine's name the address 127.0.1.1."""

    class Probe(socket.socket):
        def connect(self, address):
            super().connect(("127.0.0.1", address[1]))

    monkeypatch.setattr(socket, "socket", Probe)
    assert own_address("node1") == ""
    assert own_address("localhost") == "127.0.0.1"


@pytest.mark.parametrize(
    ("own", "of_name", "is_asked"),
    [("10.0.0.1", ["10.9.9.9"], True), ("10.0.0.1", ["10.0.0.1"], False),
     ("10.0.0.2", ["10.9.9.9"], False), ("127.0.0.1", ["10.9.9.9"], False)],
)  # fmt: skip
def test_torchrun_is_told_only_what_it_would_not_find(monkeypatch, own, of_name, is_asked):
    known = {"first": ["10.0.0.1"], "here": of_name, "loopback": ["127.0.0.1"]}
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda name: (name, [], known[name]))
    assert serves_unasked("loopback" if own.startswith("127") else "first", own) == is_asked


def test_a_stated_node_rank_is_not_ignored():
    assert line(host="a", port=7, node_rank=1, is_module=True, script=["m"]) == (
        "python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 --node-rank 1 "
        "--master-addr a --master-port 7 -m m"
    )


@pytest.mark.parametrize(
    ("stated", "flags", "size"),
    [
        ({"mesh": MESH, "hardware": HARDWARE}, (), (2, 4)),
        ({"mesh": MESH, "hardware": HARDWARE}, (1, 8), (1, 8)),
        ({"mesh": MESH}, (), (1, 8)),
        ({"mesh": MESH}, (2, None), (2, 4)),
        ({"mesh": {"dp_shard": "auto", "tp": 2}}, (2, 4), (2, 4)),
        ({"strategy": "ddp"}, (1, 3), (1, 3)),
        ({"mesh": "auto", "strategy": "auto", "hardware": HARDWARE}, (), (2, 4)),
    ],
)
def test_the_size_of_a_job(stated, flags, size):
    assert job_size(spec_of(**stated), *flags) == size


@pytest.mark.parametrize(
    ("stated", "flags", "message"),
    [
        ({"mesh": MESH}, (3, None), "the 8 devices of the mesh cannot be split over 3 nodes"),
        ({"mesh": MESH}, (2, 2), "2 nodes x 2 ranks are 4, but the mesh has 8 devices"),
        ({"mesh": MESH, "hardware": HARDWARE}, (None, 2), "2 nodes x 2 ranks are 4, but the mesh"),
        ({"strategy": "ddp"}, (), "nothing states how many ranks a node has"),
        ({"mesh": "auto", "strategy": "auto"}, (), "nothing states how many ranks a node has"),
        ({"mesh": MESH}, (0, None), "--nodes: 0 is not a number of at least 1"),
    ],
)
def test_a_size_that_cannot_be(stated, flags, message):
    with pytest.raises((SpecError, PlanError), match=message) as caught:
        job_size(spec_of(**stated), *flags)
    assert all(problem.fix or "at least" in problem.what for problem in caught.value.problems)


def test_scripts_that_cannot_be_started(tmp_path):
    for script, message in (([], "needs the script"), (["--lr"], "no flag --lr"),
                            ([str(tmp_path / "no.py")], "there is no such script")):  # fmt: skip
        with pytest.raises(SpecError, match=message):
            check_script(script, is_module=False)
    check_script(["package.module"], is_module=True)


def test_the_installed_torch_reads_the_variables_of_the_flight_recorder():
    root = Path(util.find_spec("torch").origin).parent
    headers = root / "include/torch/csrc/distributed/c10d"
    source = (headers / "FlightRecorder.hpp").read_text()
    source += (headers / "ProcessGroupNCCL.hpp").read_text()
    library = (root / "lib/libtorch_cpu.so").read_bytes()
    for name in flight_recorder({}):
        assert f'"{name}"' in source or name.encode() in library, name


def test_variables_of_the_user_stay():
    job = TorchrunJob(nodes=1, ranks_per_node=2, script=["t.py"])
    set_here = job.environment({})
    assert set_here["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert set_here["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert set_here["TORCH_FR_DUMP_TEMP_FILE"] == f"{Path.cwd()}/nccl_trace_rank_"
    stated = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "5", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
              "OMP_NUM_THREADS": "3", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "x"}  # fmt: skip
    assert job.environment(stated) == stated | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}


SRUN = """#!/bin/bash
printf '%s\\n' "$0 $*" "OMP=$OMP_NUM_THREADS FR=$TORCH_FR_BUFFER_SIZE $TORCH_FR_DUMP_TEMP_FILE"
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_both_forms_of_a_slurm_script(tmp_path, monkeypatch, nodes):
    """Run by bash, with an srun that prints its arguments."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    job = TorchrunJob(nodes=nodes, ranks_per_node=4, script=["t.py", "a b"], grace_s=100)
    path = tmp_path / "job.sbatch"
    write_slurm_script(path, slurm_script(job, path.name, "python"))
    subprocess.run(["bash", "-n", path], check=True)
    assert "#SBATCH --signal=TERM@130" in path.read_text()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\nprintf 'n7\\nn8\\n'\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n",
               "OMP_NUM_THREADS": "6"}  # fmt: skip

    def said(*form, code=0):
        done = subprocess.run(
            ["bash", path, *form], env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        return done.stdout.splitlines() or done.stderr

    torchrun, variables = said()
    assert said("torchrun") == [torchrun, variables]
    meeting = "--rdzv-backend c10d --rdzv-endpoint n7:29400 --rdzv-id 5 "
    size = f"--nnodes {nodes} --nproc-per-node 4 "
    flags = f"--standalone {size}" if nodes == 1 else size + meeting
    assert torchrun == (
        f"{tmp_path}/srun --ntasks-per-node=1 --ntasks={nodes} --cpu-bind=none "
        f"--kill-on-bad-exit=1 python -m torch.distributed.run {flags}t.py a b"
    )
    assert variables == f"OMP=6 FR=2000 {folder}/nccl_trace_rank_"
    assert said("tasks")[0] == (
        f"{tmp_path}/srun --ntasks-per-node=4 --ntasks={4 * nodes} --distribution=block "
        "--cpu-bind=none --kill-on-bad-exit=1 python -u t.py a b"
    )
    assert "the form is torchrun or tasks, not x" in said("x", code=2)
    with pytest.raises(SpecError, match="exists already, and launch replaces nothing"):
        check_new(path)
