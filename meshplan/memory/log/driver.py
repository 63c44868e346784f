"""Device memory outside torch's allocator: the context, and what NCCL keeps per communicator.

A plan tells which groups of ranks there are; the bytes of each are bands of `generations`. What is
said to fit must fit with the upper end. The workspaces of cuBLAS are here too, although they lie
inside the allocator, because no operator shows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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
    """What a communicator does most, which says whom it connects with whom."""

    COLLECTIVE = "collectives"
    EXCHANGE = "all to all"
    NEIGHBOURS = "send and receive"
    SHARED = "gradients of what several stages hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One group of ranks for which NCCL keeps buffers on this rank.

    Args:
        axes: Of the mesh, outermost first.
        ranks: In the group.
        ranks_in_node: How many of them share a node.
        use: What it is for.
    """

    axes: tuple[str, ...]
    ranks: int
    ranks_in_node: int
    use: CommunicatorUse = CommunicatorUse.COLLECTIVE


@dataclass(frozen=True, slots=True)
class DriverTerm:
    """One row of what the driver holds.

    Args:
        what: For a table.
        band: Its bytes.
        source: Where they come from.
    """

    what: str
    band: Band
    source: str


_THREADS: Final = 2
"""That call cuBLAS: the one that runs forward, and autograd's for the device."""


def driver_bytes(device: str, opened: Iterable[Communicator] = ()) -> Band:
    """What one rank's device holds outside of torch's allocator.

    Args:
        device: A name of `hardware`; any other gets the widest band.
        opened: The rank's communicators.
    """
    total = Band(0, 0, 0)
    for term in driver_terms(device, opened):
        total = total.plus(term.band)
    return total


def driver_terms(device: str, opened: Iterable[Communicator] = ()) -> tuple[DriverTerm, ...]:
    """The rows that `driver_bytes` adds up."""
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
    if each.use == CommunicatorUse.SHARED:  # Stages between those have none.
        band = found.pair if each.ranks == 2 else found.group
        return band._replace(low=0), found.group_source
    peers = each.ranks_in_node - 1
    if each.use == CommunicatorUse.NEIGHBOURS:
        peers = min(peers, 2)
    least, usual, most = (peers * channels * CONNECTION for channels in found.channels_per_peer)
    # Losses and checks are reduced over the same group.
    band = Band(least, usual, most).plus(found.pair if each.ranks == 2 else found.group)
    if each.ranks_in_node < each.ranks:
        band = band.plus(OVER_NODES)
    if each.use == CommunicatorUse.NEIGHBOURS:
        # torch opens one more for every pair that sends outside of a batch.
        band = band._replace(high=band.high + 2 * found.pair.high)
    return band, f"{found.group_source}; {PEERS}"


def communicators(assignment: Assignment, *, gpus_per_node: int = 8) -> tuple[Communicator, ...]:
    """The groups in which a rank takes part, each once: those of the same ranks are one.

    What the wrappers, the styles, the pipeline and the checks of `train_step` send in; torch opens
    a communicator with the first message.
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
    """Of some places along pp (`runtime.apply.pipeline.shared`), each that is not all of them."""
    stages = assignment.stages
    places = {frozenset(map(stages.rank_of, each)) for each in assignment.shared.values() if stages}
    for ranks in sorted(map(len, places)):
        if 1 < ranks < assignment.mesh.size("pp"):
            yield Communicator(
                axes=("pp",), ranks=ranks, ranks_in_node=1, use=CommunicatorUse.SHARED
            )


def _ranks_in_node(mesh: Mesh, axes: tuple[str, ...], gpus_per_node: int) -> int:
    """How many ranks of the first group along `axes` are on the first node."""
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
    """What torch gives cuBLAS for each thread that multiplies matrices, inside its allocator.

    Source: torch 2.13, ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`; cuBLASLt uses
    the same memory (TORCH_CUBLASLT_UNIFIED_WORKSPACE, the default).
    """
    return generation_of(device).workspace_bytes


def with_workspaces(log: EventLog, device: str) -> EventLog:
    """The log of a step on such a device: cuBLAS's workspaces are there before and after it."""
    size, first = workspace_bytes(device), len(log.storages)
    storage = Storage(Term.WORKSPACES, "cublas")
    born = tuple((size, first + thread, 0) for thread in range(_THREADS))
    storages = (*log.storages, *[storage] * _THREADS)
    return replace(log, storages=storages, changes=(*born, *log.changes))
