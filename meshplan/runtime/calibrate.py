"""Times of this machine: products, attention, elementwise operations, copies and collectives."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshplan.cost.calibration import Measured, Sample
from meshplan.errors import SpecError
from meshplan.hardware import Device, find_device

REPEATS: Final = 7
_WARM_UP: Final = 2
_HEADS, _WIDTH = 16, 128
_LAUNCHES: Final = 200


class _Stopwatch:
    """Times of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def settle(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def seconds(self, run: Callable[[], object]) -> float:
        """The median: what disturbs a run now and then is none of its own."""
        for _ in range(_WARM_UP):
            run()
        times = []
        for _ in range(REPEATS):
            self.settle()
            begin = time.perf_counter()
            run()
            self.settle()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


def measure(*, large: bool | None = None) -> Measured:
    """Time this machine; with a process group of several ranks, what these send as well.

    Args:
        large: Whether sizes are those of training; None where there is an accelerator.

    Assumes: in a process group, every rank calls it.
    """
    device = _device()
    is_large = device.type != "cpu" if large is None else large
    watch = _Stopwatch(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with torch.no_grad():
        return Measured(
            device=_facts(device),
            dtype=str(dtype).removeprefix("torch."),
            launch_s=_launch(watch),
            products=tuple(_products(watch, dtype, is_large)),
            attention=tuple(_attention(watch, dtype, is_large)),
            moves=tuple(_moves(watch, is_large)),
            copies=tuple(_copies(watch)) if device.type == "cuda" else (),
            collectives=tuple(_collectives(watch, is_large)) if _world() > 1 else (),
        )


@contextmanager
def together() -> Iterator[bool]:
    """Join the ranks that a launcher started, if it started several; whether this is the first."""
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


def _device() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def _facts(device: torch.device) -> Device:
    """The table's device of this name; else one of which only the name and memory are known."""
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


def _launch(watch: _Stopwatch) -> float:
    """Of one of many small kernels, which the process starts faster than they run or not."""
    x = torch.zeros(1, device=watch.device)

    def run() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1)

    return watch.seconds(run) / _LAUNCHES


def _products(watch: _Stopwatch, dtype: torch.dtype, is_large: bool) -> Iterator[Sample]:
    sizes = (2048, 4096, 8192) if is_large else (256, 384, 512)
    for m in sizes:
        for n in sizes:
            a = torch.randn(m, sizes[1], device=watch.device, dtype=dtype)
            b = torch.randn(sizes[1], n, device=watch.device, dtype=dtype)
            yield Sample(2.0 * m * n * sizes[1], watch.seconds(lambda a=a, b=b: a @ b))  # type: ignore[misc]


def _attention(watch: _Stopwatch, dtype: torch.dtype, is_large: bool) -> Iterator[Sample]:
    for length in (2048, 4096, 8192) if is_large else (256, 384, 512):
        shape = (1, _HEADS, length, _WIDTH)
        q, k, v = (torch.randn(shape, device=watch.device, dtype=dtype) for _ in range(3))

        def run(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        yield Sample(2.0 * _HEADS * _WIDTH * length**2, watch.seconds(run))


def _moves(watch: _Stopwatch, is_large: bool) -> Iterator[Sample]:
    for power in (24, 26, 28, 30) if is_large else (22, 23, 24, 25):
        x = torch.zeros(2**power // 4, device=watch.device)
        out = torch.empty_like(x)
        seconds = watch.seconds(lambda x=x, out=out: torch.mul(x, 1.5, out=out))  # type: ignore[misc]
        yield Sample(2.0 * 2**power, seconds)


def _copies(watch: _Stopwatch) -> Iterator[Sample]:
    for power in (24, 26, 28):
        host = torch.empty(2**power, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(2**power, dtype=torch.uint8, device=watch.device)
        seconds = watch.seconds(lambda a=host, b=there: b.copy_(a, non_blocking=True))  # type: ignore[misc]
        yield Sample(float(2**power), seconds)


def _collectives(watch: _Stopwatch, is_large: bool) -> Iterator[Sample]:
    ranks = _world()
    for power in (20, 22, 24, 26, 28) if is_large else (16, 18, 20, 22):
        part = torch.zeros(2**power // (4 * ranks), device=watch.device)
        whole = torch.empty(part.numel() * ranks, device=watch.device)

        def run(whole: torch.Tensor = whole, part: torch.Tensor = part) -> None:
            dist.all_gather_into_tensor(whole, part)

        passing = whole.numel() * 4.0 * (ranks - 1) / ranks
        yield Sample(passing, watch.seconds(run), hops=ranks - 1)
