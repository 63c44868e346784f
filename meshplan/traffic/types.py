"""Types of predicted traffic, and its comparison with the collectives of a real step."""

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
        axes: The mesh axes along which the participating ranks differ.
        num_bytes: Bytes of the whole tensor: the result of an all_gather or recv, the input of any
            other collective. For an all_to_all, the bytes that this rank sends.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Routed:
    """Bounds of the bytes of an all_to_all that depends on a router's decisions.

    Args:
        row_bytes: Bytes of a row, which is sent for each slot (`traffic.experts`) that this rank
            received.
        most_rows: Highest number of rows: the slots of all ranks together. The lowest is 0.
    """

    row_bytes: int
    most_rows: int

    def allows(self, num_bytes: int) -> bool:
        """Return True if this number of bytes is possible under some routing."""
        return not num_bytes % self.row_bytes and num_bytes <= self.row_bytes * self.most_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One cause of traffic in a step.

    Args:
        route: The collective, its axes and its bytes.
        count: Number of times per step.
        what: The cause, in words.
        is_split: If True, torch splits the bytes into several collectives whose sizes do not follow
            from the layout, such as DDP's buckets.
        routed: Bounds of the bytes; those of `route` then assume balanced routing. None if the
            bytes of `route` are exact.
    """

    route: Route
    count: int
    what: str
    is_split: bool = False
    routed: Routed | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The traffic of one rank in a call of `train_step` without checks.

    Checks, which send more, run in the steps 1, 2, 4, 8, ...

    Args:
        traffic: The predicted traffic, one entry for each cause.
        unknown: Descriptions of further traffic, certain or possible, that cannot be predicted.
    """

    traffic: tuple[Traffic, ...]
    unknown: tuple[str, ...] = ()

    def routes(self) -> Counter[Route]:
        """Return how often each route is used; traffic that torch splits counts as one use."""
        out: Counter[Route] = Counter()
        for each in self.traffic:
            out[each.route] += each.count
        return out


@dataclass(frozen=True, slots=True)
class RouteDifference:
    """A route that a real step used more or less often than predicted.

    Args:
        route: The route.
        predicted: Uses in the forecast.
        counted: Uses in the real step.
    """

    route: Route
    predicted: int
    counted: int


def differences(forecast: Forecast, counted: Counter[Route]) -> tuple[RouteDifference, ...]:
    """Return the differences between a forecast and the routes counted in a real step.

    The result is () if all bytes are equal. Traffic that depends on a router is equal if it occurs
    as often as predicted, each time within its bounds.
    """
    predicted = forecast.routes()
    found = _joined(forecast, predicted, _balanced(forecast, predicted, counted))
    return tuple(
        RouteDifference(route, predicted[route], found[route])
        for route in sorted(predicted.keys() | found.keys())
        if predicted[route] != found[route]
    )


def _balanced(
    forecast: Forecast, predicted: Counter[Route], counted: Counter[Route]
) -> Counter[Route]:
    """Return `counted`, with routes within a router's bounds replaced by the predicted ones."""
    routed = [(each, each.routed) for each in forecast.traffic if each.routed]
    exact = predicted - Counter({})
    for each, _ in routed:
        exact[each.route] -= each.count
    found, free = Counter(counted), Counter(counted)
    free.subtract(exact)
    # Match large rows first: their bytes are often a multiple of a small row too, seldom the
    # other way round.
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


def _joined(
    forecast: Forecast, predicted: Counter[Route], counted: Counter[Route]
) -> Counter[Route]:
    """Return `counted`, with the collectives that torch split up joined to one route again."""
    found = Counter(counted)
    for whole in (t.route for t in forecast.traffic if t.is_split):
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


def one(
    mesh: Mesh, kind: str, axes: Sequence[str], num_bytes: int, what: str, count: int = 1
) -> Traffic:
    """Return the `Traffic` of one collective along these axes; `what` names its cause."""
    return Traffic(route=Route(kind, mesh.spread(axes), num_bytes), count=count, what=what)


def trainable(plan: Plan) -> list[Placed]:
    """Return the parameters that get a gradient."""
    return [p for p in plan.assignment.tensors.values() if p.info.trainable]
