"""The part of `meshplan doctor` that needs torch: versions, devices, links, a collective."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Final

import torch
import torch.distributed as dist

from meshplan.errors import ApplyError, Problem
from meshplan.launch.machine import Checkup, num_cores
from meshplan.memory.log.torch_version import KNOWN, unlike
from meshplan.runtime.base.local_ranks import run_ranks
from meshplan.units import GIB, format_bytes, format_seconds
from meshplan.version import __version__

_PACKAGES: Final = ("torch", "transformers", "safetensors", "numpy")
_RANKS: Final = 2
_ELEMENTS: Final = 2**22
"""Elements of the tensor of the self-test: 16 MiB of float32."""
_SMI: Final = "nvidia-smi"
_SMI_LIMIT_S: Final = 20.0
_IN_USE: Final = GIB
"""Bytes of a GPU in use at which another process must be on it."""


def examine_versions() -> Checkup:
    """Return the versions of Python, of packages and of what torch was built with."""
    facts = {"python": platform.python_version(), "meshplan": __version__}
    for name in _PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    facts["cuda"] = torch.version.cuda or "not in this build of torch"
    facts["nccl"] = "not in this build of torch"
    if dist.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    warnings: tuple[Problem, ...] = ()
    if unlike(torch.__version__):
        known = ", ".join(f"{major}.{minor}" for major, minor in KNOWN)
        what = f"meshplan was not tested with torch {torch.__version__}"
        warnings = (Problem(what, fix=f"install one of torch {known}"),)
    return Checkup("versions", facts, (), warnings)


def num_devices() -> int:
    """Return the number of accelerators that torch sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def examine_devices() -> Checkup:
    """Examine the accelerators that torch sees, and whether they are free."""
    if not num_devices():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        facts = {"accelerators": "none, ranks run on the CPU over gloo"}
        facts["host"] = f"{num_cores()} cores, {format_bytes(memory)} of memory"
        return Checkup("devices", facts, tuple(_unseen()))
    if not torch.cuda.is_available():
        kind = torch.accelerator.current_accelerator()
        return Checkup("devices", {"accelerators": f"{num_devices()} x {kind}"})
    facts, warnings = {}, []
    for index in range(num_devices()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        facts[f"GPU {index}"] = f"{name}, {format_bytes(total)}, {format_bytes(free)} free"
        if total - free > _IN_USE:
            what = f"{format_bytes(total - free)} of GPU {index} are in use by another process"
            warnings.append(Problem(what, fix=f"see {_SMI}, and end that process"))
    return Checkup("devices", facts, tuple(_unseen()), tuple(warnings))


def _unseen() -> Iterator[Problem]:
    """Yield a problem if there are GPUs that torch does not see, or fewer than the user names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        if not torch.cuda.is_available() and shutil.which(_SMI):
            what = f"{_SMI} is installed, but this build of torch sees no GPU"
            yield Problem(what, fix="install a CUDA build of torch that suits the driver")
        return
    named = [word for word in visible.split(",") if word.strip()]
    if len(named) > num_devices():
        what = f"CUDA_VISIBLE_DEVICES names {len(named)} GPUs, and torch sees {num_devices()}"
        yield Problem(what, fix="name GPUs that exist, numbered from 0, or unset it")


def examine_links() -> Checkup:
    """Examine which GPUs reach each other's memory, and how they are connected."""
    count = torch.cuda.device_count()
    if count < 2:
        return Checkup("links", {"between GPUs": f"none: {count} GPUs are seen"})
    apart = [
        f"{a}-{b}"
        for a in range(count)
        for b in range(a + 1, count)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    facts = {"peer access": f"not between GPUs {', '.join(apart)}" if apart else "all GPUs"}
    for number, line in enumerate(_topology()):
        facts[f"topology {number}"] = line
    what = f"GPUs {', '.join(apart)} have no access to each other: data goes through the host"
    fix = "see if the machine has NVLink or PCIe peer access, and if a container hides it"
    return Checkup("links", facts, (), (Problem(what, fix=fix),) if apart else ())


def _topology() -> list[str]:
    """Return the table of `nvidia-smi topo -m`; [] if it does not answer."""
    program = shutil.which(_SMI)
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "topo", "-m"], capture_output=True, text=True, timeout=_SMI_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ["nvidia-smi does not answer"]
    lines = done.stdout.split("Legend:")[0].splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def examine_collectives() -> Checkup:
    """Sum a tensor over two local processes, over gloo and over NCCL if there are two GPUs."""
    facts, problems = {}, []
    backends = ["gloo"] + ["nccl"] * (torch.cuda.device_count() >= _RANKS)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for backend in backends:
        try:
            sent = dict(run_ranks(_RANKS, _RANKS, _sum_over_ranks, backend, visible))
        except ApplyError as error:
            fix = "see NCCL_DEBUG=WARN meshplan doctor" if backend == "nccl" else ""
            fix = fix or "see if this machine forbids sockets on the loopback interface"
            what = f"an all-reduce over {backend} fails: {error.problems[0].what}"
            problems.append(Problem(what, fix=fix))
            continue
        seconds = max(took for _, took in sent.values())
        if any(total != _expected() for total, _ in sent.values()):
            what = f"an all-reduce over {backend} gives {sent[0][0]}, not {_expected()}"
            problems.append(Problem(what, fix="test the memory and links of this machine"))
        size = format_bytes(4 * _ELEMENTS)
        facts[backend] = f"{_RANKS} processes sum {size} in {format_seconds(seconds)}"
    return Checkup("self-test", facts, tuple(problems))


def _expected() -> int:
    return sum(range(1, _RANKS + 1))


def _sum_over_ranks(send: Any, backend: str, visible: str | None) -> None:
    """Send (an element of the sum of 1, 2, ... over the ranks, seconds); runs on each rank."""
    rank, where = dist.get_rank(), torch.device("cpu")
    group = None
    if backend == "nccl":
        # Local ranks are kept off the GPUs, until the variable is read by the first use of CUDA.
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        where = torch.device("cuda", rank)
        torch.cuda.set_device(where)
        group = dist.new_group(backend=backend)
    for _ in range(2):  # The first one also connects.
        values = torch.full((_ELEMENTS,), float(rank + 1), device=where)
        began = time.perf_counter()
        dist.all_reduce(values, group=group)
        total = values.max().item()
        took = time.perf_counter() - began
    send((total, took))
