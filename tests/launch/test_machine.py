"""What `meshplan doctor` finds without torch."""

from __future__ import annotations

import os
import resource

import pytest

from meshplan.launch import machine
from meshplan.launch.machine import (
    examine_environment,
    examine_limits,
    examine_loading,
    examine_shared_memory,
    num_cores,
)


@pytest.mark.parametrize(
    ("free_bytes", "problems", "warnings"), [(2**26, 1, 0), (2**29, 0, 1), (2**34, 0, 0)]
)
def test_little_shared_memory(monkeypatch, free_bytes, problems, warnings):
    status = os.statvfs_result((4096, 4096, 2**22, 0, free_bytes // 4096, 0, 0, 0, 0, 255))
    monkeypatch.setattr(machine.os, "statvfs", lambda path: status)
    found = examine_shared_memory()
    assert (len(found.problems), len(found.warnings)) == (problems, warnings)
    assert "16.0 GiB" in found.facts["/dev/shm"]


def test_no_shared_memory(tmp_path):
    (problem,) = examine_shared_memory(str(tmp_path / "none")).problems
    assert "shared memory cannot be used: No such file" in str(problem)


def test_low_limits(monkeypatch):
    limits = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_NPROC: resource.RLIM_INFINITY,
              resource.RLIMIT_MEMLOCK: 2**16}  # fmt: skip
    monkeypatch.setattr(machine.resource, "getrlimit", lambda number: (limits[number], -1))
    monkeypatch.setattr(machine, "_INFINIBAND", "/proc")
    found = examine_limits()
    assert found.facts == {"open files": "1,024", "processes": "unlimited",
                           "locked memory": "64.0 KiB"}  # fmt: skip
    assert [warning.fix for warning in found.warnings] == [
        "ulimit -n 4096", "ulimit -l unlimited"]  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "text", "is_problem"),
    [
        ("NCCL_P2P_DISABLE", "1", False), ("NCCL_DEBUG", "info", False),
        ("TORCH_FR_BUFFER_SIZE", "0", False), ("NCCL_ASYNC_ERROR_HANDLING", "1", False),
        ("OMP_NUM_THREADS", "9999", False), ("OMP_NUM_THREADS", "many", True),
        ("GLOO_SOCKET_IFNAME", "eth99", True), ("NCCL_SOCKET_IFNAME", "=eth99", True),
        ("NCCL_SOCKET_IFNAME", "eth99,ib99", True), ("RANK", "0", True),
    ],
)  # fmt: skip
def test_a_bad_variable_is_named(variable, text, is_problem):
    found = examine_environment({variable: text})
    named = found.problems if is_problem else found.warnings
    assert len(found.problems) + len(found.warnings) == 1
    assert named[0].origin.file in (variable, "WORLD_SIZE")
    assert named[0].fix


@pytest.mark.parametrize("text", ["lo", "^docker", "=lo", "eth99,lo"])
def test_good_variables(text):
    found = examine_environment(
        {"NCCL_SOCKET_IFNAME": text, "GLOO_SOCKET_IFNAME": "lo", "HOME": "/x", "NCCL_DEBUG": "WARN"}
    )
    assert not found.problems + found.warnings
    assert set(found.facts) == {
        "launcher", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG"}  # fmt: skip


def test_loader_workers(monkeypatch):
    monkeypatch.setattr(machine, "num_cores", lambda: 64)
    assert "num_workers=7 " in examine_loading(8).facts["advice"]
    assert "num_workers=16 " in examine_loading(1).facts["advice"]
    assert "65 ranks share 64 cores" in str(examine_loading(65).warnings[0])


def test_a_container_has_fewer_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: range(8))
    quota = tmp_path / "cpu.max"
    for text, cores in (("max 100000\n", 8), ("350000 100000\n", 3), ("50000 100000\n", 1)):
        quota.write_text(text)
        assert num_cores(str(quota)) == cores
    assert num_cores(str(tmp_path / "none")) == 8
