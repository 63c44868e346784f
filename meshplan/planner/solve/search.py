"""Search all configurations best first: lower bounds, then exact candidates, then replayed memory.

A configuration is solved exactly (block options by `knapsack`, stages by `stage_cuts`), with its
memory counted in linear bytes, which never exceed the memory really needed. The resulting candidate
is then replayed. The excess that the replay finds on a rank is subtracted from the rank's capacity,
and the configuration is solved again, until a candidate fits. The search ends when no
configuration's bound is below the seconds of the best candidate by more than the tolerance, and
`failures` has found no faster one among those that the excess left out. The docstring of
`meshplan.planner.solve` has the equations.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.solve.config import Candidate, ConfigSolver, config_bound, solve_config
from meshplan.planner.solve.deadline import Deadline
from meshplan.planner.solve.failures import resolve_failures
from meshplan.planner.solve.result import (
    Guess,
    NodeState,
    ReplayedMemory,
    RuledOut,
    SearchResult,
    excess_by_rank,
    ranks_over,
)
from meshplan.planner.solve.stage_ranges import solve_ranges
from meshplan.planner.solve.warm_start import WarmStart
from meshplan.planner.tables.cost_table import CostTable, by_bound, memory_bounds, time_bounds

TOLERANCE: Final = 1e-4
"""Share by which some plan of the space may be faster than the answer."""
_EPS: Final = 1e-12
_FAILURES: Final = 6
"""Replayed candidates that may fail before the warm start looks for a candidate well below the
memory limit."""
_GUESSES, _OFTEN = 20, 10
"""Candidates that guesses may pass over before the warm start looks for the smallest candidates,
and later between two calls of `_explore`."""
_MUCH, _MOST_PROMISING = 0.95, 8
"""Share of the best candidate's seconds that a candidate of `_explore` must beat, and the number of
configurations that `_explore` tries."""
_MOST_TRIES: Final = 12
"""Candidates of one configuration that are replayed before it is given up
(`SearchResult.given_up`)."""
_AHEAD: Final = (1.02, 1.25)
"""Factors for the first two attempts to solve a configuration while no candidate fits yet: only
candidates up to this factor above the bound are searched. Slower ones need not be known exactly
yet, and excluding them is cheap."""
_MOST_GUESSES: Final = 4
"""Number of guesses for a configuration's candidates after which the next one is replayed."""


def search(
    table: CostTable,
    capacity: float,
    measure: Callable[[Candidate], ReplayedMemory],
    *,
    measure_all: Callable[[Candidate], ReplayedMemory] | None = None,
    guess: Callable[[Candidate], Guess | None] = lambda candidate: None,
    is_over: Callable[[Candidate], bool] | None = None,
    taken: Callable[[int], float] = lambda row: 0.0,
    among: NDArray[np.bool_] | None = None,
    known: tuple[Candidate, ReplayedMemory] | None = None,
    slack: float = 0.0,
    tolerance: float = TOLERANCE,
    deadline: float | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    report: Callable[[SearchResult], None] = lambda found: None,
) -> SearchResult:
    """Find the fastest candidate of the space that fits.

    Args:
        table: The cost table.
        capacity: Linear bytes that a rank may use.
        measure: Replays the memory of a candidate; may stop at the first rank that does not fit.
        measure_all: Replays the memory of every rank; None to use `measure`.
        guess: Guesses the memory of a candidate cheaply, or returns None. Guesses decide which
            candidates are replayed first, and exclude only candidates with `Guess.is_over`.
        is_over: Returns True if a candidate is proved not to fit, possibly faster than `guess`;
            None to use `Guess.is_over`.
        taken: Maps the index of a configuration to the bytes that a rank needs above its linear
            bytes, whatever the options of its blocks.
        among: [configs] mask of the configurations to search; None for all of them.
        known: A candidate that fits, with its replayed memory, which others have to beat; None if
            there is none yet.
        slack: Share by which candidates may be slower than the best to be listed in
            `SearchResult.near`; 0 lists none.
        tolerance: Share by which some plan may be faster than the answer when the search ends.
        deadline: Value of `time.monotonic()` at which the search stops with the best candidate
            found so far; None for no limit. Until one is found, a `Deadline` is not over before the
            process has computed for that long, too.
        is_stopped: Returns True once the user wants the best candidate found so far.
        report: Called with the result whenever a better candidate is found.

    Returns:
        The result, with the lower bound on the seconds of a step that was proved.
    """
    found = _Search(table, capacity, measure, slack, tolerance, deadline, report, among)
    found.is_stopped, found.guess, found.taken = is_stopped, guess, taken
    found.is_over = is_over or found.is_over
    found.measure_all = measure_all or measure
    if known is not None:
        found.found.best, found.found.measured = known
    return found.run()


class _Search:
    """The queue, the bounds and the best candidate of one search."""

    def __init__(
        self,
        table: CostTable,
        capacity: float,
        measure: Callable[[Candidate], ReplayedMemory],
        slack: float,
        tolerance: float,
        deadline: float | None,
        report: Callable[[SearchResult], None],
        among: NDArray[np.bool_] | None = None,
    ) -> None:
        self._cost_table, self._capacity, self._measure = table, capacity, measure
        self._slack, self._tolerance = slack, tolerance
        self._deadline, self._report = deadline, report
        self.is_stopped: Callable[[], bool] = lambda: False
        self.guess: Callable[[Candidate], Guess | None] = lambda candidate: None
        self.is_over: Callable[[Candidate], bool] = self._is_surely_over
        self.measure_all = measure
        self.taken: Callable[[int], float] = lambda row: 0.0
        self.found = SearchResult()
        self._waiting: list[tuple[float, int]] = []
        """Heap of (lower bound on the seconds, configuration)."""
        self._guessed: list[tuple[float, int]] = []
        """Heap of (seconds without the guess, configuration) for configurations whose place in
        `_waiting` rests on a guess."""
        self._states: dict[int, NodeState] = {}
        self._following = 0.0
        """Lower bound on the seconds of every configuration that has not entered the queue yet."""
        self._failures, self._passed_over = 0.0, 0
        self._unproved = float("inf")
        """Lower bound on the seconds of the plans that were dropped without a proof; infinite if
        there are none."""
        self._times, self._bytes = time_bounds(table), memory_bounds(table)
        if among is not None:
            self._times = np.where(among, self._times, np.inf)
        self._out = RuledOut(table.grid)
        self._seeds = WarmStart(
            table, capacity, self._times, self._bytes,
            measure=self._measured, is_open=self._is_open, is_late=self._is_late,
        )  # fmt: skip

    def run(self) -> SearchResult:
        """Examine the configuration with the lowest bound until the best candidate is proved.

        A configuration first waits in the queue with its lower bound, and then with the seconds of
        its fastest candidate by linear bytes. If a replay shows that this candidate needs more
        memory, the configuration waits with the fastest candidate of the reduced capacity. These
        values never decrease, and a candidate is replayed only if none in the queue is lower.
        """
        found, waiting = self.found, self._waiting
        for bound, row in by_bound(self._cost_table, self._capacity, self._times, self._bytes):
            self._following = bound
            # First examine the queued configurations whose bound is not above this one: all
            # configurations that have not entered the queue have higher bounds.
            while waiting and waiting[0][0] <= bound and not self._is_done():
                self._examine(*heapq.heappop(waiting))
            if self._is_done():
                break
            heapq.heappush(waiting, (bound, row))
        else:
            self._following = float("inf")
        while (waiting or self._drop_guesses()) and not self._is_done():
            self._examine(*heapq.heappop(waiting))
        if found.is_whole:
            left_s = resolve_failures(
                self._cost_table, self._states, found,
                capacity=self._capacity, room=self._room, is_open=self._is_open,
                measure=partial(self._measured, every_rank=True), take=self._take,
                is_late=self._is_late, tolerance=self._tolerance,
            )  # fmt: skip
            self._unproved = min(self._unproved, left_s)
            best_s = found.best.seconds if found.best else float("inf")
            found.lower_s = min(self._least_waiting(), best_s)
        found.lower_s = min(found.lower_s, self._unproved)
        if found.best is not None and self._slack and found.is_whole:
            self._collect()
        return found

    def _least_waiting(self) -> float:
        """Return a lower bound on the seconds of all open configurations, queued or not."""
        return min(self._following, self._waiting[0][0]) if self._waiting else self._following

    def _is_done(self) -> bool:
        """Return True if no configuration can beat the best candidate, or the time is up."""
        found = self.found
        if found.best and self._least_waiting() >= found.best.seconds * (1 - self._tolerance):
            return not self._drop_guesses()
        if self._is_late():
            found.is_whole = False
            # A configuration that is to be solved again at once is queued with 0 seconds. Its time
            # bound is the lower bound that counts.
            waiting = (max(s, float(self._times[row])) for s, row in self._waiting)
            states = self._states
            guessed = (s for s, row in self._guessed if states[row].sure_capacity is not None)
            least = min([self._following, *waiting, *guessed])
            found.lower_s = min(least, found.best.seconds) if found.best else least
            return True
        return False

    def _drop_guesses(self) -> bool:
        """Drop guesses that keep configurations from beating the best; True if there were any."""
        limit = self.found.best.seconds * (1 - self._tolerance) if self.found.best else np.inf
        is_any = False
        while self._guessed and self._guessed[0][0] < limit:
            seconds, row = heapq.heappop(self._guessed)
            state = self._states[row]
            if state.sure_capacity is not None:
                state.capacity, state.sure_capacity = state.sure_capacity, None
                state.guesses, state.dropped_guess = _MOST_GUESSES, state.guessed
                heapq.heappush(self._waiting, (seconds, row))
                is_any = True
        return is_any

    def _is_late(self) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        if late and self.found.best is None and isinstance(self._deadline, Deadline):
            late = time.process_time() > self._deadline.own
        return late or self.is_stopped()

    def _seed(self, answers: Iterable[tuple[Candidate, ReplayedMemory]]) -> None:
        """Record replayed candidates that the best-first order has not reached yet."""
        for candidate, measured in answers:
            num_ranks = len(candidate.linear_bytes)
            self.found.excess[candidate.row] = excess_by_rank(measured.excess, num_ranks)
            self._take(candidate, measured)

    def _explore(self) -> None:
        """Replay one promising candidate of the configurations whose capacity a guess lowered.

        It must be much faster than the best candidate, and must fit by the guess. The best-first
        order reaches such candidates last, and until then the best may be far from the optimum.
        """
        best = self.found.best
        if best is None:
            return
        states = self._states.items()
        promising = [r for r, s in states if s.sure_capacity is not None and r not in self._out]
        for row in sorted(promising, key=lambda row: self._states[row].reachable_s)[
            :_MOST_PROMISING
        ]:
            state = self._states[row]
            candidate = solve_config(self._cost_table, row, state.capacity, _MUCH * best.seconds)
            state.reachable_s = candidate.seconds if candidate is not None else np.inf
            if candidate is not None and self._likely_fits(candidate):
                state.reachable_s = np.inf
                if (measured := self._measured(candidate)).fits:
                    self._seed([(candidate, measured)])
                return

    def _examine(self, bound: float, row: int) -> None:
        """Raise the bound of a configuration, or replay its candidate if no other can be faster.

        Args:
            bound: Lower bound on the seconds, with which the configuration left the queue.
            row: Index of the configuration in the grid.
        """
        found = self.found
        if row in self._out:
            return
        if (state := self._states.get(row)) is None:
            room = self._room(row)
            state = self._states[row] = NodeState(room, ((float("inf"),) * len(room),))
        limit = (found.best.seconds if found.best else float("inf")) * (1 - self._tolerance)
        least = self._least_waiting()
        # The LP bound is cheap, and mostly high enough to send the configuration back to the queue.
        sure = config_bound(self._cost_table, row, state.capacity)
        if max(bound, least) < sure < limit:
            state.reachable_s = sure
            heapq.heappush(self._waiting, (sure, row))
            return
        is_far = state.num_misses == len(_AHEAD)
        target_s = limit if found.best or is_far else bound * _AHEAD[state.num_misses]
        found.num_solved += 1
        candidate = solve_config(self._cost_table, row, state.capacity, target_s)
        if candidate is None and target_s < limit and sure < limit:
            # No candidate is faster than `target_s`, so `target_s` is a lower bound.
            state.num_misses += 1
            heapq.heappush(self._waiting, (target_s, row))
            return
        if candidate is None and state.sure_capacity is not None:
            return  # `_drop_guesses` requeues it if its candidate without the guess is fast.
        if candidate is None and state.has_ranges and limit == float("inf"):
            self._out.add(row)  # No cut fits, with any options.
            if state.why:
                found.refused[row] = state.why
        if candidate is None or state.has_fitted(candidate):
            return  # `resolve_failures` looks for others that failures left out.
        if candidate.seconds > least:
            # Another configuration may be faster, so requeue this one with its exact seconds.
            state.reachable_s = candidate.seconds
            heapq.heappush(self._waiting, (candidate.seconds, row))
            return
        if state.tries == _MOST_TRIES:
            found.given_up += 1
            self._unproved = min(self._unproved, candidate.seconds)
            return
        if self._is_likely_over(row, state, candidate):
            heapq.heappush(self._waiting, (candidate.seconds, row))
            self._passed_over += 1
            if found.best is None and self._passed_over == _GUESSES:
                self._seed(self._seeds.smallest())
            elif self._passed_over % _OFTEN == 0:
                self._explore()
            return
        if state.dropped_guess and not state.tries and self._is_out(row, state.dropped_guess):
            return
        state.sure_capacity = None
        state.tries, state.guesses = state.tries + 1, _MOST_GUESSES
        measured = self._measured(candidate)
        if measured.over:
            self._solve_ranges(candidate, state, measured)
            return
        if measured.why:
            found.refused[row] = measured.why
            return
        state.learn(candidate, measured, self._capacity)
        excess = found.excess[row] = excess_by_rank(state.excess, len(state.capacity))
        if measured.fits:
            self._take(candidate, measured)
        else:
            # With several stages per rank, many candidates fail at first because of memory that
            # the linear bytes leave out. Such failures count less.
            self._failures += 1.0 if self._cost_table.grid[row]["virtual"] == 1 else 0.25
            # At the second replay, find out if any candidate of this configuration can fit.
            if state.tries == 2 and not self._can_fit(self._smallest(row), candidate, excess):
                return
            if not measured.is_of_row:  # Another candidate, as fast, may fit.
                self._unproved = min(self._unproved, candidate.seconds)
        heapq.heappush(self._waiting, (candidate.seconds if not measured.fits else 0.0, row))
        if self._failures >= _FAILURES and found.best is None:
            self._failures = float("-inf")  # Try `WarmStart.any` only once per search.
            self._seed(self._seeds.any())

    def _solve_ranges(
        self, candidate: Candidate, state: NodeState, measured: ReplayedMemory
    ) -> None:
        """Solve the block ranges of the ranks that do not fit, and requeue the configuration."""
        state.tries, state.has_ranges, state.why = 0, True, measured.why or state.why

        def measure(other: Candidate) -> ReplayedMemory:
            found = self._measured(other)
            if found.fits:
                self._take(other, found)
            return found

        solver = ConfigSolver(self._cost_table, candidate.row, self._room(candidate.row))
        if not solve_ranges(solver, candidate, measured, measure, self._is_late):
            self._unproved = min(self._unproved, candidate.seconds)
        heapq.heappush(self._waiting, (candidate.seconds, candidate.row))

    def _is_likely_over(self, row: int, state: NodeState, candidate: Candidate) -> bool:
        """Return True if a candidate does not fit by a guess.

        The configuration's capacity is then lowered so that, by the guess, the next candidate fits.
        If even the smallest candidate is proved not to fit, the configuration is excluded instead.
        """
        if state.guesses == _MOST_GUESSES:
            return False
        state.guesses += 1
        # A proof takes a fraction of the time of a guess, which plays the allocator.
        is_proved = state.guesses == 1 and self.is_over(candidate)
        smallest = self._smallest(row) if is_proved else None
        if smallest and self.is_over(smallest) and not self._can_fit(smallest):
            return True
        excess = self._likely_excess(candidate)
        if not excess:
            return False
        if state.sure_capacity is None:
            state.sure_capacity = state.capacity
            heapq.heappush(self._guessed, (candidate.seconds, row))
        state.guessed = excess
        state.capacity = tuple(self._capacity - more for more in excess)
        return True

    def _is_open(self, row: int, candidate: Candidate | None = None) -> bool:
        """Return True if nothing excludes a configuration, nor this candidate of it if given."""
        return row not in self._out and not (candidate and self._likely_excess(candidate))

    def _likely_fits(self, candidate: Candidate) -> bool:
        """Return True if there is a guess for a candidate, and by the guess it fits."""
        return self.guess(candidate) is not None and not self._likely_excess(candidate)

    def _is_surely_over(self, candidate: Candidate) -> bool:
        guess = self.guess(candidate)
        return guess is not None and guess.is_over

    def _likely_excess(self, candidate: Candidate) -> tuple[float, ...]:
        """Return the guessed excess bytes by rank if the candidate does not fit with them; else ().

        The result is () without a guess, too.
        """
        guess, linear = self.guess(candidate), candidate.linear_bytes
        if guess is None or not ranks_over(linear, guess.excess, self._capacity):
            return ()
        return excess_by_rank(guess.excess, len(linear))

    def _fits_with(self, candidate: Candidate, excess: tuple[float, ...]) -> bool:
        """Return True if a candidate fits with these excess bytes of its ranks."""
        return not ranks_over(candidate.linear_bytes, dict(enumerate(excess)), self._capacity)

    def _room(self, row: int) -> tuple[float, ...]:
        """Return the linear bytes that each rank of a configuration may use before any replay."""
        return (self._capacity - self.taken(row),) * int(self._cost_table.grid[row]["pp"])

    def _take(self, candidate: Candidate, measured: ReplayedMemory) -> None:
        """Make a candidate that fits the best one, if it is faster than the best so far."""
        found = self.found
        if found.best is None or candidate.seconds < found.best.seconds:
            found.best, found.measured = candidate, measured
            self._report(found)

    def _measured(self, candidate: Candidate, *, every_rank: bool = False) -> ReplayedMemory:
        self.found.num_measured += 1
        return self.measure_all(candidate) if every_rank else self._measure(candidate)

    def _smallest(self, row: int) -> Candidate:
        return ConfigSolver(self._cost_table, row, float("inf")).smallest()

    def _is_out(self, row: int, excess: tuple[float, ...]) -> bool:
        """Return True if not even the smallest candidate of a configuration fits.

        Guesses only decide whether the smallest candidate is examined. A replay then decides, and
        excludes the configuration if it does not fit.

        Args:
            row: Index of the configuration in the grid.
            excess: Excess bytes of each rank that were guessed for another candidate of the
                configuration.
        """
        smallest = self._smallest(row)
        if self._fits_with(smallest, excess):
            return False
        return bool(self._likely_excess(smallest)) and not self._can_fit(smallest)

    def _can_fit(
        self, smallest: Candidate, failed: Candidate | None = None, excess: tuple[float, ...] = ()
    ) -> bool:
        """Return True if a candidate of a configuration may fit; if not, exclude the configuration.

        Other configurations that need more memory are excluded with it (`RuledOut`). If the
        smallest candidate does not fit, another cut may put fewer bytes on the rank that is over.

        Args:
            smallest: The smallest candidate of a configuration.
            failed: A candidate of the configuration that was replayed and did not fit; None if
                there is none.
            excess: Excess bytes of each rank of `failed`. If the smallest candidate fits with the
                same excess, it is not replayed.
        """
        if failed is None or smallest.linear_bytes != failed.linear_bytes:
            if failed and (self._fits_with(smallest, excess) or self._likely_fits(smallest)):
                return True
            measured = self._measured(smallest)
            if measured.fits:
                self._take(smallest, measured)
                return True
            self._states[smallest.row].exclude(smallest, measured, self._capacity)
        left = self._states[smallest.row].hopes(self._room(smallest.row), self._capacity)
        if any(np.isfinite(config_bound(self._cost_table, smallest.row, most)) for most in left):
            return True
        self._out.add(smallest.row)
        return False

    def _collect(self) -> None:
        """Set `SearchResult.near`: candidates that may be within the slack of the best one."""
        found = self.found
        assert found.best is not None
        limit = found.best.seconds * (1 + self._slack)
        near = []
        for bound, row in by_bound(self._cost_table, self._capacity, self._times, self._bytes):
            if bound > limit:
                break
            if row not in found.refused and row not in self._out:
                excess = found.excess_of(self._cost_table.grid[row], row, self.taken(row))
                room = tuple(self._capacity - more for more in excess)
                candidate = solve_config(self._cost_table, row, room, limit * (1 + _EPS))
                if candidate is not None:
                    near.append(candidate)
        found.near = sorted(near, key=lambda c: (c.seconds, c.row))
