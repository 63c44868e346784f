"""Add configurations with offload to the space, as far as they may contain the best plan.

Offload costs time and saves memory. A configuration with offload takes at least as long as the same
configuration without offload and with unlimited memory, plus the slower update on the host. The
space is therefore searched without offload first, and only those variants with offload are added
that may beat the plan found. The search stays exhaustive, since a bound excludes every variant left
out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshplan.cost.grid import (
    ACTIVATIONS_ON_HOST,
    DDP,
    OPTIONS,
    PARAMS_ON_HOST,
    RECOMPUTE,
    SHARD,
    ProgramKey,
    cuts_of,
)
from meshplan.cost.host import entered_s, updates_more_s
from meshplan.cost.rows import widths_of
from meshplan.cost.shares import share, trained
from meshplan.memory.answer.hosts import host_limit
from meshplan.planner.knapsack.knapsack import Counts, Floats
from meshplan.planner.objectives.search_plans import search_plans
from meshplan.planner.problem.problem import PlanningProblem
from meshplan.planner.solve.config import Candidate
from meshplan.planner.solve.result import ReplayedMemory, SearchResult
from meshplan.planner.solve.search import TOLERANCE
from meshplan.planner.space.offload import WORDS, too_much_on_host
from meshplan.planner.space.space import Rejected
from meshplan.planner.space.trials import with_offload
from meshplan.planner.tables.cost_table import CostTable, step_seconds
from meshplan.planner.tables.memory_bounds import element_bytes_of

_FULL: Final = np.array([recompute == RECOMPUTE.index("full") for recompute, _ in OPTIONS])


def searched(
    problem: PlanningProblem, run: Callable[[CostTable], SearchResult]
) -> tuple[CostTable, SearchResult]:
    """Search the whole space: without offload first, then variants with offload that may be faster.

    Args:
        problem: The problem. Variants are added to its grid.
        run: Searches a cost table. If stopped by a time limit, it still returns a lower bound.

    Returns:
        (the cost table of the final grid, the result of all searches together).
    """
    table = problem.table
    is_alone = table.grid["pp"] == 1
    if table.starts and is_alone.any() and not is_alone.all():
        # Each pipeline stage of a live model is traced, so search what needs no trace first: a plan
        # that fits excludes many stages by their bounds.
        with np.errstate(invalid="ignore"):
            found = run(_restricted(table, is_alone, SearchResult()))
            found = _merged(found, run(_restricted(table, ~is_alone, found)))
    else:
        found = run(table)
    found.unoffloaded_s = found.best.seconds if found.best else float("inf")
    num_base = len(table.grid)
    if add_offload_variants(problem, found.unoffloaded_s):
        table = problem.table
        is_new = np.arange(len(table.grid)) >= num_base
        # Search configurations without pp first: their memory is estimated fastest, and a plan that
        # fits excludes many configurations with pp.
        is_alone = table.grid["pp"] == 1
        for some in (is_new & is_alone, is_new & ~is_alone):
            if some.any():
                with np.errstate(invalid="ignore"):  # Infinity - infinity.
                    found = _merged(found, run(_restricted(table, some, found)))
    return table, found


def fastest_that_fits(
    problem: PlanningProblem, deadline: float | None = None, *, below_s: float = float("inf")
) -> SearchResult:
    """Search the fastest plan of a problem, without `SearchResult.near`.

    Args:
        problem: The problem. Variants with offload are added to its grid.
        deadline: Value of `time.monotonic()` at which to stop with the best plan found so far; None
            for no limit.
        below_s: Seconds of a step that the plan has to be below. If none that fits is,
            `SearchResult.best` is None.
    """
    known = _known_at(below_s)
    _, found = searched(
        problem,
        lambda table: search_plans(
            problem,
            table,
            known=known,
            deadline=deadline,
            is_stopped=problem.request.is_stopped,
        ),
    )
    return _without(known, found)


_Known = tuple[Candidate, ReplayedMemory]


def _known_at(below_s: float) -> _Known | None:
    """Return a candidate that stands for these seconds; None if they are infinite.

    A search proves that nothing is faster than a candidate that fits, so it is given one.
    """
    if below_s == float("inf"):
        return None
    return Candidate(0, below_s, (), (), ()), ReplayedMemory(fits=True)


def _without(known: _Known | None, found: SearchResult) -> SearchResult:
    """Return a result without a best plan if its best is the candidate of `_known_at`."""
    is_it = known is not None and found.best is known[0]
    return replace(found, best=None, measured=None) if is_it else found


def fastest_of_all(
    problem: PlanningProblem, deadline: float | None = None
) -> tuple[PlanningProblem, SearchResult]:
    """Search the fastest plan of a problem, whatever tp shards.

    Args:
        problem: The problem. Variants with offload are added to its grid.
        deadline: As in `fastest_that_fits`.

    Returns:
        (the problem, or that of its `less_sharded` whose plan is the fastest; the result, whose
        `lower_s` and `is_whole` are of all of them).
    """
    best = problem, fastest_that_fits(problem, deadline)
    for other in problem.less_sharded:
        before = best[1]
        below_s = before.best.seconds if before.best is not None else float("inf")
        found = fastest_that_fits(other, deadline, below_s=below_s)
        at, faster = (other, found) if found.best is not None else best
        whole, lower_s = before.is_whole and found.is_whole, min(before.lower_s, found.lower_s)
        best = at, replace(faster, is_whole=whole, lower_s=lower_s)
    return best


class FastestAmong:
    """The fastest plan that fits among some configurations of a problem that was searched before.

    The cost table and the memory estimates of the first search are used again. After `search` and
    `search_offload`, `found` is what `fastest_that_fits` returns for a problem that has only these
    configurations, without `SearchResult.near`.

    Args:
        problem: The problem. Variants with offload are added to its grid.
        is_among: Maps a grid to the [configs] mask of the configurations to search. It depends on
            the mesh alone, and so is equal for all variants of a configuration.
        deadline: Value of `time.monotonic()` at which to stop with the best plan found so far; None
            for no limit.
        is_stopped: Returns True once the search has to stop with the best plan found so far.
        below_s: As in `fastest_that_fits`.

    Attributes:
        found: The result so far.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        is_among: Callable[[NDArray[np.void]], NDArray[np.bool_]],
        *,
        deadline: float | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        below_s: float = float("inf"),
    ) -> None:
        self._problem, self._is_among = problem, is_among
        self._deadline, self._is_stopped = deadline, is_stopped
        self._below_s = below_s
        self.found = SearchResult()

    @property
    def has_offload(self) -> bool:
        """True if the plan leaves offload open, so that `search_offload` may find a plan."""
        return 0 in self._problem.free.offload and len(self._problem.free.offload) > 1

    def search(self) -> None:
        """Search the configurations that the grid has."""
        self.found = self._run(self._is_among(self._problem.grid))

    def search_offload(self) -> None:
        """Search the variants with offload that may be faster than the plan found, if any."""
        problem, found = self._problem, self.found
        seconds = found.best.seconds if found.best is not None else self._below_s
        add_offload_variants(problem, seconds, self._is_among(problem.grid))
        # Some may have been added before, for a search among other configurations.
        among = self._is_among(problem.grid) & (problem.grid["offload"] != 0)
        if not self.has_offload or not among.any():
            return
        if found.best is not None:
            among[found.best.row] = True
        self.found = _merged(found, self._run(among))

    def _run(self, among: NDArray[np.bool_]) -> SearchResult:
        known = _known_at(self._below_s)
        found = search_plans(
            self._problem,
            self._problem.table,
            among=among,
            known=known,
            deadline=self._deadline,
            is_stopped=self._is_stopped,
        )
        return _without(known, found)


def _restricted(table: CostTable, some: NDArray[np.bool_], found: SearchResult) -> CostTable:
    """Return the cost table restricted to some configurations and to that of the best plan.

    Args:
        table: The cost table.
        some: [configs] mask of the configurations to keep.
        found: The result so far.
    """
    kept = some.copy()
    if found.best is not None:
        kept[found.best.row] = True
    return replace(table, seconds=np.where(kept[:, None, None], table.seconds, np.inf))


def _merged(one: SearchResult, two: SearchResult) -> SearchResult:
    """Merge the results of two searches.

    The second space includes the configuration of the first one's best plan, but its search may
    come to another, slower plan of it: what it replays depends on what it has found before.
    """
    seconds = [each.best.seconds if each.best is not None else np.inf for each in (one, two)]
    faster = two if seconds[1] < seconds[0] else one
    return replace(
        two,
        best=faster.best,
        measured=faster.measured,
        lower_s=min(one.lower_s, two.lower_s),
        is_whole=one.is_whole and two.is_whole,
        unoffloaded_s=one.unoffloaded_s,
        near=sorted([*one.near, *(c for c in two.near if c not in one.near)],
                    key=lambda c: (c.seconds, c.row)),
        refused={**one.refused, **two.refused},
        excess={**one.excess, **two.excess},
        num_solved=one.num_solved + two.num_solved,
        num_measured=one.num_measured + two.num_measured,
        given_up=one.given_up + two.given_up,
    )  # fmt: skip


def add_offload_variants(
    problem: PlanningProblem, seconds: float = float("inf"), among: NDArray[np.bool_] | None = None
) -> bool:
    """Add the configurations with offload that may be faster than the best plan so far.

    Afterwards `problem.num_configs` counts all variants, excluded or not. Without `among`, only the
    first call for a problem adds configurations.

    Args:
        problem: The problem. Its grid grows.
        seconds: Step seconds of the best plan so far; infinite if there is none.
        among: [configs] mask of the configurations whose variants are added, as far as the grid
            does not have them yet; None for all configurations.

    Returns:
        True if configurations were added.
    """
    free = problem.free
    if 0 not in free.offload or len(free.offload) == 1 or (among is None and problem.is_widened):
        return False
    table = problem.table
    limit = seconds * (1 - TOLERANCE)
    added, count, num_base = [], 0, problem.num_configs
    base = np.flatnonzero((table.grid["offload"] == 0) & (True if among is None else among))
    for offload in free.offload[1:]:
        at, rows = _offload_variants(table.grid[base], offload, problem)
        at = base[at]
        if problem.is_widened:  # `num_configs` counts all variants already.
            is_new = _is_new(rows, table.grid)
            at, rows = at[is_new], rows[is_new]
        else:
            count += len(rows)
        if not len(rows):
            continue
        may_be_faster = _bounds(problem, table, at, offload) < limit
        fits_host = _least_host_bytes(problem, rows, offload) <= host_limit(problem.spec.hardware)
        if may_be_faster.any() and not (may_be_faster & fits_host).any():
            problem.reject(Rejected(f"offload={_words(offload)}", too_much_on_host(problem.spec)))
        may_be_faster &= fits_host
        if may_be_faster.any() and (why := _refused(problem, offload)):
            problem.reject(why)
            count -= 0 if problem.is_widened else len(rows)
        elif may_be_faster.any():
            added.append(_allowed(problem, rows[may_be_faster], offload))
    rows = np.concatenate(added) if added else table.grid[:0]
    problem.extend(rows, num_base + count)
    return bool(len(rows))


def _is_new(rows: NDArray[np.void], grid: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return a mask of the configurations that a grid does not have."""
    known = {row.tobytes() for row in grid}
    return np.array([row.tobytes() not in known for row in rows], dtype=np.bool_)


def _offload_variants(
    grid: NDArray[np.void], offload: int, problem: PlanningProblem
) -> tuple[Counts, NDArray[np.void]]:
    """Return the configurations that can offload, and their variants with offload.

    FSDP2 offloads only parameters that it shards. With a single data rank it shards over one rank,
    which is tried for offload only.

    Args:
        grid: Configurations without offload.
        offload: Value of the grid's `offload`.
        problem: The problem.

    Returns:
        (indices into `grid`, one variant with offload for each).
    """
    free = problem.free
    if offload & ACTIVATIONS_ON_HOST and RECOMPUTE.index("full") not in free.recompute:
        return np.zeros(0, dtype=np.int64), grid[:0]
    can_be, alone = np.ones(len(grid), dtype=bool), np.zeros(len(grid), dtype=bool)
    if offload & PARAMS_ON_HOST:
        can_be = grid["mode"] != DDP
        alone = ~can_be & (grid["dp_replicate"] == 1) & (grid["dp_shard"] == 1)
        alone &= (grid["cp"] == 1) & (SHARD in free.modes) & (not free.hybrid)
        alone &= free.world > 1  # The grid of a single device has these configurations already.
    at = np.flatnonzero(can_be | alone)
    rows = grid[at].copy()
    rows["offload"] = offload
    rows["mode"] = np.where(alone[at], SHARD, rows["mode"])
    return at, rows


def _bounds(problem: PlanningProblem, table: CostTable, at: Counts, offload: int) -> Floats:
    """Return lower bounds on the step seconds of the variants of some configurations.

    Args:
        problem: The problem.
        table: The cost table without offload.
        at: Indices of the configurations.
        offload: Value of the grid's `offload`.
    """
    grid, seconds = table.grid[at], table.seconds[at]
    more = np.zeros(len(at))
    count = table.counts
    for at_cut in cuts_of(grid):
        own_rows = at_cut.rows(grid)
        more[own_rows] = _extra_seconds(problem, grid[own_rows], offload, at_cut)
    if offload & ACTIVATIONS_ON_HOST:
        has_choice = np.array([bool(name) for name in table.names])
        blocks = np.isin(np.arange(len(count)), np.array(table.order)[has_choice])
        offered = _FULL[None] | ~blocks[:, None]
        seconds = np.where(offered[None], seconds, np.inf)
    there = count > 0
    fastest = seconds.min(axis=2)[:, there]
    can_be = np.isfinite(fastest).all(axis=1)
    fastest = np.where(can_be[:, None], fastest, 0.0)
    least = step_seconds(table, fastest @ count[there] + more, fastest.max(axis=1), at)
    return np.where(can_be, least, np.inf)


def _least_host_bytes(problem: PlanningProblem, rows: NDArray[np.void], offload: int) -> Floats:
    """Return [configs] lower bounds on the host bytes of the fullest node: the mean over nodes."""
    out = np.zeros(len(rows))
    if not offload & PARAMS_ON_HOST:
        return out
    sizes, world = element_bytes_of(problem.trial), problem.request.cluster.num_gpus
    per_node = min(world, problem.request.cluster.gpus_per_node)
    for at_cut in cuts_of(rows):
        own_rows = at_cut.rows(rows)
        chain = problem.chain_at(*at_cut)
        for number, many in zip(*np.unique(chain.order, return_counts=True), strict=True):
            kind = chain.kinds[number]
            kept = share(rows[own_rows], kind) * sizes.stored
            kept += share(rows[own_rows], trained(kind)) * (sizes.stored + sizes.states)
            out[own_rows] += many * kept * per_node / rows["pp"][own_rows]
    return out


def _extra_seconds(
    problem: PlanningProblem, grid: NDArray[np.void], offload: int, cut: ProgramKey
) -> Floats:
    """Return [configs] extra seconds per microbatch, of all blocks together, with offload."""
    chain, profile = problem.chain_at(*cut), problem.profile
    per_node = problem.request.cluster.gpus_per_node
    widths = widths_of(problem.spec.precision, problem.trial.graph.dtype)
    out = np.zeros(len(grid))
    for number, many in zip(*np.unique(chain.order, return_counts=True), strict=True):
        kind = chain.kinds[number]
        if offload & PARAMS_ON_HOST:
            once = updates_more_s(grid, kind, profile, per_node, widths)
            out += many * once / grid["microbatches"]
        if offload & ACTIVATIONS_ON_HOST and kind.has_options:
            out += many * entered_s(grid, kind, profile)
    return out


def _allowed(problem: PlanningProblem, rows: NDArray[np.void], offload: int) -> NDArray[np.void]:
    """Return the variants whose pp and ep allow offload; reject the others.

    Only the smallest size of an axis is tried: if it does not allow offload, larger sizes do not.
    """
    for axis, where in (("pp", " in a pipeline"), ("ep", " where experts are spread")):
        spread = rows[axis] > 1
        if not spread.any() or (axis == "pp" and not offload & PARAMS_ON_HOST):
            continue
        if why := _refused(problem, offload, where, **{axis: int(rows[axis][spread].min())}):
            problem.reject(why)
            rows = rows[~spread]
    return rows


def _refused(
    problem: PlanningProblem, offload: int, where: str = "", *, pp: int = 1, ep: int = 1
) -> Rejected | None:
    """Try this offload on the model, and return the rejection; None if the model allows it.

    Args:
        problem: The problem.
        offload: Value of the grid's `offload`.
        where: Words that follow the offload in the rejection, such as " in a pipeline".
        pp: Size of pp; for more than two stages, two are tried.
        ep: Size of ep.
    """
    trial = with_offload(problem.spec, offload, pp=min(pp, 2), ep=ep, experts=problem.free.experts)
    why = problem.refuses(trial)
    return Rejected(f"offload={_words(offload)}{where}", why) if why else None


def _words(offload: int) -> str:
    return next(word for word, value in WORDS.items() if value == offload)
