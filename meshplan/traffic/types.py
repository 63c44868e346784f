"""Types of predicted and recorded traffic, and the differences between two of them."""

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
        num_bytes: Bytes of the whole tensor: what is gathered, or what is reduced or scattered. For
            an all_to_all, the bytes that this rank sends.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Routed:
    """Bounds of traffic that depends on a router's decisions.

    Args:
        row_bytes: Bytes sent for each slot that came to this rank.
        most_rows: Highest number of rows: every slot of every rank. The lowest is 0.
    """

    row_bytes: int
    most_rows: int

    def allows(self, num_bytes: int) -> bool:
        """Return True if some routing sends this many bytes."""
        return not num_bytes % self.row_bytes and num_bytes <= self.row_bytes * self.most_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One cause of traffic in a step.

    Args:
        route: The collective, its axes and its bytes.
        count: Number of times per step.
        what: The cause, in words.
        is_split: If True, torch splits `num_bytes` into parts that do not follow from the layout.
        routed: Bounds of the bytes that are sent; `num_bytes` is what a balanced routing sends.
            None if `num_bytes` is exact.
    """

    route: Route
    count: int
    what: str
    is_split: bool = False
    routed: Routed | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The traffic of one step of `train_step`, once the self-tests of the first steps are over.

    Args:
        traffic: Traffic of every cause.
        unknown: Further traffic, certain or possible, whose amount does not follow from the
            layouts, with the reason.
    """

    traffic: tuple[Traffic, ...]
    unknown: tuple[str, ...] = ()

    def routes(self) -> Counter[Route]:
        """Count the uses of each route; split traffic counts as one use."""
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
    """List the differences between a forecast and a count; () if they are equal, byte by byte.

    Traffic that depends on a router is equal if it lies within its bounds, as often as predicted.
    """
    predicted = told.routes()
    found = _joined(told, predicted, _balanced(told, predicted, counted))
    return tuple(
        RouteDifference(route, predicted[route], found[route])
        for route in sorted(predicted.keys() | found.keys())
        if predicted[route] != found[route]
    )


def _balanced(told: Forecast, predicted: Counter[Route], counted: Counter[Route]) -> Counter[Route]:
    """Replace routes within the bounds of a routing by what a balanced routing sends."""
    routed = [(each, each.routed) for each in told.traffic if each.routed]
    exact = predicted - Counter({})
    for each, _ in routed:
        exact[each.route] -= each.count
    found, free = Counter(counted), Counter(counted)
    free.subtract(exact)
    # Large rows first: their bytes may also be a multiple of a small row's, seldom the converse.
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
    """Join the parts of traffic that torch splits into one route."""
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
    """Return these axes in mesh order, without those of size 1."""
    return mesh.spread(axes)


def one(
    mesh: Mesh, kind: str, axes: Sequence[str], num_bytes: int, what: str, count: int = 1
) -> Traffic:
    """Build traffic along these axes."""
    return Traffic(route=Route(kind, along(mesh, axes), num_bytes), count=count, what=what)


def trainable(plan: Plan) -> list[Placed]:
    """List the parameters that get a gradient."""
    return [p for p in plan.assignment.tensors.values() if p.info.trainable]
