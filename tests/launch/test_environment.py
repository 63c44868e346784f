"""Variables of launchers: each launcher's read as torchrun's, and wrong ones named.

Which seeded bug would this catch? A local rank taken for the rank, SLURM trusted in a shell, its
daemons' numbers taken for mpirun's, "4(x2)" read as 42, a port that differs between the ranks.
"""

from __future__ import annotations

import re

import pytest

from meshplan.errors import ApplyError
from meshplan.launch.environment import first_host, read_rank, size_variable

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a", "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_NTASKS_PER_NODE": "4(x2)", "SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "77",
    "SLURM_JOB_NAME": "train",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_ADDR": "a",
}  # fmt: skip
PMI = {
    "PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4",
    "MASTER_ADDR": "a",
}  # fmt: skip
LSF = {
    "JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4", "LSB_JOBID": "9",
}  # fmt: skip
KUBEFLOW = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    ("environ", "launcher", "host"),
    [
        (TORCHRUN, "torchrun", "a"),
        (SLURM, "SLURM", "gpu03"),
        (OPEN_MPI, "Open MPI", "a"),
        (PMI, "PMI", "a"),
        # mpirun and mpiexec start one daemon a node with srun; torchrun may be a SLURM task.
        (SLURM | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"} | OPEN_MPI, "Open MPI", "a"),
        (SLURM | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"} | PMI, "PMI", "a"),
        (SLURM | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"} | TORCHRUN, "torchrun", "a"),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}, "SLURM", "gpu03"),
    ],
)
def test_a_launcher_is_read(environ, launcher, host):
    found = read_rank(environ)
    assert (found.launcher, found.host) == (launcher, host)
    assert (found.rank, found.world_size) == (5, 8)
    assert (found.local_rank, found.local_world_size) == (1, 4)
    named = found.torch_variables
    assert {name: named[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}  # fmt: skip


def test_kubeflow_states_no_local_rank():
    found = read_rank(KUBEFLOW)
    assert (found.rank, found.local_rank, found.local_world_size) == (5, 0, None)
    assert (found.host, found.port) == ("job-master-0", 23456)


def test_lsf_names_the_hosts_in_a_file(tmp_path):
    path = tmp_path / "ranks"
    path.write_text("batch1\nnode7\nnode7\nnode8\nnode8\n")  # The first one only launches.
    found = read_rank(LSF | {"LSB_DJOB_RANKFILE": str(path)})
    assert (found.launcher, found.host) == ("LSF", "node7")
    with pytest.raises(ApplyError, match=r"LSB_DJOB_RANKFILE: its file .* cannot be read"):
        read_rank(LSF | {"LSB_DJOB_RANKFILE": str(tmp_path / "none")})


@pytest.mark.parametrize(
    "environ",
    [{}, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, SLURM | {"SLURM_JOB_NAME": "bash"},
     SLURM | {"SLURM_JOB_NAME": "interactive"}, {"JOB_COMPLETION_INDEX": "1"}],
)  # fmt: skip
def test_a_process_that_nobody_has_launched(environ):
    assert read_rank(environ) is None


@pytest.mark.parametrize(
    ("environ", "change", "message"),
    [
        (TORCHRUN, {"WORLD_SIZE": "four"}, "WORLD_SIZE: 'four' is not a whole number"),
        (TORCHRUN, {"WORLD_SIZE": ""}, "WORLD_SIZE: it is not set, although torchrun has to"),
        (TORCHRUN, {"RANK": "8"}, "RANK: 8 is not a rank of this job: WORLD_SIZE is 8"),
        (TORCHRUN, {"RANK": "-1"}, "RANK: -1 is less than 0"),
        (TORCHRUN, {"LOCAL_RANK": "4"}, "LOCAL_RANK: 4 is not a rank of this machine: LOCAL_WOR"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE: 9 ranks of this machine are mo"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE: 0 is less than 1"),
        (TORCHRUN, {"MASTER_PORT": "70000"}, "MASTER_PORT: 70000 is not a port"),
        (TORCHRUN, {"MASTER_ADDR": ""}, "MASTER_ADDR: it is not set, and torchrun does not say"),
        (KUBEFLOW, {"RANK": ""}, "RANK: it is not set"),
        (KUBEFLOW, {"WORLD_SIZE": ""}, "WORLD_SIZE: it is not set"),
        (KUBEFLOW, {"LOCAL_RANK": "7"}, "LOCAL_RANK: 7 is more than the rank itself, RANK 5"),
        (SLURM, {"SLURM_NTASKS": "4"}, "SLURM_PROCID: 5 is not a rank of this job: SLURM_NTASKS"),
        (SLURM, {"SLURM_LOCALID": ""}, "SLURM_LOCALID: it is not set"),
        (SLURM, {"SLURM_LOCALID": "2"}, "SLURM_LOCALID: 2 on rank 5: with 4 ranks on each machin"),
        (SLURM, {"SLURM_NTASKS_PER_NODE": "4x2"}, "SLURM_NTASKS_PER_NODE: '4x2' is not a number"),
        (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "5"}, "OMPI_COMM_WORLD_RANK: 5 is not a rank"),
        (OPEN_MPI, {"MASTER_ADDR": ""}, "MASTER_ADDR: it is not set, and Open MPI does not say"),
        (PMI, {"MPI_LOCALRANKID": "x"}, "MPI_LOCALRANKID: 'x' is not a whole number"),
        (LSF, {"JSM_NAMESPACE_SIZE": "1e3"}, "JSM_NAMESPACE_SIZE: '1e3' is not a whole number"),
    ],
)  # fmt: skip
def test_the_wrong_variable_is_named(environ, change, message):
    with pytest.raises(ApplyError, match=f"\n{re.escape(message)}") as caught:
        read_rank(environ | change)
    assert all(problem.fix for problem in caught.value.problems)


def test_every_wrong_variable_is_named_at_once():
    with pytest.raises(ApplyError) as caught:
        read_rank(SLURM | {"SLURM_NTASKS": "x", "SLURM_LOCALID": "y", "SLURM_PROCID": "z"})
    assert {problem.origin.file for problem in caught.value.problems} == {
        "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_PROCID"}  # fmt: skip


def test_tasks_of_unequal_nodes():
    tasks = {"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NTASKS": "11", "SLURM_NODEID": "2",
             "SLURM_PROCID": "10", "SLURM_LOCALID": "2"}  # fmt: skip
    assert read_rank(SLURM | tasks).local_world_size == 3


def test_ranks_of_a_job_agree_on_a_port_and_jobs_differ():
    ranks = [SLURM | {"SLURM_PROCID": str(4 + local), "SLURM_LOCALID": str(local)}
             for local in range(4)]  # fmt: skip
    assert len({read_rank(each).port for each in ranks}) == 1
    others = {read_rank(SLURM | {"SLURM_JOB_ID": str(job)}).port for job in range(70, 90)}
    assert len(others) == 20
    assert all(15000 <= port < 25000 for port in others)


def test_what_the_user_states_wins():
    found = read_rank(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "99"})
    assert (found.host, found.port) == ("head", 99)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[9-12]", "n9"), ("n[009,011]x,m", "n009x"),
     ("r1-c[3-4]n5", "r1-c3n5"), ("", "")],
)  # fmt: skip
def test_the_first_host(nodes, host):
    assert first_host(nodes) == host


def test_the_variable_behind_a_world_size():
    assert size_variable(TORCHRUN) == "WORLD_SIZE"
    assert size_variable(SLURM | {"RANK": "5", "WORLD_SIZE": "8"}) == "SLURM_NTASKS"
    assert size_variable(SLURM | TORCHRUN) == "WORLD_SIZE"
