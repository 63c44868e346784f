"""The bytes that ranks send to each other in a step, and the links that carry them.

Bytes come from `traffic.forecast`. A collective is counted as if each rank sent its shard of the
tensor directly to every other rank. NCCL may route it differently, but a ring sends the same total.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from meshplan.cost.config import chain_of_plan, stage_of_places
from meshplan.cost.grid import RECOMPUTE
from meshplan.errors import PlanError
from meshplan.layout.hardware import find_device
from meshplan.layout.mesh import Mesh
from meshplan.pictures.mesh.counted import ONLY_COUNT, is_counted
from meshplan.plan.plan import Plan
from meshplan.traffic import forecast

_TIMES: Final = {"all_reduce": 2}
"""Factor of a collective's bytes: an all-reduce is a reduce-scatter and then an all-gather."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The nodes that a plan runs on, and the speed of their links.

    Args:
        per_node: Ranks per node; None if it is not stated.
        intra_bytes_per_s: Bytes per second of the links within a node; None if not known.
        inter_bytes_per_s: Bytes per second of the links between nodes; None if not known.
    """

    per_node: int | None
    intra_bytes_per_s: float | None
    inter_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """All collectives of one kind along the same axes in a step, and the link that they use.

    Args:
        kind: Kind of the collective, as in `traffic.Route`.
        axes: Axes of the mesh, as in `traffic.Route`.
        num_ranks: Number of ranks in one group.
        pair_bytes: Bytes that a rank sends to each other rank of its group in a step; 0 for "send".
        crosses: If True, some group has ranks on several nodes; None if nodes are not stated.
        bytes_per_s: Bytes per second of the slowest link in use; None if not known.
        to: For "send", pairs (receiver's coordinate along pp, bytes); else ().
    """

    kind: str
    axes: tuple[str, ...]
    num_ranks: int
    pair_bytes: float
    crosses: bool | None
    bytes_per_s: float | None
    to: tuple[tuple[int, float], ...] = ()

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends in a step."""
        if self.to:
            return sum(size for _, size in self.to)
        return self.pair_bytes * (self.num_ranks - 1)


@dataclass(frozen=True, slots=True)
class Links:
    """All communication of one rank in a step.

    Args:
        lanes: The collectives, with most bytes first.
        unknown: Texts on further communication and why its bytes are not known.
        is_computed: If True, bytes of activations are computed from the model's sizes, as the
            planner does, and not from a recorded forward.
    """

    lanes: tuple[Lane, ...]
    unknown: tuple[str, ...]
    is_computed: bool = False

    @property
    def crossing_bytes(self) -> float:
        """Bytes that the rank sends in a step in groups that have ranks on several nodes."""
        return sum(lane.sent_bytes for lane in self.lanes if lane.crosses)


def machine_of(plan: Plan) -> Machine:
    """Return the nodes and links that the plan states, or that its GPU usually has."""
    stated = plan.spec.hardware
    if stated is None:
        return Machine(per_node=None, intra_bytes_per_s=None, inter_bytes_per_s=None)
    intra, inter = stated.intra_bytes_per_s, stated.inter_bytes_per_s
    if stated.gpu is not None:
        device = find_device(stated.gpu, plan.spec.origin("hardware.gpu"))
        intra, inter = intra or device.intra_bytes_per_s, inter or device.inter_bytes_per_s
    return Machine(per_node=stated.gpus_per_node, intra_bytes_per_s=intra, inter_bytes_per_s=inter)


def links_of(plan: Plan, rank: int = 0) -> Links:
    """Return the communication of one rank in a step."""
    if is_counted(plan):
        # The modules, which are not known, decide which bytes are gathered and how often.
        is_alone = plan.mesh.world_size == 1
        return Links((), () if is_alone else (f"what is sent: {ONLY_COUNT}",))
    predicted, machine, mesh = forecast(plan, rank=rank), machine_of(plan), plan.mesh
    totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for each in predicted.traffic:
        if each.route.kind != "recv":
            route = each.route
            totals[route.kind, route.axes] += route.num_bytes * each.count
    unknown = predicted.unknown
    sizes = _of_activations(plan, rank) if any(map(_is_of_activations, unknown)) else None
    if sizes is not None:
        totals.update(sizes)
        unknown = tuple(each for each in unknown if not _is_of_activations(each))
    lanes = []
    for (kind, axes), num_bytes in totals.items():
        ranks = mesh.size(*axes)
        crosses = crosses_nodes(mesh, axes, machine.per_node)
        to = _next_stages(plan, rank, num_bytes) if kind == "send" else ()
        lanes.append(
            Lane(
                kind=kind,
                axes=axes,
                num_ranks=ranks,
                pair_bytes=_pair_bytes(kind, num_bytes, ranks),
                crosses=crosses,
                bytes_per_s=None
                if crosses is None
                else machine.inter_bytes_per_s
                if crosses
                else machine.intra_bytes_per_s,
                to=to,
            )
        )
    lanes.sort(key=lambda lane: (-lane.sent_bytes, lane.kind, lane.axes))
    return Links(tuple(lanes), unknown, sizes is not None)


def _next_stages(plan: Plan, rank: int, num_bytes: int) -> tuple[tuple[int, float], ...]:
    """Return pairs (receiver's coordinate along pp, its share of `num_bytes`).

    Activations go to the ranks of the next stages, and gradients to those of the stages before.
    """
    stages = plan.assignment.stages
    assert stages is not None
    place = plan.mesh.index(rank, ("pp",))
    to: Counter[int] = Counter()
    for stage in stages.of_rank(place):
        for beside in (stage - 1, stage + 1):
            if 0 <= beside < stages.num and stages.rank_of(beside) != place:
                to[stages.rank_of(beside)] += 1
    return tuple((at, num_bytes * count / to.total()) for at, count in sorted(to.items()))


def _is_of_activations(unknown: str) -> bool:
    return unknown.startswith(("what activations send along tp", "what the stages send"))


def _of_activations(plan: Plan, rank: int) -> Counter[tuple[str, tuple[str, ...]]] | None:
    """Return the bytes of activations and their gradients along tp and pp, by (kind, axes).

    Returns None if the sizes of the model's activations are not known.
    """
    a, stages, micro = plan.assignment, plan.assignment.stages, plan.micro
    try:
        chain = chain_of_plan(plan)
    except PlanError:
        return None
    assert micro is not None
    samples = micro * plan.accumulate
    out: Counter[tuple[str, tuple[str, ...]]] = Counter()
    place = plan.mesh.index(rank, ("pp",))
    places = stage_of_places(plan, chain)
    for number, name, stage in zip(chain.order, chain.names, places, strict=True):
        if stages is not None and stages.rank_of(stage) != place:
            continue
        kind, recompute = chain.kinds[number], a.recompute.get(name)
        redone = kind.sent_recompute[RECOMPUTE.index(recompute.policy.mode) if recompute else 0]
        for sent in (kind.sent_forward, kind.sent_backward, redone):
            out["all_reduce", ("tp",)] += int(sent.all_reduce_bytes * samples)
            # `gather_bytes` includes reduce-scatters: they move as many bytes as all-gathers.
            out["all_gather", ("tp",)] += int(sent.gather_bytes * samples)
    if stages is not None:
        boundary = max(kind.boundary_bytes for kind in chain.kinds)
        for stage in range(stages.num - 1):
            ends = {stages.rank_of(stage), stages.rank_of(stage + 1)}
            # One rank of a boundary sends the activations; the other one sends their gradients.
            out["send", ("pp",)] += int(boundary * samples) * (place in ends and len(ends) > 1)
    return Counter({key: size for key, size in out.items() if size})


def _pair_bytes(kind: str, num_bytes: int, ranks: int) -> float:
    """Return the bytes that a rank sends to each other rank of its group; 0 for a "send".

    Args:
        kind: Kind of the collective.
        num_bytes: Bytes of the whole tensor, summed over all collectives.
        ranks: Number of ranks in the group.

    >>> _pair_bytes("all_gather", 800, 8), _pair_bytes("all_reduce", 800, 8)
    (100.0, 200.0)
    """
    if kind == "send":
        return 0.0
    return _TIMES.get(kind, 1) * num_bytes / ranks


def strides(mesh: Mesh, axes: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return (size, stride in ranks) of each axis; axes may be borrowed, such as ep.

    >>> strides(Mesh.of({"dp_replicate": 2, "dp_shard": 4}), ("dp_replicate",))
    ((2, 4),)
    """
    known: dict[str, tuple[int, int]] = {}
    stride = 1
    for axis in reversed(mesh.axes):
        known[axis.name] = (axis.size, stride)
        stride *= axis.size
    for loan in mesh.loans:
        size, within = known[loan.within]
        known[loan.name] = (loan.size, within)
        known[loan.rest] = (size // loan.size, within * loan.size)
    return tuple(known[axis] for axis in axes if axis in known)


def members(mesh: Mesh, axes: Sequence[str], first: int = 0) -> Iterator[int]:
    """Yield the ranks of a group along these axes; `first` has coordinate 0 on each of the axes."""
    spans = [[place * stride for place in range(size)] for size, stride in strides(mesh, axes)]
    for offsets in itertools.product(*spans):
        yield first + sum(offsets)


def crosses_nodes(mesh: Mesh, axes: Sequence[str], per_node: int | None) -> bool | None:
    """Return True if a group along these axes has ranks on several nodes; None if unknown."""
    if per_node is None:
        return None
    spread = strides(mesh, axes)
    reach = sum((size - 1) * stride for size, stride in spread)
    return any(
        rank // per_node != (rank + reach) // per_node
        for rank in range(mesh.world_size - reach)
        if all(rank // stride % size == 0 for size, stride in spread)
    )
