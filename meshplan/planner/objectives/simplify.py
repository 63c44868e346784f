"""Near the best: the simplest plan that is hardly slower, and the others that fit.

Optima are flat, and no cost model is good to two per cent; fewer axes and fewer different things
that blocks do are worth more than that.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from meshplan.cost.grid import MODES, OPTIONS, RECOMPUTE
from meshplan.layout.mesh import AXES
from meshplan.planner.problem.decision import Evaluated
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import Candidate, solve_config
from meshplan.planner.solve.result import SearchResult
from meshplan.planner.tables.cost_table import CostTable
from meshplan.spec.keys import KEEP
from meshplan.spec.spec import Allocator

SLACK: Final = 0.02
"""How much slower a simpler plan may be, as a share."""

Options = tuple[bool, ...]
"""Which of `cost.grid.OPTIONS` blocks may take."""


class Try(NamedTuple):
    """A row with less to choose from.

    Attributes:
        options: What its blocks may do.
        allocators: Its memory may be told with.
    """

    row: int
    options: Options
    allocators: tuple[Allocator, ...]


_MOST_SIMPLER, _MOST_MESHES, _MOST_NEAR, _MOST_GUESSES, _MORE = 8, 5, 3, 1, 1.02
_DDP: Final = MODES.index("ddp")


class Simplifier:
    """The rows that a search found within SLACK of the best."""

    def __init__(self, job: PlanningProblem, numbers: CostTable, found: SearchResult) -> None:
        self._job, self._numbers, self._found = job, numbers, found
        self._only: dict[tuple[int, Options], CostTable] = {}
        self._excess: dict[tuple[int, tuple[Allocator, ...]], float] = {}
        """Bytes that the last answer held above the linear figures, by row and allocators."""

    def choose(self) -> tuple[Evaluated | None, tuple[Evaluated, ...]]:
        """(the simplest within the slack, others that are near)."""
        found = self._found
        if found.best is None or found.measured is None:
            return None, ()
        best = found.measured.result
        assert isinstance(best, Evaluated)
        tries = self._simpler(self._complexity(found.best, best.plan.spec.allocator))
        chosen = next(self._that_fit(tries, _MOST_SIMPLER), best)
        everything = (True,) * len(OPTIONS)
        keep = int(self._job.spec.solve.get("keep", KEEP))
        every = self._job.free.allocators
        rows = itertools.islice(self._one_of_a_mesh(), _MOST_MESHES)
        near = (Try(row, everything, every) for row in rows)
        more = max(keep - (best.stated != chosen.stated), 0)
        others = [best, *itertools.islice(self._that_fit(near, _MOST_NEAR), more)]
        by_words = {str(way.stated): way for way in others if way.stated != chosen.stated}
        return chosen, tuple(sorted(by_words.values(), key=lambda way: way.seconds)[:keep])

    def _one_of_a_mesh(self) -> Iterator[int]:
        """The fastest row of each mesh but the best one's: its others are the best, little changed.

        Rows of one mesh differ in rounds and microbatches alone.
        """
        assert self._found.best is not None
        known = {self._mesh(self._found.best.row)}
        for candidate in self._found.near:
            mesh = self._mesh(candidate.row)
            if mesh not in known:
                known.add(mesh)
                yield candidate.row

    def _mesh(self, row: int) -> tuple[int, ...]:
        return tuple(int(self._job.grid[row][axis]) for axis in AXES)

    def _simpler(self, simplest: tuple[float, ...]) -> Iterator[Try]:
        """Rows near the best, and what their blocks may do, that are simpler: simplest first.

        Most are solved for nothing if they are before their turn, which is by what is sure of them:
        blocks that may do one thing do one, and where they may do more and do one, they do what
        those do that may do no other.
        """
        waiting: list[tuple[tuple[float, ...], int, Try]] = []
        rows = (candidate.row for candidate in self._found.near)
        alone = [(each,) for each in self._job.free.allocators]
        for row, some in itertools.product(rows, alone):
            if (own := self._of_row(row, *some)) > simplest[: len(own)]:
                continue
            for options in _sets_of_options():
                sure = (*own, min(sum(options), 2), self._virtual(row))
                heapq.heappush(waiting, (sure, len(waiting), Try(row, options, some)))
        limit = (*simplest, -1)
        while waiting and waiting[0][0] < limit:
            least, number, each = heapq.heappop(waiting)
            if len(least) == len(limit):
                yield each
            elif (one := self._solve(each)) is not None:
                key = (*self._complexity(one, *each.allocators), each.row)
                if least <= key < limit:
                    heapq.heappush(waiting, (key, number, each))

    def _known_excess(self, each: Try) -> float:
        known = self._found.excess.get(each.row, self._job.taken(each.row))
        return self._excess.get((each.row, each.allocators), known)

    def _solve(self, each: Try) -> Candidate | None:
        """The fastest way of a row within the slack, as far as is known what it really holds."""
        found, (row, options, _) = self._found, each
        assert found.best is not None
        room = self._job.capacity - self._known_excess(each)
        limit = found.best.seconds * (1 + SLACK)
        if (row, options) not in self._only:
            self._only[row, options] = self._numbers.only(row, options)
        one = solve_config(self._only[row, options], 0, room, limit)
        return replace(one, row=row) if one is not None else None

    def _that_fit(self, tries: Iterable[Try], most: int) -> Iterator[Evaluated]:
        """Those of some tries that the memory room certifies, in this order."""
        found, job, numbers = self._found, self._job, self._numbers
        for each in tries:
            guesses, key = 0, (each.row, each.allocators)
            while most > 0 and not job.question.is_stopped():
                one = self._solve(each)
                if one is None:
                    break
                guesses += 1
                few = guesses <= _MOST_GUESSES
                guess = job.guess(numbers, one, each.allocators) if few else None
                if guess and max(one.linear_bytes) + guess.excess_bytes > job.capacity:
                    known = self._known_excess(each)
                    self._excess[key] = max(guess.excess_bytes, known * _MORE, 1.0)
                    continue
                measured = job.measure(numbers, one, allocators=each.allocators)
                found.num_measured += 1
                most -= 1
                if measured.fits:
                    assert isinstance(measured.result, Evaluated)
                    yield measured.result
                if measured.fits or measured.why:
                    break
                # It held more than was known of this row: ask for less, until none is near.
                known = self._known_excess(each)
                self._excess[key] = max(measured.excess_bytes, known * _MORE, 1.0)

    def _complexity(self, candidate: Candidate, allocator: str) -> tuple[float, ...]:
        """As `_of_row`, then different things that blocks do, stages of a rank, the cost."""
        blocks = {
            (b.recompute, b.reshard)
            for stage in self._job.blocks(self._numbers, candidate)
            for b in stage
        }
        row = candidate.row
        own = self._of_row(row, allocator)
        return *own, len(blocks), self._virtual(row), candidate.seconds

    def _virtual(self, row: int) -> int:
        return int(self._job.grid[row]["virtual"])

    def _of_row(self, row: int, allocator: str) -> tuple[int, int, int]:
        """Count what is offloaded, axes that are spread, and settings that only make room."""
        config = self._job.grid[row]
        spread = sum(int(config[axis] > 1) for axis in AXES)
        # Sharding over one rank is simpler than sharding over more, and not as simple as none.
        shards = config["mode"] != _DDP and not spread and not config["offload"]
        room = int(config["loss_chunks"] > 1) + int(allocator != "default")
        return int(config["offload"]).bit_count(), spread + int(shards), room


def _sets_of_options() -> Iterator[Options]:
    """Some recomputations with parameters that are kept, that are given back, and with both."""
    for size in range(1, len(RECOMPUTE) + 1):
        for again in itertools.combinations(range(len(RECOMPUTE)), size):
            for back in ((0,), (1,), (0, 1)):
                yield tuple(r in again and s in back for r, s in OPTIONS)
