"""Find a number of devices: the smallest that trains in time, or the one with least GPU-hours."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from meshplan.errors import Origin, PlanError, Problem, SpecError
from meshplan.planner.objectives.fastest import fastest_of
from meshplan.planner.objectives.layouts import with_other_layouts
from meshplan.planner.objectives.priced import price, why_priced
from meshplan.planner.problem.decision import Decision, PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import cluster_of
from meshplan.planner.tables.cost_table import time_bounds
from meshplan.shown import shown
from meshplan.spec.spec import Spec
from meshplan.units import format_seconds

DAY_S: Final = 86400.0
_MOST_NODES: Final = 2**17
_TENTH: Final = 0.1
_HARDLY: Final = 0.02
"""Share of the time that a larger size must save; one that saves less is hardly faster. A step then
has too few samples for more nodes."""
_SLOWER: Final = 2
"""Consecutive sizes that are hardly faster, after which no larger size is tried."""
_WITHOUT: Final = 4
"""Consecutive sizes without a mesh, after which no larger size is tried."""
_STEP, _MOST_TIMES = 4, 1024
"""Factor by which the samples of a step are raised each time, and the largest total factor."""
_FEW: Final = 7
"""Numbers of nodes tried for each larger number of samples."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One number of nodes, and how long the training takes on these nodes.

    Args:
        nodes: Number of nodes.
        num_gpus: Number of devices on these nodes.
        days: Days that the training takes; None if nothing fits, or if `least_days` is too long.
        least_days: Lower bound on the days; None if there is no mesh of this size.
        decision: The planner's decision; None if nothing was planned or nothing fits.
        why: Reason why there is no plan; "" if there is one.
    """

    nodes: int
    num_gpus: int
    days: float | None
    least_days: float | None
    decision: Decision | None
    why: str = ""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTarget:
    """The sizes tried to train on a number of tokens within a number of days.

    Args:
        tokens: Tokens to train on.
        days: Days that the training may take.
        sizes: All sizes that were tried, fewest nodes first.
        answer: The smallest size that is fast enough; None if no size was.
        is_fewest: If True, every smaller number of nodes was tried.
        samples: Samples of a step that the plan states (`batch.global`); None if it states none.
        more: If there is no answer, (a larger number of samples of a step, a size that is fast
            enough with it); None if there is no such size.
    """

    tokens: float
    days: float
    sizes: tuple[Size, ...]
    answer: Size | None
    is_fewest: bool
    samples: int | None = None
    more: tuple[int, Size] | None = None


def with_nodes(request: PlanRequest, nodes: int) -> PlanRequest:
    """Return the request for another number of nodes.

    Raises:
        PlanError: The plan states no hardware, or no device and no profile give its speeds.
    """
    fixed = request.stating([f"hardware.nodes={nodes}"])
    return replace(fixed, cluster=cluster_of(fixed.read(()), request.device, request.profile))


def fewest(
    request: PlanRequest,
    tokens: float,
    days: float,
    report: Callable[[str], None] = lambda text: None,
) -> TrainingTarget:
    """Find the fewest whole nodes that train on a number of tokens in a number of days.

    Each size tried is planned. Sizes grow through powers of two and the middles between them until
    a size is fast enough. Bisection then finds a smaller one. As far as time allows, all remaining
    smaller sizes are tried too, because more nodes are not always faster. If more nodes are hardly
    faster, a step has too few samples for them, and more samples are tried.

    Args:
        request: The request. Its number of nodes does not matter.
        tokens: Tokens to train on.
        days: Days that the training may take.
        report: Called with lines on the progress.

    Raises:
        PlanError: The plan lacks a statement, such as the sequence length, or states its mesh and
            is not searched.
    """
    if why := why_priced(request):
        found = price(request, report)
        assert found.chosen is not None
        on = f"{found.chosen.plan.mesh.world_size:,} GPUs"
        days = tokens * found.chosen.seconds / max(1, found.tokens) / DAY_S
        what = f"the fewest nodes are searched, and plans like this one are not: {why}"
        fix = f"on the {on} of its mesh it trains in {days:,.1f} days"
        raise PlanError(Problem(what, found.spec.origin("mesh"), fix))
    return _Fewest(request, tokens, days, report).run()


def _sizes_from(first: int) -> Iterator[int]:
    """Yield numbers of nodes: the first, then powers of two and the middles between them.

    >>> list(itertools.islice(_sizes_from(83), 5))
    [83, 96, 128, 192, 256]
    """
    yield first
    power = 1
    while power <= _MOST_NODES:
        yield from (each for each in (power, 3 * power // 2) if first < each <= _MOST_NODES)
        power *= 2


class _Fewest:
    """The search that `fewest` runs. Each size is planned only once."""

    def __init__(
        self, request: PlanRequest, tokens: float, days: float, report: Callable[[str], None]
    ) -> None:
        self._request, self._tokens, self._days, self._report = request, tokens, days, report
        self._deadline = time.monotonic() + 4 * request.limit_s
        self._known: dict[int, Size] = {}

    def run(self) -> TrainingTarget:
        """Run the search."""
        first = self._first()
        failed, fastest, num_slower, num_without = first - 1, math.inf, 0, 0
        for nodes in _sizes_from(first):
            if self._is_enough(nodes):
                break
            failed, least = nodes, self._known[nodes].least_days
            num_without = num_without + 1 if least is None else 0
            if least is not None:
                num_slower = 0 if least < fastest * (1 - _HARDLY) else num_slower + 1
                fastest = min(fastest, least)
            if num_slower == _SLOWER or num_without == _WITHOUT or self._is_late():
                return self._with_more_samples(first)
        else:
            return self._with_more_samples(first)
        # Bisect between the largest size that failed and the size that is fast enough.
        while nodes - failed > 1 and not self._is_late():
            middle = (failed + nodes) // 2
            if self._is_enough(middle):
                nodes = middle
            else:
                failed = middle
        # Bisection assumes that more nodes are faster, which does not always hold.
        for fewer in range(first, nodes):
            if self._is_late():
                return self._training(nodes, False)
            if self._is_enough(fewer):
                return self._training(fewer, True)
        return self._training(nodes, True)

    def _first(self) -> int:
        """Return the nodes needed at the devices' peak throughput: a lower bound on the answer."""
        problem = PlanningProblem(with_nodes(self._request, 1))
        per_token = problem.chain_at(1).flops / _length(problem.spec)
        seconds = (
            self._days * DAY_S * problem.profile.peak_flops * problem.request.cluster.gpus_per_node
        )
        return max(1, math.ceil(self._tokens * per_token / seconds))

    def _training(self, nodes: int | None, is_fewest: bool) -> TrainingTarget:
        """Return the target with the sizes tried so far; the answer is the size with `nodes`."""
        sizes = tuple(self._known[n] for n in sorted(self._known))
        answer = self._known[nodes] if nodes is not None else None
        return TrainingTarget(
            tokens=self._tokens,
            days=self._days,
            sizes=sizes,
            answer=answer,
            is_fewest=is_fewest,
            samples=self._request.read(()).batch.global_,
        )

    def _with_more_samples(self, first: int) -> TrainingTarget:
        """Return a target without an answer; `more` is a size that needs more samples, if found.

        Args:
            first: Smallest number of nodes to try.
        """
        found, times = self._training(None, False), _STEP
        while found.samples is not None and times <= _MOST_TIMES:
            samples = times * found.samples
            other = self._with_samples(samples)
            for nodes in itertools.islice(_sizes_from(first), _FEW):
                if self._is_late():
                    return found
                if other._is_enough(nodes):
                    return replace(found, more=(samples, other._known[nodes]))
            times *= _STEP
        return found

    def _with_samples(self, samples: int) -> _Fewest:
        """Return the same search with another number of samples in a step."""

        def report(text: str) -> None:
            self._report(f"with batch.global: {samples:,}, {text}")

        request = self._request.stating([f"batch.global={samples}"])
        return _Fewest(request, self._tokens, self._days, report)

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline or self._request.is_stopped()

    def _is_enough(self, nodes: int) -> bool:
        """Return True if this number of nodes trains in time. Each number is planned once."""
        if nodes not in self._known:
            self._known[nodes] = self._size(nodes)
            size = self._known[nodes]
            took = format_days(size.days) if size.days is not None else size.why
            self._report(f"{size.num_gpus:,} GPUs: {took}")
        days_there = self._known[nodes].days
        return days_there is not None and days_there <= self._days

    def _size(self, nodes: int) -> Size:
        """Plan one number of nodes, unless its lower bound already takes too many days."""
        request = with_nodes(self._request, nodes)
        gpus = request.cluster.num_gpus
        never = Size(nodes=nodes, num_gpus=gpus, days=None, least_days=None, decision=None)
        try:
            problem = PlanningProblem(request)
            samples = problem.samples(0)
            per_step = samples * _length(problem.spec)
            steps = self._tokens / per_step
            least = float(np.min(time_bounds(problem.table))) * steps / DAY_S
        except PlanError as error:
            if nodes > 1 and request.cluster.inter is None:
                raise  # Without `inter` bandwidth every other number of nodes fails the same way.
            return replace(never, why=error.problems[0].what)
        if least > self._days:
            return replace(never, least_days=least, why=f"at least {format_days(least)}")
        decision = fastest_of(problem)
        if decision.chosen is None:
            why = "nothing fits" if decision.is_whole else "time limit reached"
            return replace(never, least_days=least, why=why)
        evaluated = replace(
            decision.chosen, stated={"hardware.nodes": nodes, **decision.chosen.stated}
        )
        return replace(
            never,
            days=evaluated.seconds * steps / DAY_S,
            least_days=least,
            decision=replace(decision, chosen=evaluated),
        )


def _length(spec: Spec) -> int:
    """Return the tokens of a sample.

    Raises:
        PlanError: The plan states no sequence length.
    """
    if spec.batch.seq_len is None:
        what = "the plan states no sequence length, which is needed to turn --tokens into steps"
        raise PlanError(Problem(what, spec.origin("batch"), "add batch: {seq_len: 2048}"))
    return spec.batch.seq_len


def cheapest(request: PlanRequest, report: Callable[[str], None] = lambda text: None) -> Decision:
    """Find the plan whose step takes the fewest GPU-hours, on all nodes or on fewer.

    The number of nodes is halved down to 1, and each size is planned separately. A plan that is
    twice as fast on twice the devices costs the same.

    Args:
        request: The request.
        report: Called with lines on the progress.

    Raises:
        PlanError: The plan allows no configuration on any number of nodes.
    """
    found: list[tuple[float, int, Decision, PlanningProblem]] = []
    wants_layouts, request = request.other_layouts, replace(request, other_layouts=False)
    empty: PlanError | None = None
    nodes = request.cluster.nodes
    sizes = sorted({max(1, nodes >> shift) for shift in range(nodes.bit_length())}, reverse=True)
    first: Decision | None = None
    for size in sizes:
        try:
            problem = PlanningProblem(with_nodes(request, size))
            decision = fastest_of(problem)
        except PlanError as error:
            empty = empty or error
            continue
        first = first or decision
        gpus = size * request.cluster.gpus_per_node
        if decision.chosen is None:
            report(f"{gpus:,} GPUs: nothing fits")
            continue
        hours = decision.chosen.seconds * gpus / 3600
        report(f"{gpus:,} GPUs: {hours:.4f} GPU-hours a step")
        found.append((hours, gpus, decision, problem))
    if not found:
        if first is not None:
            return replace(first, objective="cost")
        assert empty is not None
        raise empty
    _, gpus, best, problem = min(found, key=lambda each: each[:2])
    if wants_layouts:
        best = with_other_layouts(problem, best)
    assert best.chosen is not None
    size = gpus // request.cluster.gpus_per_node
    stated = dict(best.chosen.stated)
    if size != nodes:
        stated = {"hardware.nodes": size, **stated}
    return replace(
        best,
        objective="cost",
        chosen=replace(best.chosen, stated=stated),
        is_whole=all(each[2].is_whole for each in found),
    )


def format_days(days: float) -> str:
    """Format a number of days; less than a tenth of a day is given in hours, minutes and seconds.

    >>> format_days(13.96), format_days(0.004)
    ('14.0 days', '5 min 46 s')
    """
    return f"{days:,.1f} days" if days >= _TENTH else format_seconds(days * DAY_S)


def positive(value: str | float, flag: str) -> float:
    """Return the positive number that a command-line flag states, such as 14 or 15e12.

    Args:
        value: The text or number that the user gave.
        flag: The flag, for the error message.

    Raises:
        SpecError: The value is not a positive number.
    """
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not (number > 0 and math.isfinite(number)):
        raise SpecError(
            Problem(f"'{value}' is not a positive number", Origin(flag), "write 14 or 15e12")
        )
    return number
