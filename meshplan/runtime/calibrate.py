"""Time matrix products, attention, elementwise kernels, copies and collectives on this machine."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshplan.cost.calibration import Sample, Timings
from meshplan.errors import SpecError
from meshplan.layout.hardware import Device, find_device
from meshplan.runtime.base.mesh import gather_into

ROUNDS: Final = 30
"""Number of timed rounds. Each round runs every operation once."""
_HEADS, _WIDTH = 16, 128
"""Heads of the timed attention, and channels of each head."""
_LAUNCHES: Final = 200
"""Kernel launches that are timed together as one operation."""


@dataclass(frozen=True, slots=True)
class _TimedWork:
    """An operation to time.

    Args:
        amount: Floating-point operations, bytes or kernel launches of one execution (see `Sample`).
        run: Executes the operation once.
        hops: Ranks that a collective passes on the way; 0 for anything but a collective.
    """

    amount: float
    run: Callable[[], object]
    hops: int = 0


def measure(*, large: bool | None = None) -> Timings:
    """Time this machine and, in a process group of several ranks, its collectives.

    Each of `ROUNDS` rounds runs every operation once, and the shortest time of each operation
    counts. A disturbance, such as another process, only lengthens runs and usually lasts longer
    than one run. Taking turns keeps it from hitting all runs of the same operation.

    Args:
        large: If True, use tensor sizes typical of training; if False, smaller ones. None means
            True on an accelerator and False on a CPU.

    Returns:
        The timings, one `Sample` per operation and size.

    Assumes: in a process group, every rank calls this function.
    """
    device = _device()
    is_large = device.type != "cpu" if large is None else large
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.no_grad():
        works = {
            "launch": list(_launches(device)),
            "products": list(_products(device, dtype, is_large)),
            "attention": list(_attention(device, dtype, is_large)),
            "moves": list(_moves(device, is_large)),
            "copies": list(_copies(device)) if device.type == "cuda" else [],
            "collectives": list(_collectives(device, is_large)) if _world() > 1 else [],
        }
        everything = [work for group in works.values() for work in group]
        least = _least(device, everything)
    samples = {
        name: tuple(_sample(work, least[id(work)]) for work in group)
        for name, group in works.items()
    }
    (launch,) = samples.pop("launch")
    return Timings(
        device=_facts(device),
        dtype=str(dtype).removeprefix("torch."),
        launch_s=launch.seconds / launch.amount,
        **samples,
    )


@contextmanager
def together() -> Iterator[bool]:
    """Join the process group of a launcher such as torchrun, if any; yield True on rank 0 only."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield not dist.is_initialized() or dist.get_rank() == 0
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def _sample(work: _TimedWork, halves: list[float]) -> Sample:
    """Return the `Sample` of an operation from its shortest seconds in even and in odd rounds."""
    least = min(halves)
    return Sample(work.amount, least, work.hops, max(h for h in halves if h < math.inf) / least - 1)


def _least(device: torch.device, works: list[_TimedWork]) -> dict[int, list[float]]:
    """Return [shortest seconds in even rounds, in odd rounds] by `id` of the operation."""
    least = {id(work): [math.inf, math.inf] for work in works}
    for number in range(ROUNDS + 1):
        for work in works:
            _synchronize(device)
            begin = time.perf_counter()
            work.run()
            _synchronize(device)
            if number:  # Round 0 also loads libraries and chooses kernels.
                seconds = time.perf_counter() - begin
                halves = least[id(work)]
                halves[number % 2] = min(seconds, halves[number % 2])
    return least


def _synchronize(device: torch.device) -> None:
    """Wait for the kernels launched so far, if the device is an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _device() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def seen_devices() -> tuple[Device | None, int]:
    """Return the first accelerator of this machine and how many there are; (None, 0) without one.

    A device that the hardware table lacks has a name and its memory only.
    """
    device = _device()
    return (None, 0) if device.type == "cpu" else (_facts(device), torch.accelerator.device_count())


def _facts(device: torch.device) -> Device:
    """Return the device from the hardware table, or just its name and memory if it is not there."""
    if device.type != "cuda":
        return Device(name=device.type, memory_bytes=0)
    properties = torch.cuda.get_device_properties(device)
    words = [w for w in properties.name.lower().split() if w not in ("nvidia", "hbm3", "hbm2e")]
    try:
        return find_device(" ".join(words))
    except SpecError:
        return Device(name=properties.name, memory_bytes=properties.total_memory)


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _launches(device: torch.device) -> Iterator[_TimedWork]:
    """Yield one operation that launches a tiny kernel `_LAUNCHES` times in a row."""
    x = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1)

    yield _TimedWork(_LAUNCHES, run)


def _products(device: torch.device, dtype: torch.dtype, is_large: bool) -> Iterator[_TimedWork]:
    """Yield matrix products; `amount` is their floating-point operations."""
    sizes = (2048, 4096, 8192) if is_large else (512, 768, 1024)
    for m in sizes:
        for n in sizes:
            a = torch.randn(m, sizes[1], device=device, dtype=dtype)
            b = torch.randn(sizes[1], n, device=device, dtype=dtype)
            yield _TimedWork(2.0 * m * n * sizes[1], partial(torch.matmul, a, b))


def _attention(device: torch.device, dtype: torch.dtype, is_large: bool) -> Iterator[_TimedWork]:
    """Yield causal attentions; `amount` counts only the unmasked half of the operations."""
    for length in (2048, 4096, 8192) if is_large else (512, 768, 1024):
        shape = (1, _HEADS, length, _WIDTH)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
        run = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        yield _TimedWork(2.0 * _HEADS * _WIDTH * length**2, run)


def _moves(device: torch.device, is_large: bool) -> Iterator[_TimedWork]:
    """Yield elementwise products of tensors larger than caches; `amount` is bytes moved."""
    for power in (27, 28, 29, 30) if is_large else (25, 26, 27):
        x = torch.zeros(2**power // 4, device=device)
        yield _TimedWork(2.0 * 2**power, partial(torch.mul, x, 1.5, out=torch.empty_like(x)))


def _copies(device: torch.device) -> Iterator[_TimedWork]:
    """Yield copies from pinned host memory to the device; `amount` is bytes."""
    for power in (24, 26, 28):
        host = torch.empty(2**power, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(2**power, dtype=torch.uint8, device=device)
        yield _TimedWork(float(2**power), partial(there.copy_, host, non_blocking=True))


def _collectives(device: torch.device, is_large: bool) -> Iterator[_TimedWork]:
    """Yield all-gathers over all ranks; `amount` is the bytes that pass through one rank."""
    ranks, group = _world(), dist.group.WORLD
    assert group is not None
    for power in (22, 24, 26, 28) if is_large else (20, 22, 24):
        part = torch.zeros(2**power // (4 * ranks), device=device)
        whole = torch.empty(ranks, part.numel(), device=device)
        passing = whole.numel() * 4.0 * (ranks - 1) / ranks
        yield _TimedWork(passing, partial(gather_into, whole, part, group), ranks - 1)
