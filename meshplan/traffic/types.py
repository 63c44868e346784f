"""What is sent, what was recorded, and where two of them differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.assign import Placed
from meshplan.layout.mesh import Mesh
from meshplan.plan.plan import Plan


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """One kind of collective along one part of the mesh.

    Args:
        kind: all_gather, all_reduce, reduce_scatter, all_to_all, broadcast, send or recv.
        axes: The mesh axes along which its ranks differ.
        num_bytes: Of the whole tensor: what is gathered, or what is reduced or scattered. Of an
            all_to_all what this rank sends.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Routed:
    """Bounds of what a router decides.

    Args:
        row_bytes: Sent for each slot that came to this rank.
        most_rows: Every slot of every rank; none may come as well.
    """

    row_bytes: int
    most_rows: int

    def allows(self, num_bytes: int) -> bool:
        """Whether some routing sends this much."""
        return not num_bytes % self.row_bytes and num_bytes <= self.row_bytes * self.most_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One cause of traffic in a step.

    Args:
        route: What is sent where.
        count: How often.
        what: The cause.
        is_split: torch cuts `num_bytes` into pieces that no layout tells.
        routed: `num_bytes` is what a balanced routing sends, and what is really sent lies within
            these bounds; None where it is exact.
    """

    route: Route
    count: int
    what: str
    is_split: bool = False
    routed: Routed | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The traffic of one step of `train_step` after the self-tests of the first ones.

    Args:
        traffic: Every cause.
        unknown: What else is sent, or may be, and why no layout tells how much.
    """

    traffic: tuple[Traffic, ...]
    unknown: tuple[str, ...] = ()

    def routes(self) -> Counter[Route]:
        """How often each route is used; what is split counts as one piece."""
        out: Counter[Route] = Counter()
        for each in self.traffic:
            out[each.route] += each.count
        return out


@dataclass(frozen=True, slots=True)
class RouteDifference:
    """A route that is used more or less often than predicted."""

    route: Route
    predicted: int
    counted: int


def differences(told: Forecast, counted: Counter[Route]) -> tuple[RouteDifference, ...]:
    """Where a forecast and a count differ; () when they are equal, byte by byte.

    What a router decides is equal when it lies within its bounds, as often as predicted.
    """
    predicted = told.routes()
    found = _joined(told, predicted, _balanced(told, predicted, counted))
    return tuple(
        RouteDifference(route, predicted[route], found[route])
        for route in sorted(predicted.keys() | found.keys())
        if predicted[route] != found[route]
    )


def _balanced(told: Forecast, predicted: Counter[Route], counted: Counter[Route]) -> Counter[Route]:
    """A count in which what lies within the bounds of a routing is what a balanced one sends."""
    routed = [(each, each.routed) for each in told.traffic if each.routed]
    exact = predicted - Counter({})
    for each, _ in routed:
        exact[each.route] -= each.count
    found, free = Counter(counted), Counter(counted)
    free.subtract(exact)
    # Wide rows first: what they may be, narrow ones may be too, seldom the other way round.
    for each, bounds in sorted(routed, key=lambda pair: -pair[1].row_bytes):
        left = each.count
        for route in sorted(free, reverse=True):
            is_alike = (route.kind, route.axes) == (each.route.kind, each.route.axes)
            if is_alike and bounds.allows(route.num_bytes):
                taken = max(0, min(left, free[route]))
                left -= taken
                free[route] -= taken
                found[route] -= taken
                found[each.route] += taken
    return found


def _joined(told: Forecast, predicted: Counter[Route], counted: Counter[Route]) -> Counter[Route]:
    """A count in which the pieces of what torch splits are one."""
    found = Counter(counted)
    for whole in (t.route for t in told.traffic if t.is_split):
        pieces = Counter(
            {
                route: found[route] - predicted[route]
                for route in found
                if (route.kind, route.axes) == (whole.kind, whole.axes)
                and found[route] > predicted[route]
            }
        )
        if sum(route.num_bytes * times for route, times in pieces.items()) == whole.num_bytes:
            found = found - pieces + Counter([whole])
    return found


def along(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """These axes in mesh order, without those of one rank."""
    return mesh.spread(axes)


def one(
    mesh: Mesh, kind: str, axes: Sequence[str], num_bytes: int, what: str, count: int = 1
) -> Traffic:
    """Traffic along these axes."""
    return Traffic(route=Route(kind, along(mesh, axes), num_bytes), count=count, what=what)


def trainable(plan: Plan) -> list[Placed]:
    """Every parameter that gets a gradient."""
    return [p for p in plan.assignment.tensors.values() if p.info.trainable]
