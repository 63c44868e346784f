"""Bounds and guesses of a candidate's memory from truncated models, before it is fully estimated.

A candidate without pipeline stages does not fit if the lower bound of a rank, from a model with few
blocks, exceeds the limit. The memory of communicators is included and follows from the mesh alone.
A guess of the reserved bytes decides which candidates are examined first, but excludes none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshplan.assign import Assignment
from meshplan.cost.grid import SCHEDULE_WORDS
from meshplan.errors import MeshplanError
from meshplan.layout.mesh import AXES, Axis, Mesh
from meshplan.memory.analytic.estimate import analytic_log_of_rank
from meshplan.memory.analytic.stages import Played
from meshplan.memory.log.driver import communicators, driver_bytes
from meshplan.model.graph import ModelGraph
from meshplan.plan.plan import Plan, make_plan
from meshplan.planner.lock.lock import overrides
from meshplan.planner.problem.decision import PlanRequest
from meshplan.planner.problem.overrides import BlockChoice
from meshplan.planner.problem.truncated import Blocks, TruncatedBound, shorten
from meshplan.planner.solve.config import Candidate
from meshplan.spec.spec import Allocator

Stages = Sequence[Sequence[BlockChoice]]

_MOST_KEPT: Final = 2
"""Number of logs that are cached: of a candidate, and of the smallest one of its configuration."""


_OPENING: Final = ("mode", "offload", "gathers_kv")
"""Fields of a configuration that, besides the axes of its mesh, decide which communicators are
opened (`memory.log.driver.communicators`)."""


@dataclass(frozen=True, slots=True)
class TruncatedFigures:
    """Bound and guess of a candidate's excess bytes, which come on top of its linear bytes.

    Attributes:
        least: Lower bound on the excess bytes of a rank.
        likely: {allocator setting: guessed excess bytes of a rank}; {} if no guess was made.
        is_over: If True, a rank is proved not to fit.
    """

    least: float
    likely: Mapping[Allocator, float]
    is_over: bool


class TruncatedEstimate:
    """Bound and guess the memory of one request's candidates with truncated models.

    Args:
        request: The request.
        stated: Maps a configuration of the grid and the choices of its blocks, by stage, to the
            statements of the plan.
        widening: Factor by which memory estimates widen the reserved bytes to their upper end.
        kind_of_block: Kind of each block by its fqn; empty if all blocks are identical.
        allocators: Allocator settings that the plan leaves open.
        firsts: For a live model, the blocks that a pipeline stage can begin with, in order.

    Attributes:
        played: Cache of the stages played so far, shared with estimates of full models.
    """

    def __init__(
        self,
        request: PlanRequest,
        stated: Callable[[np.void, Stages], dict[str, Any]],
        widening: float,
        kind_of_block: Mapping[str, int],
        *,
        allocators: Sequence[Allocator],
        firsts: Sequence[str] = (),
    ) -> None:
        self._allocators, self._firsts = allocators, firsts
        self._request, self._stated, self._widening = request, stated, widening
        self._kind_of_block = kind_of_block
        self._alone = driver_bytes(request.device, ()).high
        self._taken: dict[tuple[int, ...], float] = {}
        self._kinds: dict[tuple[object, ...], Assignment | None] = {}
        self._seen: dict[tuple[object, ...], TruncatedFigures | None] = {}
        self._under: dict[tuple[int, float], float] = {}
        """Most linear bytes of a candidate that is not proved to exceed the capacity, by (index of
        the configuration, capacity)."""
        self.played = Played()
        self._logs: dict[tuple[object, ...], tuple[Plan, TruncatedBound] | None] = {}

    def links(self, plan: Plan) -> float:
        """Return the bytes that a plan's communicators use, on the scale of linear bytes."""
        return self._links(plan.assignment)

    def _links(self, assignment: Assignment) -> float:
        per_node = self._request.cluster.gpus_per_node
        opened = communicators(assignment, gpus_per_node=per_node)
        return (driver_bytes(self._request.device, opened).high - self._alone) / self._widening

    def taken(self, grid: NDArray[np.void], number: int) -> float:
        """Return the bytes of a configuration's communicators, on the scale of linear bytes.

        The result is 0 if the configuration cannot be planned for a truncated model; for a live
        model, for the whole one.

        Args:
            grid: All configurations.
            number: Index of the configuration.
        """
        row = grid[number]
        key = tuple(int(row[name]) for name in (*AXES, *_OPENING))
        if key not in self._taken:
            self._taken[key] = self._least(grid, row)
        return self._taken[key]

    def _least(self, grid: NDArray[np.void], row: np.void) -> float:
        """Return the bytes of a configuration's communicators, from a plan of any blocks.

        The axes larger than 1 and `_OPENING` decide which communicators are opened, and the mesh
        decides their sizes. One plan for each set of these is therefore enough.
        """
        kind = (*(bool(row[axis] > 1) for axis in AXES), *(int(row[name]) for name in _OPENING))
        try:
            if kind not in self._kinds:
                self._kinds[kind] = self._with_any_blocks(grid, row)
        except MeshplanError:
            return 0.0  # The full estimate will report the error.
        if (found := self._kinds[kind]) is None:
            return 0.0
        axes = tuple(Axis(axis.name, int(row[axis.name])) for axis in found.mesh.axes)
        loans = tuple(replace(loan, size=int(row[loan.name])) for loan in found.mesh.loans)
        return self._links(replace(found, mesh=Mesh(axes, loans)))

    def _with_any_blocks(self, grid: NDArray[np.void], row: np.void) -> Assignment | None:
        """Return a configuration's assignment, of a truncated model if there is one.

        None if there is neither a truncated model nor a live one.
        """
        shorter, traced = self._request.shorter, self._request.traced
        if traced is not None:
            stages = [[BlockChoice(name, 0, 0)] for name in self._firsts[: int(row["pp"])]]
            words = self._stated(row, stages)
            return traced.decide(self._request.read(overrides(words))).assignment
        if shorter is None:
            return None
        return self._truncated_assignment(_shortest(grid, row), shorter)

    def _truncated_assignment(
        self, row: np.void, shorter: Callable[[Blocks], ModelGraph]
    ) -> Assignment:
        """Return a configuration's assignment for a truncated model with one block per stage.

        Each rank has one stage. Without pp the single stage has two blocks.
        """
        pp, row = int(row["pp"]), row.copy()
        if row["virtual"] > 1:
            row["virtual"], row["schedule"] = 1, SCHEDULE_WORDS.index("1F1B")
        every = len(self._request.graph.blocks())
        # Take the last blocks: in models with experts in only some blocks, the last ones have them.
        graph = shorter(tuple(range(every))[-max(2, pp) :])
        blocks = [BlockChoice(name, 0, 0) for name in graph.blocks()]
        stages = [blocks] if pp == 1 else [[block] for block in blocks]
        return self._plan(row, stages, graph).assignment

    def bound(
        self,
        row: np.void,
        blocks: Sequence[BlockChoice],
        candidate: Candidate,
        capacity: float,
        *,
        guesses: bool,
    ) -> TruncatedFigures | None:
        """Bound a candidate's excess bytes with a truncated model.

        Args:
            row: The candidate's configuration, which has no pp.
            blocks: The choices of the candidate's blocks.
            candidate: The candidate.
            capacity: Linear bytes that a rank may use.
            guesses: If True, guess the excess bytes too.

        Returns:
            The figures; None if no truncated model can be made or planned. Also None if no guess is
            requested and the bound is unlikely to exclude the candidate, because it did not
            exclude one with at least as many linear bytes.
        """
        key = candidate.row, candidate.ends, candidate.option_counts, capacity
        at, (linear,) = (candidate.row, capacity), candidate.linear_bytes
        if not guesses and key not in self._seen and linear <= self._under.get(at, -np.inf):
            return None
        seen = self._seen.get(key)
        lacks = guesses and seen is not None and not seen.likely
        if key not in self._seen or lacks:
            found = self._seen[key] = self._bound(row, blocks, candidate, capacity, guesses=guesses)
            if found is not None and not found.is_over:
                self._under[at] = max(linear, self._under.get(at, linear))
        return self._seen[key]

    def _bound(
        self,
        row: np.void,
        blocks: Sequence[BlockChoice],
        candidate: Candidate,
        capacity: float,
        *,
        guesses: bool,
    ) -> TruncatedFigures | None:
        """Bound and guess a candidate's excess bytes; args and result are those of `bound`."""
        try:
            found = self._truncated(row, blocks, candidate)
        except MeshplanError:
            return None  # The full estimate will report the error.
        if found is None:
            return None
        (plan, bound), (linear,) = found, candidate.linear_bytes
        extra = self.links(plan) - linear
        least, likely = bound.least_bytes + extra, dict[Allocator, float]()
        if guesses:
            for each in self._allocators:
                spec = replace(plan.spec, allocator=each)
                guess = bound.likely_bytes(self._request.device, spec) + extra
                likely[each] = max(guess, least)
        return TruncatedFigures(least, likely, least + linear > capacity)

    def _truncated(
        self, row: np.void, blocks: Sequence[BlockChoice], candidate: Candidate
    ) -> tuple[Plan, TruncatedBound] | None:
        """Return the plan of a truncated model and its bound; None if there is none.

        The last few are cached: a candidate is first bounded, and then guessed if it may fit.
        """
        key = candidate.row, candidate.ends, candidate.option_counts
        if key not in self._logs:
            assert self._request.shorter is not None
            short, found = shorten(blocks, self._request.shorter, self._kind_of_block), None
            if short is not None:
                plan = self._plan(row, [short.blocks], short.graph)
                log = analytic_log_of_rank(plan, 0, device=self._request.device, played=self.played)
                found = plan, TruncatedBound(log, short)
            while len(self._logs) >= _MOST_KEPT:
                del self._logs[next(iter(self._logs))]
            self._logs[key] = found
        return self._logs[key]

    def _plan(self, row: np.void, stages: Stages, graph: ModelGraph) -> Plan:
        return make_plan(self._request.read(overrides(self._stated(row, stages))), graph)


def _shortest(grid: NDArray[np.void], row: np.void) -> np.void:
    """Return the configuration of the grid with the fewest stages that opens equal communicators.

    Such configurations have the same axes larger than 1, and the same fields of `_OPENING`.
    """
    if row["pp"] * row["virtual"] <= 2:
        return row
    alike = np.ones(len(grid), dtype=bool)
    for name in _OPENING:
        alike &= grid[name] == row[name]
    for axis in AXES:
        alike &= (grid[axis] > 1) == (row[axis] > 1)
    stages = grid["pp"] * grid["virtual"]
    at = np.flatnonzero(alike)
    found: np.void = grid[at[np.argmin(stages[at])]]
    return found
