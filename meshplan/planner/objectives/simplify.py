"""Choose the simplest of the plans that are hardly slower than the best, and list alternatives.

Many plans are nearly as fast as the best, and no cost model is accurate to two per cent. Fewer mesh
axes, axes that leave the model whole on each rank, and fewer different choices of the blocks are
worth more than such a difference.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from meshplan.cost.grid import DDP, OPTIONS, RECOMPUTE
from meshplan.layout.mesh import AXES, DATA_AXES
from meshplan.planner.problem.decision import Evaluated
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import Candidate, solve_config
from meshplan.planner.solve.result import SearchResult, excess_by_rank, ranks_over
from meshplan.planner.tables.cost_table import CostTable
from meshplan.spec.keys import KEEP
from meshplan.spec.spec import Allocator

SLACK: Final = 0.02
"""Share by which a simpler plan may be slower than the best plan."""
_UNSEARCHED: Final = 0.005
"""Part of `SLACK` that is left for numbers of loss chunks between those that the search tries: of
371 drawn plans, the best such number made two faster, by 0.45 and 1.08 %
(`tests/bench/no_better.py`). Their allocated bytes lie between those of their neighbours, but the
allocator may reserve less for them than for either."""

Options = tuple[bool, ...]
"""For each of `cost.grid.OPTIONS`, True if blocks may take this option."""


class Try(NamedTuple):
    """A configuration with fewer options for its blocks.

    Attributes:
        row: Index of the configuration.
        options: For each of `cost.grid.OPTIONS`, True if the configuration's blocks may take it.
        allocators: Allocator settings to estimate the memory with.
    """

    row: int
    options: Options
    allocators: tuple[Allocator, ...]


_MOST_SIMPLER, _MOST_MESHES, _MOST_NEAR, _MOST_GUESSES, _MORE = 8, 5, 3, 1, 1.02


class Simplifier:
    """Choose among the configurations that a search found within `SLACK` of the best plan.

    Args:
        problem: The problem.
        table: The cost table that was searched.
        found: The result of the search.
    """

    def __init__(self, problem: PlanningProblem, table: CostTable, found: SearchResult) -> None:
        self._problem, self._cost_table, self._found = problem, table, found
        self._only: dict[tuple[int, Options], CostTable] = {}
        self._excess: dict[tuple[int, tuple[Allocator, ...]], tuple[float, ...]] = {}
        """{(configuration, allocators): excess bytes of the last candidate, by rank}."""

    def choose(self) -> tuple[Evaluated | None, tuple[Evaluated, ...]]:
        """Choose the simplest plan within `SLACK` of the best.

        Returns:
            (the chosen plan, alternatives that fit, fastest first); (None, ()) if nothing fits.
        """
        found = self._found
        if found.best is None or found.measured is None:
            return None, ()
        best = found.measured.result
        assert isinstance(best, Evaluated)
        tries = self._simpler(self._complexity(found.best, best.plan.spec.allocator))
        chosen = next(self._that_fit(tries, _MOST_SIMPLER), best)
        everything = (True,) * len(OPTIONS)
        keep = int(self._problem.spec.solve.get("keep", KEEP))
        every = self._problem.free.allocators
        rows = itertools.islice(self._one_of_a_mesh(), _MOST_MESHES)
        near = (Try(row, everything, every) for row in rows)
        more = max(keep - (best.stated != chosen.stated), 0)
        others = [best, *itertools.islice(self._that_fit(near, _MOST_NEAR), more)]
        by_words = {
            str(evaluated.stated): evaluated
            for evaluated in others
            if evaluated.stated != chosen.stated
        }
        return chosen, tuple(
            sorted(by_words.values(), key=lambda evaluated: evaluated.seconds)[:keep]
        )

    def _one_of_a_mesh(self) -> Iterator[int]:
        """Yield the fastest near configuration of each mesh except the best plan's mesh.

        Other configurations of the same mesh would differ too little to be alternatives.
        """
        assert self._found.best is not None
        known = {self._mesh(self._found.best.row)}
        for candidate in self._found.near:
            mesh = self._mesh(candidate.row)
            if mesh not in known:
                known.add(mesh)
                yield candidate.row

    def _mesh(self, row: int) -> tuple[int, ...]:
        return tuple(int(self._problem.grid[row][axis]) for axis in AXES)

    def _simpler(self, simplest: tuple[float, ...]) -> Iterator[Try]:
        """Yield the tries that are simpler than the best plan, simplest first.

        A try waits in a queue under a lower bound on its complexity, and is solved only when it
        comes first: most tries never do. The bound counts one choice if the try allows a
        single option, and two if it allows more: a plan with one choice is found by the try of
        that option alone.

        Args:
            simplest: Complexity of the best plan.
        """
        waiting: list[tuple[tuple[float, ...], int, Try]] = []
        rows = (candidate.row for candidate in self._found.near)
        alone = [(each,) for each in self._problem.free.allocators]
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

    def _known_excess(self, each: Try) -> tuple[float, ...]:
        """Return the known excess bytes by rank: of a try's last candidate or configuration."""
        problem, row = self._problem, each.row
        known = self._found.excess_of(problem.grid[row], row, problem.taken(row))
        return self._excess.get((row, each.allocators), known)

    def _raise_excess(self, each: Try, one: Candidate, excess: Mapping[int, float]) -> None:
        """Take the excess bytes with which a candidate of a try does not fit.

        Known excess never shrinks, and that of a rank that is over grows: tries come to an end.
        """
        known = self._known_excess(each)
        ranks = range(len(known))
        over = ranks_over(one.linear_bytes, excess, self._problem.capacity) or ranks
        found = excess_by_rank(excess, len(known))
        self._excess[each.row, each.allocators] = tuple(
            max(found[rank], known[rank] * (_MORE if rank in over else 1), 1.0) for rank in ranks
        )

    def _solve(self, each: Try) -> Candidate | None:
        """Return the fastest candidate of a try within `SLACK`; None if there is none.

        The excess bytes known so far are subtracted from the capacity.
        """
        found, (row, options, _) = self._found, each
        assert found.best is not None
        capacity = tuple(self._problem.capacity - more for more in self._known_excess(each))
        limit = found.best.seconds * (1 + SLACK - _UNSEARCHED)
        if (row, options) not in self._only:
            self._only[row, options] = self._cost_table.only(row, options)
        one = solve_config(self._only[row, options], 0, capacity, limit)
        return replace(one, row=row) if one is not None else None

    def _that_fit(self, tries: Iterable[Try], most: int) -> Iterator[Evaluated]:
        """Yield the plans of some tries whose memory estimate fits, in the order of the tries.

        Args:
            tries: The tries.
            most: Number of memory estimates that may be made.
        """
        found, problem, table = self._found, self._problem, self._cost_table
        for each in tries:
            guesses = 0
            while most > 0 and not problem.request.is_stopped():
                one = self._solve(each)
                if one is None:
                    break
                guesses += 1
                few = guesses <= _MOST_GUESSES
                guess = problem.guess(table, one, each.allocators) if few else None
                if guess and ranks_over(one.linear_bytes, guess.excess, problem.capacity):
                    self._raise_excess(each, one, guess.excess)
                    continue
                measured = problem.measure(table, one, allocators=each.allocators)
                found.num_measured += 1
                most -= 1
                if measured.fits:
                    assert isinstance(measured.result, Evaluated)
                    yield measured.result
                if measured.fits or measured.why:
                    break
                # The excess was larger than known: solve again with less capacity, until no
                # candidate is within the slack.
                self._raise_excess(each, one, measured.excess)

    def _complexity(self, candidate: Candidate, allocator: str) -> tuple[float, ...]:
        """Return the complexity of a candidate, a tuple; the least is the simplest.

        Its entries are those of `_of_row`, the number of different choices of blocks, the number of
        stages per rank, and the seconds of a step.
        """
        blocks = {
            (b.recompute, b.reshard)
            for stage in self._problem.blocks(self._cost_table, candidate)
            for b in stage
        }
        row = candidate.row
        own = self._of_row(row, allocator)
        return *own, len(blocks), self._virtual(row), candidate.seconds

    def _virtual(self, row: int) -> int:
        return int(self._problem.grid[row]["virtual"])

    def _of_row(self, row: int, allocator: str) -> tuple[int, int, int, int]:
        """Return counts of what makes a configuration less simple, the weightiest first.

        Returns:
            (offloaded categories, axes larger than 1, those of them that are no data axes, settings
            for memory alone).
        """
        config = self._problem.grid[row]
        spread = sum(int(config[axis] > 1) for axis in AXES)
        # FSDP over one rank counts like an axis, since it is less simple than no wrapper.
        shards = config["mode"] != DDP and not spread and not config["offload"]
        room = int(config["loss_chunks"] > 1) + int(allocator != "default")
        cut = sum(int(config[axis] > 1) for axis in AXES if axis not in DATA_AXES)
        return int(config["offload"]).bit_count(), spread + int(shards), cut, room


def _sets_of_options() -> Iterator[Options]:
    """Yield every set of recompute settings, each with reshard off, on, and free."""
    for size in range(1, len(RECOMPUTE) + 1):
        for modes in itertools.combinations(range(len(RECOMPUTE)), size):
            for back in ((0,), (1,), (0, 1)):
                yield tuple(r in modes and s in back for r, s in OPTIONS)
