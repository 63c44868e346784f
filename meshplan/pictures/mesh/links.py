"""What the ranks of a plan send to one another in a step, and over which links: facts for pictures.

Bytes are those of `traffic.forecast`. Of a collective each rank sends every other one its part of
the tensor: however the library routes it, a ring sends as much in all.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from meshplan.cost.grid import RECOMPUTE
from meshplan.cost.stages import chain_of_plan, stage_of_places
from meshplan.errors import PlanError
from meshplan.layout.hardware import find_device
from meshplan.layout.mesh import Mesh
from meshplan.pictures.mesh.counted import ONLY_COUNT, is_counted
from meshplan.plan.plan import Plan
from meshplan.traffic import forecast

_TIMES: Final = {"all_reduce": 2}
"""A sum is scattered first, and gathered then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the ranks are.

    Args:
        per_node: Ranks of a node; None where nothing says.
        intra_bytes_per_s, inter_bytes_per_s: Of the links in a node and between nodes; None where
            not known.
    """

    per_node: int | None
    intra_bytes_per_s: float | None
    inter_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One kind of collective along one part of the mesh.

    Args:
        kind, axes: As of `traffic.Route`.
        num_ranks: That take part in one.
        pair_bytes: That a rank sends to each other rank of its group in a step.
        crosses: Whether some group has ranks on several nodes; None where nothing says.
        bytes_per_s: Of the slowest link on its way; None where not known.
        to: Of "send", (place along pp, bytes).
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
        """By one rank in a step."""
        if self.to:
            return sum(size for _, size in self.to)
        return self.pair_bytes * (self.num_ranks - 1)


@dataclass(frozen=True, slots=True)
class Links:
    """All that one rank sends.

    Args:
        lanes: What sends most first.
        unknown: What else is sent, and why nothing tells how much.
        is_told: Whether what activations send follows from the model's sizes, by which the
            planner goes, and not from a record of its forward.
    """

    lanes: tuple[Lane, ...]
    unknown: tuple[str, ...]
    is_told: bool = False

    @property
    def crossing_bytes(self) -> float:
        """Of what a rank sends, what goes along groups that cross nodes."""
        return sum(lane.sent_bytes for lane in self.lanes if lane.crosses)


def machine_of(plan: Plan) -> Machine:
    """What the plan says of it."""
    stated = plan.spec.hardware
    if stated is None:
        return Machine(per_node=None, intra_bytes_per_s=None, inter_bytes_per_s=None)
    intra = stated.intra_bytes_per_s
    if intra is None and stated.gpu is not None:
        intra = find_device(stated.gpu, plan.spec.origin("hardware.gpu")).intra_bytes_per_s
    return Machine(
        per_node=stated.gpus_per_node,
        intra_bytes_per_s=intra,
        inter_bytes_per_s=stated.inter_bytes_per_s,
    )


def links_of(plan: Plan, rank: int = 0) -> Links:
    """What one rank sends in a step."""
    if is_counted(plan):
        # What is gathered, and how often, is up to the modules.
        is_alone = plan.mesh.world_size == 1
        return Links((), () if is_alone else (f"what is sent: {ONLY_COUNT}",))
    told, machine, mesh = forecast(plan, rank=rank), machine_of(plan), plan.mesh
    totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for each in told.traffic:
        if each.route.kind != "recv":
            route = each.route
            totals[route.kind, route.axes] += route.num_bytes * each.count
    unknown = told.unknown
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
    """(place along pp, bytes) of what a rank sends on: forwards onward, gradients back."""
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
    """Bytes that activations send along tp and pp, by the sizes of a known family; else None."""
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
        again = kind.sent_again[RECOMPUTE.index(recompute.policy.mode) if recompute else 0]
        for sent in (kind.sent_forward, kind.sent_backward, again):
            out["all_reduce", ("tp",)] += int(sent.all_reduce_bytes * samples)
            # A whole tensor gathered moves as much as one that is scattered.
            out["all_gather", ("tp",)] += int(sent.gather_bytes * samples)
    if stages is not None:
        boundary = max(kind.boundary_bytes for kind in chain.kinds)
        for stage in range(stages.num - 1):
            ends = {stages.rank_of(stage), stages.rank_of(stage + 1)}
            # A forward goes on to the next stage, and its gradient comes back.
            out["send", ("pp",)] += int(boundary * samples) * (place in ends and len(ends) > 1)
    return Counter({key: size for key, size in out.items() if size})


def _pair_bytes(kind: str, num_bytes: int, ranks: int) -> float:
    """From one rank to each other one; of what is sent to one stage only, 0.

    >>> _pair_bytes("all_gather", 800, 8), _pair_bytes("all_reduce", 800, 8)
    (100.0, 200.0)
    """
    if kind == "send":
        return 0.0
    return _TIMES.get(kind, 1) * num_bytes / ranks


def strides(mesh: Mesh, axes: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(size, ranks from one place to the next) of each axis, borrowed ones too.

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
    """The ranks that differ from the first one along these axes only, which is at their start."""
    spans = [[place * stride for place in range(size)] for size, stride in strides(mesh, axes)]
    for offsets in itertools.product(*spans):
        yield first + sum(offsets)


def crosses_nodes(mesh: Mesh, axes: Sequence[str], per_node: int | None) -> bool | None:
    """Whether ranks that differ along these axes only are on several nodes, anywhere."""
    if per_node is None:
        return None
    spread = strides(mesh, axes)
    reach = sum((size - 1) * stride for size, stride in spread)
    return any(
        rank // per_node != (rank + reach) // per_node
        for rank in range(mesh.world_size - reach)
        if all(rank // stride % size == 0 for size, stride in spread)
    )
