"""Time matrix products, attention, elementwise kernels, copies and collectives on this machine."""

from __future__ import annotations

import itertools
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshplan.cost.calibration import Sample, Timings
from meshplan.errors import Origin, PlanError, Problem, SpecError
from meshplan.kernels import ATTENTION_BACKWARD, attention_flops
from meshplan.layout.hardware import Device, find_device
from meshplan.runtime.base.mesh import gather_into, gathered, ranks_per_node, scatter_sum

ROUNDS: Final = 30
"""Most rounds that are timed at a time. Each round runs every operation."""
_SETTLED: Final = 0.05
"""Uncertainty (`Sample.spread`) at which no more rounds of collectives between CPUs are run. Their
times vary by half, since the threads that send compete with the ranks for cores: the median of
`ROUNDS` is not certain to a tenth."""
_BURST_S: Final = 0.01
"""Seconds for which an accelerator repeats an operation without a pause. A lone kernel also takes
the time of its launch, and runs at clock rates that a training step does not keep up."""
_HEADS, _WIDTH = 16, 128
"""Heads of the timed attention, and channels of each head."""
_MOST_S: Final = 60.0
"""Seconds that the executions of the rounds may take together, so that slow links take minutes and
not half an hour. At least `_FEWEST_ROUNDS` run."""
_FEWEST_ROUNDS: Final = 4
_LONG_S: Final = 0.5
"""Seconds of a collective after which no larger one is timed."""
_LAUNCHES: Final = 200
"""Kernel launches that a CPU times together as one operation."""
_BLOCKS: Final = 12
"""Blocks of the model whose training step shows how fast an accelerator's host launches kernels."""


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

    Each round runs every operation, and operations of different kinds take turns, so that a
    disturbance, such as another process, does not hit all runs of one. On a CPU the shortest time
    of an operation counts, because a disturbance only lengthens runs. The median counts for
    collectives, which always compete with the ranks for cores, and for an accelerator, which
    repeats each operation for `_BURST_S`: under load its clock rate goes up and down, as it does in
    training.

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
    within, across = _groups(device)
    with torch.no_grad():
        works = {
            "products": list(_products(device, dtype, is_large)),
            "attention": list(_attention(device, dtype, is_large)),
            "moves": list(_moves(device, is_large)),
        }
        seconds = _timed(device, list(_by_turns(works.values())))
        idle = {
            "launch": [_launches(device, within)],
            "copies": list(_copies(device)) if device.type == "cuda" else [],
            "collectives": list(_collectives(device, is_large, within)),
            "reductions": list(_collectives(device, is_large, within or across, reduces=True)),
            "crossings": list(_collectives(device, is_large, across)),
        }
        turns = list(_by_turns(idle.values()))
        seconds |= _timed(device, turns)
        links = [work for work in turns if work.hops]
        # What links took is the same on all ranks, so that all of them run another round or none.
        while device.type == "cpu" and _are_unsettled(links, seconds):
            for key, more in _timed(device, turns).items():
                seconds[key] += more
    samples = {
        name: tuple(_sample(work, seconds[id(work)], device) for work in group)
        for name, group in (works | idle).items()
    }
    (launch,) = samples.pop("launch")
    return Timings(
        device=_facts(device),
        dtype=str(dtype).removeprefix("torch."),
        launch_s=launch.seconds / launch.amount,
        num_nodes=1 if across is None else across.size(),
        ranks_per_node=1 if within is None else within.size(),
        **samples,
    )


@contextmanager
def together() -> Iterator[bool]:
    """Join the process group of a launcher such as torchrun; yield True on rank 0 only.

    Without a launcher, an accelerator gets a group of this one process, which FSDP2 needs.
    """
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    has_device = torch.accelerator.is_available()
    if dist.is_initialized() or (is_alone and not has_device):
        yield not dist.is_initialized() or dist.get_rank() == 0
        return
    if has_device:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    backend = dist.get_default_backend_for_device(_device())
    if is_alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def _sample(work: _TimedWork, seconds: Sequence[float], device: torch.device) -> Sample:
    """Return the `Sample` of an operation from the seconds that it took in each round."""
    is_shortest = device.type == "cpu" and not work.hops
    typical = min if is_shortest else statistics.median
    halves = sorted(typical(half) for half in (seconds[::2], seconds[1::2] or seconds))
    spread = halves[1] / halves[0] - 1
    # The median of all rounds is twice as certain as the difference between two halves of them.
    return Sample(work.amount, typical(seconds), work.hops, spread if is_shortest else spread / 2)


def _by_turns(groups: Iterable[Sequence[_TimedWork]]) -> Iterator[_TimedWork]:
    """Yield the first operation of each group, then the second of each, and so on."""
    for works in itertools.zip_longest(*groups):
        yield from (work for work in works if work is not None)


def _are_unsettled(links: Sequence[_TimedWork], seconds: Mapping[int, Sequence[float]]) -> bool:
    """Return True if more rounds can make the times of collectives between CPUs more certain."""
    spreads = [_sample(work, seconds[id(work)], torch.device("cpu")).spread for work in links]
    took = sum(sum(seconds[id(work)]) for work in links)
    return took < _MOST_S and any(spread > _SETTLED for spread in spreads)


def _timed(device: torch.device, works: Sequence[_TimedWork]) -> dict[int, list[float]]:
    """Return the seconds of one execution in each round, by `id` of the operation."""
    is_cpu = device.type == "cpu"
    # The first run also loads libraries and chooses kernels.
    once = [min(_seconds(device, work, 1) for _ in range(2)) for work in works]
    bursts = [1 if is_cpu else max(1, math.ceil(_BURST_S / seconds)) for seconds in once]
    num_rounds = min(ROUNDS, max(_FEWEST_ROUNDS, int(_MOST_S / max(1e-9, sum(once)))))
    if _world() > 1:  # All ranks must run a collective equally often.
        agreed = torch.tensor([*bursts, num_rounds], device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        *bursts, num_rounds = agreed.tolist()
    rounds = [
        [_seconds(device, work, times) for work, times in zip(works, bursts, strict=True)]
        for _ in range(num_rounds)
    ]
    if _world() > 1:
        # Groups that share a link are done when the slowest one is: the first of them had the link
        # for itself for a part of its time.
        rounds = [
            [worst if work.hops else own for work, worst, own in zip(works, *both, strict=True)]
            for both in zip(_slowest(device, rounds), rounds, strict=True)
        ]
    return {
        id(work): list(each) for work, each in zip(works, zip(*rounds, strict=True), strict=True)
    }


def _slowest(device: torch.device, rounds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the seconds of each operation in each round on the rank on which it took longest."""
    seconds = torch.tensor(rounds, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.tolist()


def _seconds(device: torch.device, work: _TimedWork, times: int) -> float:
    """Return the seconds of one execution, from `times` executions in a row.

    All ranks begin a collective at the same time, also those of other groups.
    """
    if work.hops:
        dist.all_reduce(torch.zeros(1, device=device))
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(times):
        work.run()
    _synchronize(device)
    return (time.perf_counter() - begin) / times


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


def _launches(device: torch.device, within: dist.ProcessGroup | None) -> _TimedWork:
    """Return an operation whose time is that of launching kernels.

    On a CPU it launches a tiny kernel `_LAUNCHES` times. On an accelerator it is a training step of
    a model so small that the host sets the pace, wrapped by FSDP2 over the ranks of the node:
    autograd and the hooks of modules take several times as long as the launch itself.
    """
    if device.type == "cpu":
        x = torch.zeros(1)

        def run() -> None:
            for _ in range(_LAUNCHES):
                x.add_(1)

        return _TimedWork(_LAUNCHES, run)
    model = nn.Sequential(*(_SmallBlock() for _ in range(_BLOCKS))).to(device, torch.bfloat16)
    if dist.is_initialized():
        # Over the ranks of a node: a network between nodes would set the pace instead of the host.
        ranks = 1 if within is None else within.size()
        shape = _world() // ranks, ranks
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("node", "rank"))["rank"]
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x = torch.randn(1, 16, _SmallBlock.WIDTH, device=device, dtype=torch.bfloat16)

    def step() -> None:
        with torch.enable_grad():
            model(x).sum().backward()
        model.zero_grad()

    return _TimedWork(_BLOCKS * _SmallBlock.KERNELS, step)


class _SmallBlock(nn.Module):
    """A decoder block with the usual number of parameters, as small as kernels allow."""

    WIDTH, HEADS = 64, 4
    KERNELS = 14 + 27
    """Kernels of forward and backward as `cost.reading` counts them. Forward: 2 norms, 7 products,
    attention, activation, gate and 2 sums. Backward: 2 for each norm and product, 1 for attention
    and activation, 2 for the gate, and 5 sums of gradients of tensors that several kernels read."""

    def __init__(self) -> None:
        super().__init__()
        size = self.WIDTH
        self.norm, self.norm_after = nn.RMSNorm(size), nn.RMSNorm(size)
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            nn.Linear(size, size, bias=False) for _ in range(7)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            each(y).unflatten(-1, (self.HEADS, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        y = self.norm_after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _products(device: torch.device, dtype: torch.dtype, is_large: bool) -> Iterator[_TimedWork]:
    """Yield matrix products; `amount` is their floating-point operations."""
    sizes = (2048, 4096, 8192) if is_large else (128, 512, 1024)
    for m in sizes:
        for n in sizes:
            a = torch.randn(m, sizes[1], device=device, dtype=dtype)
            b = torch.randn(sizes[1], n, device=device, dtype=dtype)
            yield _TimedWork(2.0 * m * n * sizes[1], partial(torch.matmul, a, b))


def _attention(device: torch.device, dtype: torch.dtype, is_large: bool) -> Iterator[_TimedWork]:
    """Yield forwards and backwards of causal attention; `amount` is without the masked half."""
    for length in (2048, 4096, 8192) if is_large else (512, 768, 1024):
        shape = (1, _HEADS, length, _WIDTH)
        q, k, v, given = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
        run = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        amount = attention_flops(2 * q.numel(), length, is_causal=True)
        yield _TimedWork(amount, run)
        with torch.enable_grad():
            inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
            out = run()
        backward = partial(torch.autograd.grad, out, inputs, given, retain_graph=True)
        yield _TimedWork(ATTENTION_BACKWARD * amount, backward)


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


def _groups(device: torch.device) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return (group of the ranks of this node, group of the same rank of each node).

    A group of a single rank is None.

    Raises:
        PlanError: Nodes have different numbers of ranks, or no launcher says how many they have.
    """
    world = _world()
    if world == 1:
        return None, None
    per_node = ranks_per_node() or world
    names = gathered(socket.gethostname())
    if per_node == world and len(set(names)) > 1:
        what = f"ranks run on {len(set(names))} hosts, and nothing says how many are on each"
        fix = "start them with torchrun, or set LOCAL_WORLD_SIZE on each"
        raise PlanError(Problem(what, Origin("LOCAL_WORLD_SIZE"), fix))
    # Each rank must refuse, also those of a node that has as many ranks as another one.
    bounds = torch.tensor([per_node, -per_node], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    most, least = bounds[0].item(), -bounds[1].item()
    if most != least:
        what = f"some nodes have {least} ranks and others {most}"
        fix = "start as many ranks on each node, as torchrun does"
        raise PlanError(Problem(what, Origin("LOCAL_WORLD_SIZE"), fix))
    shape = world // per_node, per_node
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("node", "rank"))
    within, across = (mesh.get_group(name) for name in ("rank", "node"))
    return within if per_node > 1 else None, across if per_node < world else None


def _collectives(
    device: torch.device,
    is_large: bool,
    group: dist.ProcessGroup | None,
    *,
    reduces: bool = False,
) -> Iterator[_TimedWork]:
    """Yield all-gathers of a group, or reduce-scatters; `amount` is bytes through one rank.

    All groups of one kind run at the same time, as in training: several ranks of a node share its
    link to other nodes. On a slow link, the sizes end where one takes longer than `_LONG_S`.
    """
    if group is None:
        return
    ranks = group.size()
    for number, power in enumerate((22, 24, 26, 28) if is_large else (18, 20, 22, 24)):
        part = torch.zeros(2**power // (4 * ranks), device=device)
        whole = torch.zeros(ranks, part.numel(), device=device)
        passing = whole.numel() * 4.0 * (ranks - 1) / ranks
        run = partial(scatter_sum, part, whole, group) if reduces else partial(
            gather_into, whole, part, group
        )  # fmt: skip
        work = _TimedWork(passing, run, ranks - 1)
        yield work
        seconds = torch.tensor(_seconds(device, work, 1), device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if number and seconds.item() > _LONG_S:
            return
