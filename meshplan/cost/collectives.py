"""Estimate the time of collectives from the topology, for many groups of ranks at once.

A group has some ranks on each node. Its traffic between nodes uses the links of all its ranks on a
node, so the bandwidth of a ring is the lower of the link within a node and the sum of those links.
Each further rank is a further hop. An all-reduce may use a tree instead; an all-gather may not.

Source: Thakur et al. 2005 (collective communication in MPICH), sections 4.1 and 4.5; nccl-tests,
doc/PERFORMANCE.md, for bus bandwidth; NCCL 2.27, tuning.cc: 51, 99, 195 and 387 GB/s for 1, 2, 4
and 8 ranks per node on H100 nodes of eight 400 Gb/s links.

Units: bytes of the whole tensor (`traffic.types.Route`), seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.profile import Profile

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """The shape of a group of communicating ranks, one group per configuration.

    Args:
        ranks: Number of ranks in the group.
        per_node: Ranks of the group on one node.
        nodes: Nodes over which the group is spread.
    """

    ranks: Array
    per_node: Array
    nodes: Array


def group(ranks: Array, stride: Array, gpus_per_node: int) -> CollectiveGroup:
    """Build the groups whose ranks lie `stride` apart.

    Args:
        ranks: Ranks along the axes of the group.
        stride: Product of the sizes of the inner axes.
        gpus_per_node: Devices of one node.
    """
    # Ranks `stride` apart that fit on one node.
    room = np.maximum(1.0, np.floor(gpus_per_node / np.minimum(stride, gpus_per_node)))
    per_node = np.minimum(ranks, room)
    return CollectiveGroup(ranks, per_node, np.ceil(ranks / per_node))


def _bandwidth(of: CollectiveGroup, profile: Profile) -> Array:
    links = of.per_node * profile.inter_bytes_per_s
    outside = np.minimum(profile.intra_bytes_per_s, links)
    return np.where(of.nodes > 1, outside, profile.intra_bytes_per_s)


def _hops(of: CollectiveGroup, profile: Profile) -> Array:
    """Seconds of latency of one pass around the ring."""
    within = (of.ranks - of.nodes) * profile.intra_latency_s
    return within + (of.nodes - 1) * profile.inter_latency_s


def all_gather(
    num_bytes: Array, of: CollectiveGroup, profile: Profile, count: Array | int = 1
) -> Array:
    """Seconds of `count` all-gathers or reduce-scatters, which take equally long.

    Args:
        num_bytes: Bytes of all `count` collectives together.
        of: The groups, one per configuration.
    """
    wire = num_bytes * (of.ranks - 1) / of.ranks / _bandwidth(of, profile)
    return np.where(of.ranks > 1, count * _hops(of, profile) + wire, 0.0)


def all_reduce(
    num_bytes: Array, of: CollectiveGroup, profile: Profile, count: Array | int = 1
) -> Array:
    """Seconds of `count` all-reduces: two passes of a ring, or a tree where that has fewer hops."""
    wire = 2 * num_bytes * (of.ranks - 1) / of.ranks / _bandwidth(of, profile)
    across = np.ceil(np.log2(of.nodes)) * profile.inter_latency_s
    within = np.ceil(np.log2(of.per_node)) * profile.intra_latency_s
    hops = 2 * np.minimum(_hops(of, profile), across + within)
    return np.where(of.ranks > 1, count * hops + wire, 0.0)


def all_to_all(
    num_bytes: Array, of: CollectiveGroup, profile: Profile, count: Array | int = 1
) -> Array:
    """Seconds of `count` all-to-alls; links within a node and between nodes are used at once.

    Args:
        num_bytes: Bytes that one rank sends, its own part included, of all `count` together.
        of: The groups, one per configuration.
    """
    within = num_bytes * (of.per_node - 1) / of.ranks / profile.intra_bytes_per_s
    out = num_bytes * (of.ranks - of.per_node) / of.ranks / profile.inter_bytes_per_s
    latency = np.where(of.nodes > 1, profile.inter_latency_s, profile.intra_latency_s)
    return np.where(of.ranks > 1, count * latency + np.maximum(within, out), 0.0)


def send(
    num_bytes: Array, crosses: Array | bool, profile: Profile, count: Array | int = 1
) -> Array:
    """Seconds of `count` sends from one rank to another.

    Args:
        num_bytes: Bytes of all `count` sends together.
        crosses: True where the two ranks are on different nodes.
    """
    inside = count * profile.intra_latency_s + num_bytes / profile.intra_bytes_per_s
    out = count * profile.inter_latency_s + num_bytes / profile.inter_bytes_per_s
    return np.where(crosses, out, inside)
