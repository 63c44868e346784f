"""One question made concrete: its space, the figures of every row, and the memory room's word."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import cuts_of
from meshplan.cost.profile import Profile, measured_for, profile_of
from meshplan.cost.types import Chain
from meshplan.errors import MeshplanError, PlanError, Problem
from meshplan.memory.analytic.estimate import estimate_analytic
from meshplan.memory.analytic.ranks import ERROR, OverError
from meshplan.memory.answer.estimate import RESERVED_ERROR, MemoryEstimate
from meshplan.memory.decoder.sizes import shape_of
from meshplan.memory.log.driver import driver_bytes
from meshplan.plan.plan import Plan, make_plan
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.allowed import why_not_allowed
from meshplan.planner.problem.certified import OVER, certify_plan, words_of
from meshplan.planner.problem.chains import Chains
from meshplan.planner.problem.decision import Evaluated, PlanRequest
from meshplan.planner.problem.overrides import BlockChoice, blocks_of, statements
from meshplan.planner.problem.truncated_estimate import Stages, TruncatedEstimate, TruncatedFigures
from meshplan.planner.solve.config import Candidate
from meshplan.planner.solve.result import Guess, ReplayedMemory
from meshplan.planner.space.batch import check_batch
from meshplan.planner.space.cp import EXCHANGES, context_of
from meshplan.planner.space.emptiness import nothing_to_choose
from meshplan.planner.space.enumeration import enumerate_grid
from meshplan.planner.space.ep import experts_of
from meshplan.planner.space.fixed import Pins, check_fixed_choices, fixed_choices_of
from meshplan.planner.space.fixed_stages import FixedStages, fixed_stages_of
from meshplan.planner.space.offload import over_host
from meshplan.planner.space.space import Freedom, Rejected, freedom_of
from meshplan.planner.space.trials import with_axes
from meshplan.planner.tables.build import cost_table_of
from meshplan.planner.tables.cost_table import CostTable
from meshplan.planner.tables.memory_bounds import element_bytes_of
from meshplan.planner.tables.stage_layout import NOT_ALIKE, are_alike
from meshplan.spec.spec import Allocator, Spec

_SHARES: Final = (1 + RESERVED_ERROR) * (1 + ERROR)
"""By how much the memory room widens what it reserves."""


class PlanningProblem:
    """One question.

    Attributes:
        spec: As the plan file says it.
        capacity: Bytes that a rank may hold by the linear figures.
        measured: What the memory room told to its end.
    """

    def __init__(self, question: PlanRequest, free: Freedom | None = None) -> None:
        self.question = question
        self.spec = question.read(())
        self._traced = question.traced
        check_batch(self.spec, reads_tokens=self._traced is None)
        check_fixed_choices(self.spec)
        self._graph = question.graph
        self._few = question.few or question.graph
        self._chains = Chains(
            question,
            self.spec,
            element_bytes=lambda: element_bytes_of(self.trial).computed,
            cuts=lambda tp: (self.free.sequence_parallel[tp], self.free.loss_parallel[tp]),
        )
        self._driver = driver_bytes(question.device, ()).high
        self.measured: list[Evaluated] = []
        self._known: dict[tuple[object, ...], ReplayedMemory] = {}
        self._over: set[str] = set()
        self.is_widened, self._num_configs = False, 0
        self.allow(question.limit_bytes)
        if free is not None:
            self.free = free

    def widened(self, linear_bytes: float) -> int:
        """What the memory room would say at the least of so many bytes by the linear figures."""
        return int(linear_bytes * _SHARES) + self._driver

    # What there is

    @cached_property
    def free(self) -> Freedom:
        """What the plan leaves open, and the model allows.

        Raises:
            PlanError: Something in the plan, whatever it leaves open, cannot be certified.
        """
        cluster = self.question.cluster
        why = self.refuses(with_axes(self.spec, {"dp_shard": 2}))
        if why:
            fix = "leave it out, or state all that is open, and let estimate trace the model"
            raise PlanError(Problem(why, self.spec.origin(""), fix))
        return freedom_of(
            self.spec,
            world=cluster.num_gpus,
            gpus_per_node=cluster.gpus_per_node,
            num_blocks=sum(map(bool, self.chain_at(1).names)),
            refuses=self.refuses,
            can_cut=lambda stages: self._cuts.can_cut(self._graph.blocks(), stages),
            experts=experts_of(self._graph),
            keeps_from_rounds=self._keeps_from_rounds(),
            heads=self._heads(),
            is_traced=self._traced is not None,
        )

    def _heads(self) -> tuple[int, ...]:
        """Of one attention, and of its keys and values."""
        if self._traced is not None:
            return ()
        shape = shape_of(self._graph)
        return shape.heads, shape.kv_heads

    def _keeps_from_rounds(self) -> str:
        """Why no rank of a pipeline may have several stages; "" if it may."""
        if self._traced is not None:
            return "what a live model's stages hold is composed for one stage a rank"
        chain, pins = self.chain_at(1), self._pins
        named = {(k, pins.get(n)) for k, n in zip(chain.order, chain.names, strict=True) if n}
        if len(named) > 1:
            return NOT_ALIKE
        if self._cuts.by_block or self._cuts.num is not None:
            return "the plan states stages, and blocks are shared out over rounds by the planner"
        return ""

    def refuses(self, trial: Spec) -> str:
        """Why a trial cannot be, "" if it can be."""
        return why_not_allowed(trial, self.question, self._chains)

    @cached_property
    def trial(self) -> Plan:
        """Of few blocks, on one device."""
        return make_plan(with_axes(self.spec, {"dp_shard": 1}), self._few)

    @cached_property
    def dtype(self) -> str:
        """Of the model's parameters."""
        tensors = self.trial.assignment.tensors.values()
        return next(p.info.dtype for p in tensors if not p.info.is_buffer)

    def chain_at(self, tp: int, ep: int = 1, loss_chunks: int | None = None) -> Chain:
        """The model as one rank of tp, and of ep, has it, its loss in so many parts.

        Args:
            loss_chunks: None for as many as the plan states.
        """
        return self._chains.at(tp, ep, loss_chunks)

    @cached_property
    def grid(self) -> NDArray[np.void]:
        """Every configuration."""
        assert self.profile.device  # What nobody says of the machine is asked for first.
        grid = enumerate_grid(self.free)
        if not len(grid):
            raise nothing_to_choose(self.free, self.spec)
        return grid

    @property
    def num_configs(self) -> int:
        """Rows of the space, those ruled out by a bound before they were written included."""
        return max(self._num_configs, len(self.grid))

    def extend(self, rows: NDArray[np.void], num_configs: int) -> None:
        """More configurations, behind those that there are."""
        self.is_widened, self._num_configs = True, num_configs
        if len(rows):
            self.grid = np.concatenate([self.grid, rows])
            self.usual = self.numbers(self.profile)

    def reject(self, what: Rejected) -> None:
        """Say that something is not in the space after all."""
        if what not in self.free.rejected:
            self.free = replace(self.free, rejected=(*self.free.rejected, what))

    def numbers(self, profile: Profile) -> CostTable:
        """What the search reads, at the speeds of a profile."""
        self._chains.read(cuts_of(self.grid))
        found = cost_table_of(
            self.grid,
            self.chain_at,
            profile=profile,
            gpus_per_node=self.question.cluster.gpus_per_node,
            precision=self.spec.precision,
            dtype=self.dtype,
            sizes=element_bytes_of(self.trial),
            recompute=self.free.recompute,
            reshard=self.free.reshard,
            pins=self._pins,
            exchanges=context_of(self.spec).attention == EXCHANGES,
            are_units=self._traced is None and not self.spec.rules,
        )
        if not are_alike(found) and (self.grid["virtual"] > 1).any():
            what = f"the planner cannot plan several stages a rank: {NOT_ALIKE} once tp cuts them"
            fix = "say pipeline: {schedule: 1F1B}"
            raise PlanError(Problem(what, self.spec.origin("pipeline.schedule"), fix))
        return replace(found, stages=self._cuts.places(found.names))

    @cached_property
    def _cuts(self) -> FixedStages:
        return fixed_stages_of(self.spec, self._graph)

    @cached_property
    def usual(self) -> CostTable:
        """The same at the speed that the machine has."""
        return self.numbers(self.profile)

    @cached_property
    def _pins(self) -> Pins:
        return fixed_choices_of(self.spec, self._graph)

    @cached_property
    def profile(self) -> Profile:
        """How fast the machine is."""
        measured, dtype = self.question.profile, self._compute_dtype
        try:
            if measured is None:
                return profile_of(self.question.cluster, dtype=dtype)
            return measured_for(measured, self.question.cluster, dtype)
        except PlanError as error:
            at = self.spec.origin("hardware")
            raise PlanError([replace(each, origin=at) for each in error.problems]) from None

    @property
    def _compute_dtype(self) -> str:
        return self.spec.precision.param or self.dtype

    def samples(self, row: int) -> int:
        """Of a step of all ranks."""
        r = self.grid[row]
        return int(r["dp_replicate"] * r["dp_shard"] * r["micro"] * r["microbatches"])

    def flops(self, row: int) -> float:
        """Of one step of all ranks, nothing counted twice."""
        return self.flops_of_sample * self.samples(row)

    @property
    def flops_of_sample(self) -> float:
        """Forward and backward."""
        chain = self.chain_at(1)
        return sum(
            chain.kinds[k].forward.flops + chain.kinds[k].backward.flops for k in chain.order
        )

    def allow(self, limit_bytes: float) -> None:
        """Ranks may hold no more than this."""
        self.capacity = (limit_bytes - self._driver) / _SHARES
        self._known.clear()

    @property
    def chain(self) -> Chain:
        """The model as it is without tp."""
        return self.chain_at(1)

    def blocks(
        self, numbers: CostTable, candidate: Candidate
    ) -> tuple[tuple[BlockChoice, ...], ...]:
        """By stage, what each block does."""
        return blocks_of(candidate, numbers.order, numbers.names)

    def stated(
        self, numbers: CostTable, candidate: Candidate, allocator: Allocator | None = None
    ) -> dict[str, Any]:
        """What the plan file would have to say."""
        row, stages = self.grid[candidate.row], self.blocks(numbers, candidate)
        return self._stated(row, stages, allocator)

    def measure(
        self,
        numbers: CostTable,
        candidate: Candidate,
        *,
        to_the_end: bool = False,
        allocators: tuple[Allocator, ...] = (),
    ) -> ReplayedMemory:
        """What the memory room says of a candidate.

        Args:
            to_the_end: Whether what does not fit is of interest too.
            allocators: Of which the first that it fits with is taken, or the one that reserves the
                least; () for all that the plan leaves open.
        """
        glance = self._glance(numbers, candidate, guesses=False)
        if not to_the_end and glance is not None and glance.is_over:  # Whatever the allocator.
            return ReplayedMemory(fits=False, excess_bytes=glance.least_bytes)
        found: list[ReplayedMemory] = []
        for allocator in allocators or self.free.allocators:
            key = candidate.row, candidate.ends, candidate.takes, to_the_end, allocator
            if key not in self._known:
                self._known[key] = self._measure(numbers, candidate, allocator, to_the_end)
            found.append(self._known[key])
            if found[-1].fits:
                return found[-1]
        return min(found, key=lambda each: each.excess_bytes)

    def _measure(
        self, numbers: CostTable, candidate: Candidate, allocator: Allocator, to_the_end: bool
    ) -> ReplayedMemory:
        question, stated = self.question, self.stated(numbers, candidate, allocator)
        try:
            plan = make_plan(question.read(overrides(stated)), self._graph)
            links = self._brief.links(plan)
            most = float("inf") if to_the_end else self.capacity - links
            memory = self._memory(plan, most, candidate)
        except OverError as over:
            held = candidate.linear_bytes[plan.mesh.index(over.rank, ("pp",))]
            excess = over.reserved_bytes + links - held
            return ReplayedMemory(fits=False, excess_bytes=excess, is_of_row=self._is_of_row)
        except MeshplanError as error:
            return ReplayedMemory(fits=False, why=error.problems[0].what)
        if (why := over_host(self.spec, plan, memory)) is not None:
            return ReplayedMemory(fits=False, why=why, is_of_row=False)
        excess = 0.0
        for group in memory.groups:
            held = (group.band[1] - self._driver) / _SHARES
            place = plan.mesh.index(group.ranks[0], ("pp",))
            excess = max(excess, held - candidate.linear_bytes[place])
        way = Evaluated(
            stated=stated, seconds=candidate.seconds, plan=plan, memory=memory, candidate=candidate
        )
        if words_of(way) in self._over:
            return ReplayedMemory(fits=False, why=OVER, is_of_row=False)
        self.measured.append(way)
        return ReplayedMemory(
            fits=memory.fits is True, excess_bytes=excess, result=way, is_of_row=self._is_of_row
        )

    @cached_property
    def _is_of_row(self) -> bool:
        """Whether blocks that may choose are all alike, so that only their number counts."""
        kinds = self.chain_at(1).kinds
        return self._traced is None or sum(kind.has_options for kind in kinds) < 2

    def _memory(self, plan: Plan, most: float, candidate: Candidate) -> MemoryEstimate:
        if self._traced is not None:
            return self._traced.memory(plan, most)
        return estimate_analytic(
            plan,
            device=self.question.device,
            limit_bytes=self.question.limit_bytes,
            most_bytes=most,
            packs=False,
            likely=candidate.linear_bytes,
            played=self._brief.played,
        )

    def certified(self, way: Evaluated) -> Evaluated | None:
        """What was chosen, as its model does it and not as it was composed; None if it is over."""
        if (found := certify_plan(self.question, way)) is None:
            self._over.add(words_of(way))
            self._known.clear()
            self.measured.remove(way)
        return found

    def guess(
        self, numbers: CostTable, candidate: Candidate, allocators: tuple[Allocator, ...] = ()
    ) -> Guess | None:
        """What some rank may hold above its linear figure, if a short model tells so.

        Args:
            allocators: As for `measure`.
        """
        glance = self._glance(numbers, candidate, guesses=True)
        if glance is None or not glance.likely_bytes:
            return None
        some = allocators or self.free.allocators
        return Guess(min(glance.likely_bytes[each] for each in some), glance.is_over)

    def is_over(self, numbers: CostTable, candidate: Candidate) -> bool:
        """Whether a short model is sure that a candidate holds too much."""
        told = self._glance(numbers, candidate, guesses=True, spares=True)
        return told is not None and told.is_over

    def taken(self, row: int) -> float:
        """What a row's communicators take of the capacity, whatever its blocks do."""
        return self._brief.taken(self.grid, row)

    @cached_property
    def _brief(self) -> TruncatedEstimate:
        chain = self.chain
        kinds = {n: k for k, n in zip(chain.order, chain.names, strict=True) if n}
        looks = kinds if len(set(kinds.values())) > 1 else {}
        return TruncatedEstimate(
            self.question, self._stated, _SHARES, looks, allocators=self.free.allocators
        )

    def _stated(
        self, row: np.void, stages: Stages, allocator: Allocator | None = None
    ) -> dict[str, Any]:
        allocator = allocator or self.free.allocators[0]
        return statements(self.spec, self.free, row, stages, self._pins, allocator)

    def _glance(
        self, numbers: CostTable, candidate: Candidate, **asked: bool
    ) -> TruncatedFigures | None:
        if self.question.shorter is None or self.spec.rules:
            return None
        stages, row = self.blocks(numbers, candidate), self.grid[candidate.row]
        return self._brief.glance(row, stages, candidate, self.capacity, **asked)
