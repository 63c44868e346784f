"""The limits, memory and environment variables of this machine, and problems in them."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from meshplan.errors import ApplyError, Origin, Problem
from meshplan.launch.environment import read_rank
from meshplan.shown import shown
from meshplan.units import GIB, format_bytes

_SHM: Final = "/dev/shm"
_SHM_LEAST, _SHM_ENOUGH = GIB // 8, GIB
"""Bytes of shared memory without which loader workers and NCCL fail, and those that most need."""
_MOST_WORKERS: Final = 16
"""Loader workers of a rank beyond which a dataset is rarely read faster."""
_CPU_QUOTA: Final = "/sys/fs/cgroup/cpu.max"
_INFINIBAND: Final = "/sys/class/infiniband"

_OF_INTEREST: Final = (
    "NCCL_", "TORCH_", "TORCHELASTIC_", "GLOO_", "SLURM_", "OMPI_COMM_", "PMI_", "JSM_NAMESPACE_",
    "CUDA_", "OMP_", "PYTORCH_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "MPI_LOCAL", "LSB_JOBID",
)  # fmt: skip
"""Beginnings of the variables that torch, NCCL and launchers read."""
_COSTLY: Final = MappingProxyType(
    {
        ("NCCL_P2P_DISABLE", "1"): "GPUs exchange data through host memory instead of NVLink",
        ("NCCL_SHM_DISABLE", "1"): "ranks of a machine exchange data over the network",
        ("NCCL_IB_DISABLE", "1"): "nodes exchange data over TCP instead of InfiniBand",
        ("NCCL_DEBUG", "INFO"): "every rank prints hundreds of lines",
        ("NCCL_DEBUG", "TRACE"): "every rank prints a line for each collective",
        ("CUDA_LAUNCH_BLOCKING", "1"): "each kernel waits for the one before it",
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "each collective is checked by another one",
        ("TORCH_NCCL_BLOCKING_WAIT", "1"): "each collective waits for the GPU",
        ("TORCH_FR_BUFFER_SIZE", "0"): "NCCL's flight recorder is off",
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "0"): "NCCL's flight recorder is off",
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "0"): "NCCL's flight recorder writes nothing",
    }
)
"""(variable, value) -> its effect, for a warning: the user may want it."""
_OLD_NAMES: Final = MappingProxyType(
    {
        "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
        "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    }
)
"""Names of torch's variables that it no longer reads or warns about."""


@shown
@dataclass(frozen=True, slots=True)
class Checkup:
    """The findings of `meshplan doctor` on one topic.

    Args:
        topic: The topic, in a word or two.
        facts: What was found, by name.
        problems: What a job would fail at.
        warnings: What may slow a job down or may be meant.
    """

    topic: str
    facts: Mapping[str, str]
    problems: tuple[Problem, ...] = field(default=())
    warnings: tuple[Problem, ...] = field(default=())


def examine_shared_memory(path: str = _SHM) -> Checkup:
    """Examine the shared memory, in which loader workers and NCCL pass data on."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        what = f"shared memory cannot be used: {error.strerror}"
        problem = Problem(what, Origin(path), "mount a tmpfs there")
        return Checkup("shared memory", {path: "none"}, (problem,))
    size, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    facts = {path: f"{format_bytes(size)}, {format_bytes(free)} free"}
    fix = "start the container with --shm-size=16g or --ipc=host, or remount it larger"
    what = f"only {format_bytes(free)} of shared memory are free: "
    if free < _SHM_LEAST:
        what += "workers of data loaders and NCCL fail without it"
        return Checkup("shared memory", facts, (Problem(what, Origin(path), fix),))
    if free < _SHM_ENOUGH:
        what += "workers of data loaders with large batches may fail"
        return Checkup("shared memory", facts, (), (Problem(what, Origin(path), fix),))
    return Checkup("shared memory", facts)


_LIMITS: Final = (
    (resource.RLIMIT_NOFILE, "open files", "-n", 4096, "each rank opens sockets to others"),
    (resource.RLIMIT_NPROC, "processes", "-u", 4096, "ranks and loader workers have threads"),
)
"""(Limit, its name, flag of ulimit, what it should be at least, why)."""


def examine_limits() -> Checkup:
    """Examine the limits of the shell (ulimit)."""
    facts: dict[str, str] = {}
    warnings: list[Problem] = []
    for number, name, flag, least, why in _LIMITS:
        soft, _ = resource.getrlimit(number)
        is_free = soft == resource.RLIM_INFINITY
        facts[name] = "unlimited" if is_free else f"{soft:,}"
        if not is_free and soft < least:
            what = f"at most {soft:,} {name}: {why}"
            warnings.append(Problem(what, Origin(f"ulimit {flag}"), f"ulimit {flag} {least}"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_free = soft == resource.RLIM_INFINITY
    facts["locked memory"] = "unlimited" if is_free else format_bytes(soft)
    if not is_free and os.path.isdir(_INFINIBAND):
        what = f"at most {format_bytes(soft)} of locked memory: InfiniBand locks what it sends from"
        warnings.append(Problem(what, Origin("ulimit -l"), "ulimit -l unlimited"))
    return Checkup("limits", facts, (), tuple(warnings))


def examine_environment(environ: Mapping[str, str]) -> Checkup:
    """Examine the environment variables that torch, NCCL and launchers read."""
    facts = {name: text for name, text in sorted(environ.items()) if name.startswith(_OF_INTEREST)}
    problems: list[Problem] = []
    warnings = [
        Problem(f"{text}: {costs}", Origin(name), f"unset {name} if it is not meant")
        for (name, text), costs in _COSTLY.items()
        if environ.get(name, "").upper() == text
    ]
    warnings += [
        Problem("torch has another name for it now", Origin(old), f"write {new}")
        for old, new in _OLD_NAMES.items()
        if old in environ
    ]
    launcher = "none started this process"
    try:
        launched = read_rank(environ)
        if launched is not None:
            launcher = f"{launched.launcher}: rank {launched.rank} of {launched.world_size}"
    except ApplyError as error:
        launcher = "its variables contradict each other"
        problems += error.problems
    problems += _absent_interfaces(environ)
    threads = environ.get("OMP_NUM_THREADS")
    if threads is not None and not (threads.isdecimal() and int(threads) > 0):
        what = f"'{threads}' is not a number of threads"
        problems.append(Problem(what, Origin("OMP_NUM_THREADS"), "unset OMP_NUM_THREADS"))
    elif threads is not None and int(threads) > num_cores():
        what = f"{threads} threads on {num_cores()} cores wait for each other"
        warnings.append(Problem(what, Origin("OMP_NUM_THREADS"), "unset OMP_NUM_THREADS"))
    return Checkup("environment", {"launcher": launcher, **facts}, tuple(problems), tuple(warnings))


def _absent_interfaces(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each variable that names a network interface which is not there."""
    present = [name for _, name in socket.if_nameindex()]
    for variable, is_prefix in (("GLOO_SOCKET_IFNAME", False), ("NCCL_SOCKET_IFNAME", True)):
        text = environ.get(variable, "")
        if text.startswith("^"):  # NCCL: any but these.
            continue
        is_prefix &= not text.startswith("=")
        names = [name.strip() for name in text.lstrip("=").split(",") if name.strip()]
        if is_prefix:
            # "eth0:1": the interface and its port.
            absent = [n for n in names if not _begins(present, n.partition(":")[0])]
            wrong = absent if len(absent) == len(names) else []  # NCCL takes any that is there.
        else:
            wrong = [name for name in names if name not in present]
        if wrong:
            what = f"there is no network interface {', '.join(wrong)}"
            yield Problem(what, Origin(variable), f"name one of {', '.join(present)}")


def _begins(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def examine_loading(num_ranks: int) -> Checkup:
    """Return how many workers the data loader of each rank can use.

    Args:
        num_ranks: Number of ranks of this machine.
    """
    cores = num_cores()
    workers = min(_MOST_WORKERS, max(0, cores // num_ranks - 1))
    facts = {
        "cores": f"{cores} for {num_ranks} rank{'s' * (num_ranks > 1)}",
        "advice": f"num_workers={workers} in each rank's loader, and a core for the rank itself",
    }
    warnings: tuple[Problem, ...] = ()
    if num_ranks > cores:
        what = f"{num_ranks} ranks share {cores} cores"
        warnings = (Problem(what, fix="give the job at least a core for each rank"),)
    return Checkup("data loading", facts, (), warnings)


def num_cores(quota: str = _CPU_QUOTA) -> int:
    """Return the number of cores that this process may use, by its affinity and its container."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open(quota, encoding="ascii") as file:
            most, _, period = file.read().partition(" ")
    except OSError:  # No container, or cgroups of version 1.
        return cores
    return cores if most == "max" else max(1, min(cores, int(most) // int(period)))
