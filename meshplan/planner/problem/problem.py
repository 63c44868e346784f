"""One planning problem: its space of configurations, its cost tables and its memory estimates."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import cuts_of
from meshplan.cost.profile import Profile, profile_of_plan
from meshplan.cost.types import Chain
from meshplan.errors import MeshplanError, PlanError, Problem, check_all
from meshplan.layout.mesh import order_of
from meshplan.memory.analytic.estimate import RankLogs, estimate_analytic
from meshplan.memory.analytic.ranks import AnalyticRank, KnownRanks, OverError
from meshplan.memory.answer.estimate import MemoryEstimate
from meshplan.memory.decoder.sizes import shape_of
from meshplan.memory.log.driver import driver_bytes
from meshplan.plan.plan import Plan, make_plan
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.allowed import not_searched, why_not_allowed
from meshplan.planner.problem.certified import OVER, certify_plan, words_of
from meshplan.planner.problem.chains import Chains
from meshplan.planner.problem.decision import Evaluated, PlanRequest
from meshplan.planner.problem.excess import (
    ROUNDING_BYTES,
    SHARES,
    LastExcess,
    excess_of,
    least_over,
    rank_keys,
    refused_by,
)
from meshplan.planner.problem.overrides import BlockChoice, blocks_of, statements
from meshplan.planner.problem.truncated_estimate import Stages, TruncatedEstimate, TruncatedFigures
from meshplan.planner.solve.config import Candidate
from meshplan.planner.solve.result import Guess, ReplayedMemory
from meshplan.planner.space.batch import check_batch, check_same_batch
from meshplan.planner.space.emptiness import nothing_to_choose
from meshplan.planner.space.enumeration import enumerate_grid
from meshplan.planner.space.ep import experts_of
from meshplan.planner.space.fixed import Pins, check_fixed_choices, fixed_choices_of
from meshplan.planner.space.fixed_stages import FixedStages, fixed_stages_of
from meshplan.planner.space.offload import over_host
from meshplan.planner.space.space import Freedom, Rejected, freedom_of, less_sharded, only_ddp
from meshplan.planner.space.trials import data_axis, with_axes
from meshplan.planner.tables.build import cost_table_of
from meshplan.planner.tables.cost_table import CostTable
from meshplan.planner.tables.memory_bounds import element_bytes_of
from meshplan.planner.tables.stage_layout import NOT_ALIKE, are_alike
from meshplan.spec.spec import Allocator, Spec


class PlanningProblem:
    """One request with its space of configurations, its cost tables and its memory estimates.

    "Linear bytes" are the lower bounds of `CostTable` on a rank's memory, sums over its blocks.
    "Excess bytes" are the difference between an estimate of the memory package and these bounds.

    Args:
        request: The request.
        free: The choices that are open; None derives them from the plan file and the model.

    Attributes:
        spec: The spec of the plan file.
        capacity: Linear bytes that a rank may use.
        measured: Plans with complete memory estimates, whether they fit or not.
        is_widened: If True, configurations with offload were added to the grid.

    Raises:
        PlanError: The batch or the fixed choices of the plan file cannot be planned.
    """

    def __init__(self, request: PlanRequest, free: Freedom | None = None) -> None:
        self.request = request
        self.spec = request.read(())
        self._traced = request.traced
        self._graph = request.graph
        self._few = request.few or request.graph
        check_all(
            lambda: check_batch(self.spec, reads_tokens=self._traced is None),
            lambda: check_fixed_choices(self.spec),
            lambda: self.profile,
        )
        self._chains = Chains(
            request,
            self.spec,
            element_bytes=lambda: element_bytes_of(self.trial).computed,
            cuts=lambda tp: (self.free.sequence_parallel[tp], self.free.loss_parallel[tp]),
        )
        self._driver = driver_bytes(request.device, ()).high
        self.measured: list[Evaluated] = []
        self._known: dict[tuple[object, ...], ReplayedMemory] = {}
        self._ranks: dict[Hashable, AnalyticRank] = {}
        self._excess = LastExcess()
        self._over: set[str] = set()
        self.is_widened, self._num_configs = False, 0
        self.allow(request.limit_bytes)
        if free is not None:
            self.free = free

    def widened(self, linear_bytes: float) -> int:
        """Return the total bytes that an estimate reports at least for these linear bytes.

        Args:
            linear_bytes: Linear bytes of one rank.
        """
        return int(linear_bytes * SHARES) + self._driver

    # The space of configurations

    @cached_property
    def free(self) -> Freedom:
        """The choices that the plan leaves open and the model allows.

        Raises:
            PlanError: Something that the plan states cannot be planned, whatever else is chosen.
        """
        cluster = self.request.cluster
        trial = with_axes(self.spec, {data_axis(self.spec): 2})
        if (why := self.refuses(trial)) and not only_ddp(self.spec, self.refuses):
            raise PlanError(not_searched(why, trial, self.request))
        shape = None if self._traced is not None else shape_of(self._graph)
        return freedom_of(
            self.spec,
            world=cluster.num_gpus,
            gpus_per_node=cluster.gpus_per_node,
            num_blocks=sum(map(bool, self.chain_at(1).names)),
            refuses=self.refuses,
            can_cut=lambda stages: self._cuts.can_cut(self._graph.blocks(), stages),
            experts=experts_of(self._graph),
            keeps_from_rounds=self._keeps_from_rounds(),
            heads=(shape.heads, shape.kv_heads) if shape else (),
            is_traced=self._traced is not None,
        )

    @cached_property
    def less_sharded(self) -> tuple[PlanningProblem, ...]:
        """Problems of the same request whose tp shards less; together they have all settings."""
        spaces = less_sharded(self.spec, self.free, self.refuses)
        others = (PlanningProblem(self.request, free) for free in spaces)
        return tuple(each for each in others if not each._is_empty)

    @property
    def _is_empty(self) -> bool:
        try:
            return not len(self.grid)
        except PlanError:  # `EmptySpaceError`: its sizes of tp do not go with what is stated.
            return True

    def _keeps_from_rounds(self) -> str:
        """Return why pipeline ranks may not have several stages each; "" if they may."""
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
        """Return why the planner cannot use a trial spec; "" if it can."""
        return why_not_allowed(trial, self.request, self._chains)

    @cached_property
    def trial(self) -> Plan:
        """A plan of the model with only a few blocks, on one device."""
        return make_plan(with_axes(self.spec, {"dp_shard": 1}), self._few)

    def chain_at(
        self, tp: int, ep: int = 1, loss_chunks: int | None = None, stage_samples: int = 0
    ) -> Chain:
        """Return the chain of block costs of one rank of the tp and ep groups.

        Args:
            tp: Size of tp.
            ep: Size of ep.
            loss_chunks: Number of token chunks of the loss; None for the number that the plan
                states.
            stage_samples: As in `ProgramKey`.
        """
        return self._chains.at(tp, ep, loss_chunks, stage_samples=stage_samples)

    @cached_property
    def grid(self) -> NDArray[np.void]:
        """All configurations, one record each (`cost.grid.GRID`).

        Raises:
            EmptySpaceError: The choices that are open allow no configuration.
        """
        # Read the profile first: a missing figure of the machine is reported before an empty space.
        assert self.profile.device
        grid = enumerate_grid(self.free)
        if not len(grid):
            raise nothing_to_choose(self.free, self.spec)
        check_same_batch(self.spec, set((grid["dp_replicate"] * grid["dp_shard"]).tolist()))
        return grid

    @property
    def num_configs(self) -> int:
        """Number of configurations of the space, including those that a bound excluded."""
        return max(self._num_configs, len(self.grid))

    def extend(self, rows: NDArray[np.void], num_configs: int) -> None:
        """Append configurations to the grid and rebuild the cost table.

        Args:
            rows: The new configurations; may be empty.
            num_configs: Number of configurations in the whole space from now on.
        """
        self.is_widened, self._num_configs = True, num_configs
        if len(rows):
            self.grid = np.concatenate([self.grid, rows])
            self.table = self.table_at(self.profile)

    def reject(self, what: Rejected) -> None:
        """Add a rejected value to `free.rejected`, once."""
        if what not in self.free.rejected:
            self.free = replace(self.free, rejected=(*self.free.rejected, what))

    def table_at(self, profile: Profile) -> CostTable:
        """Return the cost table of the grid at the speeds of a profile.

        Raises:
            PlanError: Some configurations have several stages per rank, which requires identical
                blocks, but with tp the blocks of this model differ.
        """
        self._chains.read(cuts_of(self.grid))
        found = cost_table_of(
            self.grid,
            self.chain_at,
            profile=profile,
            gpus_per_node=self.request.cluster.gpus_per_node,
            precision=self.spec.precision,
            dtype=self.trial.graph.dtype,
            sizes=element_bytes_of(self.trial),
            recompute=self.free.recompute,
            reshard=self.free.reshard,
            pins=self._pins,
            are_units=self._traced is None and not self.spec.rules,
            order=order_of(self.spec.mesh),
        )
        if not are_alike(found) and (self.grid["virtual"] > 1).any():
            what = "a rank has several stages only of identical blocks, and with tp these differ"
            fix = "write pipeline: {schedule: 1F1B}"
            raise PlanError(Problem(what, self.spec.origin("pipeline.schedule"), fix))
        return replace(found, stages=self._cuts.places(found.names))

    @cached_property
    def _cuts(self) -> FixedStages:
        return fixed_stages_of(self.spec, self._graph)

    @cached_property
    def table(self) -> CostTable:
        """The cost table at the speeds of `profile`."""
        return self.table_at(self.profile)

    @cached_property
    def _pins(self) -> Pins:
        return fixed_choices_of(self.spec, self._graph)

    @cached_property
    def profile(self) -> Profile:
        """Speeds of the machine: measured ones, or those of its device and the code that runs."""
        measured, dtype = self.request.profile, self.spec.precision.param or self.trial.graph.dtype
        cluster = self.request.cluster
        try:
            return profile_of_plan(self.spec, self._graph, cluster, dtype, measured)
        except PlanError as error:
            at = self.spec.origin("hardware")
            raise PlanError([replace(each, origin=at) for each in error.problems]) from None

    def samples(self, row: int) -> int:
        """Return the samples of a step, summed over ranks, of configuration `grid[row]`."""
        r = self.grid[row]
        return int(r["dp_replicate"] * r["dp_shard"] * r["micro"] * r["microbatches"])

    def flops(self, row: int) -> float:
        """Return the flops of a step, summed over ranks, of `grid[row]`; without recompute."""
        return self.chain_at(1).flops * self.samples(row)

    def allow(self, limit_bytes: float) -> None:
        """Set the total bytes that a rank may use, and clear the cache of estimates."""
        # Invert `widened`: what the driver and the margins leave of the limit is for linear bytes.
        self.capacity = (limit_bytes + ROUNDING_BYTES - self._driver) / SHARES
        self._known.clear()

    def blocks(self, table: CostTable, candidate: Candidate) -> tuple[tuple[BlockChoice, ...], ...]:
        """Return the options of every block of a candidate, one tuple for each stage.

        Args:
            table: The cost table that the candidate is from.
            candidate: A solved configuration.
        """
        return blocks_of(candidate, table.order, table.names)

    def stated(
        self, table: CostTable, candidate: Candidate, allocator: Allocator | None = None
    ) -> dict[str, Any]:
        """Return {path: value} statements that turn the plan file into a candidate's plan.

        Args:
            table: The cost table that the candidate is from.
            candidate: A solved configuration.
            allocator: The allocator setting; None for the first that the plan leaves open.
        """
        row, stages = self.grid[candidate.row], self.blocks(table, candidate)
        return self._stated(row, stages, allocator)

    def measure(
        self,
        table: CostTable,
        candidate: Candidate,
        *,
        to_the_end: bool = False,
        allocators: tuple[Allocator, ...] = (),
    ) -> ReplayedMemory:
        """Estimate a candidate's memory with the memory package's replay.

        Args:
            table: The cost table that the candidate is from.
            candidate: A solved configuration.
            to_the_end: If True, complete the estimate even if a rank is known not to fit.
            allocators: Allocator settings to try in order; () for all that the plan leaves open.

        Returns:
            The estimate with the first setting that fits, or else with that of the fewest bytes.
        """
        bound = self._truncated_bound(table, candidate, guesses=False)
        if not to_the_end and bound is not None and bound.is_over:  # With any allocator.
            return ReplayedMemory(fits=False, excess={0: bound.least})
        found, shared = list[ReplayedMemory](), list[RankLogs]()
        for allocator in allocators or self.free.allocators:
            key = candidate.row, candidate.ends, candidate.option_counts, allocator
            one = self._known.get((*key, True)) or self._known.get((*key, to_the_end))
            if one is None:
                one = self._measure(table, candidate, allocator, shared, to_the_end)
                self._known[*key, to_the_end] = one
                self._excess.note(candidate.row, one.excess)
            found.append(one)
            if one.fits:
                return one
        return least_over(found)

    def _measure(
        self,
        table: CostTable,
        candidate: Candidate,
        allocator: Allocator,
        shared: list[RankLogs],
        to_the_end: bool,
    ) -> ReplayedMemory:
        """Estimate a candidate's memory with one allocator setting; `shared` is the same for all.

        Unless `to_the_end`, stop as soon as a rank exceeds the limit.
        """
        request, stated = self.request, self.stated(table, candidate, allocator)
        is_staged = self._traced is not None and len(candidate.linear_bytes) > 1
        try:
            spec = request.read(overrides(stated))
            plan = replace(shared[0].plan, spec=spec) if shared else self._decided(spec)
        except MeshplanError as error:
            return refused_by(error, candidate, is_of_cut=is_staged)
        try:
            links = self._truncated.links(plan)
            # Of a live model's stages, all that do not fit are reported, not only the first.
            most = float("inf") if to_the_end or is_staged else self.capacity - links
            memory = self._memory(plan, most, candidate, shared)
        except OverError as over:
            place = plan.mesh.index(over.rank, ("pp",))
            excess = {place: over.reserved_bytes + links - candidate.linear_bytes[place]}
            return ReplayedMemory(fits=False, excess=excess, is_of_row=self._is_of_row)
        except MeshplanError as error:
            return refused_by(error, candidate, is_of_cut=False)
        if (why := over_host(self.spec, plan, memory)) is not None:
            return ReplayedMemory(fits=False, why=why, is_of_row=False)
        excess, places = excess_of(plan, memory, candidate, self._driver)
        evaluated = Evaluated(
            stated=stated, seconds=candidate.seconds, plan=plan, memory=memory, candidate=candidate
        )
        if words_of(evaluated) in self._over:
            return ReplayedMemory(fits=False, why=OVER, is_of_row=False)
        self.measured.append(evaluated)
        return ReplayedMemory(
            memory.fits is True, excess, result=evaluated, is_of_row=self._is_of_row,
            over=places if is_staged else (),
        )  # fmt: skip

    def _decided(self, spec: Spec) -> Plan:
        """Return the plan that a spec without open fields declares for the model."""
        return self._traced.decide(spec) if self._traced else make_plan(spec, self._graph)

    @cached_property
    def _is_of_row(self) -> bool:
        """True if all candidates of a configuration are taken to have the same excess bytes.

        False only for a live model whose blocks are of several kinds.
        """
        kinds = self.chain_at(1).kinds
        return self._traced is None or sum(kind.has_options for kind in kinds) < 2

    def _memory(
        self, plan: Plan, most: float, candidate: Candidate, shared: list[RankLogs]
    ) -> MemoryEstimate:
        if self._traced is not None:
            return self._traced.memory(plan, most)
        if not shared:
            played = self._truncated.played
            shared.append(RankLogs(plan, device=self.request.device, played=played))
        return estimate_analytic(
            plan,
            device=self.request.device,
            limit_bytes=self.request.limit_bytes,
            stop_above_bytes=most,
            try_expandable=False,
            stage_guess_bytes=self._excess.guess(candidate),
            logs=shared[0],
            known=KnownRanks(self._ranks, rank_keys(candidate, plan.spec.allocator)),
        )

    def certified(self, evaluated: Evaluated) -> Evaluated | None:
        """Return the chosen plan with the memory of a trace; None if it does not fit by the trace.

        In the latter case `measure` reports the plan as not fitting from then on.
        """
        if (found := certify_plan(self.request, evaluated)) is None:
            self._over.add(words_of(evaluated))
            self._known.clear()  # Cached estimates may report that this plan fits.
            self.measured.remove(evaluated)
        return found

    def guess(
        self, table: CostTable, candidate: Candidate, allocators: tuple[Allocator, ...] = ()
    ) -> Guess | None:
        """Guess a candidate's excess bytes from a truncated model; None if there is no guess.

        Args:
            table: The cost table that the candidate is from.
            candidate: A solved configuration.
            allocators: Allocator settings, of which the one with the fewest bytes counts; () for
                all that the plan leaves open.
        """
        bound = self._truncated_bound(table, candidate, guesses=True)
        if bound is None or not bound.likely:
            return None
        some = allocators or self.free.allocators
        return Guess({0: min(bound.likely[each] for each in some)}, bound.is_over)

    def is_over(self, table: CostTable, candidate: Candidate) -> bool:
        """Return True if a lower bound on memory proves that a candidate does not fit.

        The bound comes from a model with few of the blocks. False proves nothing.

        Args:
            table: The cost table that the candidate is from.
            candidate: A solved configuration.
        """
        bound = self._truncated_bound(table, candidate, guesses=False)
        return bound is not None and bound.is_over

    def taken(self, row: int) -> float:
        """Return the bytes of `capacity` that the communicators of `grid[row]` use.

        They do not depend on the options of the blocks.
        """
        return self._truncated.taken(self.grid, row)

    @cached_property
    def _truncated(self) -> TruncatedEstimate:
        chain = self.chain_at(1)
        kinds = {n: k for k, n in zip(chain.order, chain.names, strict=True) if n}
        kind_of_block = kinds if len(set(kinds.values())) > 1 else {}
        return TruncatedEstimate(
            self.request, self._stated, SHARES, kind_of_block,
            allocators=self.free.allocators, firsts=self.table.first_blocks,
        )  # fmt: skip

    def _stated(
        self, row: np.void, stages: Stages, allocator: Allocator | None = None
    ) -> dict[str, Any]:
        allocator = allocator or self.free.allocators[0]
        return statements(self.spec, self.free, row, stages, self._pins, allocator)

    def _truncated_bound(
        self, table: CostTable, candidate: Candidate, **options: bool
    ) -> TruncatedFigures | None:
        """Bound a candidate with a truncated model; None if rules, pp or the model prevent it."""
        row = self.grid[candidate.row]
        if self.request.shorter is None or self.spec.rules or row["pp"] > 1:
            return None
        (blocks,) = self.blocks(table, candidate)
        return self._truncated.bound(row, blocks, candidate, self.capacity, **options)
