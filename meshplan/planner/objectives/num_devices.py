"""How many devices: the fewest that train in time, and the number that costs the least."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from meshplan.errors import Origin, PlanError, Problem, SpecError
from meshplan.planner.objectives.fastest import decide_job
from meshplan.planner.problem.decision import Decision, PlanRequest
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.problem.request import cluster_of
from meshplan.planner.tables.cost_table import time_bounds
from meshplan.spec.keys import TIME_LIMIT_S
from meshplan.spec.spec import Spec
from meshplan.units import format_seconds

DAY_S: Final = 86400.0
_MOST_NODES: Final = 2**17
_TENTH: Final = 0.1
_HARDLY: Final = 0.02
"""A step has too few samples for more nodes if these take at most this share less."""
_SLOWER: Final = 2
"""Sizes in a row that are hardly faster, after which no larger one is tried."""
_WITHOUT: Final = 4
"""Sizes in a row that have no mesh, likewise."""
_STEP, _MOST_TIMES = 4, 1024
"""So many times as many samples of a step are tried, again and again, up to the most."""
_FEW: Final = 7
"""Numbers of nodes that are tried with more samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One number of nodes.

    Args:
        days: That the training takes there; None where nothing fits, or it is known to be late.
        least_days: It takes no less; None where there is no mesh of so many.
        why: Why there is no plan.
    """

    nodes: int
    num_gpus: int
    days: float | None
    least_days: float | None
    decision: Decision | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTarget:
    """So many tokens in so many days.

    Args:
        sizes: All that was looked at, fewest first.
        answer: The fewest that do; None where none was found.
        is_fewest: Whether every smaller number was looked at.
        samples: Of a step, as the plan states them; None where it states none.
        more: Where there is no answer, (samples of a step, a size that does with so many); None
            where none was found.
    """

    tokens: float
    days: float
    sizes: tuple[Size, ...]
    answer: Size | None
    is_fewest: bool
    samples: int | None = None
    more: tuple[int, Size] | None = None


def with_nodes(question: PlanRequest, nodes: int) -> PlanRequest:
    """The same on another number of nodes."""
    read = question.read
    again = replace(question, read=lambda more: read([f"hardware.nodes={nodes}", *more]))
    return replace(again, cluster=cluster_of(again.read(()), question.device, question.profile))


def fewest(
    question: PlanRequest,
    tokens: float,
    days: float,
    told: Callable[[str], None] = lambda text: None,
) -> TrainingTarget:
    """The fewest whole nodes that train on so many tokens in so many days, each size planned.

    Sizes grow by halves and doubles of powers of two until one does, are halved to the least that
    does, and then all smaller ones are looked at, as far as the time goes: that more nodes are
    faster holds for most sizes only. Where more nodes are hardly faster, a step has too few samples
    for them, and more samples are tried.

    Raises:
        PlanError: The plan says too little.
    """
    return _Fewest(question, tokens, days, told).run()


def _sizes_from(first: int) -> Iterator[int]:
    """Numbers of nodes: this one, then powers of two and the middles between them.

    >>> list(itertools.islice(_sizes_from(83), 5))
    [83, 96, 128, 192, 256]
    """
    yield first
    power = 1
    while power <= _MOST_NODES:
        yield from (each for each in (power, 3 * power // 2) if first < each <= _MOST_NODES)
        power *= 2


class _Fewest:
    """One such question."""

    def __init__(
        self, question: PlanRequest, tokens: float, days: float, told: Callable[[str], None]
    ) -> None:
        self._question, self._tokens, self._days, self._told = question, tokens, days, told
        limit = TIME_LIMIT_S if question.time_limit_s is None else question.time_limit_s
        self._deadline = time.monotonic() + 4 * limit
        self._known: dict[int, Size] = {}

    def run(self) -> TrainingTarget:
        first = self._first()
        failed, fastest, num_slower, num_without = first - 1, math.inf, 0, 0
        for nodes in _sizes_from(first):
            if self._does(nodes):
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
        while nodes - failed > 1 and not self._is_late():
            middle = (failed + nodes) // 2
            if self._does(middle):
                nodes = middle
            else:
                failed = middle
        for fewer in range(first, nodes):
            if self._is_late():
                return self._training(nodes, False)
            if self._does(fewer):
                return self._training(fewer, True)
        return self._training(nodes, True)

    def _first(self) -> int:
        """Fewer nodes could not do it if every operation ran at the peak."""
        job = PlanningProblem(with_nodes(self._question, 1))
        per_token = job.flops_of_sample / _length(job.spec)
        seconds = self._days * DAY_S * job.profile.peak_flops * job.question.cluster.gpus_per_node
        return max(1, math.ceil(self._tokens * per_token / seconds))

    def _training(self, nodes: int | None, is_fewest: bool) -> TrainingTarget:
        sizes = tuple(self._known[n] for n in sorted(self._known))
        answer = self._known[nodes] if nodes is not None else None
        return TrainingTarget(
            tokens=self._tokens,
            days=self._days,
            sizes=sizes,
            answer=answer,
            is_fewest=is_fewest,
            samples=self._question.read(()).batch.global_,
        )

    def _with_more_samples(self, first: int) -> TrainingTarget:
        """No size does; with more samples of a step one may."""
        found, times = self._training(None, False), _STEP
        while found.samples is not None and times <= _MOST_TIMES:
            samples = times * found.samples
            other = self._with_samples(samples)
            for nodes in itertools.islice(_sizes_from(first), _FEW):
                if self._is_late():
                    return found
                if other._does(nodes):
                    return replace(found, more=(samples, other._known[nodes]))
            times *= _STEP
        return found

    def _with_samples(self, samples: int) -> _Fewest:
        """The same question of steps of so many."""
        read = self._question.read

        def more_of(more: Sequence[str]) -> Spec:
            return read([f"batch.global={samples}", *more])

        def told(text: str) -> None:
            self._told(f"with batch.global: {samples:,}, {text}")

        question = replace(self._question, read=more_of)
        return _Fewest(question, self._tokens, self._days, told)

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline or self._question.is_stopped()

    def _does(self, nodes: int) -> bool:
        if nodes not in self._known:
            self._known[nodes] = self._size(nodes)
            size = self._known[nodes]
            took = format_days(size.days) if size.days is not None else size.why
            self._told(f"{size.num_gpus:,} GPUs: {took}")
        days_there = self._known[nodes].days
        return days_there is not None and days_there <= self._days

    def _size(self, nodes: int) -> Size:
        question = with_nodes(self._question, nodes)
        gpus = question.cluster.num_gpus
        never = Size(nodes=nodes, num_gpus=gpus, days=None, least_days=None, decision=None)
        try:
            job = PlanningProblem(question)
            samples = job.samples(0)
            per_step = samples * _length(job.spec)
            steps = self._tokens / per_step
            least = float(np.min(time_bounds(job.usual))) * steps / DAY_S
        except PlanError as error:
            if nodes > 1 and question.cluster.inter is None:
                raise  # Of no other number of nodes is more known.
            return replace(never, why=error.problems[0].what)
        if least > self._days:
            return replace(never, least_days=least, why=f"no less than {format_days(least)}")
        decision = decide_job(job)
        if decision.chosen is None:
            why = "nothing fits" if decision.is_whole else "the time was up"
            return replace(never, least_days=least, why=why)
        way = replace(decision.chosen, stated={"hardware.nodes": nodes, **decision.chosen.stated})
        return replace(
            never,
            days=way.seconds * steps / DAY_S,
            least_days=least,
            decision=replace(decision, chosen=way),
        )


def _length(spec: Spec) -> int:
    """Tokens of a sample."""
    if spec.batch.seq_len is None:
        what = "a training is so many tokens, and nothing says how many a sample has"
        raise PlanError(Problem(what, spec.origin("batch"), "add batch: {seq_len: 2048}"))
    return spec.batch.seq_len


def cheapest(question: PlanRequest, told: Callable[[str], None] = lambda text: None) -> Decision:
    """The plan whose step takes the fewest GPU-hours, on as many nodes as there are, or fewer.

    Halves and halves of halves of the nodes are planned, each whole: a plan that is twice as fast
    on twice the devices costs the same.

    Raises:
        PlanError: Nothing is left to choose from, on any number of nodes.
    """
    found: list[tuple[float, int, Decision]] = []
    empty: PlanError | None = None
    nodes = question.cluster.nodes
    sizes = sorted({max(1, nodes >> shift) for shift in range(nodes.bit_length())}, reverse=True)
    first: Decision | None = None
    for size in sizes:
        try:
            decision = decide_job(PlanningProblem(with_nodes(question, size)))
        except PlanError as error:
            empty = empty or error
            continue
        first = first or decision
        gpus = size * question.cluster.gpus_per_node
        if decision.chosen is None:
            told(f"{gpus:,} GPUs: nothing fits")
            continue
        hours = decision.chosen.seconds * gpus / 3600
        told(f"{gpus:,} GPUs: {hours:.4f} GPU-hours a step")
        found.append((hours, gpus, decision))
    if not found:
        if first is not None:
            return replace(first, objective="cost")
        assert empty is not None
        raise empty
    _, gpus, best = min(found, key=lambda each: each[:2])
    assert best.chosen is not None
    size = gpus // question.cluster.gpus_per_node
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
    """Days, or hours and less where it is no tenth of one.

    >>> format_days(13.96), format_days(0.004)
    ('14.0 days', '5 min 46 s')
    """
    return f"{days:,.1f} days" if days >= _TENTH else format_seconds(days * DAY_S)


def positive(value: str | float, flag: str) -> float:
    """A figure of the command line, such as 14 or 15e12.

    Raises:
        SpecError: It is no positive number.
    """
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not (number > 0 and math.isfinite(number)):
        raise SpecError(
            Problem(f"'{value}' is no positive number", Origin(flag), "write 14, or 15e12")
        )
    return number
