"""Estimate the ranks of a plan, and expand all microbatches only on ranks that may be the largest.

In a summarised log, the microbatches that cannot contain the peak have only the storages that they
leave behind; writing it takes a fraction of the time. A rank is expanded in full if its summarised
log exceeds the limit, or if the rank may need the most of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Final, NamedTuple

from meshplan.memory.answer.estimate import margin
from meshplan.memory.answer.reserved import RankSummary, ReplayCache, ReservedLog
from meshplan.memory.log.events import EventLog

ERROR: Final = 0.01
"""Possible relative error of a step computed from a config, compared with a traced step.
Source: `tests/memory/test_memory_tape.py`."""

BRIEF_ERROR: Final = 0.03
"""Additional relative error of the reserved bytes where microbatches are summarised.
[Empirical]: between 1 % less and 5 % more in 27 cases; the requested bytes are the same in all."""


class OverError(Exception):
    """Some rank reserves more than the caller's limit.

    Attributes:
        rank: The rank.
        reserved_bytes: Lower bound on the rank's reserved bytes.
    """

    def __init__(self, rank: int, reserved_bytes: int) -> None:
        super().__init__(rank, reserved_bytes)
        self.rank, self.reserved_bytes = rank, reserved_bytes


class AnalyticRank(NamedTuple):
    """The result for one rank.

    Attributes:
        figures: Peak, categories and reserved bytes.
        pooled_bytes: Lower bound on the reserved bytes, from the log alone.
        is_full: True if every microbatch was expanded, False if some were summarised.
        log: The step without cuBLAS's workspaces; None if logs are not kept.
        replayed: The result of playing the log on the allocator; None if logs are not kept.
    """

    figures: RankSummary
    pooled_bytes: int
    is_full: bool
    log: EventLog | None = None
    replayed: ReservedLog | None = None

    @property
    def error(self) -> float:
        """Possible relative error of the figures."""
        return ERROR + BRIEF_ERROR * (not self.is_full)

    @property
    def high_bytes(self) -> int:
        """Upper end of the rank's reserved bytes, without the driver's, equal on all ranks."""
        return int(margin(self.figures.reserve.reserved_bytes) * (1 + self.error))


class KnownRanks(NamedTuple):
    """A cache of ranks' results for plans that differ only in the blocks of some pipeline ranks.

    The memory of a rank depends on its own blocks alone.

    Attributes:
        results: {(key of the blocks, rank, whether it was summarised): result}.
        keys: For each position along pp, a key that is equal where the rank's blocks are, with
            their options, and everything that plans choose for all ranks.
    """

    results: dict[Hashable, AnalyticRank]
    keys: Sequence[Hashable]


class AnalyticRanks:
    """Estimates one rank of each class of equal ranks of a plan.

    Args:
        ranks: The first rank of each group of equal ranks.
        write: Maps (rank, whether to summarise) to the log of the rank's step.
        replays: Plays logs on the allocator, with a cache.
        summarised: If True, the step is so long that only the ranks that need the most memory
            should be expanded in full.
        only_summarised: If True, the step is so long that no rank should be expanded in full.
        stop_above_bytes: Stop with `OverError` as soon as one rank is known to reserve more than
            this.
        keeps_logs: If True, keep the logs in addition to their figures.
        known: Cache of results; None for no cache. It is not used if logs are kept.
        places: Position of each of `ranks` along pp.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        write: Callable[[int, bool], EventLog],
        replays: ReplayCache,
        *,
        summarised: bool,
        only_summarised: bool,
        stop_above_bytes: float,
        keeps_logs: bool,
        known: KnownRanks | None = None,
        places: Sequence[int] = (),
    ) -> None:
        self._ranks, self._write, self._replays = ranks, write, replays
        self._summarised, self._only_summarised = summarised, only_summarised
        self._stop_above_bytes, self._keeps_logs = stop_above_bytes, keeps_logs
        self._known, self._places = None if keeps_logs else known, places

    def results(self, order: Sequence[int]) -> list[AnalyticRank]:
        """Return the result of each rank, in the order of `ranks`.

        Args:
            order: Indices into `ranks`, with the ranks that probably need the most first. The first
                rank usually decides if the plan is over the limit.

        Raises:
            OverError: A rank reserves more than `stop_above_bytes`; of several, the first in
                `order`.
        """
        found = {number: self._first(number, before_all=order[0]) for number in order}
        results = [found[number] for number in range(len(order))]
        if not self._only_summarised:
            self._expand_highest(results)
        return results

    def _first(self, number: int, *, before_all: int) -> AnalyticRank:
        """Return the result of the rank with index `number` in `ranks`.

        The rank is expanded in full if all ranks are, or if its summarised log exceeds the limit.
        `before_all` is the index of the rank that is computed first.
        """
        result = self._of(number, summarised=self._summarised, is_first=number == before_all)
        if self._summarised and result.figures.reserve.reserved_bytes > self._stop_above_bytes:
            # The summary may overstate reserved bytes, so check the limit with the full log.
            return self._of(number, summarised=False)
        return result

    def _of(self, number: int, *, summarised: bool, is_first: bool = False) -> AnalyticRank:
        rank, stop_above_bytes = self._ranks[number], self._stop_above_bytes
        may_stop = summarised and not self._only_summarised and stop_above_bytes < math.inf
        result = self._known.results.get(self._key(number, summarised)) if self._known else None
        if result is None:
            log = self._write(rank, summarised)
            # The first rank usually decides, so check its cheap lower bound before playing the log
            # on the allocator. Other ranks usually fit, and their logs must be played in any case.
            if may_stop and is_first and log.pooled_bytes > stop_above_bytes:
                raise OverError(rank, log.pooled_bytes)
            replayed = self._replays.of(log)
            kept = (log, replayed) if self._keeps_logs else ()
            result = AnalyticRank(replayed.figures, log.pooled_bytes, not summarised, *kept)
            self._keep(number, result)
        reserved, pooled = result.figures.reserve.reserved_bytes, result.pooled_bytes
        if may_stop and reserved > stop_above_bytes and pooled > stop_above_bytes:
            raise OverError(rank, pooled)
        if reserved > stop_above_bytes and (self._only_summarised or not summarised):
            raise OverError(rank, reserved)
        return result

    def _keep(self, number: int, result: AnalyticRank) -> None:
        """Add the result of a rank to the cache."""
        if self._known is not None:
            self._known.results[self._key(number, not result.is_full)] = result

    def _key(self, number: int, summarised: bool) -> Hashable:
        assert self._known is not None
        return self._known.keys[self._places[number]], self._ranks[number], summarised

    def _expand_highest(self, results: list[AnalyticRank]) -> None:
        """Expand the rank with the highest `high_bytes`, until the highest is expanded in full.

        This changes only the ranks' reserved bytes, not their requested bytes.
        """
        while not results[
            highest := max(range(len(results)), key=lambda n: results[n].high_bytes)
        ].is_full:
            results[highest] = self._of(highest, summarised=False)
