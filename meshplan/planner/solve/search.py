"""Best first over all rows of the space: bounds, then exact answers, then the memory room's word.

A row is solved exactly (options by `knapsack`, stages by `cuts`) within a linear memory that is
never above the real one. The answer is then measured; what the real figure has on top is taken off
the row's capacity, and the row is solved again, until an answer fits and no faster one of that row
does. The search ends when no row's bound is below the best answer by more than the tolerance.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from meshplan.planner.solve.config import Candidate, ConfigSolver, config_bound, solve_config
from meshplan.planner.solve.result import Guess, NodeState, ReplayedMemory, RuledOut, SearchResult
from meshplan.planner.solve.warm_start import WarmStart
from meshplan.planner.tables.cost_table import CostTable, by_bound, memory_bounds, time_bounds

TOLERANCE: Final = 1e-4
"""How much faster than the answer something in the space may be, as a share."""
_EPS: Final = 1e-12
_FAILURES: Final = 6
"""Answers that may fail before something that surely fits is looked for."""
_GUESSES, _OFTEN = 20, 10
"""Answers that a guess may pass over before that, and then before one that fits by it is tried."""
_MUCH, _HOPES = 0.95, 8
"""Share of the time of the best answer that is worth a look before its turn; rows looked at."""
_MOST_TRIES: Final = 12
"""Answers of one row that are measured before it is given up (`SearchResult.given_up`)."""
_AHEAD: Final = (1.02, 1.25)
"""Before there is an answer, how far above its bound a row is solved at first, and then: what is
slower need not be known exactly yet, and to rule it out is cheap."""
_MOST_GUESSES: Final = 4
"""How often a row's memory is guessed before something of it is measured."""
_MOST_HALVED: Final = 12
"""How often what lies between an answer that fits and one that does not is looked at."""


def search(
    numbers: CostTable,
    capacity: float,
    measure: Callable[[Candidate], ReplayedMemory],
    *,
    guess: Callable[[Candidate], Guess | None] = lambda candidate: None,
    is_over: Callable[[Candidate], bool] | None = None,
    taken: Callable[[int], float] = lambda row: 0.0,
    slack: float = 0.0,
    tolerance: float = TOLERANCE,
    deadline: float | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    told: Callable[[SearchResult], None] = lambda found: None,
) -> SearchResult:
    """The fastest row of the space that fits.

    Args:
        capacity: Bytes that a rank may hold by the linear figures.
        measure: Asks the memory room.
        guess: What a candidate may hold above its linear figures, cheaply; None where nobody knows.
            It tells what to measure first, and rules out only what it is sure of.
        is_over: Whether it is sure, which may be known sooner; None to ask the guess itself.
        taken: Bytes that ranks of a row hold above their linear figures, whatever blocks do.
        slack: Rows this much slower than the best are told too, as a share.
        deadline: `time.monotonic()` at which to end with what is there.
        is_stopped: Whether somebody wants it to end with that now.
        told: Is told of each better answer.
    """
    found = _Search(numbers, capacity, measure, slack, tolerance, deadline, told)
    found.is_stopped, found.guess, found.taken = is_stopped, guess, taken
    found.is_over = is_over or found.is_over
    return found.run()


class _Search:
    """One search."""

    def __init__(
        self,
        numbers: CostTable,
        capacity: float,
        measure: Callable[[Candidate], ReplayedMemory],
        slack: float,
        tolerance: float,
        deadline: float | None,
        told: Callable[[SearchResult], None],
    ) -> None:
        self._numbers, self._capacity, self._measure = numbers, capacity, measure
        self._slack, self._tolerance = slack, tolerance
        self._deadline, self._told = deadline, told
        self.is_stopped: Callable[[], bool] = lambda: False
        self.guess: Callable[[Candidate], Guess | None] = lambda candidate: None
        self.is_over: Callable[[Candidate], bool] = self._is_surely_over
        self.taken: Callable[[int], float] = lambda row: 0.0
        self.found = SearchResult()
        self._waiting: list[tuple[float, int]] = []
        """(seconds that it takes at the least, row)."""
        self._guessed: list[tuple[float, int]] = []
        """Likewise, of rows that wait with another time, which rests on a guess."""
        self._states: dict[int, NodeState] = {}
        self._following = 0.0
        """Seconds from below of every row that has not begun to wait."""
        self._failures, self._passed_over = 0.0, 0
        self._unproved = float("inf")
        """Seconds of the fastest row that was given up."""
        self._times, self._bytes = time_bounds(numbers), memory_bounds(numbers)
        self._out = RuledOut(numbers.grid)
        self._seeds = WarmStart(
            numbers, capacity, self._times, self._bytes,
            measure=self._measured, is_open=self._is_open, is_late=self._is_late,
        )  # fmt: skip

    def run(self) -> SearchResult:
        """Whatever may be the fastest is looked at closer, until what is has been measured.

        A row goes by its bound first, then by its exact answer within the linear memory, then,
        where that really held more, by its answer within what is left: each is no faster than the
        one before, and only the least of all rows is measured.
        """
        found, waiting = self.found, self._waiting
        for bound, row in by_bound(self._numbers, self._capacity, self._times, self._bytes):
            self._following = bound
            while waiting and waiting[0][0] <= bound and not self._is_done():
                self._look_closer(*heapq.heappop(waiting))
            if self._is_done():
                break
            heapq.heappush(waiting, (bound, row))
        else:
            self._following = float("inf")
        while (waiting or self._doubt()) and not self._is_done():
            self._look_closer(*heapq.heappop(waiting))
        if found.is_whole:
            best_s = found.best.seconds if found.best else float("inf")
            found.lower_s = min(self._least_waiting(), best_s)
        found.lower_s = min(found.lower_s, self._unproved)
        if found.best is not None and self._slack and found.is_whole:
            self._collect()
        return found

    def _least_waiting(self) -> float:
        """Seconds from below of all rows whose turn has not come, also those not yet waiting."""
        return min(self._following, self._waiting[0][0]) if self._waiting else self._following

    def _is_done(self) -> bool:
        """Whether no row can be faster, or the time is up."""
        found = self.found
        if found.best and self._least_waiting() >= found.best.seconds * (1 - self._tolerance):
            return not self._doubt()
        if self._is_late():
            found.is_whole = False
            # What is to be looked at again at once waits with no time of its own.
            waiting = (max(s, float(self._times[row])) for s, row in self._waiting)
            guessed = (s for s, row in self._guessed if self._rests_on_guess(row))
            least = min([self._following, *waiting, *guessed])
            found.lower_s = min(least, found.best.seconds) if found.best else least
            return True
        return False

    def _doubt(self) -> bool:
        """Let rows wait with what is sure of them, if that may be faster than the best."""
        limit = self.found.best.seconds * (1 - self._tolerance) if self.found.best else np.inf
        is_any = False
        while self._guessed and self._guessed[0][0] < limit:
            seconds, row = heapq.heappop(self._guessed)
            state = self._states[row]
            if state.sure_capacity is not None:
                state.capacity, state.sure_capacity = state.sure_capacity, None
                state.guesses, state.doubted = _MOST_GUESSES, state.guessed
                heapq.heappush(self._waiting, (seconds, row))
                is_any = True
        return is_any

    def _rests_on_guess(self, row: int) -> bool:
        return self._states[row].sure_capacity is not None

    def _is_late(self) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        return late or self.is_stopped()

    def _seed(self, answers: Iterable[tuple[Candidate, ReplayedMemory]]) -> None:
        """Take what was found sooner than best first would come to it."""
        for candidate, measured in answers:
            self.found.excess[candidate.row] = max(measured.excess_bytes, 0.0)
            self._take(candidate, measured)

    def _explore(self) -> None:
        """Measure what is fastest of all that rests on guesses, if that is much faster.

        Best first comes to it last, and what is there until then may be far from it.
        """
        best = self.found.best
        if best is None:
            return
        states = self._states.items()
        hopes = [r for r, s in states if s.sure_capacity is not None and r not in self._out]
        for row in sorted(hopes, key=lambda row: self._states[row].hoped)[:_HOPES]:
            state = self._states[row]
            candidate = solve_config(self._numbers, row, state.capacity, _MUCH * best.seconds)
            state.hoped = candidate.seconds if candidate is not None else np.inf
            if candidate is not None and self._likely_fits(candidate):
                state.hoped = np.inf
                if (measured := self._measured(candidate)).fits:
                    self._seed([(candidate, measured)])
                return

    def _look_closer(self, bound: float, row: int) -> None:
        """Solve a row that takes `bound` at the least; measure its answer if none may be faster."""
        found = self.found
        if row in self._out:
            return
        if (state := self._states.get(row)) is None:
            state = self._states[row] = NodeState(self._capacity - self.taken(row))
        limit = (found.best.seconds if found.best else float("inf")) * (1 - self._tolerance)
        least = self._least_waiting()
        # What it takes with blocks in parts is known soon, and mostly enough.
        sure = config_bound(self._numbers, row, state.capacity)
        if max(bound, least) < sure < limit:
            state.hoped = sure
            heapq.heappush(self._waiting, (sure, row))
            return
        is_far = state.looks == len(_AHEAD)
        ahead = limit if found.best or is_far else bound * _AHEAD[state.looks]
        found.num_solved += 1
        candidate = solve_config(self._numbers, row, state.capacity, ahead)
        if candidate is None and ahead < limit and sure < limit:
            state.looks += 1
            heapq.heappush(self._waiting, (ahead, row))
            return
        if candidate is None and state.sure_capacity is not None:
            return  # It is looked at again if what is sure of it is fast.
        if candidate is None or max(candidate.linear_bytes) <= state.fits_up_to:
            self._halve(row, state)
            return
        if candidate.seconds > least:
            state.hoped = candidate.seconds
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
        if state.doubted is not None and not state.tries and self._is_out(row, state.doubted):
            return
        state.sure_capacity = None
        state.tries, state.guesses = state.tries + 1, _MOST_GUESSES
        measured = self._measured(candidate)
        if measured.why:
            found.refused[row] = measured.why
            return
        held, state.is_of_row = max(candidate.linear_bytes), measured.is_of_row
        if measured.fits:
            self._take(candidate, measured)
            state.fits_up_to = held
        else:
            state.over_from, state.seconds = min(state.over_from, held), candidate.seconds
            # Many that have several stages a rank fail at first, for what is beside the figures.
            self._failures += 1.0 if self._numbers.grid[row]["virtual"] == 1 else 0.25
            if state.tries == 2 and not self._can_fit(
                self._smallest(row), candidate, measured.excess_bytes
            ):
                return
            if not measured.is_of_row:  # Some other answer, no slower, may hold less.
                self._unproved = min(self._unproved, candidate.seconds)
        found.excess[row] = max(measured.excess_bytes, 0.0)
        below = float(np.nextafter(state.over_from, 0.0))
        state.capacity = min(self._capacity - found.excess[row], below)
        heapq.heappush(self._waiting, (candidate.seconds if not measured.fits else 0.0, row))
        if self._failures >= _FAILURES and found.best is None:
            self._failures = float("-inf")  # Once.
            self._seed(self._seeds.any())

    def _is_likely_over(self, row: int, state: NodeState, candidate: Candidate) -> bool:
        """Whether a guess says so; the row's next answer is then one that the guess lets fit."""
        if state.guesses == _MOST_GUESSES:
            return False
        state.guesses += 1
        excess = self._likely_excess(candidate)
        if excess is None:
            return False
        if state.guesses == 1 and self._is_out(row, excess, is_sure=True):
            self._out.add(row)
            return True
        if state.sure_capacity is None:
            state.sure_capacity = state.capacity
            heapq.heappush(self._guessed, (candidate.seconds, row))
        state.capacity, state.guessed = self._capacity - excess, excess
        return True

    def _is_open(self, row: int, candidate: Candidate | None = None) -> bool:
        """Whether nothing speaks against a row, or one of its answers."""
        return row not in self._out and not (candidate and self._likely_excess(candidate))

    def _likely_fits(self, candidate: Candidate) -> bool:
        return self.guess(candidate) is not None and self._likely_excess(candidate) is None

    def _is_surely_over(self, candidate: Candidate) -> bool:
        guess = self.guess(candidate)
        return guess is not None and guess.is_over

    def _likely_excess(self, candidate: Candidate) -> float | None:
        """What a candidate holds above its linear figures, where a guess says that it is over."""
        guess = self.guess(candidate)
        if guess is None or max(candidate.linear_bytes) + guess.excess_bytes <= self._capacity:
            return None
        return guess.excess_bytes

    def _halve(self, row: int, state: NodeState) -> None:
        """Look between what fits and what does not, where nothing is left within the capacity.

        What failed held more above its linear figure than smaller answers may: its worst moment
        is another.
        """
        if state.is_of_row or state.over_from == float("inf") or state.halved == _MOST_HALVED:
            return
        least = max(self._smallest(row).linear_bytes)
        low = max(least, state.fits_up_to, state.capacity)
        middle = (low + state.over_from) / 2
        if not low < middle < state.over_from:
            return
        state.halved += 1
        state.capacity = middle
        heapq.heappush(self._waiting, (state.seconds, row))

    def _take(self, candidate: Candidate, measured: ReplayedMemory) -> None:
        """What fits is the answer, if it is faster than the one before."""
        found = self.found
        if found.best is None or candidate.seconds < found.best.seconds:
            found.best, found.measured = candidate, measured
            self._told(found)

    def _measured(self, candidate: Candidate) -> ReplayedMemory:
        self.found.num_measured += 1
        return self._measure(candidate)

    def _smallest(self, row: int) -> Candidate:
        return ConfigSolver(self._numbers, row, float("inf")).smallest()

    def _is_out(self, row: int, excess: float, *, is_sure: bool = False) -> bool:
        """Whether not even what holds the least fits, where a guess says so: the row is out.

        Args:
            excess: What another answer was guessed to hold above its linear figures.
            is_sure: Go by what the guess is sure of, and measure nothing.
        """
        smallest = self._smallest(row)
        if max(smallest.linear_bytes) + excess <= self._capacity:
            return False
        if is_sure:
            return self.is_over(smallest)
        return self._likely_excess(smallest) is not None and not self._can_fit(smallest)

    def _can_fit(
        self, smallest: Candidate, failed: Candidate | None = None, excess: float = float("inf")
    ) -> bool:
        """Whether what holds the least does; if not, the row is out, and others with it.

        Args:
            failed: An answer of the row that was measured, and `excess`, what it held above its
                linear figures: where the smallest would fit with that, nobody need measure it.
        """
        if failed is None or smallest.linear_bytes != failed.linear_bytes:
            if max(smallest.linear_bytes) + excess <= self._capacity:
                return True
            if failed is not None and self._likely_fits(smallest):
                return True
            measured = self._measured(smallest)
            if measured.fits:
                self._take(smallest, measured)
                return True
        self._out.add(smallest.row)
        return False

    def _collect(self) -> None:
        """Every row that may come within the slack of the best."""
        found = self.found
        assert found.best is not None
        limit = found.best.seconds * (1 + self._slack)
        near = []
        for bound, row in by_bound(self._numbers, self._capacity, self._times, self._bytes):
            if bound > limit:
                break
            if row not in found.refused and row not in self._out:
                room = self._capacity - found.excess.get(row, self.taken(row))
                candidate = solve_config(self._numbers, row, room, limit * (1 + _EPS))
                if candidate is not None:
                    near.append(candidate)
        found.near = sorted(near, key=lambda c: (c.seconds, c.row))
