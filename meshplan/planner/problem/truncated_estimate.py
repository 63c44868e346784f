"""What short models tell of long ones, before anything is measured: cheap, and most of the answer.

A rank that is over already with what a few blocks show is over. What its communicators take is
known from the mesh alone. And what is likely reserved says where to look first, which is all that
it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True, slots=True)
class TruncatedFigures:
    """What a short model tells of a candidate.

    Attributes:
        least_bytes: Above the linear figure, where a rank is surely over.
        likely_bytes: By allocator, the same by a guess, of the rank that is worst off; {} if nobody
            asked.
        is_over: Whether a rank surely holds more than it may.
    """

    least_bytes: float
    likely_bytes: Mapping[Allocator, float]
    is_over: bool


class TruncatedEstimate:
    """Short models of one question.

    Args:
        stated: What the plan file would have to say, of a row of the grid and what blocks do.
        widening: By how much the memory room widens what it reserves.
        looks: As for `shorten`.
        allocators: That the plan leaves open.

    Attributes:
        played: Stages that were played, of whole models too.
    """

    def __init__(
        self,
        question: PlanRequest,
        stated: Callable[[np.void, Stages], dict[str, Any]],
        widening: float,
        looks: Mapping[str, int],
        *,
        allocators: Sequence[Allocator],
    ) -> None:
        self._allocators = allocators
        self._question, self._stated, self._widening = question, stated, widening
        self._looks = looks
        self._alone = driver_bytes(question.device, ()).high
        self._taken: dict[tuple[int, ...], float] = {}
        self._kinds: dict[tuple[object, ...], Assignment] = {}
        self._seen: dict[tuple[object, ...], TruncatedFigures | None] = {}
        self._under: dict[tuple[int, float], list[tuple[float, ...]]] = {}
        """By row and capacity, linear figures of answers that were not over."""
        self.played = Played()

    def links(self, plan: Plan) -> float:
        """What a plan's communicators take of the capacity."""
        return self._links(plan.assignment)

    def _links(self, assignment: Assignment) -> float:
        per_node = self._question.cluster.gpus_per_node
        opened = communicators(assignment, gpus_per_node=per_node)
        return (driver_bytes(self._question.device, opened).high - self._alone) / self._widening

    def taken(self, grid: NDArray[np.void], number: int) -> float:
        """The same of a row of the grid, whatever its blocks do; 0 where nothing tells."""
        row = grid[number]
        key = tuple(int(row[name]) for name in (*AXES, "mode", "offload"))
        if key not in self._taken:
            self._taken[key] = self._least(grid, row)
        return self._taken[key]

    def _least(self, grid: NDArray[np.void], row: np.void) -> float:
        """What is opened follows from the axes that are spread; how much that is, from the mesh."""
        shorter = self._question.shorter
        kind = tuple(bool(row[axis] > 1) for axis in AXES), int(row["mode"]), int(row["offload"])
        if shorter is None:
            return 0.0
        try:
            if kind not in self._kinds:
                self._kinds[kind] = self._like(_shortest(grid, row), shorter)
        except MeshplanError:
            return 0.0  # What is measured tells why.
        found = self._kinds[kind]
        axes = tuple(Axis(axis.name, int(row[axis.name])) for axis in found.mesh.axes)
        loans = tuple(replace(loan, size=int(row[loan.name])) for loan in found.mesh.loans)
        return self._links(replace(found, mesh=Mesh(axes, loans)))

    def _like(self, row: np.void, shorter: Callable[[Blocks], ModelGraph]) -> Assignment:
        """A row's for a model with one block a stage, and one stage a rank, or two."""
        pp, row = int(row["pp"]), row.copy()
        if row["virtual"] > 1:
            row["virtual"], row["schedule"] = 1, SCHEDULE_WORDS.index("1F1B")
        every = len(self._question.graph.blocks())
        # The last ones: where only some blocks have experts, those do.
        graph = shorter(tuple(range(every))[-max(2, pp) :])
        blocks = [BlockChoice(name, 0, 0) for name in graph.blocks()]
        stages = [blocks] if pp == 1 else [[block] for block in blocks]
        return self._plan(row, stages, graph).assignment

    def glance(
        self,
        row: np.void,
        stages: Stages,
        candidate: Candidate,
        capacity: float,
        *,
        guesses: bool,
        spares: bool = False,
    ) -> TruncatedFigures | None:
        """What a short model tells of a candidate; None where none does, or is likely to.

        Args:
            row, stages: The candidate's.
            capacity: Bytes that a rank may hold by the linear figures.
            guesses: Whether what is likely is of interest.
            spares: Whether it is of none where the candidate is over.
        """
        key = candidate.row, candidate.ends, candidate.takes, capacity
        if not guesses and key not in self._seen and self._holds_less(candidate, capacity):
            return None
        seen = self._seen.get(key)
        lacks = guesses and seen is not None and not seen.likely_bytes
        if key not in self._seen or (lacks and not (spares and seen is not None and seen.is_over)):
            linear = candidate.linear_bytes
            found = self._seen[key] = self._look(
                row, stages, linear, capacity, guesses=guesses, spares=spares
            )
            if found is not None and not found.is_over:
                self._under.setdefault((candidate.row, capacity), []).append(linear)
        return self._seen[key]

    def _holds_less(self, candidate: Candidate, capacity: float) -> bool:
        """Whether an answer of the row that holds as much everywhere was not over either."""
        return any(
            all(own <= other for own, other in zip(candidate.linear_bytes, linear, strict=True))
            for linear in self._under.get((candidate.row, capacity), ())
        )

    def _look(
        self,
        row: np.void,
        stages: Stages,
        linear: Sequence[float],
        capacity: float,
        *,
        guesses: bool,
        spares: bool = False,
    ) -> TruncatedFigures | None:
        shorter, device = self._question.shorter, self._question.device
        assert shorter is not None
        num_ranks = len(linear)
        fullest = max(range(num_ranks), key=linear.__getitem__)
        likely: dict[Allocator, float] = {}
        is_known = False
        for place in dict.fromkeys((fullest, 0, num_ranks - 1)):
            short = shorten(stages, place, shorter, num_ranks=num_ranks, looks=self._looks)
            if short is None:
                continue
            try:
                plan = self._plan(row, short.stages, short.graph)
                rank = place * (plan.mesh.world_size // num_ranks)  # pp goes outermost.
                gauge = TruncatedBound(
                    analytic_log_of_rank(plan, rank, device=device, played=self.played), short
                )
            except MeshplanError:
                return None  # The model itself tells why.
            on_top = self.links(plan) - linear[place]
            least = gauge.least_bytes + on_top
            is_over = least + linear[place] > capacity
            asks = guesses and not (spares and is_over)
            if asks:
                for each in self._allocators:
                    spec = replace(plan.spec, allocator=each)
                    guess = max(gauge.likely_bytes(device, spec) + on_top, least)
                    likely[each] = max(guess, likely.get(each, guess))
            if is_over:
                return TruncatedFigures(least, likely, True)
            is_known = True
        return TruncatedFigures(0.0, likely, False) if is_known else None

    def _plan(self, row: np.void, stages: Stages, graph: ModelGraph) -> Plan:
        return make_plan(self._question.read(overrides(self._stated(row, stages))), graph)


def _shortest(grid: NDArray[np.void], row: np.void) -> np.void:
    """Of the rows that spread the same axes in the same mode, one with the fewest stages."""
    if row["pp"] * row["virtual"] <= 2:
        return row
    alike = (grid["mode"] == row["mode"]) & (grid["offload"] == row["offload"])
    for axis in AXES:
        alike &= (grid[axis] > 1) == (row[axis] > 1)
    stages = grid["pp"] * grid["virtual"]
    at = np.flatnonzero(alike)
    found: np.void = grid[at[np.argmin(stages[at])]]
    return found
