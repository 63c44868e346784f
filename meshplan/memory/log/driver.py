"""Device memory outside torch's allocator: the CUDA context, and NCCL's buffers per communicator.

A plan determines which groups of ranks communicate; the bytes of each group are a `Band` from
`device_overheads`. To decide if a plan fits, the upper ends are used. cuBLAS's workspaces are added
here too. They are inside torch's allocator, but no aten operator shows their allocation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from meshplan.assign import Assignment
from meshplan.layout.mesh import GRADIENT_AXES, SHARD_AXES, Mesh
from meshplan.memory.log.device_overheads import (
    CONNECTION,
    OVER_NODES,
    PEERS,
    Band,
    Generation,
    generation_of,
)
from meshplan.memory.log.events import EventLog, Storage, Term


class CommunicatorUse(StrEnum):
    """The main traffic of a communicator, which determines the peers that it connects."""

    COLLECTIVE = "collectives"
    EXCHANGE = "all-to-all"
    NEIGHBOURS = "send and receive"
    SHARED = "gradients of parameters that several stages share"


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One group of ranks for which NCCL keeps buffers on this rank.

    Args:
        axes: Mesh axes of the group, outermost first.
        ranks: Number of ranks in the group.
        ranks_in_node: Number of those ranks that share a node.
        use: Main traffic of the group.
    """

    axes: tuple[str, ...]
    ranks: int
    ranks_in_node: int
    use: CommunicatorUse = CommunicatorUse.COLLECTIVE


@dataclass(frozen=True, slots=True)
class DriverTerm:
    """One item of the memory outside torch's allocator.

    Args:
        what: Name of the item, for a table.
        band: Bytes of the item.
        source: Source of those bytes.
    """

    what: str
    band: Band
    source: str


_THREADS: Final = 2
"""Threads that call cuBLAS: the one that runs forward, and autograd's thread for the device."""


def driver_bytes(device: str, opened: Iterable[Communicator] = ()) -> Band:
    """Estimate one rank's device memory outside of torch's allocator, in bytes.

    Args:
        device: A device name of `hardware`; any other name gets the widest band.
        opened: The rank's communicators.
    """
    total = Band(0, 0, 0)
    for term in driver_terms(device, opened):
        total = total.plus(term.band)
    return total


def driver_terms(device: str, opened: Iterable[Communicator] = ()) -> tuple[DriverTerm, ...]:
    """Return the items that `driver_bytes` adds up: the context, then each communicator."""
    found = generation_of(device)
    rows = [DriverTerm("context", found.context, found.context_source)]
    for each in opened:
        what = f"NCCL: {each.use} along {' and '.join(each.axes)}, {each.ranks} ranks"
        rows.append(DriverTerm(what, *_group(found, each)))
    return tuple(rows)


def _group(found: Generation, each: Communicator) -> tuple[Band, str]:
    if each.use == CommunicatorUse.COLLECTIVE:
        band = found.pair if each.ranks == 2 else found.group
        return band, found.group_source
    if each.use == CommunicatorUse.SHARED:
        # A rank whose stages have no copy of the parameter opens no communicator: low is 0.
        band = found.pair if each.ranks == 2 else found.group
        return band._replace(low=0), found.group_source
    peers = each.ranks_in_node - 1
    if each.use == CommunicatorUse.NEIGHBOURS:
        peers = min(peers, 2)
    least, usual, most = (peers * channels * CONNECTION for channels in found.channels_per_peer)
    # Losses and checks are reduced over the same group, so add the buffers of collectives.
    band = Band(least, usual, most).plus(found.pair if each.ranks == 2 else found.group)
    if each.ranks_in_node < each.ranks:
        band = band.plus(OVER_NODES)
    if each.use == CommunicatorUse.NEIGHBOURS:
        # torch opens one more communicator for every pair that sends outside of a batched call.
        band = band._replace(high=band.high + 2 * found.pair.high)
    return band, f"{found.group_source}; {PEERS}"


def communicators(assignment: Assignment, *, gpus_per_node: int = 8) -> tuple[Communicator, ...]:
    """Return all NCCL communicators that a rank opens; groups of the same ranks share one.

    These are the groups in which wrappers (FSDP2, DDP), tensor-parallel styles, the pipeline and
    the checks of `train_step` communicate. torch opens a communicator with its first message.

    Args:
        assignment: The assignment, whose mesh and units determine the groups.
        gpus_per_node: Number of GPUs in one node, each of which is one rank.
    """
    mesh = assignment.mesh
    wanted: dict[tuple[str, ...], CommunicatorUse] = {}

    def open_(axes: Iterable[str], use: CommunicatorUse = CommunicatorUse.COLLECTIVE) -> None:
        spread = mesh.spread(axes)
        if spread and wanted.get(spread, CommunicatorUse.COLLECTIVE) == CommunicatorUse.COLLECTIVE:
            wanted[spread] = use

    open_(mesh.names)
    open_(GRADIENT_AXES)
    for unit in assignment.units.values():
        open_(unit.shard_axes)
        open_(unit.replicate_axes)
    for axis in mesh.names:
        if axis not in SHARD_AXES or axis == "cp":
            open_(
                (axis,), CommunicatorUse.NEIGHBOURS if axis == "pp" else CommunicatorUse.COLLECTIVE
            )
    if assignment.experts:
        open_(("ep",), CommunicatorUse.EXCHANGE)
    if assignment.context is not None and assignment.context.attention == "all_to_all":
        open_(("cp",), CommunicatorUse.EXCHANGE)
    return (
        *(
            Communicator(
                axes=axes,
                ranks=mesh.size(*axes),
                ranks_in_node=_ranks_in_node(mesh, axes, gpus_per_node),
                use=use,
            )
            for axes, use in wanted.items()
        ),
        *_shared(assignment),
    )


def _shared(assignment: Assignment) -> Iterator[Communicator]:
    """Yield a communicator for each set of pp ranks whose stages share a parameter.

    `runtime.apply.pipeline.shared` adds up the gradients of the copies over these communicators. A
    set of all pp ranks is left out, because the communicator of the pp axis has the same ranks.
    """
    stages = assignment.stages
    places = {frozenset(map(stages.rank_of, each)) for each in assignment.shared.values() if stages}
    for ranks in sorted(map(len, places)):
        if 1 < ranks < assignment.mesh.size("pp"):
            yield Communicator(
                axes=("pp",), ranks=ranks, ranks_in_node=1, use=CommunicatorUse.SHARED
            )


def _ranks_in_node(mesh: Mesh, axes: tuple[str, ...], gpus_per_node: int) -> int:
    """Return how many ranks of the first group along `axes` are on the first node."""
    strides, stride = {}, 1
    for axis in reversed(mesh.axes):
        strides[axis.name], stride = stride, stride * axis.size
    for loan in mesh.loans:
        strides[loan.name] = strides[loan.within]
        strides[loan.rest] = strides[loan.within] * loan.size
    within = [0]
    for name in axes:
        step = strides[name]
        within = [
            place + at * step
            for place in within
            for at in range(min(mesh.size(name), math.ceil(gpus_per_node / step)))
            if place + at * step < gpus_per_node
        ]
    return len(within)


def workspace_bytes(device: str) -> int:
    """Return the bytes of cuBLAS's workspace for each thread that calls cuBLAS.

    The workspace is allocated from torch's caching allocator.

    Source: torch 2.13, ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`; cuBLASLt uses
    the same memory (TORCH_CUBLASLT_UNIFIED_WORKSPACE, the default).
    """
    return generation_of(device).workspace_bytes


def with_workspaces(log: EventLog, device: str) -> EventLog:
    """Return the log with cuBLAS's workspaces added, which exist throughout the step."""
    storage = Storage(Term.WORKSPACES, "cublas")
    return log.preceded([storage] * _THREADS, [workspace_bytes(device)] * _THREADS)
