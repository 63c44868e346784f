"""What is sent, what was recorded, and where two of them differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshplan.assign import Placed
from meshplan.mesh import Mesh
from meshplan.plan import Plan


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """One kind of collective along one part of the mesh.

    Args:
        kind: all_gather, all_reduce, reduce_scatter, all_to_all, broadcast, send or recv.
        axes: The mesh axes along which its ranks differ.
        num_bytes: Of the whole tensor: what is gathered, or what is reduced or scattered.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One cause of traffic in a step.

    Args:
        route: What is sent where.
        count: How often.
        what: The cause.
        is_split: torch cuts `num_bytes` into pieces that no layout tells.
    """

    route: Route
    count: int
    what: str
    is_split: bool = False


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
class Difference:
    """A route that is used more or less often than predicted."""

    route: Route
    predicted: int
    counted: int


def differences(told: Forecast, counted: Counter[Route]) -> tuple[Difference, ...]:
    """Where a forecast and a count differ; () when they are equal, byte by byte."""
    predicted = told.routes()
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
    return tuple(
        Difference(route, predicted[route], found[route])
        for route in sorted(predicted.keys() | found.keys())
        if predicted[route] != found[route]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One call of a module in the forward of one process, as `runtime.visits` records it.

    Args:
        fqn: The module, under its first name.
        source: A number for the input tensor: equal for calls that read the same one.
        input_shape: Of one microbatch of one rank, whole.
        output_shape: Likewise.
        input_needs_grad: Whether backward goes on to what made the input.
        output_needs_grad: Whether backward reaches this call.
        begin: When it began, in events of the forward.
        end: When it ended.
    """

    fqn: str
    source: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    input_needs_grad: bool
    output_needs_grad: bool
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of one process.

    Args:
        calls: In the order in which they began.
        saves: The events at which autograd kept a tensor for backward.
    """

    calls: tuple[Visit, ...]
    saves: tuple[int, ...]

    def of(self, fqn: str) -> tuple[Visit, ...]:
        """The calls of one module."""
        return tuple(call for call in self.calls if call.fqn == fqn)


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
