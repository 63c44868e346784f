"""Estimate the time of collectives from the topology, for many groups of ranks at once.

A group has the same number of ranks on each node, and its traffic between nodes uses the network
links of all these ranks. So the bandwidth of a ring is the lower of two: that of a link within a
node, and the sum over the network links of the group's ranks on one node. Each further rank is a
further hop. An all-reduce may use a tree instead of a ring; an all-gather may not. All groups of a
job share the switches between nodes, so links are the slower, the more nodes the job has.

Source: Thakur et al. 2005 (collective communication in MPICH), sections 4.1 and 4.5; nccl-tests,
doc/PERFORMANCE.md, for bus bandwidth; NCCL 2.27, tuning.cc: 51, 99, 195 and 387 GB/s for 1, 2, 4
and 8 ranks per node on H100 nodes of eight 400 Gb/s links.

Units: bytes of the whole tensor (`traffic.types.Route`), seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshplan.cost.grid import Array
from meshplan.cost.profile import Profile


@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """The shape of a group of communicating ranks, for each configuration.

    Args:
        ranks: Number of ranks in the group, [configurations].
        per_node: Ranks of the group on one node, [configurations].
        nodes: Nodes on which the group has ranks, [configurations].
        job_nodes: Nodes of the whole job, [configurations].
    """

    ranks: Array
    per_node: Array
    nodes: Array
    job_nodes: Array


def group(
    ranks: Array, stride: Array, gpus_per_node: int, job_nodes: Array | float = 1.0
) -> CollectiveGroup:
    """Return the groups whose ranks have global numbers `stride` apart.

    Args:
        ranks: Number of ranks in the group, [configurations].
        stride: Product of the sizes of the mesh axes inside of the group's, [configurations].
        gpus_per_node: Devices of one node.
        job_nodes: Nodes of the whole job, [configurations].
    """
    per_node = np.minimum(ranks, _room(stride, gpus_per_node))
    return CollectiveGroup(
        ranks, per_node, np.ceil(ranks / per_node), np.broadcast_to(job_nodes, ranks.shape)
    )


def job_nodes_of(grid: Array, order: Sequence[str], gpus_per_node: int) -> Array:
    """Return the nodes of the job, [configurations].

    Args:
        grid: Configurations of `grid.GRID`.
        order: The axes of the mesh, outermost first.
        gpus_per_node: Devices of one node.
    """
    return np.asarray(np.ceil(_ranks_along(grid, order) / gpus_per_node))


def _ranks_along(grid: Array, axes: Sequence[str]) -> Array:
    """Return the product of the sizes of some axes, [configurations]."""
    ranks = np.ones(len(grid))
    for axis in axes:
        if axis != "ep":  # Its ranks are borrowed: they count in the axis that lends them.
            ranks = ranks * grid[axis]
    return ranks


def _room(stride: Array, gpus_per_node: int) -> Array:
    """Return how many ranks with global numbers `stride` apart fit on one node."""
    return np.maximum(1.0, np.floor(gpus_per_node / np.minimum(stride, gpus_per_node)))


def stride_of(grid: Array, axis: str, order: Sequence[str]) -> Array:
    """Return how far apart the global numbers of neighbours along an axis are, [configurations].

    Args:
        grid: Configurations of `grid.GRID`.
        axis: Name of the axis.
        order: The axes of the mesh, outermost first.
    """
    return _ranks_along(grid, order[order.index(axis) + 1 :])


def group_along(
    grid: Array, axes: Sequence[str], order: Sequence[str], gpus_per_node: int
) -> CollectiveGroup:
    """Return the groups of ranks that differ only along these axes.

    Args:
        grid: Configurations of `grid.GRID`.
        axes: Axes that are no borrowed ones.
        order: The axes of the mesh, outermost first.
        gpus_per_node: Devices of one node.
    """
    ranks, per_node, length, stride, inner = np.ones((5, len(grid)))
    for axis in (axis for axis in reversed(order) if axis != "ep"):
        size = grid[axis]
        if axis in axes:
            # Axes next to each other in the mesh count as one: their ranks are equally far apart.
            stride = np.where(length > 1, stride, inner)
            length = length * size
        else:
            near = np.minimum(length, _room(stride, gpus_per_node))
            ends = size > 1
            ranks = np.where(ends, ranks * length, ranks)
            per_node = np.where(ends, per_node * near, per_node)
            length = np.where(ends, 1.0, length)
        inner = inner * size
    per_node = per_node * np.minimum(length, _room(stride, gpus_per_node))
    return CollectiveGroup(
        ranks * length,
        per_node,
        np.ceil(ranks * length / per_node),
        job_nodes_of(grid, order, gpus_per_node),
    )


def inter_bandwidth(job_nodes: Array, profile: Profile) -> Array:
    """Return the bytes per second that a device sends to other nodes while all of a job do.

    Args:
        job_nodes: Nodes of the whole job, [configurations].
        profile: Constants of the device and its links.
    """
    slower = 1 + profile.congestion * np.log2(job_nodes)
    return np.asarray(profile.inter_bytes_per_s / slower)


def _bandwidth(of: CollectiveGroup, profile: Profile) -> Array:
    """Return the bytes per second of a ring over the group."""
    links = of.per_node * inter_bandwidth(of.job_nodes, profile)
    outside = np.minimum(profile.intra_bytes_per_s, links)
    return np.where(of.nodes > 1, outside, profile.intra_bytes_per_s)


def _hops(of: CollectiveGroup, profile: Profile) -> Array:
    """Return the seconds of latency of one pass around the ring."""
    within = (of.ranks - of.nodes) * profile.intra_latency_s
    return within + (of.nodes - 1) * profile.inter_latency_s


def all_gather(
    num_bytes: Array, of: CollectiveGroup, profile: Profile, count: Array | int = 1
) -> Array:
    """Return the seconds of `count` all-gathers, or of as many reduce-scatters.

    Args:
        num_bytes: Bytes of all `count` collectives together.
        of: The group of each configuration.
        profile: Constants of the device and its links.
        count: Number of collectives.
    """
    wire = num_bytes * (of.ranks - 1) / of.ranks / _bandwidth(of, profile)
    return np.where(of.ranks > 1, count * _hops(of, profile) + wire, 0.0)


def all_reduce(
    num_bytes: Array, of: CollectiveGroup, profile: Profile, count: Array | int = 1
) -> Array:
    """Return the seconds of `count` all-reduces: two passes of a ring, or a tree if that is faster.

    The arguments are those of `all_gather`.
    """
    wire = 2 * num_bytes * (of.ranks - 1) / of.ranks / _bandwidth(of, profile)
    across = np.ceil(np.log2(of.nodes)) * profile.inter_latency_s
    within = np.ceil(np.log2(of.per_node)) * profile.intra_latency_s
    hops = 2 * np.minimum(_hops(of, profile), across + within)
    return np.where(of.ranks > 1, count * hops + wire, 0.0)


def all_to_all(
    num_bytes: Array, of: CollectiveGroup, profile: Profile, count: Array | int = 1
) -> Array:
    """Return the seconds of `count` all-to-alls.

    Links within a node and between nodes are used at the same time.

    Args:
        num_bytes: Bytes that one rank sends in all `count` collectives together, including those
            that it sends to itself.
        of: The group of each configuration.
        profile: Constants of the device and its links.
        count: Number of collectives.
    """
    within = num_bytes * (of.per_node - 1) / of.ranks / profile.intra_bytes_per_s
    out = num_bytes * (of.ranks - of.per_node) / of.ranks / inter_bandwidth(of.job_nodes, profile)
    latency = np.where(of.nodes > 1, profile.inter_latency_s, profile.intra_latency_s)
    return np.where(of.ranks > 1, count * latency + np.maximum(within, out), 0.0)


def send(
    num_bytes: Array, crosses: Array | bool, profile: Profile, job_nodes: Array | float = 1.0
) -> Array:
    """Return the seconds of a send from one rank to another.

    Args:
        num_bytes: Bytes that are sent.
        crosses: True where the two ranks are on different nodes.
        profile: Constants of the device and its links.
        job_nodes: Nodes of the whole job.
    """
    inside = profile.intra_latency_s + num_bytes / profile.intra_bytes_per_s
    out = profile.inter_latency_s + num_bytes / inter_bandwidth(np.asarray(job_nodes), profile)
    return np.where(crosses, out, inside)
