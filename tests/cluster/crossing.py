"""Bytes that gloo sends from node to node for the traffic that `traffic.forecast` predicts.

The forecast has collectives and the bytes of whole tensors. Which link carries how many of them is
up to the library. gloo of torch 2.13, as counted on the interfaces of two, four and eight ranks:

- all_gather: a ring, in which a rank sends (n - 1) / n of the whole tensor to the next rank.
- all_reduce: a ring twice, as with NCCL.
- reduce_scatter: an all_reduce of which a rank keeps its part, so twice the bytes of NCCL's ring.
- broadcast: each rank but the first receives the tensor once (a binomial tree).
- all_to_all, send: directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from meshplan.layout.mesh import Mesh
from meshplan.traffic import Forecast

_PASSES: Final = {"all_gather": 1, "all_reduce": 2, "reduce_scatter": 2}
"""Passes of gloo's ring, by kind of collective."""


def group_of(mesh: Mesh, axes: Sequence[str], rank: int) -> list[int]:
    """Return the ranks that differ from this one only along these axes, in order."""
    at = mesh.coordinates(rank)
    return [
        other
        for other in range(mesh.world_size)
        if all(place == at[axis] or axis in axes for axis, place in mesh.coordinates(other).items())
    ]


def leaving_bytes(mesh: Mesh, told: Forecast, rank: int, per_node: int) -> float:
    """Return the bytes that a rank sends to ranks of other nodes in a step.

    Args:
        mesh: The mesh of the plan.
        told: The forecast of this rank.
        rank: The rank.
        per_node: Ranks of one node.
    """
    total = 0.0
    for each in told.traffic:
        kind, size = each.route.kind, each.count * each.route.num_bytes
        group = group_of(mesh, each.route.axes, rank)
        place, count = group.index(rank), len(group)
        is_far = [other // per_node != rank // per_node for other in group]
        if kind in _PASSES:
            to_next = is_far[(place + 1) % count]
            total += to_next * size * _PASSES[kind] * (count - 1) / count
        elif kind == "all_to_all":
            total += size * sum(is_far) / count
        elif kind == "broadcast":
            total += size * sum(is_far[child] for child in _children(place, count))
        elif kind == "send":
            total += size * _far_share(place, is_far)
    return total


def _children(place: int, count: int) -> list[int]:
    """Return the places to which a place of a binomial tree sends, from place 0 on."""
    out, step = [], 1
    while step < count:
        if place < step and place + step < count:
            out.append(place + step)
        step *= 2
    return out


def _far_share(place: int, is_far: Sequence[bool]) -> float:
    """Return the share of a stage's sends that leave the node.

    A stage sends activations to the next stage and as many bytes of gradients to the one before.
    """
    beside = [other for other in (place - 1, place + 1) if 0 <= other < len(is_far)]
    return sum(is_far[other] for other in beside) / len(beside)
