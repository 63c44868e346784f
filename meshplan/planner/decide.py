"""The planner's line: what is free, all there is, the fastest that fits, the simplest near it.

Costs and memory are asked of their rooms; a plan that the memory room did not certify is never
given.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.chain import chain_of
from meshplan.cost.grid import OPTIONS, RECOMPUTE
from meshplan.cost.profile import Profile, profile_of
from meshplan.cost.types import Chain
from meshplan.errors import MeshplanError, PlanError, Problem
from meshplan.graph import ModelGraph
from meshplan.hardware import Cluster
from meshplan.memory.driver import driver_bytes
from meshplan.memory.estimate import RESERVED_ERROR, MemoryEstimate
from meshplan.memory.told import ERROR, refusals, styled_of, told_estimate
from meshplan.mesh import AXES
from meshplan.plan import Plan, make_plan
from meshplan.planner.held import element_bytes_of
from meshplan.planner.lock import overrides
from meshplan.planner.numbers import Numbers
from meshplan.planner.search import Candidate, Found, Measured, search, solve_row
from meshplan.planner.settle import Block, blocks_of, statements
from meshplan.planner.space import (
    Freedom,
    Rejected,
    check_batch,
    enumerate_grid,
    freedom_of,
    with_axes,
)
from meshplan.planner.tables import Pins, numbers_of
from meshplan.spec import Spec

SLACK: Final = 0.02
"""A simpler plan that is no more than this slower is preferred: optima are flat, and the cost model
is not that good."""
Options = tuple[bool, ...]
"""Which of `cost.grid.OPTIONS` blocks may take."""
_KEEP, _MOST_SIMPLER, _MOST_NEAR, _MORE = 3, 8, 6, 1.02
_SHARES: Final = (1 + RESERVED_ERROR) * (1 + ERROR)
"""By how much the memory room widens what it reserves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be planned.

    Args:
        read: The spec of the plan file with more statements.
        graph: The model.
        device: A name of `hardware`, or "cuda".
        limit_bytes: What one may hold.
        cluster: The machine.
        time_limit_s: After which the best so far is the answer; None for no limit.
    """

    read: Callable[[Sequence[str]], Spec]
    graph: ModelGraph
    device: str
    limit_bytes: int
    cluster: Cluster
    time_limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to train the model that fits: as words, decided, and with its memory.

    Args:
        stated: What the plan file would have to say, by path.
        seconds: Of a step.
    """

    stated: Mapping[str, Any]
    seconds: float
    plan: Plan
    memory: MemoryEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The same search on better and better machines, in seconds of a step."""

    roofline_s: float
    no_network_s: float
    no_memory_limit_s: float
    plan_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the planner came to.

    Args:
        spec: As the plan file says it.
        chosen: The simplest of those within SLACK of the best; None where nothing fits.
        best_s: Seconds of the fastest.
        gap: How much faster something in the space may be than the fastest.
        alternatives: Others that fit, fastest first.
        rejected: What is not in the space, or not the answer, and why.
        num_configs: Rows of the space.
        num_options: Choices of each block.
        samples: Of a step.
        flops: Of a step, without recomputation.
        is_whole: Whether the search came to its end.
    """

    spec: Spec
    chosen: Way | None
    best_s: float
    gap: float
    alternatives: tuple[Way, ...]
    rejected: tuple[Rejected, ...]
    ladder: Ladder | None
    num_configs: int
    num_options: int
    num_measured: int
    search_s: float
    samples: int
    tokens: int
    flops: float
    profile: Profile
    limit_bytes: int
    is_whole: bool = True

    def tokens_per_s(self, way: Way) -> float:
        """Of one device."""
        return self.tokens / way.seconds / way.plan.mesh.world_size

    def mfu(self, way: Way) -> float:
        """Share of the peak that the model's own flops are: what is recomputed does not count."""
        return self.flops / way.seconds / self.profile.peak_flops / way.plan.mesh.world_size


def decide(question: Question, told: Callable[[str], None] = lambda text: None) -> Decision:
    """The plan.

    Raises:
        PlanError: The plan file says too little, or nothing is left to choose from.
    """
    return _Planner(question, told).run()


class _Planner:
    """One question on its way to an answer."""

    def __init__(self, question: Question, told: Callable[[str], None]) -> None:
        self._question, self._told = question, told
        self._spec = question.read(())
        check_batch(self._spec)
        self._graph = question.graph
        self._chains: dict[int, Chain] = {}
        self._driver = driver_bytes(question.device, ()).high
        self._capacity = (question.limit_bytes - self._driver) / _SHARES

    # What there is

    @cached_property
    def free(self) -> Freedom:
        cluster = self._question.cluster
        return freedom_of(
            self._spec,
            world=cluster.num_gpus,
            gpus_per_node=cluster.gpus_per_node,
            num_blocks=len(self._chain(1).order),
            refuses=self._refuses,
        )

    def _refuses(self, trial: Spec) -> str:
        """Why a trial cannot be, "" if it can be."""
        try:
            problems = list(refusals(make_plan(trial, self._graph)))
        except PlanError as error:
            problems = list(error.problems)
        return problems[0].what if problems else ""

    @cached_property
    def _trial(self) -> Plan:
        return make_plan(with_axes(self._spec, {"dp_shard": 1}), self._graph)

    @cached_property
    def _dtype(self) -> str:
        return next(p.info.dtype for p in self._trial.assignment.tensors.values())

    def _chain(self, tp: int) -> Chain:
        if tp not in self._chains:
            length = self._spec.batch.seq_len
            assert length is not None
            cuts = tp > 1 and self.free.sequence_parallel[tp]
            trial = with_axes(self._spec, {"tp": tp}, sequence_parallel=cuts)
            self._chains[tp] = chain_of(
                self._graph,
                seq_len=length,
                element_bytes=element_bytes_of(self._trial).computed,
                tp=tp,
                styled=styled_of(make_plan(trial, self._graph)) if tp > 1 else None,
            )
        return self._chains[tp]

    @cached_property
    def grid(self) -> NDArray[np.void]:
        grid = enumerate_grid(self.free, len(self._chain(1).order))
        if not len(grid):
            what = f"no mesh of {self.free.world} devices has all that the plan states"
            whys = [f"{each.what}: {each.why}" for each in self.free.rejected]
            fix = "; ".join(whys) or "state less, or another batch.global"
            raise PlanError(Problem(what, self._spec.origin("mesh"), fix))
        return grid

    def _numbers(self, profile: Profile) -> Numbers:
        numbers, self._numbered = numbers_of(
            self.grid,
            self._chain,
            profile=profile,
            gpus_per_node=self._question.cluster.gpus_per_node,
            precision=self._spec.precision,
            dtype=self._dtype,
            sizes=element_bytes_of(self._trial),
            recompute=self.free.recompute,
            reshard=self.free.reshard,
            pins=self._pins(),
        )
        return numbers

    def _pins(self) -> Pins:
        """What rules state of single blocks."""
        return {}

    # The search

    def run(self) -> Decision:
        began = time.monotonic()
        question = self._question
        limit = question.time_limit_s
        profile = self._profile
        self._told(f"{len(self.grid):,} configurations")
        numbers = self._numbers(profile)
        found = search(
            numbers,
            self._capacity,
            self._measure,
            slack=SLACK,
            deadline=None if limit is None else began + limit,
            told=lambda found: self._told(self._line(found)),
        )
        chosen, others = self._choose(numbers, found)
        ladder = self._ladder(profile, numbers, found) if chosen else None
        best = found.best
        return Decision(
            spec=self._spec,
            chosen=chosen,
            best_s=best.seconds if best else float("inf"),
            gap=found.gap,
            alternatives=others,
            rejected=(*self.free.rejected, *self._why_refused(found)),
            ladder=ladder,
            num_configs=len(self.grid),
            num_options=sum(self.free.options),
            num_measured=found.num_measured,
            search_s=time.monotonic() - began,
            samples=self._samples(best.row) if best else 0,
            tokens=self._samples(best.row) * (self._spec.batch.seq_len or 0) if best else 0,
            flops=self._flops(numbers, best.row) if best else 0.0,
            profile=profile,
            limit_bytes=question.limit_bytes,
            is_whole=found.is_whole,
        )

    @cached_property
    def _profile(self) -> Profile:
        return profile_of(self._question.cluster, dtype=self._compute_dtype)

    @property
    def _compute_dtype(self) -> str:
        return self._spec.precision.param or self._dtype

    def _samples(self, row: int) -> int:
        r = self.grid[row]
        return int(r["dp_replicate"] * r["dp_shard"] * r["micro"] * r["microbatches"])

    def _flops(self, numbers: Numbers, row: int) -> float:
        """Of one step of all ranks, nothing counted twice."""
        chain = self._chain(1)
        one = sum(chain.kinds[k].forward.flops + chain.kinds[k].backward.flops for k in chain.order)
        return one * self._samples(row)

    def _line(self, found: Found) -> str:
        assert found.best is not None
        row = self.grid[found.best.row]
        mesh = " x ".join(f"{axis} {row[axis]}" for axis in AXES if row[axis] > 1) or "one device"
        return f"{found.best.seconds:.3f} s: {mesh}"

    def _blocks(self, candidate: Candidate) -> tuple[tuple[Block, ...], ...]:
        chain = self._numbered
        has = [kind.has_options for kind in chain.kinds]
        return blocks_of(candidate, chain.order, chain.names, has)

    def _stated(self, candidate: Candidate) -> dict[str, Any]:
        row = self.grid[candidate.row]
        return statements(self._spec, self.free, row, self._blocks(candidate))

    def _measure(self, candidate: Candidate) -> Measured:
        question, stated = self._question, self._stated(candidate)
        try:
            plan = make_plan(question.read(overrides(stated)), self._graph)
            memory = told_estimate(plan, device=question.device, limit_bytes=question.limit_bytes)
        except MeshplanError as error:
            return Measured(fits=False, why=error.problems[0].what)
        excess = 0.0
        for group in memory.groups:
            # An interleaved rank has several stages of the model, and one place in the pipeline.
            place = group.stages[0] % len(candidate.linear_bytes) if group.stages else 0
            held = (group.band[1] - self._driver) / _SHARES
            excess = max(excess, held - candidate.linear_bytes[place])
        way = Way(stated=stated, seconds=candidate.seconds, plan=plan, memory=memory)
        return Measured(fits=memory.fits is True, excess_bytes=excess, result=way)

    def _choose(self, numbers: Numbers, found: Found) -> tuple[Way | None, tuple[Way, ...]]:
        """(the simplest within the slack, others that are near)."""
        if found.best is None or found.measured is None:
            return None, ()
        best = found.measured.result
        assert isinstance(best, Way)
        simplest = self._complexity(found.best)
        simpler = sorted(
            (each, number, options)
            for number, (one, options) in enumerate(self._simpler(numbers, found))
            if (each := (*self._complexity(one), one.row)) < (*simplest, -1)
        )
        tries = ((int(key[-1]), options) for key, _, options in simpler)
        chosen = next(self._that_fit(numbers, found, tries, _MOST_SIMPLER), best)
        everything = (True,) * len(OPTIONS)
        near = ((candidate.row, everything) for candidate in found.near)
        others = [best, *self._that_fit(numbers, found, near, _MOST_NEAR)]
        by_words = {str(way.stated): way for way in others if way.stated != chosen.stated}
        keep = int(self._spec.solve.get("keep", _KEEP))
        return chosen, tuple(sorted(by_words.values(), key=lambda way: way.seconds)[:keep])

    def _simpler(self, numbers: Numbers, found: Found) -> Iterator[tuple[Candidate, Options]]:
        """Every row near the best, with fewer different things that its blocks may do."""
        for row in (candidate.row for candidate in found.near):
            for again in _subsets(range(len(RECOMPUTE))):
                for back in ((0,), (1,), (0, 1)):
                    options = tuple(r in again and s in back for r, s in OPTIONS)
                    one = self._solve(numbers, found, row, options)
                    if one is not None:
                        yield one, options

    def _solve(
        self, numbers: Numbers, found: Found, row: int, options: Options
    ) -> Candidate | None:
        """The fastest way of a row within the slack, as far as is known what it really holds."""
        assert found.best is not None
        room = self._capacity - found.excess.get(row, 0.0)
        limit = found.best.seconds * (1 + SLACK)
        one = solve_row(numbers.only(row, options), 0, room, limit)
        return replace(one, row=row) if one is not None else None

    def _that_fit(
        self,
        numbers: Numbers,
        found: Found,
        tries: Iterable[tuple[int, Options]],
        most: int,
    ) -> Iterator[Way]:
        """Those of some (row, options) that the memory room certifies, in this order."""
        for row, options in tries:
            while most > 0 and (one := self._solve(numbers, found, row, options)) is not None:
                measured = self._measure(one)
                found.num_measured += 1
                most -= 1
                if measured.fits:
                    assert isinstance(measured.result, Way)
                    yield measured.result
                if measured.fits or measured.why:
                    break
                # It held more than was known of this row: ask for less, until none is near.
                known = found.excess.get(row, 0.0)
                found.excess[row] = max(measured.excess_bytes, known * _MORE, 1.0)

    def _complexity(self, candidate: Candidate) -> tuple[float, ...]:
        """Axes that are spread, then different things that blocks do, then what it costs."""
        row = self.grid[candidate.row]
        axes = sum(int(row[axis] > 1) for axis in AXES)
        blocks = {(b.recompute, b.reshard) for stage in self._blocks(candidate) for b in stage}
        return axes, len(blocks), int(row["virtual"]), candidate.seconds

    def _ladder(self, profile: Profile, numbers: Numbers, found: Found) -> Ladder:
        """The same space where the network, or memory, is no limit."""
        assert found.best is not None
        free_network = replace(
            profile,
            intra_bytes_per_s=1e18,
            inter_bytes_per_s=1e18,
            intra_latency_s=0.0,
            inter_latency_s=0.0,
        )
        no_network = search(
            self._numbers(free_network),
            self._capacity,
            _fits,
        )
        no_limit = search(numbers, float("inf"), _fits)
        flops = self._flops(numbers, found.best.row)
        assert no_network.best is not None
        assert no_limit.best is not None
        return Ladder(
            roofline_s=flops / profile.peak_flops / self.free.world,
            no_network_s=no_network.best.seconds,
            no_memory_limit_s=no_limit.best.seconds,
            plan_s=found.best.seconds,
        )

    def _why_refused(self, found: Found) -> Iterator[Rejected]:
        """One line for each reason, with how many configurations it is of."""
        by_why: dict[str, list[int]] = {}
        for row, why in found.refused.items():
            by_why.setdefault(why, []).append(row)
        for why, rows in by_why.items():
            many = f"{len(rows)} configurations" if len(rows) > 1 else "1 configuration"
            yield Rejected(many, why)


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(items) + 1):
        yield from itertools.combinations(items, size)


def _fits(candidate: Candidate) -> Measured:
    return Measured(fits=True)
